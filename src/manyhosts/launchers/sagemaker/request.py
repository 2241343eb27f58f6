"""What SageMaker is asked for: a training job of N instances whose container starts one of our nodes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from manyhosts.control.job import Job
from manyhosts.control.plan import Later
from manyhosts.errors import ConfigError
from manyhosts.launchers import choices, packing
from manyhosts.records import run_directory

OPTIONS = {
    "image": "the container image in ECR, which has Python, manyhosts and what the script imports; there is no default",
    "role": "the ARN of the role that the job has; there is no default",
    "bucket": "where code, record and output are kept: s3://BUCKET/FOLDER; there is no default",
    "instance": "the type of the instances: ml.g5.xlarge; there is no default",
    "region": "the AWS region (default: that of your AWS configuration)",
    "profile": "the profile of your AWS configuration",
    "time": "the longest time that the run may take (default 24h)",
    "spot": "yes: spot instances, cheaper, which AWS may take away; the run continues when there are some again",
    "wait": "with spot, the longest time until the run is over, waiting included (default: time and 24h)",
    "volume": "GB of disk of each instance (default 30)",
    "data": "further input, NAME=s3://BUCKET/FOLDER,...; the script finds it in /opt/ml/input/data/NAME",
    "subnets": "subnets of your VPC, SUBNET,SUBNET; with security-groups",
    "security-groups": "security groups of your VPC, GROUP,GROUP; they must let the instances talk to each other",
    "kms-key": "the KMS key that the instances' disks, the output and what is sent are encrypted with",
    "network-isolation": "yes: the containers talk to each other and to no others",
    "tags": "tags of the job: KEY=VALUE,KEY=VALUE",
    "python": "the Python in the image (default python3)",
}
CHANNEL = "manyhosts"
ML = Path("/opt/ml")
CODE = ML / "code"
RUN_DIR = ML / "checkpoints"
"""Brought to S3 by SageMaker all the time, and back when an instance was taken away."""
CHOSEN_LATER = "chosen-when-sent"
ARCHIVE, JOB, TOKEN = "folder.tar.gz", "job.json", "token"
"""What our input channel has: the working directory, what to run, and the run's secret."""
_NEEDED = {
    "image": "-o image=ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG",
    "role": "-o role=arn:aws:iam::ACCOUNT:role/NAME; one that may use SageMaker, the bucket and ECR",
    "bucket": "-o bucket=s3://BUCKET/FOLDER",
    "instance": "-o instance=ml.g5.xlarge",
}
_PATTERNS = {
    "role": r"arn:aws[a-z-]*:iam::\d{12}:role/?[\w+=,.@/-]+",
    "bucket": r"s3://[a-z0-9][a-z0-9.-]+(/[^\s,]*)?",
    "instance": r"ml\.[a-z0-9-]+\.[a-z0-9]+",
    "region": r"[a-z]{2}(-[a-z]+)+-\d",
}
_DAY_S = 24 * 60 * 60


def check(job: Job) -> None:
    """See that SageMaker can be asked for `job`.

    Raises:
        ConfigError: an option is missing or unreadable.
    """
    options = job.options
    for key, line in _NEEDED.items():
        if key not in options:
            raise ConfigError(f"no {key} is named", where="--on sagemaker", fix=line)
    for key, pattern in _PATTERNS.items():
        if key in options and not re.fullmatch(pattern, options[key]):
            raise ConfigError(
                f"{key} is {options[key]!r}", where=f"-o {key}", fix=f"write it as {_NEEDED.get(key, OPTIONS[key])}"
            )
    if job.is_elastic:
        raise ConfigError(
            f"a training job of SageMaker has as many instances from beginning to end, and --nodes is"
            f" {job.least_nodes}:{job.nodes}",
            where="--nodes",
            fix=f"give --nodes {job.nodes}; -o spot=yes waits when an instance is taken away",
        )
    if not job.sync:
        raise ConfigError(
            "SageMaker's instances share no disk with this machine", where="--no-sync", fix="leave --no-sync out"
        )
    if ("subnets" in options) != ("security-groups" in options):
        raise ConfigError(
            "one of subnets and security-groups is given alone", where="-o subnets", fix="give both, or none"
        )
    choices.count(options, "volume", 30)
    packing.program_there(job)
    request(job)


def job_name(job: Job, suffix: str) -> str:
    """What the job is called: never twice in an account, so with a suffix of its own each time."""
    name = re.sub(r"[^a-zA-Z0-9]+", "-", job.run_id).strip("-")[: 62 - len(suffix)].strip("-")
    return f"{name or 'run'}-{suffix}"


