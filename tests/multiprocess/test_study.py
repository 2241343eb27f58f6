"""A study of a real script: every size is run once, whatever happens in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from runs import events

SCRIPT = Path(__file__).with_name("study_script.py")
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]


class Studied:
    """A folder with a study of the script, and switches that make it fail or wait."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.study = folder, folder / "S"
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "manyhosts.cli.main",
            "study",
            *words,
            "--run-dir",
            str(self.study),
            str(SCRIPT),
        ]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.folder,
            env={**os.environ, "STUDIED": str(self.folder), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.processes.append(process)
        return process

    def result(self) -> dict:
        return json.loads((self.study / "study.json").read_text())

    def starts(self, name: str) -> int:
        """How many runs were started in the folder of a point."""
        return (self.study / "points" / f"{name}.log").read_text().count("study_script.py  ")

    def say(self, name: str, sizes: str) -> None:
        """Have the script fail, or wait, at these sizes."""
        (self.folder / "new").write_text(sizes)
        (self.folder / "new").rename(self.folder / name)

    def wait_until(self, true: Callable[[], object]) -> None:
        deadline = time.monotonic() + 150
        while not true():
            assert time.monotonic() < deadline
            assert self.processes[-1].poll() is None, self.processes[-1].communicate()
            time.sleep(0.02)

    def waits(self, size: int) -> bool:
        """Whether the run of that size is under way, and waits."""
        return (self.folder / f"waiting-{size}").exists()

    def holder(self) -> int:
        """The process that holds the study's folder."""
        return json.loads((self.study / "lock.json").read_text() or "{}").get("process", 0)

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
        for process in psutil.process_iter(["cmdline"]):  # a run whose study was killed continues
            if str(self.study) in " ".join(process.info["cmdline"] or []):
                process.kill()


@pytest.fixture
def studied(tmp_path: Path) -> Iterator[Studied]:
    found = Studied(tmp_path)
    found.say("fails", "")
    found.say("waits", "")
    yield found
    found.end()


def test_each_size_is_run_once_whatever_happens(studied: Studied) -> None:
    studied.say("waits", "1")
    study = studied.start("--workers", "1,2")
    studied.wait_until(lambda: studied.waits(1))
    study.send_signal(signal.SIGINT)
    studied.say("waits", "2")  # the first run does its step before it ends
    _, err = study.communicate(timeout=150)
    assert study.returncode == 130, err
    assert "the same command continues with what is not done" in err

    study = studied.start("--workers", "1,2,3")
    studied.wait_until(lambda: studied.waits(2))
    study.kill()  # its run continues
    study.communicate()

    studied.say("fails", "3")
    study = studied.start("--workers", "1,2,3")
    studied.wait_until(lambda: studied.holder() == study.pid)
    studied.say("waits", "")
    out, err = study.communicate(timeout=150)
    assert study.returncode == 1, err
    assert "1 worker: done before" in err
    assert "2 workers: done before" in err
    assert "failed, or not run: 3 workers" in out
    assert "there is no room for so many" in out
    assert [point["status"] for point in studied.result()["points"]] == ["completed", "completed", "failed"]
    reason = studied.result()["points"][2]["reason"]
    assert "there is no room for so many" in reason
    assert f"see the traceback in {studied.study / 'points' / '3-workers.log'}" in reason, "nobody has seen one above"
    assert "continue:" not in reason, "the study's own command continues"

    studied.say("fails", "")
    study = studied.start("--workers", "1,2,3", "--json")
    out, err = study.communicate(timeout=150)
    assert study.returncode == 0, err
    found = json.loads(out)
    assert found == studied.result()
    assert [point["workers"] for point in found["points"]] == [1, 2, 3]
    for point in found["points"]:
        steps = [line["step"] for line in events(Path(point["run_dir"]), "step")]
        assert steps == list(range(1, 16)), "no step is missing, and none stands there twice"
        assert sum(point["causes"].values()) == pytest.approx(1 - point["efficiency"], abs=1e-9)
        assert point["speed_up"] == pytest.approx(point["efficiency"] * point["workers"])
        assert len(point["epoch_seconds"]) == 3
        assert set(point["validation"]) == set(point["test"]) == {"loss"}
        assert (point["status"], point["global_batch"], point["lr"]) == ("completed", 12, 0.1)
    assert found["points"][0]["efficiency"] == pytest.approx(1)
    assert set(found["fits"][0]) == {"settings", "amdahl", "gustafson", "universal"}
    assert found["verdict"].startswith("3 workers are ")
    assert studied.starts("2-workers") == 1
