"""Tests that share what a fixture of their file has made go to one worker of pytest-xdist, where it is made once."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Such a fixture is a run or several of them: seconds, of which a second worker would spend as many."""
    for item in items:
        is_here = isinstance(item, pytest.Function) and item.path.parent == HERE
        if is_here and item.get_closest_marker("xdist_group") is None and _shares_a_fixture(item):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def _shares_a_fixture(item: pytest.Function) -> bool:
    definitions = item._fixtureinfo.name2fixturedefs
    return any(
        each[-1].scope == "module" and each[-1].baseid == item.nodeid.partition("::")[0]
        for name, each in definitions.items()
        if name in item.fixturenames
    )
