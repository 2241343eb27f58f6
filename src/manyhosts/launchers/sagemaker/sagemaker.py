"""SageMaker: a training job of N instances, asked for and asked after through boto3."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

from manyhosts.control import job_file, variables
from manyhosts.control.job import Job
from manyhosts.control.plan import Later, Plan, filled, text_of
from manyhosts.errors import ConfigError, LaunchError
from manyhosts.launchers import packing
from manyhosts.launchers.detached import State, Status
from manyhosts.launchers.engine import SECRET, Engine
from manyhosts.launchers.sagemaker import request as sagemaker_request
from manyhosts.launchers.sagemaker.client import Client, code_of
from manyhosts.launchers.sagemaker.request import ARCHIVE, JOB, TOKEN, job_name, job_there

_LOOK_S = 3.0
_LATE_S = 3.0
"""How long after its end the last words of a job may still be on their way to CloudWatch."""
_REQUEST = "CreateTrainingJob"
_LOGS = "/aws/sagemaker/TrainingJobs"
_STATES: dict[str, State] = {"Completed": "done", "Failed": "failed", "Stopped": "cancelled"}
_AT_WORK = ("Training", "Uploading", "Stopping")


class SageMaker(Engine):
    """Hands a job to SageMaker, where it lives by itself."""

    NAME = "sagemaker"
    OPTIONS = sagemaker_request.OPTIONS
    CHOOSES_HOSTS = "--nodes N and -o instance="
    ENCRYPTS = True  # traffic between instances
    SHARES_DISK = False
    CALLS_BACK = False
    ADDRESS = "algo-1"

    def __init__(
        self, connect: Callable[[str, str], Client] = Client, wait: Callable[[float], None] = time.sleep
    ) -> None:
        """`connect` makes a client for a region and a profile; empty ones are those of the AWS configuration."""
        super().__init__(wait=wait)
        self._connect = connect

    def check(self, job: Job) -> Job:
        """As of every engine, and that SageMaker can be asked for `job`."""
        checked = super().check(job)
        sagemaker_request.check(job)
        return checked

    def plan(self, job: Job) -> Plan:
        """What is put into S3, and the request, checked against botocore's description of the service if installed.

        Raises:
            ConfigError: an option is unknown, missing or unreadable.
        """
        job = self.check(job)
        request, chosen = sagemaker_request.request(job), sagemaker_request.later(job)
        notes = [f"the record will be in {request['CheckpointConfig']['S3Uri']}"]
        try:
            sagemaker_request.validate(request)
        except ImportError:
            notes.append("not compared with AWS's own description of it, for botocore is not installed here")
        files = {
            chosen[f"place of {ARCHIVE}"]: Later("archive", "(the working directory, packed)"),
            chosen[f"place of {JOB}"]: job_file.shown(job_there(job)),
            chosen[f"place of {TOKEN}"]: SECRET,
            _REQUEST: request,
        }
        workers = variables.of_all(job, address=self.ADDRESS)
        return Plan(job=job, workers=workers, files=files, notes=tuple(notes))

    def there(self, job: Job) -> Job:
        """The job in its containers."""
        return job_there(job)

    def send(self, plan: Plan) -> str:
        """Bring the working directory to S3 and make the job. Returns REGION/NAME, after PROFILE@ where one is named.

        Raises:
            LaunchError: boto3 is not installed, or AWS refused or was not reached.
        """
        job = plan.job
        profile = job.options.get("profile", "")
        name = job_name(job, secrets.token_hex(3))
        values: dict[str, Any] = {
            **sagemaker_request.values_of(job, name),
            **job_file.values_of(job),
            "archive": packing.pack(
                job.folder, leave_out=job.run_dir, needed=job.program if job.kind == "script" else ""
            ),
            SECRET.name: secrets.token_hex(16),
        }
        client = self._connect(job.options.get("region", ""), profile)
        files = filled(plan.files, values)
        request, key = files.pop(_REQUEST), {}
        if "kms-key" in job.options:
            key = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": job.options["kms-key"]}
        for place, content in files.items():
            bucket, _, path = place.removeprefix("s3://").partition("/")
            body = content if isinstance(content, bytes) else text_of(content).encode()
            client.ask("s3", "put_object", Bucket=bucket, Key=path, Body=body, **key)
        client.ask("sagemaker", "create_training_job", **request)
        return f"{profile}@{client.region}/{name}" if profile else f"{client.region}/{name}"

    def status(self, name: str) -> Status:
        """What SageMaker says of it."""
        client, job = self._of(name)
        reported = self._description(client, job)
        if reported is None:
            return Status(state="unknown", reason=f"SageMaker has no such job in {client.region}")
        word, second = reported["TrainingJobStatus"], reported.get("SecondaryStatus", "")
        state = _STATES.get(word, "running" if second in _AT_WORK else "waiting")
        if second in ("MaxRuntimeExceeded", "MaxWaitTimeExceeded"):
            state = "failed"
        reason = reported.get("FailureReason") or _last_message(reported) or second
        code = re.search(r"exit code: (\d+)", reported.get("FailureReason", ""))
        resources = reported.get("ResourceConfig", {})
        return Status(
            state=state,
            reason=f"{second}: {reason}" if reason != second else second,
            hosts=f"{resources.get('InstanceCount', '?')} x {resources.get('InstanceType', '?')}",
            log=f"CloudWatch {_LOGS} {job}/algo-1",
            code=0 if state == "done" else int(code[1]) if code else None,
        )

    def logs(self, name: str, *, follow: bool) -> Iterator[str]:
        """What the first instance has printed, from CloudWatch. Spare instances that came later are further streams.

        Raises:
            LaunchError: there is nothing yet, and `follow` is off; or there is no such job.
        """
        client, job = self._of(name)
        tokens: dict[str, str] = {}
        while True:
            over = self.status(name).over
            if over and follow:
                self._wait(_LATE_S)
            for stream in _streams(client, job):
                yield from _new_lines(client, stream, tokens)
            if over or not follow:
                break
            self._wait(_LOOK_S)
        if not tokens:
            status = self.status(name)
            raise LaunchError(
                f"there is no log of this job: {status.state}, {status.reason}",
                where=f"sagemaker://{name}",
                fix="see in the console what the job has printed" if follow else "--follow waits for its first line",
            )

    def cancel(self, name: str) -> None:
        """Stop the job. One that is over is left as it is."""
        client, job = self._of(name)
        reported = self._description(client, job)
        if reported is None or reported["TrainingJobStatus"] != "InProgress":
            return
        try:
            client.ask("sagemaker", "stop_training_job", TrainingJobName=job)
        except LaunchError as error:
            if code_of(error) != "ValidationException":  # it has ended meanwhile
                raise

    def _of(self, name: str) -> tuple[Client, str]:
        found = re.fullmatch(r"(?:([^/]+)@)?([a-z]{2}(?:-[a-z]+)+-\d)/([a-zA-Z0-9](?:-*[a-zA-Z0-9]){0,62})", name)
        if found is None:
            raise ConfigError(
                f"{name!r} is no name of a job", where=f"sagemaker://{name}", fix="write it as sagemaker://REGION/NAME"
            )
        return self._connect(found[2], found[1] or ""), found[3]

    @staticmethod
    def _description(client: Client, job: str) -> dict[str, Any] | None:
        try:
            return client.ask("sagemaker", "describe_training_job", TrainingJobName=job)
        except LaunchError as error:
            if code_of(error) == "ValidationException":  # its answer to an unknown name
                return None
            raise


def _last_message(reported: dict[str, Any]) -> str:
    changes = reported.get("SecondaryStatusTransitions", [])
    return str(changes[-1].get("StatusMessage", "")) if changes else ""


def _streams(client: Client, job: str) -> list[str]:
    """The logs of the first instance, oldest first; none where nothing was printed yet."""
    try:
        found = client.ask("logs", "describe_log_streams", logGroupName=_LOGS, logStreamNamePrefix=f"{job}/algo-1-")
    except LaunchError as error:
        if code_of(error) == "ResourceNotFoundException":  # no job of this account has ever printed anything
            return []
        raise
    streams = sorted(found["logStreams"], key=lambda stream: int(stream.get("creationTime", 0)))
    return [str(stream["logStreamName"]) for stream in streams]


def _new_lines(client: Client, stream: str, tokens: dict[str, str]) -> Iterator[str]:
    """What has come in a stream since the last call, which `tokens` remembers."""
    while True:
        more = {"nextToken": tokens[stream]} if stream in tokens else {}
        found = client.ask(
            "logs", "get_log_events", logGroupName=_LOGS, logStreamName=stream, startFromHead=True, **more
        )
        yield from (event["message"].rstrip("\n") for event in found["events"])
        before, tokens[stream] = tokens.get(stream), found["nextForwardToken"]
        if tokens[stream] == before or not found["events"]:
            return
