"""An AWS of our own, for tests: SageMaker, CloudWatch Logs and S3 as boto3 talks to them.

Requests are held to botocore's models, with their patterns, lengths and lists of values. Training jobs run: each
instance is a machine that gets /opt/ml as SageMaker lays it out.
"""

from __future__ import annotations

import functools
import json
import re
import signal
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import botocore.session
from botocore.validate import ParamValidator
from containers import Container

MODELS = {"SageMaker": "sagemaker", "Logs_20140328": "logs"}
LOGS = "/aws/sagemaker/TrainingJobs"
_GRACE_S = 120
_ENDED = ("Completed", "Failed", "Stopped")


@dataclass
class Refusal(Exception):
    code: str
    message: str


@dataclass
class Job:
    request: dict[str, Any]
    status: str = "InProgress"
    second: str = "Starting"
    reason: str = ""
    processes: list[Any] = field(default_factory=list)
    streams: list[Path] = field(default_factory=list)
    taken_away: bool = False


@dataclass
class Aws:
    folder: Path
    machines: list[Container] = field(default_factory=list)
    buckets: tuple[str, ...] = ("ours",)
    quota: int = 4
    objects: dict[str, bytes] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    threads: list[threading.Thread] = field(default_factory=list)
    url: str = ""

    def answer(self, target: str, call: str, words: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            self.asked.append(call)
            hold_to_model(MODELS[target], call, words)
            return getattr(self, f"_{call}")(**words)

    def put(self, bucket: str, key: str, body: bytes) -> None:
        with self.lock:
            self.asked.append("PutObject")
            if bucket not in self.buckets:
                raise Refusal("NoSuchBucket", "The specified bucket does not exist")
            self.objects[f"s3://{bucket}/{key}"] = body

    def _CreateTrainingJob(self, **request: Any) -> dict[str, Any]:
        name = request["TrainingJobName"]
        if name in self.jobs:
            raise Refusal("ResourceInUse", "Training job names must be unique")
        if request["ResourceConfig"]["InstanceCount"] > self.quota:
            kind = request["ResourceConfig"]["InstanceType"]
            text = f"The account-level service limit '{kind} for training job usage' is {self.quota} Instances"
            raise Refusal("ResourceLimitExceeded", text)
        for channel in request["InputDataConfig"]:
            uri = channel["DataSource"]["S3DataSource"]["S3Uri"]
            if not any(key.startswith(uri) for key in self.objects):
                raise Refusal("ValidationException", f"No S3 objects found under S3 URL {uri}")
        job = self.jobs[name] = Job(request)
        if self.machines:
            self.threads.append(threading.Thread(target=self._play, args=(name, job)))
            self.threads[-1].start()
        return {"TrainingJobArn": f"arn:aws:sagemaker:eu-central-1:123456789012:training-job/{name}"}

    def _DescribeTrainingJob(self, TrainingJobName: str) -> dict[str, Any]:
        job = self._job(TrainingJobName)
        reported = {"TrainingJobStatus": job.status, "SecondaryStatus": job.second, **job.request}
        return reported | ({"FailureReason": job.reason} if job.reason else {})

    def _StopTrainingJob(self, TrainingJobName: str) -> dict[str, Any]:
        job = self._job(TrainingJobName)
        if job.status != "InProgress":
            raise Refusal("ValidationException", f"The request was rejected because the job is {job.status}")
        job.status, job.second = "Stopping", "Stopping"
        self._signal(job)
        if not self.machines:
            job.status, job.second = "Stopped", "Stopped"
        return {}

    def _DescribeLogStreams(self, logGroupName: str, logStreamNamePrefix: str) -> dict[str, Any]:
        assert logGroupName == LOGS
        streams = [path for job in self.jobs.values() for path in job.streams]
        if not streams:
            raise Refusal("ResourceNotFoundException", "The specified log group does not exist.")
        found = [(name_of(path), number) for number, path in enumerate(streams) if path.exists()]
        found = [(name, number) for name, number in found if name.startswith(logStreamNamePrefix)]
        return {"logStreams": [{"logStreamName": name, "creationTime": number} for name, number in found]}

    def _GetLogEvents(self, logStreamName: str, nextToken: str = "f/0", **_: Any) -> dict[str, Any]:
        [path] = [path for job in self.jobs.values() for path in job.streams if name_of(path) == logStreamName]
        *lines, _unfinished = path.read_text().split("\n")
        begin = int(nextToken.removeprefix("f/"))
        page = lines[begin : begin + 10]  # pages as small as that show whether all are read
        events = [{"timestamp": 0, "message": line} for line in page]
        return {"events": events, "nextForwardToken": f"f/{begin + len(page)}", "nextBackwardToken": "b/0"}

    def _job(self, name: str) -> Job:
        if name not in self.jobs:
            raise Refusal("ValidationException", "Requested resource not found.")
        return self.jobs[name]

    # Instances.

    def take_away(self, name: str) -> None:
        """As with spare instances: SIGTERM, and all of it again on other ones."""
        with self.lock:
            self.jobs[name].taken_away = True
            self._signal(self.jobs[name])

    def _signal(self, job: Job) -> None:
        for machine, process in zip(self.machines, job.processes, strict=False):
            machine.signal(process, signal.SIGTERM)

    def _play(self, name: str, job: Job) -> None:
        count = job.request["ResourceConfig"]["InstanceCount"]
        machines = self.machines[:count]
        while True:
            with self.lock:
                job.taken_away = False
                job.processes = [self._begin(name, job, machines, number) for number in range(count)]
                job.second = "Training"
            codes = self._wait(job)
            with self.lock:
                self._keep_checkpoints(job, machines)
                if job.taken_away:
                    job.second = "Interrupted"
                    continue
                self._conclude(job, codes, machines)
                return

    def _begin(self, name: str, job: Job, machines: list[Container], number: int) -> Any:
        machine, hosts = machines[number], [f"algo-{index + 1}" for index in range(len(machines))]
        for folder in ("input/config", "input/data", "model", "output", "checkpoints"):
            machine.host.run(["rm", "-rf", f"/opt/ml/{folder}"])  # other instances, so nothing is left of the last
            machine.make(f"/opt/ml/{folder}")
        resources = {"current_host": hosts[number], "hosts": hosts, "network_interface_name": "eth0"}
        machine.write("/opt/ml/input/config/resourceconfig.json", json.dumps(resources).encode())
        for channel in job.request["InputDataConfig"]:
            uri = channel["DataSource"]["S3DataSource"]["S3Uri"]
            self._lay_out(machine, uri, f"/opt/ml/input/data/{channel['ChannelName']}")
        checkpoints = job.request["CheckpointConfig"]
        self._lay_out(machine, checkpoints["S3Uri"], checkpoints["LocalPath"])
        log = self.folder / f"{name}__algo-{number + 1}-{len(job.streams)}"
        job.streams.append(log)
        words = job.request["AlgorithmSpecification"]["ContainerEntrypoint"]
        return machine.start(words, "/", {"TRAINING_JOB_NAME": name}, log)

    def _lay_out(self, machine: Container, uri: str, folder: str) -> None:
        for key, content in self.objects.items():
            if key.startswith(f"{uri}/"):
                path = f"{folder}/{key.removeprefix(f'{uri}/')}"
                machine.make(str(Path(path).parent))
                machine.write(path, content)

    def _wait(self, job: Job) -> list[int]:
        kill_at = None
        while any(process.poll() is None for process in job.processes):
            if kill_at is None and (job.taken_away or job.status == "Stopping"):
                kill_at = time.monotonic() + _GRACE_S
            if kill_at is not None and time.monotonic() > kill_at:
                for machine, process in zip(self.machines, job.processes, strict=False):
                    machine.signal(process, signal.SIGKILL)
            time.sleep(0.05)
        return [process.returncode for process in job.processes]

    def _keep_checkpoints(self, job: Job, machines: list[Container]) -> None:
        checkpoints = job.request["CheckpointConfig"]
        for machine in reversed(machines):  # the first one's files are kept where several have the same
            root = machine.host.path(checkpoints["LocalPath"])
            for path in root.rglob("*"):
                if path.is_file():
                    self.objects[f"{checkpoints['S3Uri']}/{path.relative_to(root)}"] = path.read_bytes()

    def _conclude(self, job: Job, codes: list[int], machines: list[Container]) -> None:
        if job.status == "Stopping":
            job.status = job.second = "Stopped"
        elif any(codes):
            said = [machine.host.path("/opt/ml/output/failure") for machine in machines]
            text = next((path.read_text() for path in said if path.exists()), "")
            job.status = job.second = "Failed"
            job.reason = f"AlgorithmError: {text}, exit code: {next(code for code in codes if code)}"
        else:
            job.status = job.second = "Completed"


def name_of(path: Path) -> str:
    return path.name.replace("__", "/")


@functools.cache
def model_of(service: str) -> Any:
    """Botocore's description of a service, which is megabytes to read."""
    return botocore.session.get_session().get_service_model(service)


def hold_to_model(service: str, call: str, words: dict[str, Any]) -> None:
    shape = model_of(service).operation_model(call).input_shape
    report = ParamValidator().validate(words, shape)
    faults = [report.generate_report()] if report.has_errors() else list(_faults(words, shape, call))
    if faults:
        raise Refusal("ValidationException", f"{len(faults)} validation error detected: {faults[0]}")


def _faults(value: Any, shape: Any, place: str) -> Iterator[str]:
    """What botocore leaves to the service: patterns, lengths of texts, lists of values."""
    if shape.type_name == "structure":
        for name, inner in value.items():
            yield from _faults(inner, shape.members[name], f"{place}.{name}")
    elif shape.type_name == "list":
        for inner in value:
            yield from _faults(inner, shape.member, place)
    elif shape.type_name == "map":
        for key, inner in value.items():
            yield from _faults(key, shape.key, place)
            yield from _faults(inner, shape.value, f"{place}.{key}")
    elif shape.type_name == "string":
        known = shape.metadata
        if "pattern" in known and not re.fullmatch(known["pattern"].replace(r"\p{L}\p{Z}\p{N}", r"\w\s"), value):
            yield f"Value '{value}' at '{place}' failed to satisfy {known['pattern']}"
        if len(value) > known.get("max", len(value)) or (shape.enum and value not in shape.enum):
            yield f"Value '{value}' at '{place}' failed to satisfy constraint"


class _Desk(BaseHTTPRequestHandler):
    aws: Aws
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        target, _, call = self.headers["X-Amz-Target"].partition(".")
        words = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            if "Credential=" not in self.headers.get("Authorization", ""):
                raise Refusal("MissingAuthenticationTokenException", "Missing Authentication Token")
            self._send(200, json.dumps(self.aws.answer(target, call, words)).encode())
        except Refusal as refusal:
            said = {"__type": refusal.code, "message": refusal.message}
            self._send(400, json.dumps(said).encode())

    def do_PUT(self) -> None:
        bucket, _, key = urllib.parse.unquote(self.path).lstrip("/").partition("?")[0].partition("/")
        assert "aws-chunked" not in self.headers.get("Content-Encoding", "")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            self.aws.put(bucket, key, body)
            self._send(200, b"")
        except Refusal as refusal:
            text = f"<Error><Code>{refusal.code}</Code><Message>{refusal.message}</Message></Error>"
            self._send(404, text.encode())

    def _send(self, code: int, content: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/x-amz-json-1.1")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def variables(aws: Aws) -> dict[str, str]:
    """What has boto3 talk to it, whatever this machine's AWS configuration says."""
    nothing = str(aws.folder / "no-configuration")
    return {
        "AWS_ENDPOINT_URL": aws.url,
        "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "eu-central-1",
        "AWS_CONFIG_FILE": nothing,
        "AWS_SHARED_CREDENTIALS_FILE": nothing,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
    }


@contextmanager
def serve(folder: Path, machines: Callable[[], list[Container]] = list) -> Iterator[Aws]:
    made = Aws(folder, machines())
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Desk", (_Desk,), {"aws": made}))
    server.daemon_threads = True
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield made
    finally:
        for job in made.jobs.values():
            for machine, process in zip(made.machines, job.processes, strict=False):
                if process.poll() is None:
                    machine.signal(process, signal.SIGKILL)
        for each in made.threads:
            each.join()
        server.shutdown()
        server.server_close()
        thread.join()
