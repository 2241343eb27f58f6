"""Hosts that come when a run over ssh has begun: on their way, with what they need, and fit for it."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from launching import wait_until

from manyhosts import __version__
from manyhosts.control.display import PlainDisplay
from manyhosts.control.job import Job
from manyhosts.errors import LaunchError
from manyhosts.hosts import version_check
from manyhosts.hosts.connection import Unreachable
from manyhosts.hosts.disks import HERE, Disks
from manyhosts.hosts.files import Files
from manyhosts.hosts.remote_probe import is_on_a_network
from manyhosts.launchers.ssh.cluster import Cluster
from manyhosts.launchers.ssh.remote_agent import DeferredAgent

LONG = [sys.executable, "-c", "import time; time.sleep(60)"]


def agent() -> subprocess.Popen[bytes]:
    return subprocess.Popen(LONG)


def nothing() -> None:
    pass


def test_latecomer_is_on_its_way_then_an_agent_and_then_its_end() -> None:
    may_come = threading.Event()

    def come() -> subprocess.Popen[bytes]:
        may_come.wait(20)
        return agent()

    late = DeferredAgent(come, nothing)
    assert late.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        late.wait(timeout=0.01)
    may_come.set()
    with pytest.raises(subprocess.TimeoutExpired):
        late.wait(timeout=0.2)
    late.kill()
    assert late.wait(timeout=120) == late.poll() == -9


def test_latecomer_that_cannot_come_has_ended() -> None:
    def refuse() -> subprocess.Popen[bytes]:
        raise LaunchError("host far does not answer")

    late = DeferredAgent(refuse, nothing)
    assert late.wait(timeout=120) == 1


def test_latecomer_that_is_given_up_on_its_way_leaves_no_agent() -> None:
    gives_up, may_end = threading.Event(), threading.Event()
    started: list[subprocess.Popen[bytes]] = []

    def come() -> subprocess.Popen[bytes]:
        may_end.wait(20)
        started.append(agent())
        return started[-1]

    late = DeferredAgent(come, gives_up.set)
    late.terminate()
    assert gives_up.is_set()
    assert late.wait() == 1, "nobody waits for it"
    may_end.set()
    wait_until(lambda: late.poll() is not None, "it has ended")
    assert started[0].wait(timeout=120) != 0


def test_files_that_decide_what_a_worker_does_must_be_those_of_the_beginning(tmp_path: Path) -> None:
    script, printed = tmp_path / "train.py", tmp_path / "out.txt"
    script.write_text("print()")
    printed.write_text("")
    files = Files.to_bring(tmp_path)
    assert list(files.paths) == ["out.txt", "train.py"]
    printed.write_text("more")
    files.see_that_none_has_changed()
    script.write_text("print(1)")
    with pytest.raises(LaunchError, match=r"train\.py is not what it was"):
        files.see_that_none_has_changed()
    script.unlink()
    with pytest.raises(LaunchError, match=r"train\.py is not what it was"):
        files.see_that_none_has_changed()


@pytest.mark.parametrize(
    ("folder", "expected"), [("/home/me/runs", True), ("/home/menu", False), ("/home/me/scratch/runs", False)]
)
def test_disk_of_a_network_is_known_by_its_kind(folder: str, expected: bool, tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/sda1 / ext4 rw 0 0\nserver:/home /home/me nfs4 rw 0 0\n/dev/sdb1 /home/me/scratch xfs rw 0 0\n"
    )
    assert is_on_a_network(folder, str(mounts)) is expected
    assert not is_on_a_network(folder, str(tmp_path / "none"))


class Machine:
    """A machine with folders: those of one number are one folder. `writes`: whether it may write there."""

    def __init__(self, folders: dict[str, dict[str, int]], *, writes: bool = True) -> None:
        self.folders, self.writes = folders, writes

    def ask(self, question: str, *, folder: str, name: str = "") -> Any:
        inside = self.folders.setdefault(folder, {})
        if question == "mark" and self.writes:
            inside[name] = 1
        elif question == "unmark":
            inside.pop(name, None)
        return self.writes if question == "mark" else (list(inside), [id(inside), 0])


def test_machines_are_grouped_by_what_they_share(tmp_path: Path) -> None:
    """Two share all, one of them without the right to write; one shares nothing; and one comes later."""
    nfs: dict[str, dict[str, int]] = {}
    machines = [Machine({}), Machine(nfs), Machine(nfs, writes=False)]
    disks = Disks(tmp_path, tmp_path / "run")
    folders = disks.find(dict(enumerate(machines)))
    assert folders == {HERE: HERE, 0: 0, 1: 1, 2: 1}
    assert len({disks.of(HERE), disks.of(0), disks.of(1)}) == 3
    assert disks.of(1) == disks.of(2)
    assert not disks.find_late(3, Machine(nfs))
    assert disks.of(3) == disks.of(1)
    assert not disks.find_late(0, Machine({}))
    assert disks.of(0) not in {disks.of(HERE), disks.of(1)}, "it has lost its disk"
    here = [*tmp_path.iterdir(), *(tmp_path / "run").iterdir()]
    assert [path.name for path in here if "-record-here" not in path.name] == ["run"]
    disks.forget()
    assert list((tmp_path / "run").iterdir()) == []


class Reached:
    """A host that answers whatever it is asked while it is `up`; `knocks` are the places that it was to try."""

    socket = "ControlPath=none"

    def __init__(self, name: str, address: str, disk: Machine, *, up: bool = True) -> None:
        self.host, self.address, self.disk, self.up = name, address, disk, up
        self.ended, self.is_open = threading.Event(), up
        self.knocks: list[tuple[str, int]] = []

    def switch(self, *, on: bool) -> None:
        self.up = on
        self.close()

    def wait_for_end(self) -> None:
        self.ended.wait()

    def close(self) -> None:
        self.is_open = False
        self.ended.set()

    def again(self) -> Reached:
        self.is_open = self.up
        if self.up:
            self.ended.clear()
        return self

    def tunnel(self, *_: Any) -> int:
        return 4712

    def facts(self) -> dict[str, Any]:
        if not self.up:
            raise Unreachable(f"host {self.host} does not answer")
        own = {"address": self.address, "interfaces": [{"name": "eth0", "address": self.address, "kind": ""}]}
        return {**version_check.here(__version__), **own, "executable": "python3"}

    def ask(self, question: str, **details: Any) -> Any:
        if question in ("mark", "marks", "unmark"):
            return self.disk.ask(question, **details)
        if question == "try_connections":
            self.knocks += details["places"][:-1]
            return [""] * len(details["places"])
        return {"way": self.address, "exists": True, "listen": 4711}[question]


class Run:
    """A run of three hosts that begins with two of them. Each agent ends as soon as it was started."""

    def __init__(self, folder: Path, disks: list[int]) -> None:
        shared = [Machine({}) for _ in disks]
        self.hosts = [
            Reached(f"n{node}", f"127.0.0.{node + 1}", shared[disk], up=node < 2) for node, disk in enumerate(disks)
        ]
        job = Job(program="t.py", folder=folder, run_dir=folder / "run", nodes=3, least_nodes=1, sync=False)
        self.printed = io.StringIO()
        display = PlainDisplay(self.printed, self.printed)
        self.cluster = Cluster(job, self.hosts, display, agents=[["true"]] * 3)
        self.cluster.survey()
        self.cluster.bring_files()
        assert [self.agent_of(node) for node in range(3)] == [0, 0, 1], "the last one is away"

    def agent_of(self, node: int) -> int | None:
        """How the agent of a node ended that the head has called."""
        return self.cluster.start_agent(node, "127.0.0.1:29400", "token").wait(timeout=120)

    def end(self) -> None:
        self.cluster.close_tunnels()
        for host in self.hosts:
            host.close()


@pytest.mark.parametrize(
    ("disks", "fits"), [([0, 0, 0], True), ([0, 0, 1], False), ([0, 1, 2], True), ([0, 1, 1], True)]
)
def test_comer_with_a_disk_of_its_own_is_refused_where_the_run_has_begun_on_one(
    disks: list[int], fits: bool, tmp_path: Path
) -> None:
    run = Run(tmp_path, disks)
    run.hosts[2].switch(on=True)
    assert run.agent_of(2) == (0 if fits else 1)
    run.agent_of(2)
    said = "host n2 has a run directory of its own, and the run has begun on hosts that share one"
    assert (said in run.printed.getvalue()) is not fits
    run.end()


def test_hosts_that_come_back_together_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """All were switched off; at the beginning they have reached each other, and a third one that comes must, too."""
    run = Run(tmp_path, [0, 1, 2])
    for host in run.hosts[:2]:
        host.switch(on=False)
    assert [run.agent_of(node) for node in (0, 1)] == [1, 1]
    for host in run.hosts:
        host.switch(on=True)
        host.knocks.clear()
    assert [run.agent_of(node) for node in range(3)] == [0, 0, 0]
    assert [host.knocks for host in run.hosts] == [[], [], [("127.0.0.1", 4711), ("127.0.0.2", 4711)]]
    run.end()
