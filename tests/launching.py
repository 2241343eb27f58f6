"""Starts `manyhosts run` as a user does, and watches the processes that it makes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from preloaded import children, descendants

MANYHOSTS = [sys.executable, "-P", "-m", "manyhosts.cli.main"]
# What would change what is tested here:
SHARED = ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "MANYHOSTS_SET", "PYTHONUNBUFFERED")
HANGS_S = 120.0
"""What has not happened by then never will, on the busiest machine: a test that ends here hangs, it is not slow."""


BEGINNING = re.compile(r"\Amanyhosts: starting .*\n")
"""What `manyhosts run` says of itself first where there is no terminal."""


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
    run_dir: Path

    def log(self, rank: int) -> str:
        [path] = (self.run_dir / "logs").glob(f"*-{rank}.log")
        return path.read_text()


def write_script(folder: Path, source: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(source))
    return path


def run(folder: Path, source: str, *options: str, arguments: Sequence[str] = (), name: str = "script.py") -> Ended:
    """Write `source` as a script into `folder` and run it with `manyhosts run OPTIONS SCRIPT ARGUMENTS`."""
    script = write_script(folder, source, name)
    return run_words(folder, "--run-dir", str(folder / "run"), *options, str(script), *arguments)


def run_words(folder: Path, *words: str) -> Ended:
    done = subprocess.run(
        [*MANYHOSTS, "run", *words], cwd=folder, env=environment(), capture_output=True, text=True, timeout=120
    )
    return Ended(done.returncode, done.stdout, BEGINNING.sub("", done.stderr), folder / "run")


def start(folder: Path, source: str, *options: str) -> subprocess.Popen[str]:
    """As `run`, but does not wait for its end. It leads its own process group, like a command typed at a terminal."""
    script = write_script(folder, source)
    return subprocess.Popen(
        [*MANYHOSTS, "run", "--run-dir", str(folder / "run"), *options, str(script)],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in SHARED}


def wait_until(true: Callable[[], bool], what: str, timeout_s: float = HANGS_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s in vain: {what}"
        time.sleep(0.02)


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [psutil.Process(process.pid), *descendants(psutil.Process(process.pid))]


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    found = []
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            if each.is_running() and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found


def agents(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Agents; what one has just forked is not one, though it still has its command line."""
    found = []
    for each in processes:
        with suppress(psutil.NoSuchProcess):  # a zombie is none such, either
            if is_agent(each) and not is_agent(each.parent() or each):
                found.append(each)
    return found


def is_agent(process: psutil.Process) -> bool:
    command = process.cmdline()
    return "manyhosts.control.agent.agent" in command or command[:2] == ["manyhosts", "agent"]


def templates(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [child for agent in agents(processes) for child in children(agent)]


def workers(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """All that the templates have forked: workers and stores."""
    return [child for template in templates(processes) for child in template.children()]
