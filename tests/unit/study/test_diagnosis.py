"""What limits a job is named, with what to change, what that would give, and how far adding workers pays."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from studies import Costs, make_study

from manyhosts.config.strategies import named
from manyhosts.study import columns, fits
from manyhosts.study.points import Asked, Point
from manyhosts.study.rows import Size
from manyhosts.study.study import known
from manyhosts.study.verdict import Verdict, _of_snapshots, to_gain, verdict_on

SCRIPT = __file__  # any file that is there


def test_law_with_as_many_sizes_as_coefficients_has_no_error_to_show() -> None:
    found = fits.fit("amdahl", [1, 2], [1.0, 0.3])
    assert found is not None
    assert columns.error_of(found) == "too few sizes"
    spread = fits.fit("amdahl", [1, 2, 4], [1.0, 1.8, 3.0])
    assert spread is not None
    assert columns.error_of(spread).endswith(" %")


def asked(**more: object) -> Asked:
    return Asked(script=SCRIPT, nodes=(1, 2, 4), workers_per_node=1, **more)  # type: ignore[arg-type]


def ideal(point: Point) -> Costs:
    return {"compute": 1.0 / point.workers, "exposed": 0.0, "data": 0.0, "evaluation": 0.0}


FAULTS = {
    "communication_exposed": lambda n: {"exposed": 0.5 * (n > 1)},
    "data_wait": lambda n: {"data": 0.5},
    "evaluation": lambda n: {"evaluation": 6.0},
    "compute": lambda n: {"compute": 0.8 if n > 1 else 1.0},
    "snapshot": lambda n: {"writing": 6.0},
}


@pytest.mark.parametrize("cause", FAULTS)
def test_the_fault_that_was_put_in_is_named_first(cause: str, tmp_path: Path) -> None:
    study = make_study(tmp_path, asked(), lambda point: {**ideal(point), **FAULTS[cause](point.workers)})
    verdict = study.verdicts()[()]
    assert verdict.limit == cause
    assert verdict.change
    assert verdict.change in verdict.text
    large = study.sizes[()][-1]
    assert sum(large.causes.values()) == pytest.approx(1 - large.efficiency, abs=1e-12)
    assert verdict.speed_up_without == pytest.approx(large.speed_up / (1 - to_gain(large)[cause]))
    others = {name: share for name, share in large.causes.items() if name != cause}
    assert max(others.values()) < 0.05, "what was not put in costs next to nothing"


def test_a_job_that_scales_has_no_limit(tmp_path: Path) -> None:
    verdict = make_study(tmp_path, asked(), ideal).verdicts()[()]
    assert (verdict.limit, verdict.speed_up_without) == (None, None)
    assert "No cause takes more than a fiftieth" in verdict.text
    assert verdict.pays_up_to == 16
    assert "16 at least (predicted, not measured)" in verdict.text


def test_what_is_shared_out_and_takes_time_all_the_same_is_named(tmp_path: Path) -> None:
    """A loader that is slow for every sample costs no efficiency, and most of the time."""
    study = make_study(tmp_path, asked(), lambda point: {**ideal(point), "data": 2.0 / point.workers})
    large, verdict = study.sizes[()][-1], study.verdicts()[()]
    assert large.causes["data_wait"] == pytest.approx(0, abs=0.03)
    assert verdict.limit == "data_wait"
    assert verdict.speed_up_without == pytest.approx(3 * large.speed_up, rel=0.05)
    assert "which takes 6" in verdict.text


def test_how_far_it_pays_and_what_it_costs(tmp_path: Path) -> None:
    verdict = make_study(tmp_path, asked()).verdicts()[()]
    assert verdict.pays_up_to == 2
    assert "A further worker pays up to 2" in verdict.text
    price = verdict.price
    assert price is not None
    epochs = make_study(tmp_path, asked()).sizes[()]
    before, now = epochs[0].epoch_seconds, epochs[-1].epoch_seconds
    assert before is not None
    assert now is not None
    assert price["per_epoch_largest"] == pytest.approx(4 * 0.5 * now / 3600)
    extra = price["per_epoch_largest"] - price["per_epoch_smallest"]
    assert price["per_hour_saved"] == pytest.approx(extra / ((before - now) / 3600))


def test_the_same_result_has_its_price_at_both_ends(tmp_path: Path) -> None:
    study = make_study(tmp_path, asked())
    verdict, (small, *_, large) = study.verdicts()[()], study.sizes[()]
    assert verdict.price is not None
    assert verdict.price["loss"] == pytest.approx(0.5 + 0.04), "what the worst of them came down to"
    for name, size in (("smallest", small), ("largest", large)):
        assert size.row.measured is not None
        until = size.row.measured.spent.seconds_to(verdict.price["loss"])
        assert until is not None
        assert verdict.price[f"per_loss_{name}"] == pytest.approx(size.row.point.nodes * 0.5 * until / 3600)
    assert "The same result, a validation loss of 0.54, costs" in verdict.text


@pytest.mark.parametrize(
    ("slowest", "said"),
    [
        (("worker 3 on b", 0.9), "It is worker 3 on b, all the time (90 % of it)"),
        (("worker 3 on b", 0.2), "No worker is slow all the time (the slowest, worker 3 on b, explains 20 % of it)"),
        (None, "manyhosts doctor looks for a worker"),
    ],
)
def test_one_slow_worker_and_pauses_of_all_have_other_cures(
    slowest: tuple[str, float] | None, said: str, tmp_path: Path
) -> None:
    [*others, large] = make_study(tmp_path, asked(), ideal).sizes[()]
    assert large.row.measured is not None
    before = large.row.measured.spent
    waits = replace(before, seconds={**before.seconds, "straggler": 0.5 * before.total}, slowest=slowest)
    row = replace(large.row, measured=replace(large.row.measured, spent=waits))
    verdict = verdict_on([*others, Size(rows=(row,))], {}, asked(), None)
    assert verdict.limit == "straggler"
    assert said in verdict.text


def test_strong_and_weak_scaling_are_told_apart_in_every_table(tmp_path: Path) -> None:
    study = make_study(tmp_path, asked(weak=16), ideal)
    for table in (columns.speed(study), columns.results(study), columns.lost(study)):
        named = {tuple(row[:3]) for row in table[1:]}
        assert table[0][2] == "batch_size_per_worker"
        assert {("2", "2", "-"), ("2", "2", "16")} <= named
        assert len(named) == 6


def test_negative_shares_are_explained_where_there_are_some(tmp_path: Path) -> None:
    study = make_study(tmp_path / "a", asked(), lambda point: {**ideal(point), "data": 0.4 / point.workers**2})
    assert study.sizes[()][-1].causes["data_wait"] < 0
    assert "a gain" in columns.note_on_lost(study)
    slow = make_study(tmp_path / "b", asked(), lambda point: {**ideal(point), "exposed": 0.5 * (point.workers > 1)})
    assert all(share > -0.0005 for size in slow.sizes[()] for share in size.causes.values())
    assert columns.note_on_lost(slow) == ""


def test_what_is_advised_can_be_asked_for(tmp_path: Path) -> None:
    verdict = make_study(tmp_path, asked(), lambda point: {**ideal(point), "exposed": 0.5}).verdicts()[()]
    [name] = re.findall(r"strategy=([\w-]+)", verdict.change)
    assert named(name).name == name


def test_workers_of_one_machine_are_named_with_the_price(tmp_path: Path) -> None:
    study = make_study(tmp_path, Asked(script=SCRIPT, workers=(1, 2)), ideal)
    assert "with 1 worker and " in study.verdict()
    assert "sooner over" in study.verdict(), "a machine that is used for less time is paid for less"


def test_runs_of_a_few_steps_are_said_to_tell_little(tmp_path: Path) -> None:
    study = make_study(tmp_path, asked(), ideal)
    assert "a longer --budget" not in study.verdict()
    for row in study.rows:
        assert row.measured is not None
        summary = json.loads(row.place.run.summary.read_text())
        row.place.run.summary.write_text(json.dumps({**summary, "steps": 1}))
    assert "With 1 step a run is mostly what is spent once" in known(asked(), tmp_path).verdict()


def test_a_run_whose_record_is_gone_is_told_with_what_helps(tmp_path: Path) -> None:
    study = make_study(tmp_path, asked(), ideal)
    study.rows[0].place.run.run_json.unlink()
    after = known(asked(), tmp_path)
    assert [row.outcome.done for row in after.rows] == [False, True, True]
    [(_, reason)] = columns.failures(after)
    assert "its record is no longer complete" in reason
    assert f"where: {study.rows[0].place.run.path}\n  fix:   delete that folder" in reason


def test_without_validation_there_is_no_time_to_a_loss(tmp_path: Path) -> None:
    study = make_study(tmp_path, asked(), ideal)
    assert "time to loss" in columns.results(study)[0][-1]
    for row in study.rows:
        lines = row.place.run.metrics.read_text().splitlines()
        row.place.run.metrics.write_text("".join(f"{line}\n" for line in lines if '"validation"' not in line))
    table = columns.results(known(asked(), tmp_path))
    assert not any("time to" in cell for cell in table[0])
    assert {len(row) for row in table} == {len(table[0])}


def test_more_than_ideal_is_doubted(tmp_path: Path) -> None:
    study = make_study(tmp_path, asked(), lambda point: {**ideal(point), "compute": 1.0 / point.workers**1.3})
    verdict = study.verdicts()[()]
    assert "That is more than ideal" in verdict.text
    assert "A further worker" not in verdict.text
    assert "Without it" not in verdict.text
    assert verdict.speed_up_without is None
    assert (verdict.pays_up_to, verdict.fastest) == (None, None)


def test_the_fastest_of_the_settings_that_were_tried_is_named(tmp_path: Path) -> None:
    words = make_study(tmp_path, asked(vary={"compression": ("none", "bf16")}, repeat=2)).verdict()
    first, none, bf16 = words.split("\n\n")
    assert first.startswith("compression=bf16 is the fastest: ")
    assert none.startswith("compression=none: 4 workers are ")
    assert bf16.startswith("compression=bf16: 4 workers are ")


def test_a_strategy_without_a_setting_that_is_tried_has_rows_without_its_value(tmp_path: Path) -> None:
    study = make_study(tmp_path, asked(vary={"strategy": ("ddp", "fsdp"), "compression": ("none", "bf16")}))
    rows = [row[:4] for row in columns.speed(study)]
    assert rows[0] == ["workers", "nodes", "strategy", "compression"]
    assert [row[2:] for row in rows[1::3]] == [["ddp", "none"], ["ddp", "bf16"], ["fsdp", columns.NOTHING]]
    for table in (columns.results(study), columns.lost(study), columns.laws(study)):
        assert {len(row) for row in table} == {len(table[0])}
    assert "\n\nstrategy=fsdp: 4 workers are " in study.verdict()


def test_one_size_alone_is_compared_with_nothing(tmp_path: Path) -> None:
    study = make_study(tmp_path, Asked(script=SCRIPT, workers=(1, 2)), fails=2)
    assert study.verdicts()[()] == Verdict(
        text="One size has ended well (1 worker), so there is nothing to compare it with.",
        limit=None, change="", speed_up_without=None, pays_up_to=None, fastest=None,
    )  # fmt: skip
    assert study.to_json()["fits"] == [{"settings": {}}]


def test_the_next_size_is_the_measure_where_the_smallest_failed(tmp_path: Path) -> None:
    study = make_study(tmp_path, asked(), ideal, fails=1)
    [failed, two, four] = study.to_json()["points"]
    assert (failed["status"], failed["speed_up"], failed["causes"]) == ("failed", None, None)
    assert [point["nodes"] for point in (failed, two, four)] == [1, 2, 4]
    assert (two["speed_up"], two["efficiency"]) == (1.0, 1.0)
    assert four["speed_up"] == pytest.approx(2, rel=0.05)
    assert four["efficiency"] == pytest.approx(four["speed_up"] / 2)


def test_advice_for_snapshots_is_not_what_is_set_already(tmp_path: Path) -> None:
    given = asked()
    assert "snapshots.every" in _of_snapshots(given)
    set_already = replace(given, settings={"snapshots.every": "30 min"})
    assert "snapshots.every" not in _of_snapshots(set_already)
    assert "validate_every" in _of_snapshots(set_already)
