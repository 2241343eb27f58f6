"""What serves an export elsewhere: a container (Dockerfile, Apptainer), Kubernetes manifests, an app for Ray Serve."""

from __future__ import annotations

import base64
import json
import secrets
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import manyhosts
from manyhosts.export.description import Description

PORT = 8080
USER = 10001
_PACKAGES = (
    *("torch", "numpy", "safetensors", "torchmetrics", "click", "rich", "cryptography"),
    *("starlette", "uvicorn", "prometheus_client"),
)
_PROBE = (
    "import os, urllib.request as u; "
    "u.urlopen(u.Request('http://127.0.0.1:{port}/readyz', "
    "headers={{'Authorization': 'Bearer ' + os.environ.get('MANYHOSTS_SERVE_TOKEN', '')}}), timeout=5)"
)


def base_image(described: Description) -> str:
    """The image to build on: of the Python that has verified the export."""
    return "python:{}.{}-slim".format(*str(described.source["versions"]["python"]).split("."))


def probe(port: int = PORT) -> list[str]:
    """The command that says whether the model in this container answers, token and all."""
    return ["python", "-c", _PROBE.format(port=port)]


def command(words: tuple[str, ...] = ()) -> list[str]:
    """What the container runs."""
    serve = f"python -m manyhosts.cli.main serve /app/model --host 0.0.0.0 --port {PORT}"
    return [*serve.split(), *words]


def requirements(described: Description) -> str:
    """What is installed in the container: the versions that have verified the export here."""
    names = (*_PACKAGES, *(["onnxruntime"] if described.format == "onnx" else []))
    return "".join(f"{name}=={metadata.version(name).partition('+')[0]}\n" for name in names)


def write_context(folder: Path, export: Path, described: Description) -> None:
    """Put the model, this manyhosts and the list of packages into `folder`."""
    for source, name in ((export, "model"), (Path(manyhosts.__file__).parent, "manyhosts")):
        shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "requirements.txt").write_text(requirements(described))


def dockerfile(image: str, words: tuple[str, ...] = ()) -> str:
    """The text of a Dockerfile whose context `write_context` has made."""
    return "\n".join(
        [
            f"FROM {image}",
            "WORKDIR /app",
            "COPY requirements.txt .",
            "RUN python -m pip install --no-cache-dir -r requirements.txt",
            "COPY manyhosts manyhosts",
            "COPY model model",
            "ENV PYTHONPATH=/app PYTHONUNBUFFERED=1 HOME=/tmp",
            f"USER {USER}:{USER}",
            f"EXPOSE {PORT}",
            "# The token is given to the container: docker run -e MANYHOSTS_SERVE_TOKEN -p 8080:8080 IMAGE",
            f"HEALTHCHECK --start-period=120s --interval=10s CMD {json.dumps(probe())}",
            f"ENTRYPOINT {json.dumps(command(words))}",
            "",
        ]
    )


def apptainer(image: str) -> str:
    """The text of an Apptainer definition, built in the folder that `write_context` has made."""
    return "\n".join(
        [
            "Bootstrap: docker",
            f"From: {image}",
            "",
            "%files",
            "    requirements.txt /app/requirements.txt",
            "    manyhosts /app/manyhosts",
            "    model /app/model",
            "",
            "%post",
            "    python -m pip install --no-cache-dir -r /app/requirements.txt",
            "",
            "%environment",
            "    export PYTHONPATH=/app PYTHONUNBUFFERED=1",
            "",
            "%runscript",
            "    # The token: APPTAINERENV_MANYHOSTS_SERVE_TOKEN=... apptainer run model.sif",
            f'    exec {" ".join(command())} "$@"',
            "",
        ]
    )


_LABEL = "manyhosts/model"


def manifests(name: str, options: Mapping[str, str]) -> list[dict[str, Any]]:
    """Secret, Deployment, Service, HorizontalPodAutoscaler, PodDisruptionBudget and NetworkPolicy of one served model.

    The token is in the Secret; the pods cannot be reached from outside the namespace.
    """
    labels = {_LABEL: name}
    meta: dict[str, Any] = {"name": name, "labels": labels, "namespace": options.get("namespace", "default")}
    least, most = int(options.get("min", "1")), int(options.get("max", "4"))
    limits = {"cpu": options.get("cpu", "1"), "memory": options.get("memory", "2Gi")}
    token = options.get("token") or secrets.token_urlsafe(24)
    check = {"exec": {"command": probe()}, "timeoutSeconds": 6}
    container = {
        "name": "model",
        "image": options["image"],
        "ports": [{"containerPort": PORT, "name": "http"}],
        "env": [
            {"name": "MANYHOSTS_SERVE_TOKEN", "valueFrom": {"secretKeyRef": {"name": name, "key": "token"}}},
        ],
        "startupProbe": {**check, "periodSeconds": 5, "failureThreshold": 60},
        "readinessProbe": {**check, "periodSeconds": 5},
        "resources": {"requests": limits, "limits": limits},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108  # where it is in every container
    }
    pod = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 60,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    selector = {"matchLabels": labels}
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": meta,
            "type": "Opaque",
            "data": {"token": base64.b64encode(token.encode()).decode()},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": meta,
            "spec": {"selector": selector, "template": {"metadata": {"labels": labels}, "spec": pod}},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": meta,
            "spec": {"selector": labels, "ports": [{"name": "http", "port": 80, "targetPort": "http"}]},
        },
        {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": meta,
            "spec": {
                "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
                "minReplicas": least,
                "maxReplicas": most,
                "metrics": [
                    {
                        "type": "Resource",
                        "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}},
                    }
                ],
            },
        },
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": meta,
            "spec": {"maxUnavailable": 1, "selector": selector},
        },
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": meta,
            "spec": {
                "podSelector": selector,
                "policyTypes": ["Ingress"],
                "ingress": [{"from": [{"podSelector": {}}], "ports": [{"port": PORT}]}],
            },
        },
    ]


def ray_config(name: str, options: Mapping[str, str]) -> dict[str, Any]:
    """What `serve deploy` takes: the application of `ray_app`, with replicas by load."""
    return {
        "applications": [
            {
                "name": name,
                "route_prefix": f"/{name}",
                "import_path": "ray_app:app",
                "deployments": [
                    {
                        "name": "Model",
                        "max_ongoing_requests": 64,
                        "autoscaling_config": {
                            "min_replicas": int(options.get("min", "1")),
                            "max_replicas": int(options.get("max", "4")),
                            "target_ongoing_requests": 16,
                        },
                        "ray_actor_options": {"num_cpus": float(options.get("cpu", "1"))},
                    }
                ],
            }
        ]
    }


RAY_APP = '''"""The model served by Ray Serve: each replica answers as `manyhosts serve` does, with its own batching."""

import os
from pathlib import Path

from manyhosts.serve.app import Options, Server
from manyhosts.serve.workers import Served
from ray import serve

TOKEN = os.environ["MANYHOSTS_SERVE_TOKEN"]  # Ray's proxy listens for others, so every request must have it


def application():
    return Server(Options(served=Served(folder=Path(__file__).parent / "model"), token=TOKEN)).app(opens=True)


@serve.deployment
@serve.ingress(application)
class Model:
    """One replica."""


app = Model.bind()
'''
