"""The table of what a resume may change is the one that the program goes by, and names every setting."""

from __future__ import annotations

import re
from dataclasses import fields

from pages import ROOT

from manyhosts.config.settings import Settings
from manyhosts.training.state.resuming import TABLE


def test_page_has_the_table_of_the_program() -> None:
    lines = (ROOT / "docs" / "resuming.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("| ")][1:] == [f"| {row.what} | {row.then} |" for row in TABLE]


def test_every_setting_is_in_the_table() -> None:
    named = {name for row in TABLE for name in re.findall(r"`(\w+)`", row.what)}
    assert {entry.name for entry in fields(Settings)} - named == set()
