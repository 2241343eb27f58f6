"""A study corrects the model: factors that are known are found again, and the error is told as it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from measured_training import MEASURED, group, machines

from manyhosts.errors import ConfigError
from manyhosts.planner.calibrate import NAME, Calibration, Run, calibrate, runs_of
from manyhosts.planner.measured import Network
from manyhosts.planner.predict import predictions, ways

NETWORK = Network(latency_s=0.0, bytes_per_second=500)


def runs(compute: float, communication: float) -> list[Run]:
    """What would be measured of a training that is so many times as slow as the model says."""
    by = Calibration(compute=compute, communication=communication)
    found = []
    for workers in (1, 2, 4):
        for way in ways(MEASURED)[: 1 if workers == 1 else 2]:
            asked = replace(group(workers), between=NETWORK, within=NETWORK)
            seconds = way.model.step(by.measured(MEASURED), asked.slower(by.communication)).seconds
            found.append(Run(group=asked, way=way, step_seconds=seconds))
    return found


@pytest.mark.parametrize(("compute", "communication"), [(0.6, 0.8), (1.3, 3.0), (2.7, 1.0), (1.0, 2.2)])
def test_factors_that_are_known_are_found_again(compute: float, communication: float) -> None:
    found = calibrate(MEASURED, runs(compute, communication))
    assert found.compute == pytest.approx(compute, rel=0.02)
    assert found.communication == pytest.approx(communication, rel=0.05)
    assert found.median_after is not None
    assert found.median_after < 0.01


def test_runs_as_predicted_change_nothing() -> None:
    found = calibrate(MEASURED, runs(1.0, 1.0))
    assert (found.compute, found.communication) == (1.0, 1.0)
    assert (found.median_before, found.worst_before) == (pytest.approx(0), pytest.approx(0))


def test_error_is_told_of_runs_that_the_factors_were_not_found_from() -> None:
    odd = [*runs(1.0, 1.0)]
    odd[2] = replace(odd[2], step_seconds=3 * odd[2].step_seconds)
    found = calibrate(MEASURED, odd)
    assert found.worst_after is not None
    assert found.worst_after > 0.5  # no factor makes that run, seen from the others
    assert "off by" in str(found)


def test_one_run_says_how_slow_computing_is_and_nothing_of_exchanges() -> None:
    [alone] = runs(2.0, 5.0)[:1]
    found = calibrate(MEASURED, [alone])
    assert found.compute == pytest.approx(2.0, rel=0.01)
    assert (found.communication, found.median_after) == (1.0, None)


def point(workers: int, seconds: float, **more: Any) -> dict[str, Any]:
    parts = {
        "compute": 4 * seconds,
        "communication_exposed": 0.0,
        "data_wait": 0.0,
        "straggler": 0.0,
        "evaluation": 9.0,
    }
    return {
        "workers": workers, "nodes": workers, "settings": {}, "steps": 5, "restarts": 0, "seconds": parts, **more
    }  # fmt: skip


def test_points_of_a_study_become_runs_and_failed_ones_do_not() -> None:
    failed = {"workers": 4, "nodes": 1, "settings": {}, "status": "failed"}
    study = {
        "points": [
            point(1, 2.46),
            point(2, 1.3, settings={"compression": "bf16"}),
            failed,
            point(2, 1.0, settings={"compression": "topk"}),
            point(2, 1.1, settings={"strategy": "local_sgd", "seed": "1"}),
            point(2, 9.0, steps=1),
        ]
    }
    found = runs_of(study, NETWORK, NETWORK, ways(MEASURED))
    assert [(each.group.workers, each.group.nodes, each.way.strategy, each.way.compression) for each in found] == [
        (1, 1, "ddp", "none"), (2, 2, "ddp", "bf16"), (2, 2, "local-sgd", "none"),
    ]  # fmt: skip
    assert [each.step_seconds for each in found] == pytest.approx([2.46, 1.3, 1.1])
    several = {"asked": {"settings": {"compression": "bf16"}}, "points": [
        point(2, 1.3, settings={"seed": "1"}), point(2, 1.0, settings={"batch_size": "7"}),
    ]}  # fmt: skip
    [found] = runs_of(several, NETWORK, NETWORK, ways(MEASURED))
    assert (found.way.compression, found.step_seconds) == ("bf16", pytest.approx(1.3)), "another batch has other steps"
    with pytest.raises(ConfigError, match="no run of this study ended well"):
        runs_of({"points": [failed]}, NETWORK, NETWORK, ways(MEASURED))


def test_epoch_that_was_disturbed_is_no_measure_of_a_step() -> None:
    study = {"points": [point(1, 3.0, epoch_seconds=[10.0, 2.0, 2.0, 1.0]), point(2, 3.0, epoch_seconds=[10.0, 2.0])]}
    found = runs_of(study, NETWORK, NETWORK, ways(MEASURED))
    assert [each.step_seconds for each in found] == pytest.approx([3.0 * 2.0 / 3.75, 3.0])


def test_everything_that_exchanges_take_is_calibrated() -> None:
    by = Calibration(communication=2.0)
    network = Network(latency_s=1.0, bytes_per_second=1.0, processor_s_per_message=0.5, processor_s_per_byte=0.25)
    slower = network.slower(by.communication)
    assert (slower.latency_s, slower.bytes_per_second) == (2.0, 0.5)
    assert (slower.processor_s_per_message, slower.processor_s_per_byte) == (1.0, 0.5)
    packs = replace(MEASURED.compression["bf16"], arithmetic_s=1.0, processor_s=3.0)
    found = by.measured(replace(MEASURED, compression={"bf16": packs}, copy_s_per_byte=0.5))
    assert (found.compression["bf16"].arithmetic_s, found.compression["bf16"].processor_s) == (2.0, 6.0)
    assert found.copy_s_per_byte == 1.0
    assert found.update_s == MEASURED.update_s


def test_calibration_is_kept_beside_the_study_and_changes_predictions(tmp_path: Path) -> None:
    written = calibrate(MEASURED, runs(2.0, 3.0))
    assert written.write(tmp_path) == tmp_path / NAME
    read = Calibration.read(tmp_path)
    assert read == written
    kind = machines(2, network=NETWORK)
    [plain] = predictions(MEASURED, kind, [(2, 1)], ways(MEASURED)[:1])
    [slower] = predictions(read.measured(MEASURED), read.machines(kind), [(2, 1)], ways(MEASURED)[:1])
    assert slower.step.compute == pytest.approx(2 * plain.step.compute, rel=0.02)
    assert slower.step.seconds == pytest.approx(runs(2.0, 3.0)[1].step_seconds, rel=0.02)


def test_file_that_is_no_calibration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"there is no {NAME}"):
        Calibration.read(tmp_path)
    (tmp_path / NAME).write_text('{"compute": 1}')
    with pytest.raises(ConfigError, match="holds something else"):
        Calibration.read(tmp_path)
