"""Columns on a terminal that is too narrow for all they hold."""

from __future__ import annotations

import io
import sys

import pytest

from manyhosts.cli.columns import print_columns


class Terminal(io.StringIO):
    """What is printed to it is drawn."""

    def isatty(self) -> bool:
        return True


def test_name_of_a_row_is_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "runs/train-20261127-032416"
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "60")
    print_columns(
        ("run", "state", "begun", "best"), [(name, "completed", "2026-11-27 03:24", "loss 0.0059 at step 290")]
    )
    assert name in terminal.getvalue()
