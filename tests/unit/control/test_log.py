"""Logs of workers: byte for byte, whole lines, within their size, and no harm from a full disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manyhosts.control.agent.log import Log
from manyhosts.errors import ConfigError
from manyhosts.units import bytes_of

WORDS = st.binary(max_size=8) | st.sampled_from([b"\n", b"a\r\n"])
CHUNKS = st.lists(st.tuples(st.sampled_from(["out", "err"]), WORDS))


def no_gap(why: str) -> None:
    raise AssertionError(why)


@given(CHUNKS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_every_byte_is_kept_and_lines_stay_whole(tmp_path: Path, chunks: list[tuple[str, bytes]]) -> None:
    path = tmp_path / "n1-0.log"
    path.unlink(missing_ok=True)
    log = Log(path, 0, no_gap)
    for stream, chunk in chunks:
        log.write(stream, chunk)
    log.close()
    written = {name: b"".join(chunk for stream, chunk in chunks if stream == name) for name in ("out", "err")}
    found = path.read_bytes()
    assert len(found) == sum(map(len, written.values()))
    lines = [line for data in written.values() for line in data.split(b"\n")[:-1]]
    assert all(line + b"\n" in found for line in lines)
    assert sorted(found.replace(b"\n", b"")) == sorted(b"".join(written.values()).replace(b"\n", b""))


def test_bytes_of_one_stream_are_those_that_were_written(tmp_path: Path) -> None:
    words = b"caf\xe9 \xff\0\n10%\r50%\r100%\r\n\x1b[31mred\x1b[0m\nno end"
    log = Log(tmp_path / "log", 0, no_gap)
    for place in range(0, len(words), 5):
        log.write("out", words[place : place + 5])
    log.close()
    log.close()
    assert (tmp_path / "log").read_bytes() == words


def test_bar_under_way_is_in_the_log_and_a_half_line_is_not(tmp_path: Path) -> None:
    log = Log(tmp_path / "log", 0, no_gap)
    log.write("err", b"10%\r20%")
    log.write("out", b"half a li")
    log.flush_partial_line()
    assert (tmp_path / "log").read_bytes() == b"10%\r20%"
    log.close()


def test_full_log_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "n1-0.log"
    path.write_bytes(b"of the run before\n")
    log = Log(path, 1000, no_gap)
    lines = [f"line {number}\n".encode() for number in range(300)]
    for line in lines:
        log.write("out", line)
    log.close()
    kept = Path(f"{path}.1").read_bytes() + path.read_bytes()
    assert b"".join(lines).endswith(kept)
    assert 1000 < len(kept) <= 2000
    assert sorted(file.name for file in tmp_path.iterdir()) == ["n1-0.log", "n1-0.log.1"]


def test_full_disk_is_told_once(tmp_path: Path) -> None:
    reported: list[str] = []
    (tmp_path / "log").symlink_to("/dev/full")
    log = Log(tmp_path / "log", 0, reported.append)
    for _ in range(3):
        log.write("out", b"a line\n")
    log.close()
    nowhere = Log(tmp_path / "no folder" / "log", 0, reported.append)
    nowhere.write("out", b"first\n")
    (tmp_path / "no folder").mkdir()
    nowhere.write("out", b"second\n")
    nowhere.close()
    assert reported == ["No space left on device", "No such file or directory"]
    assert (tmp_path / "no folder" / "log").read_bytes() == b"second\n"


@pytest.mark.parametrize(
    ("text", "size"), [("1 GiB", 1 << 30), ("500 MB", 500_000_000), ("20k", 20_000), ("1.5KiB", 1536), ("0", 0)]
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert bytes_of(text, where="--log-size") == size


@pytest.mark.parametrize("text", ["", "much", "-1", "1 iB", "5 PB", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot read the size"):
        bytes_of(text, where="--log-size")
