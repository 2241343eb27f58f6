"""The container that serves an export: a Dockerfile or an Apptainer definition, and everything that it copies in."""

from __future__ import annotations

import json
import shutil
from importlib import metadata
from pathlib import Path

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
