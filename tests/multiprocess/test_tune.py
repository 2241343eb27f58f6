"""Searches of a real script: what is found can be had again, nothing is lost to a kill, and the budget is kept."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from runs import events

SCRIPT = Path(__file__).with_name("tune_script.py")
MANYHOSTS = [sys.executable, "-m", "manyhosts.cli.main"]
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]


class Searches:
    """A folder in which searches of the script are started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []

    def start(
        self, *words: str, into: str = "T", slow: float = 0.0, own: tuple[str, ...] = ()
    ) -> subprocess.Popen[str]:
        command = [*MANYHOSTS, "tune", *words, "--run-dir", str(self.folder / into), str(SCRIPT), *own]
        variables = {"OMP_NUM_THREADS": "1", "SLOW": str(slow), "MANYHOSTS_WARM_S": "0.1"}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.folder,
            env={**os.environ, **variables},
        )  # fmt: skip
        self.processes.append(process)
        return process

    def search(self, *words: str, code: int = 0, **more: object) -> dict:
        process = self.start(*words, **more)
        _, self.said = process.communicate(timeout=400)
        assert process.returncode == code, self.said
        return self.result()

    def result(self, into: str = "T") -> dict:
        return json.loads((self.folder / into / "tune.json").read_text())

    def trial(self, number: int) -> Path:
        return self.folder / "T" / "trials" / str(number)

    def wait_until(self, true: Callable[[], object]) -> None:
        deadline = time.monotonic() + 200
        while not true():
            assert time.monotonic() < deadline
            assert self.processes[-1].poll() is None, self.processes[-1].communicate()
            time.sleep(0.02)

    def validations(self, number: int) -> list[dict]:
        path = self.trial(number) / "metrics.jsonl"
        return events(path.parent, "validation") if path.exists() else []

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
        for process in psutil.process_iter(["cmdline"]):
            if str(self.folder) in " ".join(process.info["cmdline"] or []):
                process.kill()


@pytest.fixture
def searches(tmp_path: Path) -> Iterator[Searches]:
    found = Searches(tmp_path)
    yield found
    found.end()


def weights(run_dir: Path) -> str:
    return json.loads((run_dir / "summary.json").read_text())["weights_sha256"]


