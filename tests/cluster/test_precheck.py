"""What `manyhosts run` looks at before workers start: an error ends it, a warning is a line; and --no-check."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from remote import run

from manyhosts.lab import Lab

QUICK = "print('hello')"


def test_disk_of_one_host_that_has_no_room_ends_the_run_and_one_with_little_is_told_in_a_line(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    hosts = make_lab(2)
    run_dir = tmp_path / "run"
    asked = ["--hosts", "lab1,lab2", "--run-dir", str(run_dir)]
    for host, size in ((hosts[0], "700m"), (hosts[1], "20m")):
        host.run(["mkdir", "-p", str(run_dir)])
        host.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(run_dir)])
    ended = run(hosts, tmp_path, QUICK, *asked)
    assert (ended.code, ended.out.count("hello")) == (3, 0), ended.err
    assert "manyhosts: the disk of host lab2 is nearly full: 21.0 MB are left for the run directory\n" in ended.err
    assert "warning: the disk of host lab1 is nearly full: 734.0 MB are left" in ended.out + ended.err
    ended = run(hosts, tmp_path, QUICK, *asked, "--no-check")
    assert (ended.code, ended.out.count("hello")) == (0, 2), ended.err
    assert "nearly full" not in ended.out + ended.err


def test_hosts_that_are_well_are_looked_at_without_a_word(four: Lab, tmp_path: Path) -> None:
    ended = run(four, tmp_path, QUICK, "--hosts", "lab1,lab2")
    assert (ended.code, ended.out.count("hello")) == (0, 2), ended.err
    reported = [line for line in (ended.out + ended.err).splitlines() if "hello" not in line]
    assert reported == ["manyhosts: lab1 (10.77.0.1), lab2 (10.77.0.2) talk over eth0"]
