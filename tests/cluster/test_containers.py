"""Runs in containers on hosts that ssh reaches: same weights, nothing left behind, a sentence for what is wrong."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from container_runtimes import image, install
from launching import MANYHOSTS, wait_until, write_script
from remote import Ended, run, start

from manyhosts.lab import Lab

IMAGE = "my.org/train:1"
TOLD = "/usr/local/told"
RUNTIMES = ("docker", "podman", "apptainer")
SOURCE = """
    import os
    import torch
    from torch import nn
    import manyhosts as mh

    images = torch.rand(96, 16, generator=torch.Generator().manual_seed(7))
    labels = images.reshape(96, 4, 4).sum(2).argmax(1)
    trainer = mh.Trainer(
        model=lambda: nn.Linear(16, 4),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        data=mh.Data(train=torch.utils.data.TensorDataset(images, labels), batch_size=24),
        virtual_workers=3,
    )
    trainer.fit("2 epochs")
    image = os.environ.get("MANYHOSTS_IMAGE", "").split()
    print("sees", os.path.exists("../outside"), os.environ.get("PASSWORD"), image[:1])
"""
WAITS = "import time\nprint('it runs', flush=True)\ntime.sleep(600)\n"


@pytest.fixture(scope="module")
def hosts(four: Lab) -> Lab:
    """Hosts without any runtime, but for what a test gives them."""
    for host in four:
        host.run(["rm", "-f", "/usr/local/bin/docker", "/usr/bin/docker"])
    return four


def give(hosts: Lab, folder: Path, runtimes: Mapping[str, str], **more: Any) -> None:
    """Let each host have one runtime and no other, with one image. `folder` is what its containers do not see."""
    for host in hosts:
        for name in RUNTIMES:
            host.path(f"/usr/local/bin/{name}").unlink(missing_ok=True)
        host.path(TOLD).unlink(missing_ok=True)
        if host.name in runtimes:
            reported = {
                "images": {IMAGE: image(digests=["ab"])},
                "reported": TOLD,
                "hidden": [str(folder.parent)],
                **more,
            }
            install(runtimes[host.name], host.path("/usr/local/bin"), **reported)


def containers_of(hosts: Lab) -> str:
    """All that runtimes were told on all hosts."""
    return "".join(path.read_text() for host in hosts if (path := host.path(TOLD)).exists())


def hash_of(run_dir: Path) -> str:
    return str(json.loads((run_dir / "summary.json").read_text())["weights_sha256"])


def test_three_hosts_with_docker_and_podman_train_to_the_bits_of_one_process(hosts: Lab, tmp_path: Path) -> None:
    folder = tmp_path / "the project"
    folder.mkdir()
    give(hosts, folder, {"lab1": "docker", "lab2": "podman", "lab3": "docker"}, hidden=[str(tmp_path)])
    for host in hosts:
        host.run(["mkdir", "-p", str(folder)])
        host.path(folder.parent / "outside").write_text("of the host")
    options = ["-o", f"container={IMAGE}", "--env", "PASSWORD=s3cret", "--run-dir", "many"]
    ended = run(hosts, folder, SOURCE, "--hosts", "lab1,lab2,lab3", *options)
    assert ended.code == 0, ended.err
    seen = sorted(line.partition("] ")[2] for line in ended.out.splitlines() if "] sees" in line)
    assert seen == ["sees False s3cret ['docker']"] * 2 + ["sees False s3cret ['podman']"]
    assert "s3cret" not in containers_of(hosts)
    write_script(folder, SOURCE, "alone.py")
    words = [*MANYHOSTS, "run", "--env", "OMP_NUM_THREADS=1", "--run-dir", "one", "alone.py"]
    subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=120)
    assert hash_of(folder / "many") == hash_of(folder / "one")


def sentence(ended: Ended) -> str:
    [what] = [line for line in ended.err.splitlines() if line.startswith("manyhosts: ")]
    assert ended.code == 3
    assert "fix:" in ended.err
    assert "it runs" not in ended.out
    return what


def test_host_that_lacks_the_image_has_another_or_one_without_manyhosts_is_named(hosts: Lab, tmp_path: Path) -> None:
    def tried(**more: Any) -> str:
        give(hosts, tmp_path, {"lab1": "docker"})
        for name in RUNTIMES:
            hosts[1].path(f"/usr/local/bin/{name}").unlink(missing_ok=True)
        if more:
            own = {"reported": TOLD, "hidden": [str(tmp_path.parent)], **more}
            install("docker", hosts[1].path("/usr/local/bin"), **own)
        return sentence(run(hosts, tmp_path, WAITS, "--hosts", "lab1,lab2", "-o", f"container={IMAGE}"))

    assert "host lab2 has no container runtime for the image my.org/train:1: docker or podman is not there" in tried()
    assert "host lab2 has no image my.org/train:1 (docker: Error: No such image" in tried(images={})
    others = {IMAGE: image("22", digests=["cd"])}
    assert "hosts lab1 and lab2 have different images: my.org/train:1 is sha256:" in tried(images=others)
    bare = {IMAGE: image(digests=["ab"], python="")}
    assert "there is no Python in the image my.org/train:1 on host lab2: neither" in tried(images=bare)
    lacking = {IMAGE: image(digests=["ab"], python='set -- -S "$@"')}  # a Python without its packages
    assert "the image my.org/train:1 on host lab2 has no manyhosts: " in tried(images=lacking)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_container_is_left_by_a_run_that_is_ended(hosts: Lab, tmp_path: Path, number: signal.Signals) -> None:
    give(hosts, tmp_path, {"lab1": "docker", "lab2": "podman"})
    options = ["-o", f"container={IMAGE}", "--head-timeout", "1", "--run-dir", "waits"]
    started = start(hosts, tmp_path, WAITS, "--hosts", "lab1,lab2", *options)
    try:
        assert started.stdout is not None
        assert sorted(started.stdout.readline().partition("] ")[2] for _ in "ab") == ["it runs\n"] * 2
        hosts.desk.end(started, number)
        out, err = started.communicate(timeout=120)
        for name in ("lab1", "lab2"):
            wait_until(lambda name=name: not _runs_on(hosts, name), f"no container is left on {name}")
    finally:
        hosts.desk.end(started)
    assert number == signal.SIGKILL or started.returncode == 130, out + err


def _runs_on(hosts: Lab, name: str) -> bool:
    """Whether a worker, an agent or a runtime's client is there."""
    found = hosts.host(name).processes().values()
    return any("python" in words or words.startswith("manyhosts ") for words in found)


