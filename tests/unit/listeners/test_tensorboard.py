"""TensorBoard's own reader finds what was drawn."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from stories import BEGIN, ended, started, stepped, validated, was_tested

from manyhosts.events import Event
from manyhosts.listeners.tensorboard import WriteTensorBoard

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def listen(folder: Path, *events: Event) -> None:
    listener = WriteTensorBoard(folder)
    for event in events:
        listener(event)
    listener.close()


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    reader = accumulator.EventAccumulator(str(folder), size_guidance={accumulator.SCALARS: 0})
    reader.Reload()
    return [(point.step, point.value) for point in reader.Scalars(tag)] if tag in reader.Tags()["scalars"] else []


def test_steps_validations_and_tests_are_drawn_with_their_values(tmp_path: Path) -> None:
    listen(
        tmp_path,
        started(),
        *(stepped(step, loss=float(step), gradient_norm=0.5, values={"extra": 7.0}) for step in (1, 2, 3)),
        validated(3, loss=0.5, accuracy=0.75),
        ended(3),
        was_tested(3, loss=0.25),
    )
    assert points(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert points(tmp_path, "train/lr") == [(step, pytest.approx(0.1)) for step in (1, 2, 3)]
    assert points(tmp_path, "train/samples_per_second") == [(step, 8.0) for step in (1, 2, 3)]
    assert points(tmp_path, "train/gradient_norm") == [(step, 0.5) for step in (1, 2, 3)]
    assert points(tmp_path, "train/extra") == [(step, 7.0) for step in (1, 2, 3)]
    assert points(tmp_path, "validation/accuracy") == [(3, 0.75)]
    assert points(tmp_path, "validation/loss") == [(3, 0.5)]
    assert points(tmp_path, "test/loss") == [(3, 0.25)]


def test_fast_steps_are_drawn_together_without_losing_their_mean_or_the_last(tmp_path: Path) -> None:
    listen(tmp_path, started(), *(stepped(step, loss=float(step)) for step in range(1, 10_001)))
    drawn = points(tmp_path, "train/loss")
    assert 10 <= len(drawn) < 1000
    assert drawn[-1][0] == 10_000
    weights = [step - before for (step, _), before in zip(drawn, [0, *(step for step, _ in drawn)], strict=False)]
    mean = sum(weight * value for weight, (_, value) in zip(weights, drawn, strict=True)) / 10_000
    assert mean == pytest.approx(5000.5)


def test_steps_that_are_done_once_more_are_drawn_once(tmp_path: Path) -> None:
    listen(tmp_path, started(), *(stepped(step, loss=1.0) for step in range(1, 7)))
    listen(
        tmp_path, started(4, time=BEGIN + 90), *(stepped(step, loss=2.0, time=BEGIN + 90 + step) for step in (5, 6, 7))
    )
    assert points(tmp_path, "train/loss") == [*((step, 1.0) for step in range(1, 5)), (5, 2.0), (6, 2.0), (7, 2.0)]


def test_numbers_that_are_none_too_large_or_negative_and_names_of_any_letters_are_drawn_as_they_are(
    tmp_path: Path,
) -> None:
    values = {"large": 1e300, "less": -1e300, "none": math.nan, "größe": -0.1, "n" * 300: 1.0}
    listen(tmp_path, *(stepped(step, loss=1.0, values=values) for step in (1, 127, 128, 70_000)))
    for name, expected in values.items():
        found = points(tmp_path, f"train/{name}")
        assert [step for step, _ in found] == [1, 127, 128, 70_000]
        expected = math.copysign(math.inf, expected) if abs(expected) > 1e38 else expected
        assert [value for _, value in found] == [pytest.approx(expected, nan_ok=True)] * 4


def test_of_tensorboard_its_messages_alone_are_imported_and_only_to_draw(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from stories import stepped;"
        "from manyhosts.listeners.tensorboard import WriteTensorBoard;"
        f"listener = WriteTensorBoard(Path({str(tmp_path)!r})); listener.close();"
        f"assert not list(Path({str(tmp_path)!r}).iterdir()); assert 'tensorboard' not in sys.modules;"
        f"listener = WriteTensorBoard(Path({str(tmp_path)!r})); listener(stepped(1, loss=2.0)); listener.close();"
        "sys.exit(any(name in sys.modules for name in ('boto3', 'fsspec', 'numpy', 'torch')))"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})
    assert points(tmp_path, "train/loss") == [(1, 2.0)]


def test_script_that_fails_before_anything_is_drawn_ends_with_its_own_error_and_leaves_its_steps(
    tmp_path: Path,
) -> None:
    code = f"""
from pathlib import Path
from stories import stepped
from manyhosts.listeners.tensorboard import WriteTensorBoard
WriteTensorBoard(Path({str(tmp_path)!r}))(stepped(1, loss=2.0))
raise RuntimeError("the script fails")
"""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr.splitlines()[-1] == "RuntimeError: the script fails"
    assert points(tmp_path, "train/loss") == [(1, 2.0)]