def test_a_grid_is_tried_and_the_line_of_the_best_gives_its_weights(searches: Searches) -> None:
    found = searches.search(
        "--sampler", "grid", "--search", "lr=0.5,0.001", "--search", "--width=3,5", "--workers", "2"
    )
    assert set(found) == {"schema_version", "trials", "best", "spent", "budget"}
    assert [set(each) for each in found["trials"]] == [{"number", "settings", "status", "value", "seconds"}] * 4
    assert {(each["settings"]["lr"], each["settings"]["--width"]) for each in found["trials"]} == {
        ("0.5", "3"), ("0.5", "5"), ("0.001", "3"), ("0.001", "5"),
    }  # fmt: skip
    assert {each["status"] for each in found["trials"]} == {"completed"}
    best = found["best"]
    assert best["value"] == min(each["value"] for each in found["trials"])
    assert best["settings"]["lr"] == "0.5"
    command = [*MANYHOSTS, *shlex.split(best["command"])[1:]]
    command[command.index("run") + 1 : command.index("run") + 1] = ["--run-dir", str(searches.folder / "again")]
    subprocess.run(
        command, check=True, cwd=searches.folder, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert weights(searches.folder / "again") == weights(Path(best["run_dir"]))
    assert found["spent"]["worker_seconds"] == pytest.approx(2 * sum(each["seconds"] for each in found["trials"]))


def test_a_killed_search_loses_only_what_was_under_way_and_that_resumes(searches: Searches) -> None:
    words = ("--sampler", "grid", "--search", "lr=0.5,0.1,0.01", "--set", "snapshots.every=1 steps", "--pruner", "none")
    search = searches.start(*words, slow=0.05)
    searches.wait_until(lambda: searches.validations(1))
    search.kill()
    search.communicate()
    kept = searches.result()["trials"][0]
    found = searches.search(*words, slow=0.0)
    statuses = [each["status"] for each in found["trials"]]
    assert statuses == ["completed", "interrupted", "completed", "completed"]
    assert found["trials"][0] == kept
    assert [each["settings"]["lr"] for each in found["trials"]] == ["0.5", "0.1", "0.01", "0.1"]
    assert [line["resumed_from"] for line in events(searches.trial(1), "start")][-1]
    undisturbed = searches.folder / "undisturbed"
    subprocess.run(
        [*MANYHOSTS, "run", "--workers", "1", "--set", "lr=0.1", "--run-dir", str(undisturbed), str(SCRIPT)],
        check=True, cwd=searches.folder, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert weights(searches.trial(1)) == weights(undisturbed)


def test_the_budget_of_workers_is_kept_and_its_three_warnings_arrive(searches: Searches) -> None:
    heard = searches.folder / "heard"
    script = searches.folder / "hear.py"
    script.write_text(f"import sys\nopen({str(heard)!r}, 'a').write(sys.argv[1] + '\\n')\n")
    words = ("--search", "lr=log:0.01:1", "--workers", "2", "--pruner", "none")
    limit = 60.0
    found = searches.search(
        *words, "--budget", f"{limit:g} worker-s", "--set", "duration=400 epochs",
        "--warn", shlex.join([sys.executable, str(script)]), slow=0.02,
    )  # fmt: skip
    times = [line["time"] for line in searches.validations(0)]
    interval = max(after - before for before, after in itertools.pairwise(times))
    assert found["spent"]["worker_seconds"] <= limit + 2 * interval
    assert [each["status"] for each in found["trials"]] == ["stopped"]
    assert [line.partition(" %")[0] for line in heard.read_text().splitlines()] == ["50", "80", "95"]
    assert list((searches.trial(0) / "snapshots").glob("step-*")), "it was stopped without a snapshot"


def test_no_trial_is_begun_that_would_not_end_within_the_budget(searches: Searches) -> None:
    words = ("--search", "lr=log:0.01:1", "--pruner", "none", "--price", "3600/worker-hour")
    found = searches.search(*words, "--trials", "1", slow=0.02)
    cost = found["spent"]["money"]
    assert cost == pytest.approx(found["spent"]["worker_seconds"])
    found = searches.search(*words, "--budget", f"${1.2 * cost + 3:.2f}", slow=0.02)
    assert len(found["trials"]) == 1
    assert found["spent"]["money"] == pytest.approx(cost)


def test_bad_trials_are_stopped_early_and_a_search_can_be_interrupted(searches: Searches) -> None:
    words = ("--sampler", "grid", "--search", "lr=0.5,0.4,0.3,0.2,0.15,1e-7", "--set", "duration=8 epochs")
    search = searches.start(*words, slow=0.01)
    searches.wait_until(lambda: searches.validations(0))
    search.send_signal(signal.SIGINT)
    _, said = search.communicate(timeout=200)
    assert search.returncode == 130, said
    assert [each["status"] for each in searches.result()["trials"]] == ["interrupted"]
    found = searches.search(*words, slow=0.01)
    status = {each["settings"]["lr"]: each["status"] for each in found["trials"]}
    assert status.pop("1e-7") == "pruned"
    assert set(status.values()) == {"completed"}, "0.5 was resumed"
    (bad,) = [each["number"] for each in found["trials"] if each["status"] == "pruned"]
    assert len(searches.validations(bad)) < 8


def test_by_itself_a_search_finds_the_rates_that_are_worth_trying(searches: Searches) -> None:
    found = searches.search("--trials", "2")
    assert "range test" in searches.said
    assert 1e-5 < found["trials"][0]["settings"]["lr"] < 10
    assert found["spent"]["worker_seconds"] > sum(each["seconds"] for each in found["trials"]), (
        "the test was for nothing"
    )
    page = subprocess.run(
        [*MANYHOSTS, "report", str(searches.folder / "T")], check=True, capture_output=True, text=True
    ).stdout.strip()
    for words in ("History", "What mattered", "Parallel coordinates", "--set lr=", "2 trials are done"):
        assert words in Path(page).read_text()


def test_searches_on_several_hosts_share_a_journal(searches: Searches) -> None:
    words = ("--search", "lr=log:0.01:1", "--storage", f"journal:{searches.folder / 'J'}", "--trials", "4")
    first = searches.start(*words, into="one")
    second = searches.start(*words, into="two")
    for process in (first, second):
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
    trials = searches.result("one")["trials"]
    assert 4 <= len(trials) <= 5, "each search looks before it begins a trial"
    runs = [len(list((searches.folder / name / "trials").glob("*/summary.json"))) for name in ("one", "two")]
    assert sum(runs) == len(trials)
    assert min(runs) >= 1


def test_a_script_that_fails_and_a_metric_that_is_not_there_end_the_search(searches: Searches) -> None:
    process = searches.start("--search", "lr=0.1,0.2", "--trials", "9", own=("--fail",))
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1, said
    assert "the first 3 trials have all failed: rank 0 on host" in said
    assert "RuntimeError: there is nothing to train" in said
    process = searches.start("--search", "lr=0.1,0.2", "--trials", "9", "--metric", "accuracy:max", into="U")
    _, said = process.communicate(timeout=300)
    assert process.returncode == 2, said
    assert "validations have no 'accuracy'" in said
    assert "it is one of: loss" in said
