"""Hosts that share a disk which the starting machine lacks, beside one with a disk of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from alone import SOURCE, undisturbed
from commands import summary
from remote import run
from runs import step_lines

from manyhosts.lab import Lab


@pytest.mark.timeout(400)
def test_hosts_that_share_a_disk_write_one_record_and_one_machine_has_one_name(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    hosts = make_lab(3, shared={str(tmp_path): (0, 1)})
    run_dir = tmp_path / "many"
    for names, steps in (("lab1,lab2", 12), ("lab2,lab3,lab1", 24)):
        options = ["--env", f"DURATION={steps} steps", "--hosts", names, "--run-dir", "many"]
        ended = run(hosts, tmp_path, SOURCE, *options)
        assert ended.code == 0, ended.err
        assert "stays there" not in ended.err
        places = [run_dir, *(host.path(run_dir) for host in (hosts[0], hosts[2])[: steps // 12])]
        for place in places:  # here, on the disk that two share, and on that of the third, which keeps a copy
            assert [line["step"] for line in step_lines(place)] == list(range(1, steps + 1))
            assert (place / "run.json").stat().st_size > 0
    assert "continues after step 12" in ended.out
    assert summary(run_dir)["weights_sha256"] == undisturbed(tmp_path, 24)["weights_sha256"]
    left = [
        path for place in (run_dir, hosts[0].path(tmp_path), hosts[2].path(run_dir)) for path in place.glob(".many*")
    ]
    assert left == []
    twice = run(hosts, tmp_path, None, "--hosts", f"lab1,{hosts[0].address}")
    assert (twice.code, twice.out) == (3, "")
    assert f"lab1 and {hosts[0].address} are two names of one machine" in twice.err
