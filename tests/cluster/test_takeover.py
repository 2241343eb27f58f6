"""A command that is killed and typed again takes the run over: hosts train on meanwhile; nothing is lost, or twice."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from alone import SOURCE, WAITS_AT_THE_END, undisturbed
from commands import summary
from launching import wait_until
from remote import run, start
from runs import restarts, step_lines
from testbed import needs

from manyhosts.lab import Host, Lab
from manyhosts.records import run_directory

CLOSED = """
add table inet t; add chain inet t in { type filter hook input priority 0; policy accept; };
add rule inet t in ct state new iif eth0 drop
"""
SECRET = "a password that nobody else is to read"


class Training:
    """A run on three hosts of their own disks; its workers do not end before `let_go`."""

    def __init__(self, hosts: Lab, folder: Path, steps: int) -> None:
        self.hosts, self.folder, self.steps = hosts, folder, steps
        self.run_dir, self.metrics = folder / "many", hosts[0].path(folder / "many")
        self.options = ["--hosts", ",".join(hosts.names[:3]), "--run-dir", "many", "--env", "SLOW=0.01"]
        self.options += ["--env", f"DURATION={steps} steps", "--env", f"PASSWORD={SECRET}"]
        self.commands: list[subprocess.Popen[str]] = []
        self.source: str | None = SOURCE + WAITS_AT_THE_END

    def type(self, *more: str) -> subprocess.Popen[str]:
        self.commands.append(start(self.hosts, self.folder, self.source, *self.options, *more))
        self.source = None
        return self.commands[-1]

    def step(self) -> int:
        return len(step_lines(self.metrics)) if (self.metrics / "metrics.jsonl").exists() else 0

    def wait_for_step(self, step: int, what: str) -> None:
        ended = [each for each in self.commands if each.poll() is not None]
        wait_until(
            lambda: self.step() >= step or any(each.poll() is not None for each in self.commands if each not in ended),
            what,
        )
        assert self.step() >= step, what

    def let_go(self, hosts: int = 3) -> None:
        for host in list(self.hosts)[:hosts]:
            host.path(self.folder / "continue").touch()

    def end(self) -> None:
        for command in self.commands:
            self.hosts.desk.end(command)
            command.communicate()
        for host in self.hosts:
            for pid, words in host.processes().items():
                if words.startswith("manyhosts "):
                    os.kill(pid, signal.SIGKILL)

    def is_uncut(self, workers: int = 3) -> None:
        """Every step once, with the bits of a run to which nothing happened; every line of every log once."""
        assert [line["step"] for line in step_lines(self.run_dir)] == list(range(1, self.steps + 1))
        ended, wanted = summary(self.run_dir), undisturbed(self.folder, self.steps)
        assert (ended["weights_sha256"], ended["status"]) == (wanted["weights_sha256"], "completed")
        for rank in range(workers):
            [log] = (self.run_dir / "logs").glob(f"*-{rank}.log")
            assert log.read_text().count(f"the end of {rank}\n") == 1, log.read_text()


def ours(host: Host) -> dict[int, str]:
    return {pid: words for pid, words in host.processes().items() if words.startswith("manyhosts ")}


def agents(host: Host) -> int:
    return sum(" agent " in words for words in ours(host).values())


def kill(hosts: Lab, command: subprocess.Popen[str]) -> None:
    hosts.desk.end(command, signal.SIGKILL)
    command.communicate(timeout=120)


def test_command_that_is_killed_and_typed_again_takes_the_run_over(four: Lab, tmp_path: Path) -> None:
    training = Training(four, tmp_path, 400)
    try:
        first = training.type()
        training.wait_for_step(10, "it trains")
        record = training.run_dir / run_directory.HEAD
        assert stat.S_IMODE(record.stat().st_mode) == 0o600
        assert SECRET not in record.read_text()
        beside = run(four, tmp_path, None, *training.options)
        assert (beside.code, "is in progress: process" in beside.err) == (2, True), "a head that lives keeps its agents"
        kill(four, first)
        at = training.step()
        training.wait_for_step(at + 5, "workers make steps without a head")
        other = run(four, tmp_path, None, *training.options, "--restarts", "3")
        assert (other.code, "give the command that began it" in other.err) == (2, True), other.err
        heirs = [training.type(), training.type()]
        wait_until(lambda: any(each.poll() is not None for each in heirs), "one of the two is refused")
        training.let_go()
        said = [each.communicate(timeout=120) for each in heirs]
    finally:
        training.end()
    assert sorted(each.returncode for each in heirs) == [0, 2], said
    [(out, err)] = [words for words, each in zip(said, heirs, strict=True) if each.returncode == 0]
    assert "this one takes it over" in err
    assert all(out.count(f"the end of {rank}\n") == 1 for rank in range(3)), out
    training.is_uncut()
    assert (summary(training.run_dir)["restarts"], restarts(training.run_dir)) == (0, [])
    assert not record.exists()


MEETS_LATE = """
    import os, time
    open(f"began-{os.environ['RANK']}", "w").close()
    while os.environ["RANK"] == "1" and not os.path.exists("meet"):
        time.sleep(0.05)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_whose_head_is_cut_off_while_they_meet_form_their_group_when_it_is_back(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    """One worker comes to the meeting while the others wait there and the head is cut off for 20 s."""
    hosts = make_lab(3, prefix="meet")
    training = Training(hosts, tmp_path, 30)
    training.source = MEETS_LATE + SOURCE + WAITS_AT_THE_END
    try:
        command = training.type()
        began = [host.path(training.folder / f"began-{rank}") for rank, host in enumerate(hosts)]
        wait_until(lambda: all(each.exists() for each in began), "all scripts have begun", timeout_s=90)
        hosts.desk.cut()
        hosts[1].path(training.folder / "meet").touch()
        time.sleep(20)
        assert training.step() == 0, "no group without the head, through which they meet"
        hosts.desk.mend()
        training.let_go()
        _, err = command.communicate(timeout=120)
    finally:
        training.end()
    assert command.returncode == 0, err
    training.is_uncut()
    assert (summary(training.run_dir)["restarts"], restarts(training.run_dir)) == (0, [])


@pytest.mark.slow
@needs("nft")
@pytest.mark.timeout(400)
def test_run_whose_hosts_reach_the_head_through_ssh_alone_goes_on_when_ssh_had_given_all_of_them_up(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    """The head is cut off until no ssh of it is left; its tunnels are opened again, and its agents find it there."""
    hosts = make_lab(3, prefix="tunnel")
    hosts.desk.run(["nft", CLOSED])
    training = Training(hosts, tmp_path, 400)
    try:
        command = training.type()
        training.wait_for_step(10, "it trains")
        before = ssh(hosts.desk)
        assert len(before) >= 3, "one for each host at least"
        hosts.desk.cut()
        training.wait_for_step(training.step() + 20, "workers make steps without a head")
        wait_until(lambda: not before & ssh(hosts.desk), "ssh has given all hosts up", timeout_s=120)
        hosts.desk.mend()
        training.let_go()
        _, err = command.communicate(timeout=300)
    finally:
        training.end()
    assert command.returncode == 0, err
    training.is_uncut()
    assert (summary(training.run_dir)["restarts"], restarts(training.run_dir)) == (0, [])


def ssh(host: Host) -> set[int]:
    """What runs there and leads to other hosts."""
    return {pid for pid, words in host.processes().items() if words.startswith("ssh ")}


@pytest.mark.slow
@needs("nft")
@pytest.mark.timeout(400)
def test_run_of_hosts_that_may_go_and_reach_the_head_through_ssh_alone_is_taken_over(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    """Its command is killed before any worker has started, and again when they train; then a host is lost, too."""
    hosts = make_lab(3, prefix="over")
    hosts.desk.run(["nft", CLOSED])
    training = Training(hosts, tmp_path, 2000)
    training.options += ["--nodes", "2:3"]
    try:
        first = training.type()
        wait_until(lambda: bool(ours(hosts[2])) or first.poll() is not None, "an agent is there")
        kill(hosts, first)
        second = training.type()
        training.wait_for_step(10, "it trains")
        wait_until(lambda: all(agents(host) == 1 for host in hosts), "those of the first command are gone")
        kill(hosts, second)
        hosts[2].kill()
        at = training.step()
        heir = training.type()
        training.wait_for_step(at + 5, "two hosts continue")
        training.let_go(hosts=2)
        _, err = heir.communicate(timeout=120)
    finally:
        training.end()
    assert (heir.returncode, "this one takes it over" in err) == (0, True), err
    training.is_uncut(workers=2)
