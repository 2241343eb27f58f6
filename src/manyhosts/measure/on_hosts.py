"""Measures a script where it will run: on one host, on several of its workers, and between hosts.

Each start is an ordinary `manyhosts run`, whose workers measure in place of training.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from manyhosts.control import variables
from manyhosts.errors import LaunchError
from manyhosts.measure.measure import INSIDE, Asked, Found, Starts, Told, collect, settings_of
from manyhosts.measure.request import Request

_SHOWN_LINES = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """How workers are started."""

    program: Sequence[str]
    """What stands for `manyhosts`."""
    words: Sequence[str]
    """Behind `run`, for every start: `--on slurm`, `--cluster lab`."""
    hosts: Sequence[str]
    """Where they are named: a start on n of them takes the first n."""


def measure(asked: Asked, where: Where, tell: Callable[[str], None]) -> Found:
    """As `measure.measure`, with workers that `manyhosts run` starts.

    Raises:
        LaunchError: they could not be started; what `manyhosts run` said of it is told.
    """
    with _by_run(asked, where, tell) as start:
        return collect(asked, start, between=True)


def command(asked: Asked, where: Where, request: Request, nodes: int, workers_per_node: int) -> list[str]:
    """What is typed behind `manyhosts run` for one start, without what has it measure."""
    hosts = ["--hosts", ",".join(where.hosts[:nodes])] if where.hosts else ["--nodes", str(nodes)]
    words = [*where.words, *hosts]
    words += ["--workers-per-node", str(workers_per_node)]
    for key, value in settings_of(asked, request).items():
        words += ["--set", f"{key}={value}"]
    return words


@contextlib.contextmanager
def _by_run(asked: Asked, where: Where, tell: Callable[[str], None]) -> Iterator[Starts]:
    with tempfile.TemporaryDirectory(prefix="manyhosts-plan-", ignore_cleanup_errors=True) as folder:
        number = 0

        def start(request: Request, nodes: int, workers_per_node: int) -> Told:
            nonlocal number
            number += 1
            on = f"{nodes} host{'s' * (nodes > 1)}"
            tell(f"starting {workers_per_node * nodes} worker{'s' * (workers_per_node * nodes > 1)} on {on}")
            words = ["run", *command(asked, where, request, nodes, workers_per_node)]
            for key, value in {**request.environment(), variables.FIRST: INSIDE}.items():
                words += ["--env", f"{key}={value}"]
            for name in asked.environment:
                words += ["--env", name]  # its value is seen by nobody who lists processes
            words += ["--run-dir", str(Path(folder) / str(number)), asked.script, *asked.arguments]
            return _heard([*where.program, *words], asked, tell)

        yield start


def _heard(words: Sequence[str], asked: Asked, tell: Callable[[str], None]) -> Told:
    """Run a command to its end, hearing each line."""
    told = Told(tell)
    output: deque[str] = deque(maxlen=_SHOWN_LINES)
    with subprocess.Popen(
        words,
        cwd=asked.folder,
        env={**os.environ, **asked.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None, "it was asked for"
        try:
            for line in process.stdout:
                text = line.decode(errors="replace").rstrip("\n")
                output.append(text)
                told.hear(text)
        except KeyboardInterrupt:
            process.wait()  # of a Ctrl-C on the terminal it has heard, too
            raise
    if process.returncode:
        told.error = LaunchError(
            said_last(output) or f"manyhosts run ended with code {process.returncode}",
            where="manyhosts run",
            fix="see that the script runs there: manyhosts run, with the same hosts",
        )
    return told


def said_last(output: Sequence[str]) -> str:
    """What `manyhosts run` said about its failure: its sentence, else the last lines."""
    lines = list(output)
    for number in range(len(lines) - 1, -1, -1):
        if lines[number].startswith("manyhosts: "):
            more = [line.strip() for line in lines[number + 1 : number + 3] if line.startswith("  ")]
            return "; ".join([lines[number].removeprefix("manyhosts: "), *more])
    return " / ".join(line for line in lines if line.strip())
