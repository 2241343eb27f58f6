"""Durations as people write them, seconds and bytes as people say them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhosts.errors import ConfigError
from manyhosts.units import Duration, bytes_in_words, seconds_in_words


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("20 epochs", Duration(epochs=20)),
        ("1 epoch", Duration(epochs=1)),
        ("0.5 epochs", Duration(epochs=0.5)),
        ("500 steps", Duration(steps=500)),
        ("1 step", Duration(steps=1)),
        ("90s", Duration(seconds=90)),
        ("10 min", Duration(seconds=600)),
        ("2h30m", Duration(seconds=9000)),
        ("2h 30 min", Duration(seconds=9000)),
        ("1.5 hours", Duration(seconds=5400)),
        ("1 day", Duration(seconds=86400)),
        ("20 Epochs OR 2h", Duration(epochs=20, seconds=7200)),
        ("3 epochs or 100 steps or 1 min", Duration(epochs=3, steps=100, seconds=60)),
    ],
)
def test_duration_is_read(text: str, duration: Duration) -> None:
    assert Duration.parse(text) == duration


@pytest.mark.parametrize(
    "text",
    ["", "20", "epochs", "20 epoch s", "twenty epochs", "-3 epochs", "0 steps", "0 min", "2.5 steps", "5 parsecs"],
)
def test_text_that_is_no_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Duration.parse(text, where="fit(…)")
    assert repr(text) in refused.value.what
    assert refused.value.where == "fit(…)"
    assert "20 epochs or 2h" in refused.value.fix


@pytest.mark.parametrize("text", ["1 h or 2 h", "3 epochs 4 epochs", "2 epochs 30 min", "20 epochs or"])
def test_limits_that_contradict_each_other_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Duration.parse(text)


@given(
    epochs=st.none() | st.integers(1, 10_000).map(float),
    steps=st.none() | st.integers(1, 10**5),
    minutes=st.none() | st.integers(1, 59),
)
def test_duration_survives_being_written_and_read(epochs: float | None, steps: int | None, minutes: int | None) -> None:
    duration = Duration(epochs=epochs, steps=steps, seconds=None if minutes is None else 60.0 * minutes)
    if duration != Duration():
        assert Duration.parse(str(duration)) == duration


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.00042, "0.00042 s"),
        (0.13, "0.13 s"),
        (3.14159, "3.1 s"),
        (42.4, "42 s"),
        (59.7, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.6, "1 h 00 min"),
        (7620, "2 h 07 min"),
    ],
)
def test_seconds_are_said_as_people_say_them(seconds: float, words: str) -> None:
    assert seconds_in_words(seconds) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (512, "512 B"), (1500, "1.5 kB"), (524_900_000, "524.9 MB"), (4e9, "4.0 GB"), (3e12, "3.0 TB")],
)
def test_bytes_are_said_in_decimal_units(count: float, words: str) -> None:
    assert bytes_in_words(count) == words
