"""Runs without a terminal: a handle is printed, and from any other terminal they are asked after, read and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from launching import MANYHOSTS, alive, environment, wait_until, write_script
from preloaded import descendants

pytestmark = pytest.mark.multiprocess

SOURCE = """
    import os, signal, sys, time
    print("begins", os.environ["RANK"], flush=True)
    if sys.argv[1] == "fails" and os.environ["RANK"] == "1":
        raise ValueError("no such thing")
    if sys.argv[1] == "waits":
        while True:
            time.sleep(0.1)
"""


def manyhosts(folder: Path, *words: str) -> Any:
    return subprocess.run(
        [*MANYHOSTS, *words], cwd=folder, env=environment(), capture_output=True, text=True, timeout=120
    )


def detach(folder: Path, what: str, *options: str) -> str:
    script = write_script(folder, SOURCE)
    words = ["--detach", "--workers", "2", "--run-dir", str(folder / "run"), *options, str(script), what]
    done = manyhosts(folder, "run", *words)
    assert done.returncode == 0, done.stderr
    return str(done.stdout).strip()


def status(folder: Path, handle: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(manyhosts(folder, "status", "--json", handle).stdout)
    return found


def head_of(folder: Path) -> psutil.Process:
    return psutil.Process(json.loads((folder / "run" / "detached" / "state.json").read_text())["process"])


def test_detached_run_tells_how_it_stands_what_it_printed_and_that_it_is_done(tmp_path: Path) -> None:
    handle = detach(tmp_path, "ends")
    assert handle == f"local://{tmp_path}/run"
    lines = manyhosts(tmp_path, "logs", "--follow", handle).stdout.splitlines()
    assert sorted(lines) == ["[0] begins 0", "[1] begins 1"]
    found = status(tmp_path, handle)
    assert (found["state"], found["code"], found["handle"]) == ("done", 0, handle)
    manyhosts(tmp_path, "cancel", handle)
    assert status(tmp_path, handle)["state"] == "done", "what is over stays as it ended"


def test_detached_run_is_also_named_by_its_directory_and_as_the_last_one(tmp_path: Path) -> None:
    script = write_script(tmp_path, SOURCE)
    handle = manyhosts(tmp_path, "run", "--detach", str(script), "ends").stdout.strip()
    directory = handle.removeprefix("local://")
    assert manyhosts(tmp_path, "logs", "--follow", "last").stdout == "begins 0\n"
    assert manyhosts(tmp_path, "logs", directory).stdout == "begins 0\n"
    found = [status(tmp_path, word) for word in (handle, directory, f"runs/{Path(directory).name}", "last")]
    assert found == [found[0]] * 4
    assert (found[0]["state"], found[0]["handle"], found[0]["directory"]) == ("done", handle, directory)


def test_run_of_a_terminal_is_asked_after_and_cancelled_from_another_one(tmp_path: Path) -> None:
    script = write_script(tmp_path, SOURCE)
    words = [*MANYHOSTS, "run", "--workers", "2", "--run-dir", "runs/one", str(script), "waits"]
    head = subprocess.Popen(words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        wait_until(lambda: manyhosts(tmp_path, "logs", "last").stdout.count("begins") == 2, "both workers run")
        found = status(tmp_path, "last")
        assert (found["state"], found["handle"]) == ("running", "")
        assert f"process {head.pid} " in found["reason"]
        done = manyhosts(tmp_path, "cancel", "runs/one")
        assert (done.returncode, done.stderr) == (0, "")
        head.communicate(timeout=60)
    finally:
        head.kill()
        head.communicate()
    assert head.returncode == 130
    assert status(tmp_path, "last")["state"] != "running"
    assert manyhosts(tmp_path, "cancel", "runs/one").returncode == 0, "what is over is left as it is"


def test_detached_run_that_fails_says_why_and_with_which_code(tmp_path: Path) -> None:
    handle = detach(tmp_path, "fails")
    said = manyhosts(tmp_path, "logs", "--follow", handle).stdout
    assert "ValueError: no such thing" in said
    found = status(tmp_path, handle)
    assert (found["state"], found["code"]) == ("failed", 1)
    assert "rank 1" in found["reason"]
    assert manyhosts(tmp_path, "status", handle).stdout.startswith("failed · ")


def test_cancelled_run_leaves_no_process_and_can_be_cancelled_twice(tmp_path: Path) -> None:
    handle = detach(tmp_path, "waits")
    log = tmp_path / "run" / "logs" / "detached.log"
    wait_until(lambda: log.read_text().count("begins") == 2, "both workers run")
    head = head_of(tmp_path)
    family = [head, *descendants(head)]
    with ThreadPoolExecutor(4) as terminals:  # all look at the same lock
        assert {each["state"] for each in terminals.map(lambda _: status(tmp_path, handle), range(4))} == {"running"}
    for _ in range(2):
        assert manyhosts(tmp_path, "cancel", handle).returncode == 0
    assert status(tmp_path, handle)["state"] == "cancelled"
    wait_until(lambda: not alive(family), "nothing of it runs")


def test_same_run_directory_is_not_started_twice(tmp_path: Path) -> None:
    handle = detach(tmp_path, "waits")
    again = manyhosts(tmp_path, "run", "--detach", "--run-dir", str(tmp_path / "run"), "script.py", "ends")
    manyhosts(tmp_path, "cancel", handle)
    assert again.returncode == 2
    assert "a run in this directory is in progress" in again.stderr


def test_run_whose_process_was_killed_is_failed_and_its_workers_end(tmp_path: Path) -> None:
    handle = detach(tmp_path, "waits")
    log = tmp_path / "run" / "logs" / "detached.log"
    wait_until(lambda: log.read_text().count("begins") == 2, "both workers run")
    head = head_of(tmp_path)
    family = descendants(head)
    os.kill(head.pid, signal.SIGKILL)
    wait_until(lambda: status(tmp_path, handle)["state"] == "failed", "it is noticed")
    assert "gone without a word" in status(tmp_path, handle)["reason"]
    wait_until(lambda: not alive(family), "nothing of it runs")


def test_handle_with_the_wrong_target_names_the_right_one(tmp_path: Path) -> None:
    handle = detach(tmp_path, "ends")
    asked = manyhosts(tmp_path, "status", handle.replace("local:", "ssh:"))
    assert asked.returncode == 2
    assert f"ask for {handle}" in asked.stderr
    manyhosts(tmp_path, "logs", "--follow", handle)
