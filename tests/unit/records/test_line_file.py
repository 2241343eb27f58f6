"""Lines survive crashes: a half-written end is repaired, a tail is replaced or not, a full disk is waited for."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from manyhosts.records import line_file
from manyhosts.records.line_file import LineFile, read_lines


def open_file(path: Path) -> LineFile[int]:
    return LineFile(path, lambda number: json.dumps({"n": number}) + "\n")


def numbers(path: Path) -> list[int]:
    return [line["n"] for line in read_lines(path)]


def test_lines_are_read_back_in_order(tmp_path: Path) -> None:
    file = open_file(tmp_path / "f")
    for number in range(100):
        file.add(number)
    file.close()
    assert numbers(tmp_path / "f") == list(range(100))


def test_no_file_has_no_lines(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "absent")) == []


@pytest.mark.parametrize("torn", ['{"n": 3', '{"n"', "{", '{"n": 3}', "\x00\x00"])
def test_torn_last_line_is_left_out_by_readers_and_taken_away_by_the_next_writer(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "f"
    path.write_text('{"n": 1}\n{"n": 2}\n' + torn)
    assert numbers(path) == [1, 2]
    file = open_file(path)
    file.add(4)
    file.close()
    assert path.read_text() == '{"n": 1}\n{"n": 2}\n{"n": 4}\n'


def test_file_that_is_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("x" * 200_000)  # longer than a block
    open_file(path).close()
    assert path.read_bytes() == b""


def test_damaged_line_in_the_middle_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b'{"n": 1}\n\x00\x00\x00\n[1]\n{"n": 2}\n')
    assert numbers(tmp_path / "f") == [1, 2]


@pytest.mark.parametrize("width", [0, 1_000, 70_000], ids=["short", "medium", "longer than a block"])
def test_tail_finds_the_newest_lines_and_where_they_start(tmp_path: Path, width: int) -> None:
    path = tmp_path / "f"
    file: LineFile[int] = LineFile(path, lambda number: json.dumps({"n": number, "fill": "ü" * width}) + "\n")
    for number in range(30):
        file.add(number)
    tail = file.tail(lambda line: line["n"] <= 17)
    assert [line["n"] for _, line in tail] == list(range(17, 30))
    content = path.read_bytes()
    for start, line in tail:
        assert json.loads(content[start : content.index(b"\n", start)])["n"] == line["n"]
    file.close()


def test_tail_without_an_end_is_the_whole_file(tmp_path: Path) -> None:
    file = open_file(tmp_path / "f")
    for number in range(3):
        file.add(number)
    assert [line["n"] for _, line in file.tail(lambda line: False)] == [0, 1, 2]
    file.close()


def test_tail_is_replaced_and_the_file_goes_on_growing(tmp_path: Path) -> None:
    file = open_file(tmp_path / "f")
    for number in range(10):
        file.add(number)
    [(start, _), *_] = file.tail(lambda line: line["n"] == 6)
    file.replace_tail(start, [{"n": 66}])
    file.add(7)
    file.close()
    assert numbers(tmp_path / "f") == [0, 1, 2, 3, 4, 5, 66, 7]
    assert os.listdir(tmp_path) == ["f"]


def test_crash_while_a_tail_is_replaced_leaves_every_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Crash(BaseException):
        pass

    def cut(*_: object) -> None:
        raise Crash

    file = open_file(tmp_path / "f")
    for number in range(10):
        file.add(number)
    [(start, _), *_] = file.tail(lambda line: line["n"] == 6)
    with monkeypatch.context() as patch:
        patch.setattr(line_file.os, "replace", cut)
        with pytest.raises(Crash):
            file.replace_tail(start, [])
    file.close()
    assert numbers(tmp_path / "f") == list(range(10))


def test_full_disk_is_waited_for_and_no_line_is_lost_or_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_write, room = os.write, [10]

    def small_disk(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real_write(descriptor, bytes(data)[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(line_file.os, "write", small_disk)
    file = open_file(tmp_path / "f")
    for number in range(5):
        file.add(number)
    with pytest.raises(OSError, match="No space left"):
        file.flush()
    assert numbers(tmp_path / "f") == [0]  # and a half-written second line
    assert "No space left" in caplog.text
    assert str(tmp_path / "f") in caplog.text
    room[0] = 1_000
    file.add(5)
    file.flush()
    file.close()
    assert numbers(tmp_path / "f") == [0, 1, 2, 3, 4, 5]
