"""Names lead to code that is imported when asked for."""

from __future__ import annotations

import pytest

from manyhosts.errors import ConfigError
from manyhosts.table import Table, nearest

SHAPES: Table = Table(
    kind="shape", group="manyhosts.tests.shapes", own={"round": "fractions:Fraction", "square": "decimal:Decimal"}
)


def test_name_leads_to_what_it_stands_for() -> None:
    from fractions import Fraction

    assert SHAPES.load("round") is Fraction
    assert SHAPES.names() == ["round", "square"]


def test_unknown_name_is_refused_with_the_nearest_and_all_known() -> None:
    with pytest.raises(ConfigError) as refused:
        SHAPES.load("sqare")
    assert refused.value.what == "there is no shape named 'sqare'"
    assert refused.value.fix == "did you mean 'square'? known: round, square"


def test_word_that_looks_like_nothing_known_gets_no_guess() -> None:
    assert nearest("zzz", ["round", "square"]) == ""


def test_other_package_adds_a_name_by_an_entry_point(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    meta = tmp_path / "shapes-1.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: shapes\nVersion: 1.0\n")
    (meta / "entry_points.txt").write_text("[manyhosts.tests.shapes]\nstar = statistics:mean\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from statistics import mean

    assert SHAPES.names() == ["round", "square", "star"]
    assert SHAPES.load("star") is mean
