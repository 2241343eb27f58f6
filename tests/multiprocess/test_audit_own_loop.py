"""A worker that computes wrongly in a loop of one's own is found in whichever pass it is, named and left out."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from commands import alive_workers, finish, kill_all, start, summary, wait_for_step
from launching import Ended, run_words
from runs import Recipe, events, restarts, samples_by_step, step_lines

pytestmark = pytest.mark.multiprocess
SCRIPT = Path(__file__).with_name("audit_own_script.py")
STEPS = 12


def run(workers: int, folder: Path, share: float, faults: list[dict[str, Any]] | None = None) -> Ended:
    folder.mkdir()
    words = ["--workers", str(workers), "--env", "OMP_NUM_THREADS=1", "--env", f"FAULTS={json.dumps(faults or [])}"]
    path = f"PYTHONPATH={SCRIPT.parent}{os.pathsep}{SCRIPT.parents[1]}"
    return run_words(folder, *words, "--env", path, "--run-dir", str(folder / "run"), str(SCRIPT), str(share))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "one"
    ended = run(1, folder, 0.0)
    assert ended.code == 0, ended.out + ended.err
    return folder / "run"


def assert_as_if_nothing_had_been(found: Path, undisturbed: Path, output: str) -> None:
    assert summary(found)["weights_sha256"] == summary(undisturbed)["weights_sha256"], output
    assert [line["step"] for line in step_lines(found)] == list(range(1, STEPS + 1)), output
    assert [line["loss"] for line in step_lines(found)] == [line["loss"] for line in step_lines(undisturbed)]
    assert samples_by_step(found) == samples_by_step(undisturbed)


def test_audits_change_no_bit_and_compare_every_pass(undisturbed: Path, tmp_path: Path) -> None:
    ended = run(3, tmp_path / "audited", 1.0)
    output = ended.out + ended.err
    assert ended.code == 0, output
    assert_as_if_nothing_had_been(ended.run_dir, undisturbed, output)
    [text] = [line["text"] for line in events(ended.run_dir, "note") if "every bit was equal" in line["text"]]
    # Two passes over both models, one whose rows are compared and then what follows from them: for each of 8 parts.
    assert text.startswith(f"audit: of {4 * 8 * STEPS} parts"), text


@pytest.mark.parametrize("what", ["input", "gradient", "rows", "kept", "weights"])
def test_one_bit_in_any_pass_leaves_out_the_right_worker(what: str, undisturbed: Path, tmp_path: Path) -> None:
    lasting = what == "input"  # or it may strike samples that only a dispute would have it compute
    ended = run(3, tmp_path / "faulty", 1.0, [{"worker": 1, "what": what, "step": 5, "lasting": lasting}])
    output = ended.out + ended.err
    assert ended.code == 0, output
    assert_as_if_nothing_had_been(ended.run_dir, undisturbed, output)
    [line] = restarts(ended.run_dir)
    words = "other weights than the other workers" if what == "weights" else "computed part [0-9] of step 5 wrongly"
    assert re.match(f"rank 1 on host .*{words}", line["reason"]), line
    assert (line["step"], line["how"]) == (4, "with 2 workers"), "nothing is done again but the step under way"


def test_worker_that_errs_again_and_again_is_found_where_a_part_is_computed_twice_more(
    undisturbed: Path, tmp_path: Path
) -> None:
    """What a part keeps is as before the pass each time that it is computed."""
    ended = run(2, tmp_path / "faulty", 1.0, [{"worker": 1, "what": "gradient", "step": 7}])
    output = ended.out + ended.err
    assert ended.code == 0, output
    assert_as_if_nothing_had_been(ended.run_dir, undisturbed, output)
    [line] = restarts(ended.run_dir)
    assert (line["step"], line["how"]) == (6, "with 1 worker")
    assert "of step 7 wrongly" in line["reason"]


def test_honest_worker_that_is_killed_is_not_accused(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parent))
    monkeypatch.setenv("SHARE", "1.0")
    process = start(3, tmp_path / "run", Recipe(), pids=tmp_path / "pids", script=SCRIPT)
    try:
        wait_for_step(process, tmp_path / "run", 4)
        os.kill(alive_workers(tmp_path / "pids")[1], signal.SIGKILL)
        output = finish(process)
    except BaseException:
        kill_all(process)
        raise
    assert process.returncode == 0, output
    assert_as_if_nothing_had_been(tmp_path / "run", undisturbed, output)
    assert all("was killed by SIGKILL" in line["reason"] for line in restarts(tmp_path / "run"))
