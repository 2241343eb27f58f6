"""Writes what serves an export elsewhere, and applies it on request. Requests to SageMaker are checked first."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhosts.deploy import recipe
from manyhosts.errors import ConfigError, LaunchError
from manyhosts.export.description import Description
from manyhosts.records.atomic_file import write_json
from manyhosts.table import nearest

_VARIANT = "all"
_DIMENSION = "sagemaker:variant:DesiredInstanceCount"


def requests(name: str, options: Mapping[str, str]) -> list[dict[str, Any]]:
    """The calls in their order: `service`, `call` and `words` of each. The image is in ECR, with the model in it."""
    least, most = int(options.get("min", "1")), int(options.get("max", "4"))
    variant = {
        "VariantName": _VARIANT,
        "ModelName": name,
        "InstanceType": options.get("instance", "ml.m5.large"),
        "InitialInstanceCount": least,
        "ContainerStartupHealthCheckTimeoutInSeconds": 600,
    }
    scaled = {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{name}/variant/{_VARIANT}",
        "ScalableDimension": _DIMENSION,
    }
    tracking = {
        "TargetValue": float(options.get("per-instance", "600")),
        "PredefinedMetricSpecification": {"PredefinedMetricType": "SageMakerVariantInvocationsPerInstance"},
    }
    return [
        {
            "service": "sagemaker",
            "call": "create_model",
            "words": {
                "ModelName": name,
                "ExecutionRoleArn": options["role"],
                "PrimaryContainer": {"Image": options["image"]},
                "EnableNetworkIsolation": True,
            },
        },
        {
            "service": "sagemaker",
            "call": "create_endpoint_config",
            "words": {"EndpointConfigName": name, "ProductionVariants": [variant]},
        },
        {
            "service": "sagemaker",
            "call": "create_endpoint",
            "words": {"EndpointName": name, "EndpointConfigName": name},
        },
        {
            "service": "application-autoscaling",
            "call": "register_scalable_target",
            "words": {**scaled, "MinCapacity": least, "MaxCapacity": most},
        },
        {
            "service": "application-autoscaling",
            "call": "put_scaling_policy",
            "words": {
                **scaled,
                "PolicyName": name,
                "PolicyType": "TargetTrackingScaling",
                "TargetTrackingScalingPolicyConfiguration": tracking,
            },
        },
    ]


def validate(asked: list[dict[str, Any]]) -> None:
    """Hold the calls to botocore's models: names, types, lengths, patterns that it checks.

    Raises:
        ConfigError: one is not as the service wants it.
        LaunchError: botocore is not installed.
    """
    try:
        import botocore.session
        from botocore import xform_name
        from botocore.validate import ParamValidator
    except ImportError as cause:
        raise LaunchError(
            "botocore, the client of AWS, is not installed here",
            where="--to sagemaker",
            fix="in a clone of manyhosts: pip install '.[sagemaker]'",
        ) from cause
    session = botocore.session.Session()
    for each in asked:
        model = session.get_service_model(each["service"])
        operation = next(name for name in model.operation_names if xform_name(name) == each["call"])
        report = ParamValidator().validate(each["words"], model.operation_model(operation).input_shape)
        if report.has_errors():
            raise ConfigError(
                f"SageMaker would refuse {each['call']}: {report.generate_report()}",
                where="-o",
                fix="correct that option",
            )


OPTIONS: Mapping[str, Mapping[str, str]] = {
    "docker": {"image": "the image to build on", "tag": "the name of the image that is built"},
    "apptainer": {"image": "the image to build on"},
    "kubernetes": {
        "image": "the image that serves the model, as the cluster pulls it (required)",
        "namespace": "where it goes (default)",
        "min": "fewest copies (1)",
        "max": "most copies (4)",
        "cpu": "CPUs of each (1)",
        "memory": "memory of each (2Gi)",
        "token": "what clients must know; one is made where it is not given",
    },
    "sagemaker": {
        "image": "the image in ECR that serves the model (required)",
        "role": "the ARN of the role that it runs as (required)",
        "instance": "kind of machine (ml.m5.large)",
        "region": "AWS region",
        "min": "fewest machines (1)",
        "max": "most machines (4)",
        "per-instance": "requests a minute for each machine, above which another is added (600)",
    },
    "ray": {"min": "fewest copies (1)", "max": "most copies (4)", "cpu": "CPUs of each (1)"},
}
_REQUIRED = {"kubernetes": ("image",), "sagemaker": ("image", "role")}
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is to be served where."""

    export: Path
    to: str
    name: str = "model"
    output: Path | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = OPTIONS[self.to]
        for key in self.options:
            if key not in known:
                raise ConfigError(
                    f"--to {self.to} has no option {key!r}",
                    where=f"-o {key}",
                    fix=f"{nearest(key, known)}known: " + "; ".join(f"{name}: {said}" for name, said in known.items()),
                )
        for key in _REQUIRED.get(self.to, ()):
            if key not in self.options:
                builds = "; `manyhosts deploy --to docker` writes what builds one" if key == "image" else ""
                fix = f"-o {key}=…: {known[key]}{builds}"
                raise ConfigError(f"--to {self.to} needs to know {key}", where=f"-o {key}", fix=fix)
        for key in ("min", "max", "cpu", "per-instance"):
            text = self.options.get(key, "1")
            if not re.fullmatch(r"[1-9]\d*", text):
                raise ConfigError(f"{key} is {text!r}", where=f"-o {key}", fix="give an integer from 1")
        if int(self.options.get("min", "1")) > int(self.options.get("max", "4")):
            raise ConfigError("min is more than max", where="-o min", fix="give -o max, too")
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"{self.name!r} is no name for a service", where="--name", fix="small letters, digits and -, up to 42"
            )

    @property
    def folder(self) -> Path:
        """Where it is written."""
        return self.output or self.export / ".." / f"{self.export.name}-{self.to}"


