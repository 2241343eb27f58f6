"""Starts `manyhosts run` for tests, and kills it without mercy."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import psutil
from launching import alive, wait_until
from preloaded import descendants
from runs import Recipe

SCRIPT = Path(__file__).parent / "multiprocess" / "recipe_script.py"
DEADLY = SCRIPT.with_name("deadly_script.py")


def start(
    workers: int,
    run_dir: Path,
    recipe: Recipe,
    options: Sequence[str] = (),
    *,
    pids: Path | None = None,
    dies_at: str | None = None,
    script: Path | None = None,
) -> subprocess.Popen[str]:
    """`manyhosts run` with the script of `recipe`, in a process group of its own.

    Workers leave their process ids in the folder `pids`, for `alive_workers`. `dies_at`: see `deadly_script`, or what
    `script` says of it.
    """
    if pids is not None:
        pids.mkdir(exist_ok=True)
    count = "--workers-per-node" if "--nodes" in options else "--workers"
    words = [
        "run",
        count,
        str(workers),
        "--run-dir",
        str(run_dir),
        *options,
        str(script or (SCRIPT if dies_at is None else DEADLY)),
    ]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "manyhosts.cli.main", *words],
        env={
            **os.environ,
            "RECIPE": json.dumps(asdict(recipe)),
            "PYTHONPATH": os.pathsep.join(
                [str(SCRIPT.parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
            ),
            "OMP_NUM_THREADS": "1",
            "PIDS": str(pids or ""),
            "DIES_AT": dies_at or "",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 120) -> str:
    """What it printed, once it has ended."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        kill_all(process)
        raise
    return output


def alive_workers(pids: Path) -> list[int]:
    """Process ids of the workers that run, in the order of the ranks that they were started with, then of age."""
    found = []
    for path in pids.iterdir():
        rank, pid = map(int, path.name.split("-"))
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end at any moment
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append((rank, path.stat().st_mtime, pid))
    return [pid for _, _, pid in sorted(found)]


def steps_done(run_dir: Path) -> int:
    """The last step that has a line on the disk."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if b'"step"' in line), default=0)


def kill_all(process: subprocess.Popen[str]) -> None:
    """A power cut: SIGKILL to the command and to everything that came from it. Raises where it has ended by itself."""
    assert process.poll() is None, f"it had ended by itself: {process.communicate()[0]}"
    head = psutil.Process(process.pid)
    family, new = set[psutil.Process](), {head}
    while new:  # all stand still before the first is killed: one that is forked meanwhile would not be found any more
        for one in new:
            _send(one, signal.SIGSTOP)
        family |= new
        new = set(descendants(head)) - family
    for one in family:
        _send(one, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not alive([*family]), "all of it is gone")


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def wait_for_step(process: subprocess.Popen[str], run_dir: Path, step: int) -> None:
    """Until `step` has a line on the disk, or the command has ended."""
    wait_until(lambda: steps_done(run_dir) >= step or process.poll() is not None, f"step {step}")


def summary(run_dir: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((run_dir / "summary.json").read_text())
    return found