def values_of(job: Job, name: str) -> dict[str, str]:
    """What the job's `name` decides: what a plan fills in when it is sent."""
    folder = input_place(job, name)
    return {"name": name, "input": folder, **{f"place of {file}": f"{folder}/{file}" for file in (ARCHIVE, JOB, TOKEN)}}


def later(job: Job) -> dict[str, Later]:
    """The same before there is a name."""
    return {key: Later(key, value) for key, value in values_of(job, job_name(job, CHOSEN_LATER)).items()}


def place(job: Job) -> str:
    """Where everything of the run is in S3. A run that continues finds its record there again."""
    return f"{job.options['bucket'].rstrip('/')}/{job.run_id}"


def input_place(job: Job, name: str) -> str:
    """Where the job's code is brought to."""
    return f"{place(job)}/jobs/{name}/input"


def job_there(job: Job) -> Job:
    """`job` as its instances see it."""
    environment = {**job.environment, run_directory.SEPARATE_DISKS: "1"}  # each instance has a disk of its own
    return replace(
        job,
        program=packing.program_there(job),
        folder=CODE,
        run_dir=RUN_DIR,
        options={},
        hosts=(),
        environment=environment,
    )


def request(job: Job) -> dict[str, Any]:
    """The words of CreateTrainingJob.

    Raises:
        ConfigError: an option cannot be read.
    """
    options, chosen = job.options, later(job)
    limit_s = choices.seconds(options, "time") or _DAY_S
    stopping = {"MaxRuntimeInSeconds": limit_s}
    spot = choices.yes(options, "spot", default=False)
    if spot:
        stopping["MaxWaitTimeInSeconds"] = max(limit_s, choices.seconds(options, "wait") or limit_s + _DAY_S)
    channels = {CHANNEL: chosen["input"], **_data(job)}
    made: dict[str, Any] = {
        "TrainingJobName": chosen["name"],
        "RoleArn": options["role"],
        "AlgorithmSpecification": {
            "TrainingImage": options["image"],
            "TrainingInputMode": "File",
            "ContainerEntrypoint": [options.get("python", "python3"), "-P", "-m", "manyhosts.launchers.sagemaker.node"],
        },
        "InputDataConfig": [_channel(channel, uri) for channel, uri in channels.items()],
        "OutputDataConfig": {"S3OutputPath": f"{place(job)}/jobs"},
        "CheckpointConfig": {"S3Uri": f"{place(job)}/run", "LocalPath": str(RUN_DIR)},
        "ResourceConfig": {
            "InstanceType": options["instance"],
            "InstanceCount": job.nodes,
            "VolumeSizeInGB": choices.count(options, "volume", 30),
        },
        "StoppingCondition": stopping,
        "EnableManagedSpotTraining": spot,
        "EnableInterContainerTrafficEncryption": job.encrypt,
        "EnableNetworkIsolation": choices.yes(options, "network-isolation", default=False),
        "HyperParameters": {"script": job.program, **job.overrides},  # to be seen and searched for in the console
        "Tags": [
            {"Key": key, "Value": value}
            for key, value in {"manyhosts": job.run_id, **choices.pairs(options, "tags", OPTIONS)}.items()
        ],
    }
    if "kms-key" in options:
        made["OutputDataConfig"]["KmsKeyId"] = made["ResourceConfig"]["VolumeKmsKeyId"] = options["kms-key"]
    if "subnets" in options:
        groups = options["security-groups"].split(",")
        made["VpcConfig"] = {"Subnets": options["subnets"].split(","), "SecurityGroupIds": groups}
    return made


def validate(made: dict[str, Any]) -> None:
    """Hold a request to botocore's own description of the service.

    Raises:
        ImportError: botocore is not installed.
        ConfigError: it does not fit.
    """
    import botocore.session
    from botocore.validate import ParamValidator

    service = botocore.session.get_session().get_service_model("sagemaker")
    report = ParamValidator().validate(made, service.operation_model("CreateTrainingJob").input_shape)
    if report.has_errors():
        raise ConfigError(
            f"SageMaker would not take this: {report.generate_report()}",
            where="CreateTrainingJob",
            fix="see what -o gave it: `manyhosts run --on sagemaker --help`",
        )


def _channel(name: str, uri: str) -> dict[str, Any]:
    source = {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": "FullyReplicated"}
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}, "InputMode": "File"}


def _data(job: Job) -> dict[str, str]:
    """Channel → where it is in S3."""
    found = choices.pairs(job.options, "data", OPTIONS)
    for name, uri in found.items():
        if not re.fullmatch(r"[\w.-]+", name) or not re.fullmatch("s3://.+", uri):
            fix = f"data: {OPTIONS['data']}"
            raise ConfigError(f"cannot read {f'{name}={uri}'!r}", where="-o data", fix=fix)
    return found
