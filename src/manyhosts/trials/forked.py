"""Trials whose workers are forked, on this machine, from one process with torch loaded.

A run of `manyhosts run` has a head and agents, which continue without lost workers and take seconds to start. Trials
want neither: workers here get torchrun's variables and nothing else, and where one fails the others are ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from manyhosts.control import variables
from manyhosts.control.agent import host_state
from manyhosts.control.agent.fork_server import ForkServer
from manyhosts.control.agent.log import Lines
from manyhosts.control.agent.processes import cpu_seconds, kill_descendants
from manyhosts.control.head.failures import rebuilt
from manyhosts.control.job import Job
from manyhosts.control.loop import Loop
from manyhosts.errors import ManyhostsError, ScriptError
from manyhosts.trials.runs import Interrupted

_ADDRESS = "127.0.0.1"
_WAY_OUT_S = 3.0
"""After one has failed: time for the others to fail too, so that the first can be told from its consequences."""
_WARM_S = 60.0
_COMPUTES = 0.1
"""The share of a core from which on workers that say nothing are taken to compute."""
_PERIODS = 10
"""For so many times the limit at most."""
_SHOWN_LINES = 30


class LocalTrialRunner:
    """Holds the process that workers are forked from."""

    def __init__(self, preload: Sequence[str], folder: Path) -> None:
        """Start it: it loads `preload` and runs workers in `folder`."""
        self._loop = Loop()
        self._scratch = Path(tempfile.mkdtemp(prefix="manyhosts-"))
        self._workers: dict[str, _Worker] = {}
        self._interrupted = False
        self._warm = True
        self._lost = False
        self._jobs = 0
        environment = {**os.environ, **variables.of_one_machine(os.environ)}
        self._loop.every(0.5, lambda: None)  # so that a waiting caller looks at the clock, too
        self._loop.on_signals([signal.SIGINT, signal.SIGTERM], lambda _: self._interrupt())
        self._fork_server = ForkServer(
            self._loop,
            preload=preload,
            environment=environment,
            folder=str(folder),
            scratch=self._scratch,
            stdin=False,
            on_event=self._hear,
            on_warm=lambda _: self._be_warm(),
            on_end=self._lose,
            on_words=_pass_on,
        )

    def run(
        self, job: Job, *, hang_s: float, hear: Callable[[str], None] | None = None
    ) -> tuple[ManyhostsError | None, Sequence[str]]:
        """Run `job` to its end. Returns why it failed, if it did, and the last lines of its workers.

        A worker that says nothing for `hang_s` seconds, and does not end, counts as hung. `hear` is called with every
        line, when it comes.

        Raises:
            Interrupted: by a signal.
        """
        self._jobs += 1
        output: deque[str] = deque(maxlen=_SHOWN_LINES)
        listening = socket.create_server((_ADDRESS, 0), backlog=64)
        store = f"store {self._jobs}"
        self._fork_server.ask("store", [listening.fileno()], name=store)
        place = listening.getsockname()[:2]
        listening.close()
        job.run_dir.mkdir(parents=True, exist_ok=True)
        self._workers = {}
        for rank in range(job.workers):
            worker = _Worker(self._loop, rank, output, self._end_others_soon, hear)
            self._workers[f"{self._jobs}.{rank}"] = worker
            environment = {
                **variables.of_host(os.environ, cores=host_state.cores(), workers=job.workers),
                **job.environment,
                **variables.of_worker(job, node=0, local_rank=rank, generation=0, store=place),
                variables.RUN_DIR: str(job.run_dir),
            }
            ends = worker.open_pipes()
            command = {
                "kind": job.kind, "program": job.program, "arguments": list(job.arguments), "folder": str(job.folder),
                "stdin": False,
            }  # fmt: skip
            self._fork_server.ask("worker", ends, name=f"{self._jobs}.{rank}", environment=environment, **command)
            for end in ends:
                os.close(end)
        hung = self._wait(hang_s)
        self._fork_server.ask("signal", name=store, signal=signal.SIGKILL, group=True)
        if self._interrupted:
            raise Interrupted
        return self._outcome(job, hung), output

    def load(self) -> None:
        """Wait until the process has loaded what it was to load. A job that is run earlier waits by itself."""
        self._loop.run(lambda: self._fork_server.ready or self._lost or self._interrupted)

    def warm(self, modules: Sequence[str]) -> None:
        """Have the process load what a worker has imported, for those to come, and wait until it has."""
        if not modules or self._lost:
            return
        self._warm = False
        self._fork_server.ask("warm", modules=list(modules))
        until = time.monotonic() + _WARM_S
        self._loop.run(lambda: self._warm or self._lost or self._interrupted or time.monotonic() > until)
        if self._interrupted:
            raise Interrupted

    def close(self) -> None:
        """End everything that was started."""
        for worker in self._workers.values():
            worker.close()
        if not self._lost:
            kill_descendants(of=self._fork_server.pid)  # not those of this process, which may have others of its own
            self._fork_server.close()
        self._loop.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _wait(self, hang_s: float) -> bool:
        """Until all workers have ended. Returns whether they were ended because nothing moved."""
        hung, moved, used, began = False, 0.0, 0.0, time.monotonic()

        def look() -> bool:
            nonlocal hung, moved, used
            if self._lost or all(worker.ended for worker in self._workers.values()):
                return True
            now = time.monotonic()
            if max(moved, *(worker.heard for worker in self._workers.values())) + hang_s < now and not hung:
                # A script that prints nothing, and computes: a tokenizer, a compiler, one long step.
                before, used = used, max(used, cpu_seconds(self._fork_server.pid))
                if used - before > _COMPUTES * hang_s and now - began < _PERIODS * hang_s:
                    moved = now
                    return False
                hung = True
                self._end_all()
            return False

        self._loop.run(look)
        return hung

    def _outcome(self, job: Job, hung: bool) -> ManyhostsError | None:
        if self._lost:
            return ScriptError("the process that workers are forked from was killed", where="this machine")
        failed = [worker for worker in self._workers.values() if worker.error or worker.code or worker.signal]
        first = min(failed, key=lambda worker: (worker.error is None, worker.when), default=None)
        if first is None:
            return None
        if first.error is not None:
            words = first.error.get("words")
            return rebuilt(words) if words else _of_the_script(first.error, first.rank, job)
        if hung:
            return ScriptError(
                "the workers got no further", where=job.program, fix="see which collective one of them does not enter"
            )
        how = f"was ended by {signal.Signals(first.signal).name}" if first.signal else f"ended with code {first.code}"
        return ScriptError(f"rank {first.rank} {how}", where=job.program, fix=f"see what it prints: {_again(job)}")

    def _hear(self, event: dict[str, Any]) -> None:
        worker = self._workers.get(event["name"])
        if worker is not None and event["event"] == "ended":
            worker.end(event["code"], event["signal"])

    def _end_others_soon(self) -> None:
        job = self._jobs
        self._loop.after(_WAY_OUT_S, lambda: self._end_all() if job == self._jobs else None)

    def _end_all(self) -> None:
        for name, worker in self._workers.items():
            if not worker.ended:
                self._fork_server.ask("signal", name=name, signal=signal.SIGKILL, group=True)

    def _interrupt(self) -> None:
        self._interrupted = True
        self._end_all()

    def _lose(self) -> None:
        self._lost = True

    def _be_warm(self) -> None:
        self._warm = True


def _of_the_script(error: Mapping[str, Any], rank: int, job: Job) -> ScriptError:
    """What the script raised, with the line of its own that led there: no one sees the traceback here."""
    frames = re.findall(r'^ *File "(.*)", line (\d+)', str(error.get("text", "")), re.MULTILINE)
    own = [number for file, number in frames if Path(file).name == Path(job.program).name]
    line = f", line {own[-1]}" if own else ""
    return ScriptError(
        str(error["summary"]),
        where=f"{job.program}{line}, rank {rank}",
        fix=f"see the entire traceback: {_again(job)}",
    )


def _again(job: Job) -> str:
    """What shows all that the script prints."""
    return shlex.join(["manyhosts", "run", job.program, *job.arguments])


class _Worker:
    """What one worker says, and how it ends."""

    def __init__(
        self,
        loop: Loop,
        rank: int,
        output: deque[str],
        on_failure: Callable[[], None],
        hear: Callable[[str], None] | None,
    ) -> None:
        self._loop, self.rank, self._output, self._on_failure, self._hear = loop, rank, output, on_failure, hear
        self.error: Mapping[str, Any] | None = None
        self.code = self.signal = 0
        self.ended = False
        self.heard = self.when = time.monotonic()
        self._records = b""
        self._lines = Lines()
        self._open: dict[int, Callable[[bytes], None]] = {}
        """Our end of each pipe, and who takes what comes."""

    def open_pipes(self) -> list[int]:
        """Start to listen. Returns the worker's ends, in the order in which the template wants them."""
        theirs = []
        for take in (self._show, self._show, self._note, self._forget):
            reading, writing = os.pipe()
            self._open[reading] = take
            theirs.append(writing)
            self._loop.watch(reading, partial(self._read, reading))
        return theirs

    def end(self, code: int, number: int) -> None:
        """Its process has ended; what is in its pipes is read first."""
        for end, take in self._open.items():
            os.set_blocking(end, False)
            with contextlib.suppress(BlockingIOError):
                while chunk := os.read(end, 1 << 16):
                    take(chunk)
        self.code, self.signal, self.ended, self.when = code, number, True, time.monotonic()
        self.close()
        if code or number:
            self._on_failure()

    def close(self) -> None:
        """Listen no more."""
        for end in self._open:
            self._loop.unwatch(end)
            os.close(end)
        self._open.clear()

    def _read(self, end: int) -> None:
        chunk = os.read(end, 1 << 16)
        if chunk:
            self._open[end](chunk)
            return
        self._loop.unwatch(end)
        del self._open[end]
        os.close(end)

    def _show(self, chunk: bytes) -> None:
        self.heard = time.monotonic()
        lines = self._lines.feed(chunk)
        self._output.extend(lines)
        if self._hear is not None:
            for line in lines:
                self._hear(line)

    def _note(self, chunk: bytes) -> None:
        *records, self._records = (self._records + chunk).split(b"\n")
        for record in map(json.loads, records):
            if record["record"] == "failed" and self.error is None:
                self.error, self.when = record, time.monotonic()
                self._on_failure()

    def _forget(self, chunk: bytes) -> None:
        """Where it is, which no one has asked."""


def _pass_on(words: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(words)
        sys.stderr.flush()
