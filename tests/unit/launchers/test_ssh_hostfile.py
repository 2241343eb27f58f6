"""Names of hosts as people write them, with users, ports and addresses of IPv6."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhosts.control.job import Job
from manyhosts.errors import ConfigError
from manyhosts.hosts import hostfile
from manyhosts.launchers.mpi import Mpi


@pytest.mark.parametrize(
    ("host", "destination", "port"),
    [
        ("a", "a", ""),
        ("me@a:2222", "me@a", "2222"),
        ("10.0.0.1:22", "10.0.0.1", "22"),
        ("fd77::1", "fd77::1", ""),
        ("me@[fd77::1]:22", "me@fd77::1", "22"),
    ],
)
def test_host_has_a_destination_and_perhaps_a_port(host: str, destination: str, port: str) -> None:
    assert hostfile.in_words(host) == (host,)
    assert hostfile.destination(host) == (destination, port)


@pytest.mark.parametrize(
    "host", ["a:b", "a:22:", "me@", ":22", "a:99999", "[fd77::1]22", "[a]:22", "a b", "a..b", "a\u202eb", 64 * "a"]
)
def test_what_is_no_host_is_refused_with_what_may_be_written(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hostfile.in_words(host)
    assert caught.value.where == "--hosts"
    assert "[fd00::1]:22" in caught.value.fix


def test_lines_of_a_hostfile_say_ports_and_slots(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a:4\nme@b slots=2\n[fd77::1]:3\nfd77::2 slots=1 port=22\nc port=2222 slots=2\n")
    assert hostfile.in_file(path) == (("a", "me@b", "[fd77::1]", "[fd77::2]:22", "c:2222"), (4, 2, 3, 1, 2))


def test_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"\x7fELF\xd0\x30")
    with pytest.raises(ConfigError, match="cannot read the hostfile: it is no text"):
        hostfile.in_file(tmp_path / "hosts")


def test_mpirun_is_told_no_host_that_it_would_misread(tmp_path: Path) -> None:
    job = Job(program="t.py", folder=tmp_path, run_dir=tmp_path, nodes=2, hosts=("a", "me@b:22"))
    with pytest.raises(ConfigError, match="mpirun takes names"):
        Mpi().plan(job)


@pytest.mark.parametrize(
    ("text", "line", "fix"),
    [
        ("a slots=1\nb slots=1\na slots=1\n", 3, "name slots=2 gives it two workers"),
        ("a:22 slots=4\n", 1, "name slots=4"),
        ("a slots=1000\n", 1, "at most 512 slots"),
        ("me@a:2222\n", 1, "me@a port=2222"),
        ("a:22:x\n", 1, "name port=2222"),
        ("a slot=4\n", 1, "name slots=4"),
        ("a slots=0\n", 1, "name slots=4"),
    ],
)
def test_line_of_a_hostfile_that_is_not_understood_is_named_with_what_is(
    text: str, line: int, fix: str, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ConfigError) as raised:
        hostfile.in_file(tmp_path / "hosts")
    assert raised.value.where.endswith(f"hosts, line {line}")
    assert fix in raised.value.fix


def test_host_that_a_scheduler_names_once_for_each_worker_has_as_many(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\na\nb\na\n")
    assert hostfile.in_file(tmp_path / "hosts") == (("a", "b"), (3, 1))
