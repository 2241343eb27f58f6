"""Hosts that join a run by themselves: who is let in, what the others are told, and what comes out."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from containers import digits, weights, weights_here
from launching import MANYHOSTS, environment, wait_until
from ranks import free_port

from manyhosts.cli.main import main
from manyhosts.control.joining import FINGERPRINT_BYTES, JoinSecret
from manyhosts.control.tls import Identity
from manyhosts.hosts import version_check
from manyhosts.records import run_directory

VIRTUAL = ("--set", "virtual_workers=4")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short training, as each host has it."""
    folder = tmp_path_factory.mktemp("project")
    digits(folder, epochs=3)
    script = folder / "digits.py"
    pause = 'float(__import__("os").environ.get("PAUSE", "0"))'
    script.write_text(script.read_text().replace(pause, '1.0 * __import__("os").path.exists("slow")'))
    return folder


@pytest.fixture(scope="module")
def alone(project: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the training comes to that nobody joins."""
    folder = shutil.copytree(project, tmp_path_factory.mktemp("alone") / "here")
    return weights_here(folder, *VIRTUAL)


class Run:
    """A run on this machine that hosts are to join, each in a folder of its own."""

    def __init__(self, project: Path, place: Path, nodes: str, stack: ExitStack, *, slow: bool) -> None:
        self._project, self._place, self._stack = project, place, stack
        self.folder = shutil.copytree(project, place / "head")
        if slow:
            (self.folder / "slow").touch()
        self.secret_file = place / "secret"
        self.err = place / "err"
        self.port = free_port()
        words = ["--on", "join", "--nodes", nodes, "-o", "bind=127.0.0.1", "-o", f"port={self.port}"]
        words += ["-o", f"secret-file={self.secret_file}", "--run-dir", "runs/one", *VIRTUAL, "digits.py"]
        self.words = [*MANYHOSTS, "run", *words]
        self._stack.callback(self._end_agents)
        self.type()
        wait_until(self.listens, "the head listens")

    def type(self) -> None:
        """Start it, or take it over."""
        with self.err.open("a") as err:
            self.process = self._start(self.words, self.folder, err)

    def _end_agents(self) -> None:
        """Those that would wait for another command, where a test fails in between."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cwd() == str(self.folder) and str(process.cmdline()).startswith("['manyhosts agent"):
                    process.kill()

    def _start(self, words: Sequence[str], folder: Path, err: object) -> subprocess.Popen[str]:
        started = subprocess.Popen(
            words,
            cwd=folder,
            env={**environment(), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=err,  # type: ignore[arg-type]
            text=True,
            process_group=0,
        )
        self._stack.callback(end, started)
        return started

    def listens(self) -> bool:
        assert self.process.poll() is None, self.err.read_text()
        if not self.secret_file.exists():
            return False
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()
        except OSError:
            return False
        return True

    def host(self, name: str) -> Path:
        """The folder of a host that has the project."""
        return shutil.copytree(self._project, self._place / name)

    def join(self, folder: Path) -> subprocess.Popen[str]:
        words = [*MANYHOSTS, "join", f"127.0.0.1:{self.port}", "--secret-file", str(self.secret_file)]
        return self._start(words, folder, subprocess.PIPE)

    def lines(self) -> list[dict[str, Any]]:
        """What the record tells so far."""
        assert self.process.poll() in (None, 0, -signal.SIGKILL), self.err.read_text()
        path = self.folder / "runs" / "one" / "metrics.jsonl"
        whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        return [json.loads(line) for line in whole]

    def events(self) -> list[str]:
        return [line["event"] for line in self.lines()]

    def reported(self) -> list[str]:
        """What the record tells beside steps."""
        return [
            line.get("text") or line.get("how") or "" for line in self.lines() if line["event"] in ("note", "restart")
        ]

    def hurry(self) -> None:
        """Let steps take no longer than they need."""
        (self.folder / "slow").unlink()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@contextmanager
def started(project: Path, place: Path, nodes: str, *, slow: bool = False) -> Iterator[Run]:
    with ExitStack() as stack:
        yield Run(project, place, nodes, stack, slow=slow)


class Refused:
    """Asks, in this process, whether somebody may join who may not."""

    def __init__(self, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._run, self._capsys, self._monkeypatch = run, capsys, monkeypatch

    def __call__(self, folder: Path, secret: str, *words: str, code: int, at: str = "") -> str:
        """What is told."""
        with self._monkeypatch.context() as patched:
            if secret:
                patched.setenv("MANYHOSTS_JOIN_SECRET", secret)
            asked = ["join", at or f"127.0.0.1:{self._run.port}", "--folder", str(folder), *words]
            self._capsys.readouterr()
            assert main(asked) == code
        said = self._capsys.readouterr().err
        assert "Traceback" not in said
        return said


def test_who_does_not_fit_is_told_so_and_the_others_train_as_if_nobody_had_asked(
    project: Path,
    alone: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with started(project, tmp_path, "2") as run:
        refused = Refused(run, capsys, monkeypatch)
        secret = run.secret_file.read_text().strip()
        assert run.secret_file.stat().st_mode & 0o077 == 0
        good = run.host("good")
        for wrong in ("", "abc", secret[:-1], secret[:20] + ("a" if secret[20] != "a" else "b") + secret[21:]):
            words = "the secret cannot be asked for" if not wrong else "this is not the secret of a run"
            assert words in refused(good, wrong, code=2)
        known = JoinSecret.parse(secret, where="test")
        of_another = str(JoinSecret(known.token, Identity().fingerprint[:FINGERPRINT_BYTES]))
        assert "is not the run that this secret is of" in refused(good, of_another, code=3)
        other_token = str(JoinSecret("00" * 16, known.fingerprint))
        assert "does not know the secret" in refused(good, other_token, code=3)
        port = free_port()
        assert f"no head listens at 127.0.0.1:{port}" in refused(good, secret, code=3, at=f"127.0.0.1:{port}")
        assert "does not resolve" in refused(good, secret, code=3, at="no.such.host.invalid")
        assert "no interface with the address" in refused(good, secret, "--address", "10.1.2.3", code=2)
        empty = tmp_path / "empty"
        empty.mkdir()
        assert "digits.py is missing, and is in" in refused(empty, secret, code=2)
        other = run.host("other")
        (other / "digits.py").write_text((other / "digits.py").read_text() + "\n")
        said = refused(other, secret, code=2)
        assert "this is not the project as" in said
        assert "digits.py differs from" in said
        with monkeypatch.context() as patched:
            real = version_check.here
            patched.setattr(version_check, "here", lambda version: {**real(version), "torch": "2.12.0"})
            assert "this host has torch 2.12.0, and the run" in refused(good, secret, code=2)
        joined = run.join(good)
        _, err = joined.communicate(timeout=150)
        assert joined.returncode == 0, err
        assert run.process.wait(timeout=120) == 0, run.err.read_text()
        assert secret not in run.err.read_text() + err, "it is in its file alone"
        assert weights(run.folder / "runs" / "one") == alone


@pytest.mark.slow
def test_hosts_that_come_and_go_while_others_train_change_nothing(
    project: Path,
    alone: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with started(project, tmp_path, "1:2", slow=True) as run:
        refused = Refused(run, capsys, monkeypatch)
        wait_until(lambda: "step" in run.events(), "one worker trains alone")
        first = run.join(run.host("first"))
        wait_until(lambda: "continues with 2 workers, 1 of them new" in run.reported(), "a host has joined")
        second, secret = run.host("second"), run.secret_file.read_text()
        assert "this machine is a host of the run already" in refused(second, secret, code=3)
        os.kill(first.pid, signal.SIGINT)
        _, err = first.communicate(timeout=120)
        assert (first.returncode, "Traceback" in err) == (3, False), err
        wait_until(lambda: "with 1 worker" in run.reported(), "the other continues")
        joined = run.join(second)
        wait_until(lambda: run.reported().count("continues with 2 workers, 1 of them new") == 2, "it is back")
        run.hurry()
        assert run.process.wait(timeout=120) == 0, run.err.read_text()
        _, err = joined.communicate(timeout=120)
        assert joined.returncode == 0, err
        assert weights(run.folder / "runs" / "one") == alone
        steps = [event["step"] for event in run.lines() if event["event"] == "step"]
        assert steps == list(range(1, len(steps) + 1)), "each step once"


@pytest.mark.slow
def test_hosts_keep_a_run_whose_command_was_killed_for_the_same_one_typed_again(
    project: Path, alone: str, tmp_path: Path
) -> None:
    with started(project, tmp_path, "2", slow=True) as run:
        secret = run.secret_file.read_text()
        joined = run.join(run.host("other"))
        wait_until(lambda: "step" in run.events(), "it trains")
        end(run.process)
        at = len(run.lines())
        run.type()
        wait_until(lambda: "takes it over" in run.err.read_text(), "it is taken over")
        wait_until(lambda: len(run.lines()) > at, "steps are made")
        assert run.secret_file.read_text() == secret, "hosts may come with what was shown first"
        run.hurry()
        assert run.process.wait(timeout=120) == 0, run.err.read_text()
        _, err = joined.communicate(timeout=120)
        assert (joined.returncode, "the head is there again" in err) == (0, True), err
        assert weights(run.folder / "runs" / "one") == alone
        lines = run.lines()
    steps = [line["step"] for line in lines if line["event"] == "step"]
    assert steps == list(range(1, len(steps) + 1)), "each step once"
    assert [line for line in lines if line["event"] == "restart"] == []
    assert not (run.folder / "runs" / "one" / run_directory.HEAD).exists()


def test_secret_is_asked_for_at_a_terminal_and_not_shown(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "manyhosts.cli.main", "join", "127.0.0.1:9"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=tmp_path,
        start_new_session=True,
    )
    os.close(theirs)
    said = b""
    while b"the secret of the run:" not in said:
        said += os.read(ours, 1000)
    os.write(ours, b"not-a-secret\n")
    try:
        while chunk := os.read(ours, 1000):
            said += chunk
    except OSError:  # the terminal is gone with its last process
        pass
    assert process.wait(timeout=120) == 2
    os.close(ours)
    assert b"this is not the secret of a run" in said
    assert b"not-a-secret" not in said
