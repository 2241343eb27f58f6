"""Counters of the kernel, in folders as it shows them."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from manyhosts.control.agent import host_state
from manyhosts.control.agent.host_state import Kills, kills, limit_bytes, memory_left


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


def test_memory_left_is_the_least_of_machine_and_cgroups_shared_by_those_of_the_host(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, "0::/job/step\n")
    kernel.write("proc/meminfo", "MemTotal: 16000000 kB\nMemAvailable:   8000000 kB\n")
    for folder, most, used, files in (("job/step", "max", 10, 0), ("job", "5000000000", 2_000_000_000, 500_000_000)):
        kernel.write(f"cgroup/{folder}/memory.events", "oom_kill 0\n")
        kernel.write(f"cgroup/{folder}/memory.max", f"{most}\n")
        kernel.write(f"cgroup/{folder}/memory.current", f"{used}\n")
        kernel.write(f"cgroup/{folder}/memory.stat", f"anon 5\ninactive_file {files}\n")
    assert memory_left(1, kernel.mount, kernel.proc) == 3_500_000_000
    assert memory_left(7, kernel.mount, kernel.proc) == 500_000_000
    kernel.write("cgroup/job/memory.max", "max\n")
    assert memory_left(2, kernel.mount, kernel.proc) == 4_000_000 * 1024


def test_memory_left_in_version_1_of_cgroups(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, "4:cpuset,memory:/job\n")
    kernel.write("proc/meminfo", "MemTotal: 16000000 kB\nMemAvailable:   8000000 kB\n")
    kernel.write("cgroup/memory/job/memory.oom_control", "oom_kill 0\n")
    kernel.write("cgroup/memory/job/memory.limit_in_bytes", "1000000000\n")
    kernel.write("cgroup/memory/job/memory.usage_in_bytes", "900000000\n")
    kernel.write("cgroup/memory/job/memory.stat", "inactive_file 1\ntotal_inactive_file 300000000\n")
    assert memory_left(1, kernel.mount, kernel.proc) == 400_000_000


def test_memory_left_by_the_limits_of_the_process_is_its_own(tmp_path: Path) -> None:
    """Of what it has taken already the kernel's table tells."""
    kernel = Kernel(tmp_path, "0::/\n")
    kernel.write("proc/self/status", "VmSize:\t  500000 kB\nVmData:\t  100000 kB\n")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, before[1]))
    try:
        stacks = host_state._THREADS * host_state._stack_bytes()  # of threads that a worker begins in a run
        assert memory_left(4, kernel.mount, kernel.proc) == (1 << 40) - 100_000 * 1024 - stacks
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    assert memory_left(1, kernel.mount, kernel.proc) is None, "nobody says"
