"""A run begins no later than under torchrun."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.starts_cold]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def startup(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # for what the benchmarks share
    spec = importlib.util.spec_from_file_location("startup", BENCHMARKS / "startup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_first_step_comes_no_later_than_under_torchrun(startup: ModuleType) -> None:
    # One round of three: whatever else the machine does in a round only makes one of the two late.
    assert any(
        startup.ratio(startup.measure(workers=2, rounds=1, names=["torchrun", startup.OURS])) < 1.2 for _ in "123"
    )
