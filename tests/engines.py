"""Runs on the hosts of a lab, started by an engine, compared with what one process makes of the same recipe."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
from runs import Recipe, trained

from manyhosts.lab import Host, Lab

FOLDER = "/root/job"
RECIPE = Recipe(samples=103, duration="1 epochs", accuracy=False)
SCRIPTS = Path(__file__).parent / "cluster"
MANYHOSTS = [sys.executable, "-P", "-m", "manyhosts.cli.main"]


_SHARE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
source, process, target = sys.argv[1:]
tree = libc.syscall(428, -100, source.encode(), 1 | 0o2000000)  # open_tree: a copy of the mount that is in no namespace
libc.setns(os.open(f"/proc/{process}/ns/mnt", os.O_RDONLY), 0)
os.makedirs(target, exist_ok=True)
done = libc.syscall(429, tree, b"", -100, target.encode(), 4)  # move_mount, from the descriptor itself
sys.exit(0 if tree >= 0 and done == 0 else os.strerror(ctypes.get_errno()))
"""


def share(lab: Lab, folder: Path, target: str = FOLDER) -> None:
    """Let every host see `folder` of this machine as `target`, as a file server would; with the scripts in it."""
    others = ("runs.py", "ranks.py", "multiprocess/accelerate_script.py", "multiprocess/lightning_script.py")
    for script in [*SCRIPTS.glob("*_script.py"), *(SCRIPTS.parent / name for name in others)]:
        shutil.copy(script, folder)  # hosts may not see the tests themselves
    os.chmod(folder, 0o755)
    for host in lab:
        subprocess.run([sys.executable, "-c", _SHARE, str(folder), str(host.process), target], check=True)


def environment(**more: str) -> dict[str, str]:
    """What a user's shell has, with the tests' own modules; torch's cache is where a test may leave something."""
    paths = [*(path for path in os.environ.get("PYTHONPATH", "").split(":") if path), str(SCRIPTS.parent)]
    return {"PYTHONPATH": ":".join(paths), "TORCHINDUCTOR_CACHE_DIR": "/root/cache", "OMP_NUM_THREADS": "1", **more}


def recipe() -> str:
    """The recipe as the script's environment has it."""
    return "RECIPE=" + json.dumps(asdict(RECIPE))


def run(host: Host, words: Sequence[str], *, before: Sequence[str] = (), timeout_s: float = 160) -> Any:
    """`manyhosts run WORDS` on `host`, in the folder of the scripts. Returns what subprocess.run does."""
    words = [*before, *MANYHOSTS, "run", "--env", recipe(), "--env", "TORCHINDUCTOR_CACHE_DIR=/root/cache", *words]
    return host.run(words, folder=FOLDER, env=environment(), timeout_s=timeout_s, check=False)


def run_alone(lab: Lab, words: Sequence[str], gone: str, *, before: Sequence[str] = ()) -> Any:
    """`manyhosts run WORDS` for a script that all hosts have but the last, which lacks the "script" or its "folder"."""
    *having, _last = lab
    for host in having if gone == "folder" else lab:
        host.run(["mkdir", "-p", "/root/alone"])
    for host in having:
        host.path("/root/alone/here.py").write_text("print('here')\n")
    words = [*before, *MANYHOSTS, "run", *words, "--run-dir", f"{FOLDER}/alone", "here.py"]
    try:
        return having[0].run(words, folder="/root/alone", env=environment(), timeout_s=160, check=False)
    finally:
        for host in lab:
            host.run(["rm", "-rf", "/root/alone"])


def lacks(gone: str) -> str:
    """What is said of the host that `run_alone` has left without it."""
    here = {"script": "there is no script 'here.py' here", "folder": "the working directory is not here"}
    return f"{here[gone]}: hosts are expected to share it, or have copies"


def examined(host: Host, words: Sequence[str], *, before: Sequence[str] = ()) -> Any:
    """What `manyhosts doctor WORDS --json` on `host` finds, and its exit code."""
    done = host.run(
        [*before, *MANYHOSTS, "doctor", *words, "--json"],
        folder=FOLDER,
        env=environment(),
        timeout_s=160,
        check=False,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def hashes(out: str) -> dict[int, tuple[str, str]]:
    """By rank: the host's name and the hash of the weights, as the recipe's script prints them."""
    found = re.findall(r"weights (\d+) (\S+) (\w+)", out)
    return {int(rank): (host, digest) for rank, host, digest in found}


def equal_hashes(out: str, workers: int) -> bool:
    """Whether a script with Accelerate or Lightning has trained so many workers together, to the same bits."""
    found = re.findall(r"rank (\d) of (\d) on cpu: (\w{64})", out)
    ranks = sorted((int(rank), int(count)) for rank, count, _ in found)
    return ranks == [(rank, workers) for rank in range(workers)] and len({digest for _, _, digest in found}) == 1


def furthest_from_one_process(weights: Path, tmp_path: Path) -> float:
    """How far the weights in a file are from those that one process makes of the recipe, at most."""
    [alone] = trained(1, RECIPE, tmp_path / "alone")
    together = numpy.load(weights)
    return max(float(abs(together[name] - value).max()) for name, value in alone["weights"].items())
