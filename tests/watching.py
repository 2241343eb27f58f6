"""Real runs that stand still until a test lets them continue, and `manyhosts watch` of them, which may not write."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from commands import kill_all
from launching import environment, wait_until
from runs import step_lines

SCRIPT = Path(__file__).parent / "multiprocess" / "held_script.py"
HELD_AFTER_STEPS = 14
HELD_AT = r"step +1\d of 24"
"""As a watch shows it: what is told of a step comes one or two steps later."""
READS_ALONE = """
import os, sys
folder = os.path.realpath(sys.argv.pop(1))
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
def see(event, given):
    if event == "fcntl.flock" or event == "fcntl.lockf":
        os.write(2, b"WRITES: takes a lock\\n"), os._exit(99)
    changes = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.utime", "os.chmod", "os.chown", "os.truncate",
               "os.link", "os.symlink", "os.setxattr", "os.kill", "signal.pthread_kill")
    if event in changes or (event == "open" and given[2] & WRITES):
        if event.endswith("kill") or any(
            isinstance(each, (str, bytes)) and os.fsdecode(os.path.realpath(each)).startswith(folder) for each in given
        ):
            os.write(2, f"WRITES: {event} {given}\\n".encode()), os._exit(99)
from manyhosts.watch.screen import Lines
Lines.EVERY_S = 0.5  # so that tests do not wait for the next line
sys.addaudithook(see)
from manyhosts.cli.main import main
sys.exit(main())
"""
"""Runs a command of manyhosts that may read the folder named first, and change nothing in it."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class HeldRun:
    """A run of two workers that stands still in its third epoch until `go_on`."""

    def __init__(self, folder: Path, *, held: bool = True) -> None:
        self.run_dir, self._gate = folder / "run", folder / "goes-on"
        if not held:
            self.go_on()
        self._output = (folder / "output").open("wb")
        words = ["run", "--workers", "2", "--run-dir", str(self.run_dir), str(SCRIPT)]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "manyhosts.cli.main", *words],
            env={
                **environment(),
                "HELD": str(self._gate),
                "HELD_AFTER_STEPS": str(HELD_AFTER_STEPS),
                "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")]),
                "OMP_NUM_THREADS": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_until_held(self) -> None:
        """Until a worker stands still, and so the other does at the next exchange, and steps are on record."""

        def is_held() -> bool:
            assert self.process.poll() is None, self.output
            return any(self._gate.parent.glob(f"{self._gate.name}-*")) and len(step_lines(self.run_dir)) >= 10

        wait_until(is_held, "the run stands still")

    def go_on(self, how: str = "") -> None:
        """Let it continue; with `fail` to its failure."""
        half = self._gate.with_name("half")
        half.write_text(how)
        half.rename(self._gate)

    def end(self) -> int:
        """Its exit code, once it has ended."""
        return self.process.wait(timeout=120)

    @property
    def output(self) -> str:
        """What it has printed."""
        return Path(self._output.name).read_text()

    def close(self) -> None:
        """Leave nothing of it behind."""
        if self.process.poll() is None:
            kill_all(self.process)
        self._output.close()


@contextlib.contextmanager
def held_run(folder: Path, *, held: bool = True) -> Iterator[HeldRun]:
    run = HeldRun(folder, held=held)
    try:
        yield run
    finally:
        run.close()


class Watching:
    """`manyhosts watch` of a folder, or `verb`: what it says, to a terminal or a pipe, as it comes."""

    def __init__(self, folder: Path, *words: str, terminal: bool = False, verb: str = "watch") -> None:
        reader, writer = pty.openpty() if terminal else os.pipe()
        self._said = bytearray()
        self.process = subprocess.Popen(
            [sys.executable, "-c", READS_ALONE, str(folder), verb, *words, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=writer,
            env={
                **environment(), "TERM": "xterm-256color", "COLUMNS": "110", "LINES": "40", "LANG": "C.UTF-8",
                "PYTHONUNBUFFERED": "1",
            },
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in a shell's background ignore it
        )  # fmt: skip
        os.close(writer)
        self._thread = threading.Thread(target=self._read, args=(reader,))
        self._thread.start()

    def _read(self, reader: int) -> None:
        with contextlib.suppress(OSError):  # so a terminal says that its last program has ended
            while piece := os.read(reader, 1 << 16):
                self._said += piece
        os.close(reader)

    @property
    def said(self) -> str:
        """Everything so far, without colours and moves of the cursor."""
        return _CONTROL.sub("", self._said.decode(errors="replace")).replace("\r", "")

    def wait_for(self, words: str) -> None:
        """Until it has shown these."""
        wait_until(lambda: re.search(words, self.said) is not None or self.process.poll() is not None, words)
        assert re.search(words, self.said), self.said

    def end(self) -> int:
        """Its exit code, once it has ended."""
        code = self.process.wait(timeout=120)
        self._thread.join()
        return code

    def close(self) -> int:
        """Ctrl-C, where it still continues; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.end()


@contextlib.contextmanager
def watching(folder: Path, *words: str, terminal: bool = False) -> Iterator[Watching]:
    found = Watching(folder, *words, terminal=terminal)
    try:
        yield found
    finally:
        found.close()
