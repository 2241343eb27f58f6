"""What is shown while a run continues."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from stories import BEGIN, ended, epoch_done, record, snapshot_saved, started, stepped, validated

from manyhosts.events import Event, Note, Recovered, SnapshotSkipped
from manyhosts.listeners.paint import bare
from manyhosts.listeners.progress import ShowProgress
from manyhosts.listeners.terminal import Fields


class Hearing:
    """A voice that nobody but the test hears."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.fields: list[dict[str, Any]] = []
        self.order: list[str] = []
        self.closed = False

    def say(self, text: str) -> None:
        self.said += bare(text).split("\n")
        self.order.append("said")

    def progress(self, fields: Fields) -> None:
        self.fields.append(dict(fields))
        self.order.append("ended" if fields.get("ended") else "progress")

    def close(self) -> None:
        self.closed = True


def show(events: Sequence[Event], *, restarts: int = 0, **settings: Any) -> Hearing:
    voice = Hearing()
    listener = ShowProgress(voice, record(**settings), Path("runs/x"), restarts=restarts)
    for event in events:
        listener(event)
    listener.close()
    return voice


def test_start_says_what_runs_where(tmp_path: Path) -> None:
    assert show([started()]).said == ["train.py  2 workers (ddp) · batch 8 · 3 epochs"]


def test_start_says_where_it_goes_on() -> None:
    voice = show([started(4, resumed_from="/runs/x/snapshots/step-00000004")])
    assert voice.said[1] == "continues after step 4 (step-00000004)"


def test_epochs_are_not_one_more_where_a_run_continues_in_an_epoch_whose_last_batch_is_small() -> None:
    """1,258 samples are 20 batches, of which the last is of 42: after ten, more than half of an epoch is done."""
    begun = started(150, steps_per_epoch=20, total_steps=200, epochs_done=7 + 10 * 64 / 1258)
    assert show([begun, stepped(151)]).fields[-1]["epochs"] == 10


def test_duration_is_told_in_full_words() -> None:
    assert show([started()], duration="3epoch").said == ["train.py  2 workers (ddp) · batch 8 · 3 epochs"]


def test_epoch_and_its_validation_are_one_line_with_a_mark_when_best() -> None:
    voice = show(
        [
            started(),
            *(stepped(step) for step in range(1, 5)),
            epoch_done(4, train_loss=0.25),
            validated(4, loss=0.5, accuracy=0.9),
            *(stepped(step) for step in range(5, 9)),
            epoch_done(8, train_loss=0.125),
            validated(8, loss=0.6, accuracy=0.8, best=False),
        ]
    )
    assert voice.said[1:] == [
        "epoch 1/3   loss 0.2500   validation: accuracy 90.00 %, loss 0.5000  ★ best",
        "epoch 2/3   loss 0.1250   validation: accuracy 80.00 %, loss 0.6000",
    ]


def test_epoch_without_validation_and_validation_without_epoch_have_their_lines() -> None:
    voice = show([started(), stepped(4), epoch_done(4, train_loss=0.25), stepped(6, loss=0.75), validated(6, loss=0.5)])
    assert voice.said[1:] == ["epoch 1/3   loss 0.2500", "step 6   loss 0.7500   validation: loss 0.5000  ★ best"]


def test_what_went_wrong_and_what_is_worth_saying_once_is_said() -> None:
    voice = show(
        [
            started(),
            Note(text="BatchNorm is global", step=0, time=BEGIN),
            SnapshotSkipped(step=4, path=Path("s/step-4"), reason="one bit is wrong", time=BEGIN),
            Recovered(step=4, reason="rank 1 died", how="without it", steps_redone=1, seconds_lost=0.5, time=BEGIN),
            snapshot_saved(4),
        ]
    )
    assert voice.said[1:] == [
        "BatchNorm is global",
        "snapshot step-4 is left out: one bit is wrong",
        "continued without it after rank 1 died: 1 step redone, 0.5 s lost",
    ]


def test_live_line_says_how_far_how_fast_and_how_long() -> None:
    [fields] = show([started(), *(stepped(step, loss=float(step), samples=8) for step in (1, 2, 3))]).fields
    assert fields == {
        "epoch": 1,
        "epochs": 3,
        "step": 3,
        "total_steps": 12,
        "loss": 2.0,
        "lr": 0.1,
        "samples_per_second": 8.0,
        "seconds_left": 9.0,  # nine steps, a second each
        "fraction": 0.25,
        "restarts": 0,
        "waiting": 0.25,
    }


def test_speed_is_that_of_the_last_seconds_and_time_left_counts_validations_too() -> None:
    voice = Hearing()
    listener = ShowProgress(voice, record(), Path("x"))
    listener(started())
    for step, time, seconds in [(1, 1.0, 1.0), (2, 2.0, 1.0), (3, 30.0, 0.5), (4, 31.0, 0.5)]:
        listener(stepped(step, time=BEGIN + time, seconds=seconds))
        listener.flush()
    listener.close()
    assert voice.fields[-1]["samples_per_second"] == 16.0
    assert voice.fields[-1]["seconds_left"] == 8 * 10.0  # 30 s for the three steps since the first


def test_run_with_a_limit_of_time_counts_down_to_it() -> None:
    voice = show(
        [started(total_steps=None), *(stepped(step) for step in (1, 2, 3))],
        duration="10s",
    )
    assert voice.fields[-1]["seconds_left"] == 7.0
    assert voice.fields[-1]["fraction"] == pytest.approx(0.3)
    assert (voice.fields[-1]["epochs"], voice.fields[-1]["total_steps"]) == (None, None)


def test_whichever_limit_comes_first_is_shown() -> None:
    events = [started(), *(stepped(step) for step in (1, 2, 3))]
    assert show(events, duration="3 epochs or 5s").fields[-1]["seconds_left"] == 2.0
    assert show(events, duration="3 epochs or 1h").fields[-1]["seconds_left"] == 9.0


def test_restarts_before_this_process_and_in_it_are_counted() -> None:
    recovered = Recovered(step=1, reason="a", how="b", steps_redone=0, seconds_lost=0.0, time=BEGIN)
    assert show([started(), recovered, stepped(2)], restarts=2).fields[-1]["restarts"] == 3


def test_thousand_steps_between_two_looks_are_one_change_of_the_live_line() -> None:
    voice = show([started(total_steps=4000), *(stepped(step) for step in range(1, 1001))])
    assert len(voice.fields) < 50


def test_end_takes_the_live_line_away_after_everything_else_was_said() -> None:
    voice = Hearing()
    listener = ShowProgress(voice, record(), Path("x"))
    for event in [started(), stepped(4), epoch_done(4), validated(4, loss=0.5), ended(4)]:
        listener(event)
    assert voice.order[-1] == "ended"  # at once, for the last screen comes next
    assert voice.said[-1].startswith("epoch 1/3")
    listener.close()
    assert voice.closed


def test_loss_since_the_last_line_leaves_out_what_was_left_out_and_knows_weights() -> None:
    steps = [stepped(1, loss=1.0, weight=1.0), stepped(2, loss=3.0, weight=99.0), stepped(3, loss=math.nan)]
    said = show([started(), *steps, validated(3, loss=0.5)]).said
    assert any("loss 2.98" in line for line in said)
