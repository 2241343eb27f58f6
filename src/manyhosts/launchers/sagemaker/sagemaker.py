"""SageMaker: a training job of N instances, asked for and asked after through boto3."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

from manyhosts.control import job_file, variables
from manyhosts.control.display import Display
from manyhosts.control.job import Job, Plan
from manyhosts.errors import ConfigError, LaunchError
from manyhosts.launchers import detached, packing
from manyhosts.launchers.detached import State, Status
from manyhosts.launchers.sagemaker import node as sagemaker_node
from manyhosts.launchers.sagemaker import request as sagemaker_request
from manyhosts.launchers.sagemaker.client import Client, code_of
from manyhosts.launchers.sagemaker.request import OPTIONS, input_place, job_name, job_there

_LOOK_S = 3.0
_LATE_S = 3.0
"""How long after its end the last words of a job may still be on their way to CloudWatch."""
_LOGS = "/aws/sagemaker/TrainingJobs"
_STATES: dict[str, State] = {"Completed": "done", "Failed": "failed", "Stopped": "cancelled"}
_AT_WORK = ("Training", "Uploading", "Stopping")


class SageMaker:
    """Hands a job to SageMaker, where it lives by itself."""

    OPTIONS = OPTIONS

    def __init__(
        self, connect: Callable[[str, str], Client] = Client, wait: Callable[[float], None] = time.sleep
    ) -> None:
        """`connect` makes a client for a region and a profile; empty ones are those of the AWS configuration."""
        self._connect, self._wait = connect, wait

    def plan(self, job: Job) -> Plan:
        """The request, held to botocore's description of the service where that is installed.

        Raises:
            ConfigError: an option is unknown, missing or unreadable.
        """
        sagemaker_request.check(job)
        request = sagemaker_request.request(job, job_name(job))
        notes = [f"the record will be in {request['CheckpointConfig']['S3Uri']}"]
        try:
            sagemaker_request.validate(request)
        except ImportError:
            notes.append("not compared with AWS's own description of it, for botocore is not installed here")
        files = {"CreateTrainingJob": json.dumps(request, indent=1)}
        return Plan(
            job=job,
            hosts=(),
            agents=(),
            workers=variables.of_all(job, address="algo-1"),
            files=files,
            notes=tuple(notes),
        )

    def submit(self, plan: Plan, display: Display) -> int:
        """Send the job and show what it prints until it is over. Ctrl-C ends it.

        Raises:
            LaunchError: boto3 is not installed, or AWS refused or was not reached.
        """
        return detached.send_and_follow(self, "sagemaker", plan, display, wait=self._wait)

    def send(self, plan: Plan) -> str:
        """Bring the working directory to S3 and make the job. Returns REGION/NAME, behind PROFILE@ where one is named.

        Raises:
            LaunchError: as in `submit`.
        """
        job = plan.job
        packed = packing.pack(job.folder, leave_out=job.run_dir, needed=job.program if job.kind == "script" else "")
        profile = job.options.get("profile", "")
        client = self._connect(job.options.get("region", ""), profile)
        name = job_name(job, secrets.token_hex(3))
        bucket, _, folder = input_place(job, name).removeprefix("s3://").partition("/")
        content = {
            sagemaker_node.ARCHIVE: packed,
            sagemaker_node.JOB: job_file.text_of(job_there(job)).encode(),
            sagemaker_node.TOKEN: secrets.token_hex(16).encode(),
        }
        key = {}
        if "kms-key" in job.options:
            key = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": job.options["kms-key"]}
        for file, body in content.items():
            client.ask("s3", "put_object", Bucket=bucket, Key=f"{folder}/{file}", Body=body, **key)
        client.ask("sagemaker", "create_training_job", **sagemaker_request.request(job, name))
        return f"{profile}@{client.region}/{name}" if profile else f"{client.region}/{name}"

    def status(self, name: str) -> Status:
        """What SageMaker says of it."""
        client, job = self._of(name)
        told = self._description(client, job)
        if told is None:
            return Status(state="unknown", reason=f"SageMaker has no such job in {client.region}")
        word, second = told["TrainingJobStatus"], told.get("SecondaryStatus", "")
        state = _STATES.get(word, "running" if second in _AT_WORK else "waiting")
        if second in ("MaxRuntimeExceeded", "MaxWaitTimeExceeded"):
            state = "failed"
        reason = told.get("FailureReason") or _last_message(told) or second
        code = re.search(r"exit code: (\d+)", told.get("FailureReason", ""))
        resources = told.get("ResourceConfig", {})
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
            LaunchError: there is nothing yet, and nobody follows; or there is no such job.
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
                fix="--follow waits for its first line",
            )

    def cancel(self, name: str) -> None:
        """Stop the job. One that is over is left as it is."""
        client, job = self._of(name)
        told = self._description(client, job)
        if told is None or told["TrainingJobStatus"] != "InProgress":
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
            if code_of(error) == "ValidationException":  # what it says of a name that nobody has
                return None
            raise


def _last_message(told: dict[str, Any]) -> str:
    changes = told.get("SecondaryStatusTransitions", [])
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
