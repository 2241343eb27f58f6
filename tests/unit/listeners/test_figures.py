"""Numbers and signs as a person reads them."""

from __future__ import annotations

import pytest

from manyhosts.listeners import figures
from manyhosts.listeners.paint import bar, bare, paint, writable


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((0.0612345, "0.0612"), (0.5, "0.5000"), (1.23456, "1.2346"), (12.3456, "12.346"), (12345.6, "12346")),
        *(
            (0, "0"),
            (6e-4, "0.00060"),
            (1.2e-5, "1.2e-05"),
            (-0.25, "-0.2500"),
            (2e9, "2.0e+09"),
            (float("nan"), "nan"),
            (float("inf"), "inf"),
        ),
    ],
)
def test_number_has_the_digits_that_matter(value: float, shown: str) -> None:
    assert figures.number(value) == shown


def test_shares_are_percentages_and_losses_are_not() -> None:
    assert figures.figure("accuracy", 0.98333) == "accuracy 98.33 %"
    assert figures.figure("val_f1", 1) == "val_f1 100.00 %"
    assert figures.figure("token_acc", 0.5) == "token_acc 50.00 %"
    assert figures.figure("loss", 0.5) == "loss 0.5000"
    assert figures.figure("acceleration", 0.5) == "acceleration 0.5000"
    assert figures.figure("accuracy", 98.3) == "accuracy 98.300"


def test_loss_comes_last() -> None:
    assert figures.figures({"loss": 0.5, "accuracy": 0.9}, ", ") == "accuracy 90.00 %, loss 0.5000"


@pytest.mark.parametrize(
    ("per_second", "shown"),
    [(0.4167, "0.42"), (9.96, "10"), (512.3, "512"), (9999.4, "9999"), (30512, "30.5k"), (2.5e6, "2.5M")],
)
def test_rate_is_short(per_second: float, shown: str) -> None:
    assert figures.rate(per_second) == f"{shown} samples/s"


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0:00"), (42.4, "0:42"), (725, "12:05"), (11253, "3:07:33"), (-3, "0:00")]
)
def test_time_to_go_is_a_clock(seconds: float, shown: str) -> None:
    assert figures.clock(seconds) == shown


def test_amounts_have_their_plural() -> None:
    assert (figures.amount(1, "step"), figures.amount(12345, "step")) == ("1 step", "12,345 steps")


@pytest.mark.parametrize(
    ("share", "filled"), [(-1, ""), (0, ""), (0.5, "█████"), (0.55, "█████▌"), (1, "█" * 10), (2, "█" * 10)]
)
def test_bar_fills_its_share_of_a_fixed_width(share: float, filled: str) -> None:
    assert bar(share, 10) == filled.ljust(10)


def test_paint_comes_off_again() -> None:
    assert bare(paint("good", "bold", "green") + paint("", "red") + " news") == "good news"


def test_signs_become_letters_where_the_terminal_knows_no_others() -> None:
    text = "━━╸── ███▌ ★ · → Zürich"
    assert writable(text, "utf-8") == text
    assert writable(text, None) == text
    assert writable(text, "ascii") == "==>-- #### * - -> Z?rich"
    assert writable("plain", "ascii") == "plain"