def test_doctor_names_hosts_whose_image_differs_or_is_not_there(hosts: Lab, tmp_path: Path) -> None:
    give(hosts, tmp_path, {name: "docker" for name in ("lab1", "lab2", "lab3", "lab4")})
    own = {"reported": TOLD, "hidden": [str(tmp_path.parent)]}
    install("docker", hosts[1].path("/usr/local/bin"), images={IMAGE: image("22")}, **own)
    install("docker", hosts[2].path("/usr/local/bin"), images={}, **own)
    words = [*MANYHOSTS, "doctor", "--hosts", ",".join(hosts.names), "-o", f"container={IMAGE}", "--json"]
    done = hosts.desk.run(words, folder=str(tmp_path), timeout_s=170, check=False)
    found = {each["where"]: each for each in json.loads(done.stdout)["findings"] if each["level"] == "error"}
    assert done.returncode == 3
    assert found["host lab3"]["what"].startswith("host lab3 has no image my.org/train:1")
    assert "22222222" in found["host lab2"]["what"]
    assert found["host lab2"]["check"] == "image"
    assert len(found) == 2
    assert "--pull never" in containers_of(hosts) or '["--pull", "never"]' in containers_of(hosts)
    assert not hosts[0].path(tmp_path / "runs").exists(), "it leaves nothing"
