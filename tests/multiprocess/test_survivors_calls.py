"""Workers that die in a test, in a second fit or between two calls of a script leave the others to continue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import summary
from launching import Ended, run, run_words
from runs import samples_by_step, step_lines

pytestmark = pytest.mark.multiprocess
SCRIPT = Path(__file__).with_name("calls_script.py")
WORKERS = 3


def run_script(folder: Path, place: str, rank: int, parts: int, *more: str) -> Ended:
    (folder / "ended").mkdir(parents=True)
    words = ["--workers", str(WORKERS), "--env", "OMP_NUM_THREADS=1", *more, "--run-dir", str(folder / "run")]
    return run_words(folder, *words, str(SCRIPT), place, str(rank), str(parts))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Runs that nothing happened to, by the number of virtual workers."""
    folders = {}
    for parts in (0, 4):
        folders[parts] = tmp_path_factory.mktemp(f"whole-{parts}")
        ended = run_script(folders[parts], "nowhere", 0, parts)
        assert ended.code == 0, ended.out + ended.err
    return folders


def given(folder: Path) -> list[Any]:
    """What the calls gave, by worker that came to the end."""
    return [json.loads(path.read_text()) for path in sorted((folder / "ended").iterdir())]


def assert_same(died: Path, lived: Path, output: str) -> None:
    expected = given(lived)[0]
    for found in given(died):
        assert found == expected, output
    for name, steps in (("run", 40), ("run/trainer-2", 20)):
        broken, undisturbed = died / name, lived / name
        assert summary(broken)["weights_sha256"] == summary(undisturbed)["weights_sha256"], output
        assert summary(broken)["test"] == summary(undisturbed)["test"], output
        assert [line["step"] for line in step_lines(broken)] == list(range(1, steps + 1)), output
        assert [line["loss"] for line in step_lines(broken)] == [line["loss"] for line in step_lines(undisturbed)]
        assert samples_by_step(broken) == samples_by_step(undisturbed), output


def restarts(folder: Path) -> list[dict[str, Any]]:
    lines = [
        json.loads(line)
        for name in ("run", "run/trainer-2")
        for line in (folder / name / "metrics.jsonl").read_text().splitlines()
    ]
    return [line for line in lines if line["event"] == "restart"]


PLACES = ["test", "between", "fit again", "making", "fit of another", "validation"]
QUICK = [("test", 0, 0), ("fit again", 0, 4), ("between", 2, 0)]
ALL = [(place, rank, parts) for place in PLACES for rank in (0, 1) for parts in (0, 4)]


@pytest.mark.parametrize(
    ("place", "rank", "parts"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in ALL if each not in QUICK)],
)
def test_worker_that_dies_in_a_later_call_costs_no_bit(
    whole: dict[int, Path], place: str, rank: int, parts: int, tmp_path: Path
) -> None:
    ended = run_script(tmp_path / "died", place, rank, parts)
    output = ended.out + ended.err
    assert ended.code == 0, output
    assert "starting all workers again" not in output
    assert_same(tmp_path / "died", whole[parts], output)
    assert len(given(tmp_path / "died")) >= (WORKERS if not parts else WORKERS - 1), output
    assert_told(tmp_path / "died", rank)


@pytest.mark.xdist_group("stand-in")
@pytest.mark.parametrize(("place", "rank"), [("test", 1), pytest.param("fit again", 0, marks=pytest.mark.slow)])
def test_worker_that_dies_in_a_later_call_on_a_gpu_costs_no_bit(place: str, rank: int, tmp_path: Path) -> None:
    lived = run_script(tmp_path / "lived", "nowhere", 0, 0, "--env", "STAND_IN=1")
    assert lived.code == 0, lived.out + lived.err
    ended = run_script(tmp_path / "died", place, rank, 0, "--env", "STAND_IN=1")
    assert ended.code == 0, ended.out + ended.err
    assert_same(tmp_path / "died", tmp_path / "lived", ended.out + ended.err)
    assert_told(tmp_path / "died", rank)


MOMENTS = {
    "before it says that it is over": "manyhosts.training.loop.run_end:RunEnd.record:1:before",
    "when it has said so": "manyhosts.training.loop.run_end:RunEnd.record:1:after",
    "when all have left the fit": "manyhosts.elastic.session:CollectiveCalls.done:1:before",
    "before it begins again": "manyhosts.training.fit:Fit.begin:2:before",
    "with the records open again": "manyhosts.training.telemetry.run_log:RunLog.open_records:2:after",
    "with what came out of the test told": "manyhosts.training.session:Session._test:1:after",
}
FIRST = ("before it says that it is over", "when all have left the fit")


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "moment", [moment if moment in FIRST else pytest.param(moment, marks=pytest.mark.slow) for moment in MOMENTS]
)
def test_worker_that_dies_where_a_call_begins_or_ends_costs_no_bit(
    whole: dict[int, Path], moment: str, rank: int, tmp_path: Path
) -> None:
    ended = run_script(tmp_path / "died", MOMENTS[moment], rank, 0)
    output = ended.out + ended.err
    assert ended.code == 0, output
    assert_same(tmp_path / "died", whole[0], output)
    assert len(given(tmp_path / "died")) == WORKERS, output
    assert_told(tmp_path / "died", rank)


def test_worker_that_dies_behind_the_last_call_has_its_lines_done_by_another(
    whole: dict[int, Path], tmp_path: Path
) -> None:
    ended = run_script(tmp_path / "died", "end", 0, 0)
    output = ended.out + ended.err
    assert ended.code == 0, output
    assert_same(tmp_path / "died", whole[0], output)
    assert len(given(tmp_path / "died")) == WORKERS, output


def test_error_that_a_worker_meets_in_an_exchange_of_the_scripts_own_is_told_by_its_cause(tmp_path: Path) -> None:
    source = """
        import os, signal, torch, torch.distributed as dist, manyhosts as mh
        torch.manual_seed(0)
        data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
        mh.Trainer(
            model=lambda: torch.nn.Linear(4, 2), loss=torch.nn.MSELoss(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.01), data=mh.Data(train=data, batch_size=8),
        ).fit("1 epoch")
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
"""
    ended = run(tmp_path, source, "--workers", "2")
    assert ended.code == 1
    assert "rank 1 on host" in ended.err
    assert "was killed by SIGKILL" in ended.err


def assert_told(folder: Path, rank: int) -> None:
    [reported] = restarts(folder)
    assert reported["reason"].startswith(f"rank {rank} on host"), reported
    assert "killed by SIGKILL" in reported["reason"]
    assert reported["steps_redone"] <= 1
