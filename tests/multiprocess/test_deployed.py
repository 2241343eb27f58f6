"""The container that serves an export: built where a runtime runs, and its recipe followed by hand everywhere."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from small_run import make_run

from manyhosts.deploy.deploy import Request, deploy
from manyhosts.export.export import Request as Export
from manyhosts.export.export import export

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]  # the text of each recipe is read in `make test`: unit/deploy
TOKEN = "a-token-of-a-test"


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    made, _ = export(Export(run_dir=str(make_run(folder)), format="torch-export"))
    return deploy(Request(export=made, to="docker", output=folder / "docker"))[0]


def answer(port: int, token: str = TOKEN) -> int:
    """The status of a right request."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/predict",
        json.dumps({"inputs": [[[[0.5] * 8] * 8]]}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {token}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as found:
            assert len(json.load(found)["outputs"][0]) == 3
            return int(found.status)
    except urllib.error.HTTPError as error:
        return error.code


def only(packages: list[str], folder: Path) -> Path:
    """A folder with these packages and what they need, and nothing else that is installed here."""
    folder.mkdir()
    left, seen = list(packages), set()
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        found = metadata.distribution(name)
        for top in {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(found.locate_file(top))
        needs = [Requirement(line) for line in found.requires or []]
        left += [each.name for each in needs if each.marker is None or each.marker.evaluate({"extra": ""})]
    return folder


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_what_the_recipe_copies_and_installs_is_all_that_serving_takes(context: Path, tmp_path: Path) -> None:
    """What docker would do is done by hand: COPY, ENV and ENTRYPOINT, with the packages of requirements.txt alone."""
    text, app, port = (context / "Dockerfile").read_text(), tmp_path / "app", free_port()
    for source, place in re.findall(r"^COPY (\S+) (\S+)$", text, re.MULTILINE):
        copy = shutil.copytree if (context / source).is_dir() else shutil.copy
        app.mkdir(exist_ok=True)
        copy(context / source, app / place)
    pinned = dict(line.split("==") for line in (app / "requirements.txt").read_text().splitlines())
    assert all(metadata.version(name).partition("+")[0] == version for name, version in pinned.items())
    packages = only(list(pinned), tmp_path / "packages")
    python = Path(sys.base_prefix) / "bin" / "python3"
    given = dict(each.split("=") for each in re.findall(r"^ENV (.*)$", text, re.MULTILINE)[0].split())
    given["PYTHONPATH"] = given["PYTHONPATH"].replace("/app", f"{app}{os.pathsep}{packages}")
    env = {"PATH": os.environ["PATH"], "MANYHOSTS_SERVE_TOKEN": TOKEN, **given}
    where = subprocess.run(
        [python, "-c", "import manyhosts; print(manyhosts.__file__)"], env=env, cwd=app, capture_output=True, text=True
    )
    assert Path(where.stdout.strip()).is_relative_to(app), where.stderr
    words = {}
    for kind in ("HEALTHCHECK .* CMD", "ENTRYPOINT"):
        found = re.search(rf"^{kind} (\[.*\])$", text, re.MULTILINE)
        assert found is not None
        line = found[1].replace("/app/", f"{app}/").replace("8080", str(port)).replace("0.0.0.0", "127.0.0.1")
        words[kind] = [str(python), *json.loads(line)[1:]]
    with subprocess.Popen(words["ENTRYPOINT"], env=env, cwd=app, stderr=subprocess.PIPE, text=True) as process:
        try:
            healthy, end = 1, time.monotonic() + 120
            while healthy and process.poll() is None and time.monotonic() < end:
                probe = words["HEALTHCHECK .* CMD"]
                healthy = subprocess.run(probe, env=env, stderr=subprocess.DEVNULL).returncode
            assert healthy == 0, process.stderr.read() if process.poll() is not None and process.stderr else "silent"
            assert answer(port) == 200
            assert answer(port, "another") == 401
        finally:
            process.send_signal(signal.SIGTERM)
    assert process.returncode == 0


def runs(*words: str) -> bool:
    return shutil.which(words[0]) is not None and subprocess.run(words, capture_output=True).returncode == 0


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not runs("docker", "info"), reason="no docker daemon runs here")
def test_recipe_is_built_and_its_container_answers(context: Path) -> None:
    name, port = f"manyhosts-test-{secrets.token_hex(4)}", free_port()
    try:
        subprocess.run(["docker", "build", "-t", name, "."], cwd=context, check=True)
        given = ["--name", name, "-d", "-e", f"MANYHOSTS_SERVE_TOKEN={TOKEN}", "-p", f"127.0.0.1:{port}:8080"]
        subprocess.run(["docker", "run", *given, name], check=True)
        end = time.monotonic() + 300
        while time.monotonic() < end:
            try:
                assert answer(port) == 200
                break
            except OSError:
                time.sleep(1)
        assert answer(port, "another") == 401
    finally:
        subprocess.run(["docker", "rm", "-f", name], capture_output=True)
        subprocess.run(["docker", "rmi", "-f", name], capture_output=True)
