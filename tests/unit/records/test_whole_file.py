"""Small files are whole or absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from manyhosts.errors import ConfigError
from manyhosts.records import atomic_file
from manyhosts.records.atomic_file import read_json, write_json


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    write_json(tmp_path / "deep" / "file.json", {"a": [1, 2.5, None, "ä"]})
    assert read_json(tmp_path / "deep" / "file.json") == {"a": [1, 2.5, None, "ä"]}


def test_crash_before_the_rename_leaves_what_was_there_and_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crash(BaseException):
        pass

    def cut(*_: object) -> None:
        raise Crash

    write_json(tmp_path / "file.json", {"old": True})
    monkeypatch.setattr(atomic_file.os, "replace", cut)
    with pytest.raises(Crash):
        write_json(tmp_path / "file.json", {"new": True})
    assert read_json(tmp_path / "file.json") == {"old": True}
    assert os.listdir(tmp_path) == ["file.json"]


def test_number_that_is_none_is_refused_where_nobody_would_understand_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "file.json", {"a": float("nan")})
    assert not (tmp_path / "file.json").exists()


@pytest.mark.parametrize(
    "content", [None, b"{", b"[1]", b"\xff\xfe"], ids=["absent", "half-written", "a list", "no text"]
)
def test_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_json(tmp_path / "run.json")
    assert "run.json" in caught.value.what
    assert str(tmp_path) in caught.value.where
    assert caught.value.fix
