"""`--nodes MIN:MAX` over ssh: hosts that are off when the run begins, or are switched off and on while it continues."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from alone import SOURCE, undisturbed
from commands import summary
from launching import wait_until
from remote import run, start
from runs import step_lines

from manyhosts.lab import Lab

QUICK = "print('must not run')"
THREE = "continues with 3 workers, 1 of them new"


class Training:
    """A run without end on all hosts, and what it prints."""

    def __init__(self, hosts: Lab, folder: Path, process: subprocess.Popen[str], printed: Path) -> None:
        self.hosts, self.folder, self.process, self.printed = hosts, folder, process, printed

    def await_words(self, words: str, count: int = 1) -> None:
        """Until it has said so, so many times."""
        wait_until(lambda: self.printed.read_text().count(words) >= count, f"it says {words!r}")

    def stop_and_compare(self) -> None:
        """Ask it to stop; what it has done until then must be what one process does here to which nothing happens."""
        self.hosts.desk.end(self.process, signal.SIGTERM)
        self.process.wait(timeout=120)
        steps = [line["step"] for line in step_lines(self.folder / "many")]
        assert steps == list(range(1, steps[-1] + 1)), self.printed.read_text()
        reported, whole = summary(self.folder / "many"), undisturbed(self.folder, steps[-1])
        assert reported["weights_sha256"] == whole["weights_sha256"], self.printed.read_text()


@contextmanager
def training(hosts: Lab, folder: Path, nodes: str) -> Iterator[Training]:
    """What is printed goes into the working directory: a host that comes late is to get along with that."""
    options = ["--hosts", ",".join(hosts.names), "--nodes", nodes, "--run-dir", "many", "--env", "SLOW=0.005"]
    printed = folder / "out.txt"
    process = start(hosts, folder, SOURCE, "--env", "DURATION=1000000 steps", *options, into=printed)
    try:
        yield Training(hosts, folder, process, printed)
    finally:
        hosts.desk.end(process)
        process.wait()


def test_host_that_is_off_at_the_start_is_taken_in_when_it_is_there(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    hosts = make_lab(3)
    hosts[0].kill()
    with training(hosts, tmp_path, "1:3") as begun:
        begun.await_words("lab1 does not answer: the run begins without it, and takes it in when it is there")
        begun.await_words("2 workers on 2 hosts")
        hosts[0].boot()
        begun.await_words(THREE)
        begun.stop_and_compare()


@pytest.mark.slow
def test_host_that_is_switched_off_and_on_gets_the_files_again_and_is_taken_in(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    hosts = make_lab(3)
    with training(hosts, tmp_path, "1:3") as begun:
        begun.await_words("3 workers on 3 hosts")
        hosts[1].kill()  # with all that is on its disk
        begun.await_words("continued with 2 workers after rank 1 on host lab2 was lost")
        hosts[1].boot()
        begun.await_words(THREE)
        begun.stop_and_compare()


@pytest.mark.slow  # files that changed: tests/unit/launchers/test_ssh_comers.py
def test_host_that_lacks_something_when_it_comes_back_does_not_end_the_run_of_the_others(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    hosts = make_lab(3)
    hosts[2].kill()
    with training(hosts, tmp_path, "1:3") as begun:
        begun.await_words("2 workers on 2 hosts")
        script = tmp_path / "script.py"
        before = script.read_text()
        script.write_text(before + "# another thought")
        hosts[2].boot()
        begun.await_words("script.py is not what it was when the run began")
        script.write_text(before)
        begun.await_words("lab3 is called again now and then")
        assert begun.process.poll() is None
        begun.stop_and_compare()


def test_run_does_not_begin_with_fewer_hosts_than_it_was_told(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    hosts = make_lab(2)
    hosts[1].kill()
    ended = run(hosts, tmp_path, QUICK, "--hosts", "lab1,lab2", "--nodes", "2:2")
    assert (ended.code, ended.out) == (3, "")
    assert "host lab2 does not answer" in ended.err
