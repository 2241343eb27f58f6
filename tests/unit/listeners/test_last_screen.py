"""The last screen: everything that matters, in 15 lines of 80 columns."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from stories import ended, epoch_done, record, started, stepped, validated

from manyhosts.listeners.last_screen import last_screen, row_of_test
from manyhosts.listeners.paint import bare
from manyhosts.records.metrics import line_of
from manyhosts.records.summary import Summary, summarise

EVENTS = [
    started(),
    *(stepped(step) for step in range(1, 5)),
    epoch_done(4),
    validated(4, loss=0.5, accuracy=0.9833),
    ended(4, reason="all 1 epochs done"),
]


def summary(**changes: object) -> Summary:
    whole = summarise([line_of(event) for event in EVENTS], record())
    return dataclasses.replace(whole, **changes)  # type: ignore[arg-type]  # the test knows the fields


def lines(**changes: object) -> list[str]:
    return bare(last_screen(summary(**changes), Path("runs/train-1"))).split("\n")


def test_screen_of_a_run_reads_so() -> None:
    assert lines() == [
        "",
        "completed ─ all 1 epochs done ────────────────────────────────── 2 workers · ddp",
        "  validation  accuracy 98.33 %   loss 0.5000",
        "  best        accuracy 98.33 %   at step 4",
        "  time        4.0 s   1 epoch, 4 steps   8 samples/s",
        "  spent on    computing            50 %  ██████████████",
        "              waiting for workers  25 %  ███████",
        "              waiting for data     12 %  ███▌",
        "              other                12 %  ███▌",
        "  sent        1.0 kB per step, by rank 0",
        "  run         runs/train-1",
    ]
    assert bare(row_of_test({"loss": 0.06, "accuracy": 0.9861})) == "  test        accuracy 98.61 %   loss 0.0600"


def test_restarts_are_told_with_what_they_cost() -> None:
    assert "  restarts    2   23 steps redone, 4.1 s lost" in lines(restarts=2, steps_redone=23, seconds_lost=4.1)


@pytest.mark.parametrize("status", ["completed", "stopped early", "failed", "interrupted", "something new"])
@pytest.mark.parametrize("reason", ["short", "a very long reason " * 20])
def test_fullest_screen_fits(status: str, reason: str) -> None:
    parts = dict.fromkeys(("compute", "communication_exposed", "data_wait", "snapshot_stall", "other"), 0.2)
    full = lines(
        status=status,
        reason=reason,
        restarts=3,
        steps_redone=1_234_567,
        seconds_lost=12345.6,
        step_seconds={"median": 1, "p95": 1, **parts},
        seconds=123456.7,
        steps=12_345_678,
        epochs=12345,
        samples_per_second=1e7,
        bytes_sent_per_step=5.2e8,
        test={"accuracy": 0.99},
    )
    assert len(full) + 1 <= 15  # and the row of the test below
    assert max(len(line) for line in full) <= 80
    assert len(full[1]) == 80


def test_reason_that_needs_the_room_gets_it() -> None:
    reason = "accuracy has not become better for 10 validations"
    assert lines(status="stopped early", reason=reason)[1] == f"stopped early ─ {reason} " + "─" * 14


def test_run_without_a_step_has_a_screen_too() -> None:
    empty = summarise([line_of(started()), line_of(ended(0))], record())
    text = bare(last_screen(empty, Path("runs/x")))
    assert "0 epochs, 0 steps" in text
    assert "spent on" not in text


def test_run_without_validation_shows_its_training_loss() -> None:
    assert "  training    loss 0.5000" in lines(validation={}, best={}, train_loss=0.5)


def test_folder_is_shown_as_it_is_typed_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert bare(last_screen(summary(), Path.cwd() / "runs" / "x")).endswith("  run         runs/x")
    assert bare(last_screen(summary(), Path("/elsewhere/x"))).endswith("  run         /elsewhere/x")