def deploy(request: Request) -> tuple[Path, list[str]]:
    """Write the recipe or descriptions. Returns their folder, and the commands that follow.

    Raises:
        ConfigError: DIR is no export with a program, its folder is taken, or what was made does not pass its schema.
    """
    described = Description.read(request.export)
    if described.format not in ("torch-export", "onnx"):
        raise ConfigError(
            f"a {described.format} export holds weights and no program",
            where=str(request.export),
            fix="export the run with --format torch-export or onnx",
        )
    folder = Path(os.path.normpath(request.folder.absolute()))
    if folder.exists():
        raise ConfigError("this folder is there already", where=str(folder), fix="delete it, or give --output DIR")
    half = folder.with_name(f".{folder.name}.{os.getpid()}.half")
    try:
        half.mkdir(parents=True)
        follows = _WRITERS[request.to](request, described, half)
        half.rename(folder)
    except OSError as cause:
        raise ConfigError(
            f"cannot write: {cause.strerror}", where=str(folder), fix="choose another --output"
        ) from cause
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return folder, follows


def _docker(request: Request, described: Description, folder: Path) -> list[str]:
    recipe.write_context(folder, request.export, described)
    (folder / "Dockerfile").write_text(recipe.dockerfile(request.options.get("image") or recipe.base_image(described)))
    tag = request.options.get("tag", request.name)
    return [f"docker build -t {tag} .", f"docker run -e MANYHOSTS_SERVE_TOKEN -p 8080:{recipe.PORT} {tag}"]


def _apptainer(request: Request, described: Description, folder: Path) -> list[str]:
    recipe.write_context(folder, request.export, described)
    (folder / "model.def").write_text(recipe.apptainer(request.options.get("image") or recipe.base_image(described)))
    return ["apptainer build model.sif model.def", "apptainer run model.sif"]


def _kubernetes(request: Request, described: Description, folder: Path) -> list[str]:
    made = {"apiVersion": "v1", "kind": "List", "items": recipe.manifests(request.name, request.options)}
    file = folder / "model.json"
    file.touch(mode=0o600)  # the token is in it
    file.write_text(json.dumps(made, indent=1))
    return ["kubectl apply -f model.json"]


def _sagemaker(request: Request, described: Description, folder: Path) -> list[str]:
    asked = requests(request.name, request.options)
    validate(asked)
    write_json(folder / "requests.json", asked)
    # SageMaker asks /ping and /invocations, and has checked who asks before.
    recipe.write_context(folder, request.export, described)
    (folder / "Dockerfile").write_text(recipe.dockerfile(recipe.base_image(described), ("--behind-sagemaker",)))
    return [f"docker build -t {request.options['image']} . && docker push {request.options['image']}"]


def _ray(request: Request, described: Description, folder: Path) -> list[str]:
    write_json(folder / "serve.json", recipe.ray_config(request.name, request.options))
    (folder / "ray_app.py").write_text(recipe.RAY_APP)
    shutil.copytree(request.export, folder / "model", ignore=shutil.ignore_patterns("__pycache__"))
    return ["serve deploy serve.json"]


_WRITERS: Mapping[str, Callable[[Request, Description, Path], list[str]]] = {
    "docker": _docker,
    "apptainer": _apptainer,
    "kubernetes": _kubernetes,
    "sagemaker": _sagemaker,
    "ray": _ray,
}


def apply(request: Request, folder: Path, follows: list[str], client: Any = None) -> None:
    """Do what follows: build, or hand the descriptions over. SageMaker is asked through boto3, by `client`.

    Raises:
        LaunchError: it failed, or was refused.
    """
    if request.to == "sagemaker":
        if client is None:
            from manyhosts.launchers.sagemaker.client import Client

            client = Client(request.options.get("region", ""))
        for each in json.loads((folder / "requests.json").read_text()):
            client.ask(each["service"], each["call"], **each["words"])
        return
    words = follows[0].split()
    if shutil.which(words[0]) is None:
        raise LaunchError(f"{words[0]} is not installed here", where="--apply", fix=f"in {folder}: {follows[0]}")
    if subprocess.run(words, cwd=folder).returncode:
        raise LaunchError(
            f"{words[0]} failed", where=str(folder), fix=f"see the lines above; again: cd {folder} && {follows[0]}"
        )
