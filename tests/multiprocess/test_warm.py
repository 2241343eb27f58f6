"""A fork server that stays after its run serves the next one, and nobody else; and it does not stay for ever."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from launching import alive, wait_until

from manyhosts.control.agent import warm

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.starts_cold,
    pytest.mark.skipif(not warm.IS_POSSIBLE, reason="Linux alone has what this takes"),
]
PARENTS: set[int] = set()
"""What workers of this test were forked from."""
SCRIPT = """
import json, os, sys
words = {"parent": os.getppid(), "folder": os.getcwd(), "said": os.environ.get("MANYHOSTS_SAID")}
words |= {"read": sys.stdin.read(), "torch": "torch" in sys.modules}
import torch
open(sys.argv[1], "w").write(json.dumps(words))
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[list[str]]:
    """Variables of this test alone, so that its fork server is nobody else's; what stays of it ends with the test."""
    yield [f"OF_THIS_TEST={tmp_path}"]
    for parent in PARENTS:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(parent)
            process.kill()
            process.wait(10)
    PARENTS.clear()


def environment(kept: list[str], **more: str) -> dict[str, str]:
    return {**os.environ, **dict(each.split("=", 1) for each in kept), **more}


def begin(
    folder: Path, kept: list[str], *words: str, code: int = 0, said: str = "", script: str = SCRIPT, stays_s: float = 60
) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(script)
    options = ["--warm", "--run-dir", str(folder / f"run-{time.monotonic_ns()}"), *words]
    return subprocess.Popen(
        [sys.executable, "-m", "manyhosts.cli.main", "run", *options, "script.py", str(folder / "out"), str(code)],
        cwd=folder,
        env=environment(kept, MANYHOSTS_SAID=said, MANYHOSTS_WARM_S=str(stays_s)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def report(folder: Path) -> dict[str, Any]:
    """What the worker saw of its process."""
    found: dict[str, Any] = json.loads((folder / "out").read_text())
    PARENTS.add(found["parent"])
    return found


def ran(folder: Path, kept: list[str], *words: str, code: int = 0, said: str = "", **more: Any) -> dict[str, Any]:
    process = begin(folder, kept, *words, code=code, said=said, **more)
    output, _ = process.communicate(f"{said} on stdin", timeout=120)
    assert (process.returncode == 0) == (code == 0), output
    return report(folder)


def test_next_run_is_forked_from_what_the_last_one_left_and_has_all_that_is_its_own(
    tmp_path: Path, kept: list[str]
) -> None:
    first = ran(tmp_path / "a", kept, said="first")
    second = ran(tmp_path / "b", kept, said="second", code=3)
    third = ran(tmp_path / "a", kept, said="third")
    assert first["parent"] == second["parent"] == third["parent"]
    assert [each["torch"] for each in (first, second, third)] == [True] * 3
    assert second["folder"] == str(tmp_path / "b")
    assert [each["said"] for each in (first, second, third)] == ["first", "second", "third"]
    assert [each["read"] for each in (first, second, third)] == [f"{n} on stdin" for n in ("first", "second", "third")]


def test_what_differs_from_what_would_be_started_is_not_used(tmp_path: Path, kept: list[str]) -> None:
    first = ran(tmp_path / "a", kept)
    assert ran(tmp_path / "a", [*kept, "LANG=xx"])["parent"] != first["parent"]
    script = "import os\nos.environ['OMP_NUM_THREADS'] = '3'\n" + SCRIPT  # nothing may be loaded before that
    other = ran(tmp_path / "b", kept, script=script)
    assert other["parent"] != first["parent"]
    assert ran(tmp_path / "a", kept)["parent"] == first["parent"]


def test_changed_file_of_what_is_loaded_is_noticed(tmp_path: Path) -> None:
    began = time.time()
    assert warm.changed_since(began + 1) == ""
    module, name = tmp_path / "loaded_once.py", "loaded_once"
    module.write_text("")
    sys.path.insert(0, str(tmp_path))
    try:
        __import__(name)
        assert warm.changed_since(time.time() + 1) == ""
        os.utime(module, (0, 0))  # as what is unpacked has old times
        assert warm.changed_since(began - 1) == str(module)
        module.unlink()
        assert warm.changed_since(time.time() + 1) == str(module)
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop(name)


def test_two_runs_at_once_both_run_and_a_fork_server_that_stays_ends_by_itself(tmp_path: Path, kept: list[str]) -> None:
    both = [begin(tmp_path / name, kept, stays_s=2.0) for name in "ab"]
    for process in both:
        output, _ = process.communicate("", timeout=120)
        assert process.returncode == 0, output
    parents = [report(tmp_path / name)["parent"] for name in "ab"]
    assert parents[0] != parents[1]
    wait_until(lambda: not any(map(psutil.pid_exists, parents)), "their end")


@pytest.mark.parametrize("who", ["command", "agent and command"])
def test_killed_run_leaves_nothing(who: str, tmp_path: Path, kept: list[str]) -> None:
    waits = SCRIPT.replace("sys.stdin.read()", "None").replace("sys.exit", "import time; time.sleep(600); sys.exit")
    process = begin(tmp_path / "a", kept, script=waits)
    wait_until(lambda: (tmp_path / "a" / "out").exists(), "its worker")
    own = psutil.Process(process.pid)
    below = own.children(recursive=True)
    agents = [each for each in below if "manyhosts agent" in " ".join(each.cmdline())]
    assert agents
    for each in [own, *(agents if who != "command" else [])]:
        each.send_signal(signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not alive(below), "their end")


def test_other_targets_and_times_that_are_none_are_refused(tmp_path: Path, kept: list[str]) -> None:
    for words, seconds, where in ((["--on", "slurm"], "60", "--warm"), ([], "soon", "MANYHOSTS_WARM_S")):
        process = begin(tmp_path / "a", kept, *words, stays_s=seconds)  # type: ignore[arg-type]
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 2, output
        assert where in output
