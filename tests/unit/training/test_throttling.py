"""A processor that was too hot is known by what the kernel counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhosts.training.telemetry import pace
from manyhosts.training.telemetry.pace import Throttling


class System:
    """Two cores of one chip, as the kernel shows them, and a clock."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.now = folder, 100.0
        monkeypatch.setattr(pace.time, "monotonic", lambda: self.now)
        for core in (0, 1):
            (folder / f"cpu{core}" / "thermal_throttle").mkdir(parents=True)
            (folder / f"cpu{core}" / "thermal_throttle" / "core_throttle_count").write_text("7\n")
            self.set(core, "core", 5000)
            self.set(core, "package", 9000)
        (folder / "cpufreq").mkdir()

    def set(self, core: int, of: str, ms: int) -> None:
        (self.folder / f"cpu{core}" / "thermal_throttle" / f"{of}_throttle_total_time_ms").write_text(f"{ms}\n")


def test_share_is_that_of_the_processor_that_was_slowed_down_longest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = System(tmp_path, monkeypatch)
    found = Throttling(tmp_path)
    system.now += 5
    assert found.share() == 0.0
    system.set(0, "core", 6000)
    system.set(1, "core", 7000)
    system.set(1, "package", 9100)
    system.now += 5
    assert found.share() == pytest.approx(2000 / 5000)
    system.now += 5
    assert found.share() == 0.0, "it is cool again"


def test_kernel_that_does_not_count_or_says_no_number_finds_no_heat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Throttling(tmp_path / "nothing").share() == 0.0
    system = System(tmp_path, monkeypatch)
    found = Throttling(tmp_path)
    (tmp_path / "cpu0/thermal_throttle/core_throttle_total_time_ms").write_text("")
    (tmp_path / "cpu1/thermal_throttle/core_throttle_total_time_ms").unlink()
    system.now += 5
    assert found.share() == 0.0
