"""Counters of the kernel, in folders as it shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhosts.control.agent.host_state import Kills, kills, limit_bytes


class Kernel:
    """The two folders in which a kernel shows what it knows."""

    def __init__(self, folder: Path, cgroup: str) -> None:
        self.mount, self.proc = folder / "cgroup", folder / "proc"
        self.write("proc/self/cgroup", cgroup)
        self.write("proc/vmstat", "nr_free_pages 7\noom_kill 5\n")
        self.write("proc/meminfo", "MemTotal:       16000000 kB\nMemFree: 1 kB\n")

    def write(self, path: str, text: str) -> None:
        target = self.mount.parent / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def test_counter_of_the_own_cgroup_and_the_least_limit_above_it(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, "0::/job/step\n")
    kernel.write("cgroup/job/step/memory.events", "low 0\nhigh 0\nmax 3\noom 2\noom_kill 2\n")
    kernel.write("cgroup/job/step/memory.max", "max\n")
    kernel.write("cgroup/job/memory.events", "oom_kill 9\n")
    kernel.write("cgroup/job/memory.max", "4000000000\n")
    assert kills(kernel.mount, kernel.proc) == Kills(2, 5)
    assert limit_bytes(kernel.mount, kernel.proc) == (4_000_000_000, True)


def test_version_1_of_cgroups(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, "9:name=systemd:/\n4:cpuset,memory:/job\n0::/\n")
    kernel.write("cgroup/memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    kernel.write("cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n")
    assert kills(kernel.mount, kernel.proc) == Kills(1, 5)
    assert limit_bytes(kernel.mount, kernel.proc) == (16_000_000 * 1024, False), "that is no limit"


def test_container_that_sees_the_paths_of_its_host(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, "0::/kubepods/pod1/container2\n")
    kernel.write("cgroup/memory.events", "oom_kill 3\n")
    kernel.write("cgroup/memory.max", "2000000000\n")
    assert kills(kernel.mount, kernel.proc) == Kills(3, 5)
    assert limit_bytes(kernel.mount, kernel.proc) == (2_000_000_000, True)


@pytest.mark.parametrize("cgroup", ["0::/\n", "", "4:memory:/x\n"])
def test_without_such_counters_those_of_the_machine_are_left(tmp_path: Path, cgroup: str) -> None:
    kernel = Kernel(tmp_path, cgroup)
    assert kills(kernel.mount, kernel.proc) == Kills(None, 5)
    assert limit_bytes(kernel.mount, kernel.proc) == (16_000_000 * 1024, False)


def test_system_without_any_of_it(tmp_path: Path) -> None:
    assert kills(tmp_path, tmp_path) == Kills(None, 0)
    assert limit_bytes(tmp_path, tmp_path) == (0, False)
