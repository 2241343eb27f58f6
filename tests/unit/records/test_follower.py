"""Following a file that grows, is cut back, or is another one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhosts.records import follower as subject
from manyhosts.records.follower import Follower


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def follower(path: Path) -> Iterator[Follower]:
    with Follower(path, dict) as found:
        yield found


def lines(*numbers: int) -> str:
    return "".join(json.dumps({"step": number}) + "\n" for number in numbers)


def steps(follower: Follower) -> list[int]:
    return [line["step"] for line in follower.look().lines]


def add(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_each_line_is_told_once(path: Path, follower: Follower) -> None:
    assert steps(follower) == []  # there is no file yet
    path.write_text(lines(1, 2))
    assert steps(follower) == [1, 2]
    assert steps(follower) == []
    add(path, lines(3))
    assert steps(follower) == [3]


def test_line_that_is_half_written_waits_until_it_is_whole(path: Path, follower: Follower) -> None:
    whole = lines(1, 2)
    path.write_text(whole[:-4])
    assert steps(follower) == [1]
    add(path, whole[-4:])
    assert steps(follower) == [2]


def test_file_in_the_place_of_another_is_read_from_its_beginning(path: Path, follower: Follower) -> None:
    path.write_text(lines(1, 2, 3))
    assert not follower.look().began_again
    other = path.with_name("other")
    other.write_text(lines(1, 2, 7, 8, 9))  # longer than what was read: its length tells nothing
    os.replace(other, path)
    news = follower.look()
    assert news.began_again
    assert [line["step"] for line in news.lines] == [1, 2, 7, 8, 9]
    add(path, lines(10))
    assert steps(follower) == [10]


def test_file_that_was_cut_is_read_from_its_beginning(path: Path, follower: Follower) -> None:
    path.write_text(lines(1, 2, 3))
    follower.look()
    os.truncate(path, len(lines(1)))
    news = follower.look()
    assert news.began_again
    assert [line["step"] for line in news.lines] == [1]


def test_file_that_is_away_for_a_moment_is_not_read_anew(path: Path, follower: Follower) -> None:
    path.write_text(lines(1))
    follower.look()
    path.rename(path.with_name("away"))
    assert not follower.look().lines
    path.with_name("away").rename(path)
    add(path, lines(2))
    news = follower.look()
    assert not news.began_again
    assert [line["step"] for line in news.lines] == [2]


def test_long_file_comes_in_parts(path: Path, follower: Follower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_MOST_BYTES", 100)
    path.write_text(lines(*range(50)) + "x" * 250 + "\n" + lines(50))
    found, more = [], True
    while more:
        news = follower.look()
        found += [line["step"] for line in news.lines]
        more = news.more
    assert found == list(range(51))


def test_zeros_in_the_middle_are_passed_over(path: Path, follower: Follower) -> None:
    path.write_bytes(lines(1).encode() + b"\0" * 40 + b"\n" + lines(2).encode())
    assert steps(follower) == [1, 2]
