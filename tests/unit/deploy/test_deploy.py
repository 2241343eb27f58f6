"""What serves an export elsewhere: each description passes the schema of whoever reads it."""

from __future__ import annotations

import base64
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from manyhosts.deploy.deploy import OPTIONS, Request, apply, deploy
from manyhosts.errors import ConfigError, LaunchError
from manyhosts.export.description import Description, TensorSpec

VERSION = "1.31"
IMAGES = {"image": "registry.example/model:1", "role": "arn:aws:iam::123456789012:role/serving"}


@pytest.fixture
def export(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "model.pt2").write_bytes(b"a program")
    spec = TensorSpec(name="inputs", dtype="float32", shape=(4,))
    source = {"script": "train.py", "step": 8, "versions": {"python": "3.11.7"}}
    Description(format="torch-export", precision="fp32", inputs=[spec], outputs=[spec], source=source).write(folder)
    return folder


def request(export: Path, to: str, **options: str) -> Request:
    needed = {key: value for key, value in IMAGES.items() if key in OPTIONS[to] and to in ("kubernetes", "sagemaker")}
    return Request(export=export, to=to, options={**needed, **options})


def test_docker_recipe_copies_what_its_context_has_and_runs_as_nobody_special(export: Path) -> None:
    folder, follows = deploy(request(export, "docker"))
    text = (folder / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (\S+)", text, re.MULTILINE)
    assert all((folder / name).exists() for name in copied)
    assert text.startswith("FROM python:3.11-slim\n")
    assert re.search(r"^USER (?!0|root)", text, re.MULTILINE)
    for kind in ("HEALTHCHECK.* CMD", "ENTRYPOINT"):
        words = json.loads(re.search(rf"^{kind} (.*)$", text, re.MULTILINE)[1])  # type: ignore[index]
        assert words[0] == "python"
    assert words[4:7] == ["/app/model", "--host", "0.0.0.0"]
    assert Description.read(folder / "model").source["step"] == 8
    pinned = (folder / "requirements.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", line) for line in pinned)
    assert follows[0] == "docker build -t model ."


def test_apptainer_recipe_copies_what_is_beside_it(export: Path) -> None:
    folder, _ = deploy(request(export, "apptainer"))
    text = (folder / "model.def").read_text()
    assert re.findall(r"^Bootstrap: docker$|^From: python:3.11-slim$", text, re.MULTILINE)
    files = re.search(r"%files\n((?: .*\n)+)", text)
    assert files is not None
    assert all((folder / line.split()[0]).exists() for line in files[1].splitlines())


def test_kubernetes_descriptions_pass_the_schema_and_scale_by_load(export: Path) -> None:
    folder, _ = deploy(request(export, "kubernetes", max="7", namespace="ours"))
    file = folder / "model.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    made: dict[str, Any] = {}
    for document in json.loads(file.read_text())["items"]:
        kubernetes_validate.validate(document, VERSION, strict=True)
        assert document["metadata"]["namespace"] == "ours"
        made[document["kind"]] = document
    assert made["HorizontalPodAutoscaler"]["spec"]["maxReplicas"] == 7
    assert len(base64.b64decode(made["Secret"]["data"]["token"])) >= 24
    pod = made["Deployment"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == IMAGES["image"]
    assert pod["securityContext"]["runAsNonRoot"]
    labels = made["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert made["Service"]["spec"]["selector"] == labels == made["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]


def test_sagemaker_requests_are_held_to_botocore(export: Path) -> None:
    folder, _ = deploy(request(export, "sagemaker"))
    asked: list[tuple[str, dict[str, Any]]] = []

    class Client:
        def ask(self, service: str, call: str, /, **words: Any) -> None:
            asked.append((f"{service}.{call}", words))

    apply(request(export, "sagemaker"), folder, [], Client())
    assert [call for call, _ in asked] == [
        "sagemaker.create_model",
        "sagemaker.create_endpoint_config",
        "sagemaker.create_endpoint",
        "application-autoscaling.register_scalable_target",
        "application-autoscaling.put_scaling_policy",
    ]
    assert asked[0][1]["PrimaryContainer"]["Image"] == IMAGES["image"]
    assert "--behind-sagemaker" in (folder / "Dockerfile").read_text()
    with pytest.raises(ConfigError, match=r"SageMaker would refuse create_model.*ExecutionRoleArn"):
        deploy(Request(export=export, to="sagemaker", options={**IMAGES, "role": "x"}, output=export / "other"))
    assert not (export / "other").exists()


RAY = """
import json, sys
from ray.serve.schema import ServeDeploySchema
read = ServeDeploySchema.model_validate(json.loads(open("serve.json").read()))
assert read.applications[0].deployments[0].autoscaling_config["min_replicas"] == 2
sys.path.insert(0, ".")
import ray_app
assert type(ray_app.app).__name__ == "Application", ray_app.app
"""


@pytest.mark.slow  # loads Ray; that the files are written is tried above for other targets
def test_ray_application_passes_the_schema_of_ray_serve_and_can_be_bound(export: Path) -> None:
    folder, _ = deploy(request(export, "ray", min="2"))
    words = [sys.executable, "-W", "ignore", "-c", RAY]
    variables = {**os.environ, "MANYHOSTS_SERVE_TOKEN": "a-token-of-a-test"}
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr


def test_wrong_words_are_refused_and_nothing_is_written(export: Path) -> None:
    before = sorted(os.listdir(export.parent))
    for words, said in (
        ({"to": "kubernetes"}, "needs to know image"),
        ({"to": "docker", "options": {"tga": "x"}}, "no option 'tga'"),
        ({"to": "kubernetes", "options": {"image": "x", "min": "5"}}, "min is more than max"),
        ({"to": "ray", "options": {"cpu": "none"}}, "cpu is 'none'"),
        ({"to": "docker", "name": "My_Model"}, "no name for a service"),
    ):
        with pytest.raises(ConfigError, match=said):
            deploy(Request(export=export, **words))
    assert sorted(os.listdir(export.parent)) == before
    (export / "model.pt2").write_bytes(b"another program")
    with pytest.raises(ConfigError, match=r"model\.pt2 is not the file"):
        deploy(request(export, "docker"))


def test_apply_without_the_program_says_what_to_do(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(export, "docker")
    folder, follows = deploy(asked)
    monkeypatch.setenv("PATH", str(export))
    with pytest.raises(LaunchError, match="docker is not installed here"):
        apply(asked, folder, follows)
