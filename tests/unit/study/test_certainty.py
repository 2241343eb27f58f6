"""A study says how sure it is, what would make it sure, and "measured" only of what was run."""

from __future__ import annotations

from pathlib import Path

import pytest
from studies import Costs, make_study

from manyhosts.study.points import Asked, Point
from manyhosts.study.verdict import Verdict, _student


def verdict(folder: Path, speed_ups: dict[int, list[float]]) -> Verdict:
    """Of a study with these speed-ups over the first run of one worker, by seed."""

    def of(point: Point) -> Costs:
        return {
            "compute": 1.0 / speed_ups[point.workers][point.seed or 0],
            "exposed": 0.0,
            "data": 0.0,
            "evaluation": 0.0,
        }

    repeats = len(speed_ups[1])
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text("")
    asked = Asked(script=str(folder / "train.py"), arguments=(), workers=tuple(speed_ups), repeat=repeats)
    [found] = make_study(folder, asked, of).verdicts().values()
    return found


def test_two_seeds_on_either_side_of_the_limit_cannot_tell_and_what_would_is_said(tmp_path: Path) -> None:
    found = verdict(tmp_path, {1: [1.0, 1.02], 2: [1.44, 1.62]})
    assert "above 1.5 times, from where 2 workers are worth it, CANNOT BE TOLD" in found.text
    assert "runs lie between 1.41 and 1.62 times" in found.text
    assert found.certainty is not None
    assert found.certainty.probability is not None
    assert 0.3 < found.certainty.probability < 0.7
    assert found.to_json()["certainty"]["range"] == pytest.approx([1.44 / 1.02, 1.62], rel=1e-3)


def test_more_runs_that_would_tell_are_named(tmp_path: Path) -> None:
    found = verdict(tmp_path, {1: [1.0, 1.0], 2: [1.5, 1.64]})
    assert found.certainty is not None
    assert found.certainty.repeat is not None
    assert f"--repeat {found.certainty.repeat} should tell" in found.text


@pytest.mark.parametrize(("two", "side"), [([1.8, 1.82], "above"), ([1.2, 1.22], "below")])
def test_runs_far_from_the_limit_are_sure(two: list[float], side: str, tmp_path: Path) -> None:
    found = verdict(tmp_path, {1: [1.0, 1.01], 2: two})
    assert f"That is {side} 1.5 times" in found.text
    assert "with a probability of 9" in found.text


def test_one_run_of_each_size_says_that_nobody_knows(tmp_path: Path) -> None:
    found = verdict(tmp_path, {1: [1.0], 2: [1.9]})
    assert "How sure that is cannot be said from one run of each size" in found.text
    assert found.to_json()["certainty"]["probability"] is None


def test_no_size_is_praised_for_more_than_there_can_be(tmp_path: Path) -> None:
    found = verdict(tmp_path, {1: [1.0], 2: [6.84]})
    assert "2 workers were 6.84 times as fast as the runs of 1, and 2 times is the most that they can be" in found.text
    assert "what more workers gain is not known" in found.text
    assert "%" not in found.text.split(".")[0]


def test_measured_is_said_of_sizes_that_were_run_alone(tmp_path: Path) -> None:
    pays_between = verdict(tmp_path / "between", {1: [1.0], 2: [1.9], 8: [2.6]})
    assert "(measured)" not in pays_between.text
    assert "by the law through the sizes run" in pays_between.text
    run = verdict(tmp_path / "run", {1: [1.0], 2: [1.9], 3: [2.1], 4: [2.15]})
    assert "pays up to 2" in run.text
    assert "(measured)" in run.text


def test_student_is_that_of_the_tables() -> None:
    for freedom, t in ((1, 6.314), (2, 2.920), (5, 2.015), (30, 1.697)):
        assert _student(t, freedom) == pytest.approx(0.95, abs=2e-4)
        assert _student(-t, freedom) == pytest.approx(0.05, abs=2e-4)
    assert _student(0.0, 3.5) == 0.5
