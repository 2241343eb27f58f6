"""What a network carries, by what exchanges of two sizes took."""

from __future__ import annotations

import pytest

from manyhosts.communication.probe import travelling


@pytest.mark.parametrize("hidden", [0.0, 0.5, 1.0])
def test_bytes_travel_as_long_as_the_line_through_two_sizes_says(hidden: float) -> None:
    """A cable of 100 MB/s and a latency of 10 ms, of which a large exchange hides a share."""
    latency, shown = 0.010, (1 - hidden) * 0.010
    quarter, large = shown + 0.025, shown + 0.100
    assert travelling(large, quarter, latency) == pytest.approx(0.100)


def test_noise_says_no_more_than_all_and_no_less_than_all_but_the_latency() -> None:
    assert travelling(0.1, 0.001, 0.01) == 0.1
    assert travelling(0.1, 0.09, 0.01) == pytest.approx(0.09)
    assert travelling(0.1, 0.0, 0.01) == pytest.approx(0.09), "where one size was tried"
