"""The functions in which workers die in these tests are there: the slow ones are not run with every change."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import resolve_name

import pytest

PLACE = re.compile(r"\b(manyhosts\.[\w.]+:[\w.]+):\d+:(?:before|after)")
PLACES = {name for path in Path(__file__).parent.glob("*.py") for name in PLACE.findall(path.read_text())}


@pytest.mark.parametrize("place", sorted(PLACES))
def test_place_of_a_death_is_in_the_program(place: str) -> None:
    assert callable(resolve_name(place))
