"""A proposal for computing time says what was measured, what the job would cost, and how sure that is."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from studies import Costs, make_study

from manyhosts.errors import ConfigError
from manyhosts.study import proposal
from manyhosts.study.points import Asked, Point

PLOTS = Path(sys.prefix) / "plots"


def costs(point: Point) -> Costs:
    """Amdahl's law: a tenth of the work is not shared out; runs of another seed are a little slower."""
    n, noise = point.workers, 1 + 0.02 * (point.seed or 0)
    if "batch_size_per_worker" in dict(point.varied):
        return {"compute": 1.0 * noise, "exposed": 0.05 * (n - 1), "data": 0.0, "evaluation": 0.0}
    return {"compute": (0.9 / n + 0.1) * noise, "exposed": 0.0, "data": 0.0, "evaluation": 0.0}


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    script = tmp_path / "train.py"
    script.write_text("")
    return Asked(script=str(script), workers=(1, 2, 4), repeat=3, weak=8)


def test_strong_and_weak_scaling_the_cost_of_the_job_and_its_interval(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proposal, "FEWEST_STEPS", 1)
    study = replace(make_study(tmp_path / "S", asked, costs), price=3.0)
    jobs = proposal.jobs_of(study, "100 epochs")
    assert [each.workers for each in jobs] == [1, 2, 4, 8, 16]
    assert [each.measured for each in jobs] == [True, True, True, False, False]
    for each in jobs:
        assert each.interval[0] <= each.speed_up * 1.03
        assert each.interval[1] >= each.speed_up * 0.97
        assert each.worker_hours == pytest.approx(each.hours * each.workers)
        assert each.price == pytest.approx(3 * each.nodes * each.hours)
    assert jobs[0].hours / jobs[2].hours == pytest.approx(jobs[2].speed_up, rel=1e-3)
    text = proposal.text_of(study, "100 epochs")
    assert "strong" in text
    assert "weak" in text
    assert "±" in text
    words = proposal.paragraph(study, "100 epochs")
    assert "1, 2 and 4 workers in 18 runs" in words
    assert "90 % interval" in words
    assert "By extrapolation (universal scalability law)" in words


@pytest.mark.parametrize(("workers", "said"), [((1, 2), "takes 3 sizes"), ((1, 2, 4), "no law of scaling")])
def test_nothing_is_extrapolated_from_few_sizes_or_from_what_no_law_describes(
    workers: tuple[int, ...], said: str, asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proposal, "FEWEST_STEPS", 1)

    def more_than_ideal(point: Point) -> Costs:
        return {"compute": 1 / point.workers**2, "exposed": 0.0, "data": 0.0, "evaluation": 0.0}

    study = make_study(tmp_path / "S", replace(asked, workers=workers, weak=None), more_than_ideal)
    assert all(job.measured for job in proposal.jobs_of(study, "90 epochs"))
    assert said in proposal.paragraph(study, "90 epochs")


def test_points_that_are_too_short_are_refused_before_and_after(asked: Asked, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too short for a proposal"):
        proposal.check("90 epochs", "50 steps")
    with pytest.raises(ConfigError, match="depends on its speed"):
        proposal.check("2h", None)
    proposal.check("90 epochs", None)
    study = make_study(tmp_path / "S", asked, costs)
    with pytest.raises(ConfigError, match="fewer than 100 steps"):
        proposal.write(study, "90 epochs")


@pytest.mark.skipif(
    not (PLOTS / "matplotlib").exists(), reason="matplotlib is not in .venv/plots: make test puts it there"
)
def test_the_figure_is_drawn_as_svg_and_pdf(asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposal, "FEWEST_STEPS", 1)
    monkeypatch.syspath_prepend(str(PLOTS))
    files = proposal.write(make_study(tmp_path / "S", asked, costs), "90 epochs")
    assert [path.name for path in files] == ["proposal.txt", "proposal.svg", "proposal.pdf"]
    assert files[2].read_bytes().startswith(b"%PDF")
    svg = files[1].read_text()
    for words in ("strong scaling", "weak scaling", "ideal", "90 % interval"):
        assert f"<!-- {words} -->" in svg


def test_extrapolated_sizes_count_the_workers_that_there_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposal, "FEWEST_STEPS", 1)
    (tmp_path / "train.py").write_text("")
    asked = Asked(script=str(tmp_path / "train.py"), nodes=(1, 2, 4), repeat=3)
    study = make_study(tmp_path / "S", asked, costs)
    workers = [each.workers for each in proposal.jobs_of(study, "100 epochs")]
    measured = [size.row.workers for size in proposal._groups(study)[0]]
    assert workers[: len(measured)] == measured
    assert workers[len(measured) :] == [measured[-1] * factor for factor in (2, 4)][: len(workers) - len(measured)]
