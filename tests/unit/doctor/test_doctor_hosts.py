"""What is said of hosts, from what they have told: each fault is named with host, values and remedy, and no other."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from manyhosts.cluster.findings import Finding, exit_code, worst_first
from manyhosts.control.agent import host_state
from manyhosts.control.head import checks
from manyhosts.doctor import hosts as hosts_of

MINE = {"python": "3.11.2", "manyhosts": "0.1.0", "torch": "2.13.0+cpu"}
SPEED = {"unit": "operations", "cpu": 100.0, "share": 1.0, "turns": 3, "gpus": []}
GPU = {
    "name": "NVIDIA H200",
    "memory": 140 << 30,
    "memory_used": 0,
    "temperature": 40,
    "utilization": 0,
    "errors": 0,
    "slowed": False,
}


def reported(**more: Any) -> dict[str, Any]:
    disk = {"path": "/runs", "free": 100 << 30, "total": 200 << 30, "files_left": 10**6, "writable": True}
    return {
        "time_s": 0.0,
        "cores": 8,
        "cpu_quota": None,
        "load": 0.1,
        "memory": {"total": 64 << 30, "available": 60 << 30},
        "disks": {"run directory": disk, "temporary files": {**disk, "path": "/tmp"}},
        "shared_memory": {**disk, "path": "/dev/shm"},
        "descriptors": {"limit": 1024, "most": 4096},
        "environment": {},
        "interfaces": ["lo", "eth0"],
        "has_gpus": False,
        **more,
    }


def host(name: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        **MINE,
        "executable": "/usr/bin/python3",
        "condition": reported(),
        "clock": {"offset_s": 0.0, "unsure_s": 0.001},
        "graphics": {"gpus": [], "trouble": ""},
        "machine": name,
        "run_dir": {"path": "/runs", "trouble": "", "shared": True},
        "speed": SPEED,
        "exercise": {"torch": "2.13.0", "cuda": False},
        **copy.deepcopy(more),
    }


def found(*hosts: dict[str, Any], data: tuple[str, ...] = (), shares_disk: bool = True, **more: Any) -> list[Finding]:
    return hosts_of.findings(hosts, MINE, data, shares_disk=shares_disk, **more)


def only(*hosts: dict[str, Any], **more: Any) -> Finding:
    [finding] = found(*hosts, **more)
    assert finding.fix, "somebody must know what to do about it"
    return finding


def test_hosts_that_are_alike_and_well_give_no_finding() -> None:
    assert found(host("a"), host("b"), host("c", python="3.11.9", torch="2.13.0+cu130")) == []


@pytest.mark.parametrize(
    ("package", "version", "expected"),
    [
        ("torch", "1.13.0", "host b has torch 1.13.0, and this machine has 2.13.0+cpu"),
        ("torch", "", "host b has no torch: /usr/bin/python3 does not find it"),
        ("python", "3.9.2", "host b has python 3.9.2, and this machine has 3.11.2"),
        ("manyhosts", "0.0.1", "host b has manyhosts 0.0.1, and this machine has 0.1.0"),
    ],
)
def test_other_packages_are_named_with_both_versions(package: str, version: str, expected: str) -> None:
    finding = only(host("a"), host("b", **{package: version}))
    assert (finding.level, finding.check, finding.what) == ("error", "versions", expected)


def test_where_this_machine_has_no_torch_most_hosts_say_which_is_the_right_one() -> None:
    mine = {**MINE, "torch": ""}
    findings = hosts_of.findings([host("a"), host("b", torch="2.11.0"), host("c")], mine, (), shares_disk=True)
    assert [finding.what for finding in findings] == ["host b has torch 2.11.0, and most others have 2.13.0+cpu"]


@pytest.mark.parametrize("sign", [1, -1])
def test_clock_that_is_off_is_named_with_how_far_and_in_which_direction(sign: int) -> None:
    finding = only(host("a"), host("b", clock={"offset_s": sign * 3600.0, "unsure_s": 0.1}))
    word = "ahead of" if sign > 0 else "behind"
    assert (finding.level, finding.what) == ("warning", f"the clock of host b is 1 h 00 min {word} this machine's")


def test_clock_whose_offset_may_be_the_slow_way_to_it_is_not_named() -> None:
    assert found(host("a", clock={"offset_s": 7.0, "unsure_s": 4.0})) == []


CONDITIONS = [
    ({"memory": {"total": 8 << 30, "available": 100 << 20}}, "error", "104.9 MB of memory left of 8.6 GB"),
    ({"memory": {"total": 8 << 30, "available": 500 << 20}}, "warning", "524.3 MB of memory left"),
    ({"descriptors": {"limit": 256, "most": 4096}}, "warning", "may have 256 files and connections open"),
    ({"descriptors": {"limit": 64, "most": 4096}}, "error", "may have 64 files and connections open"),
    ({"shared_memory": {"free": 1 << 20, "path": "/dev/shm"}}, "warning", "1.0 MB of shared memory left"),
    ({"shared_memory": {"free": 64 << 20, "path": "/dev/shm"}}, "note", "67.1 MB of shared memory left"),
    ({"load": 30.0}, "note", "has 30.0 programs at work on 8 cores"),
    ({"environment": {"OMP_NUM_THREADS": "many"}}, "warning", "OMP_NUM_THREADS is 'many' on host b"),
    ({"environment": {"OMP_NUM_THREADS": "64"}}, "warning", "OMP_NUM_THREADS is '64' on host b, which has 8 cores"),
    ({"environment": {"GLOO_SOCKET_IFNAME": "ib0"}}, "error", "GLOO_SOCKET_IFNAME names ib0"),
    ({"environment": {"NCCL_SOCKET_IFNAME": "ib"}}, "warning", "NCCL_SOCKET_IFNAME names ib"),
    ({"environment": {"NCCL_SOCKET_IFNAME": "=eth"}}, "warning", "NCCL_SOCKET_IFNAME names =eth"),
    ({"environment": {"RANK": "0", "MASTER_ADDR": "x"}}, "note", "RANK, MASTER_ADDR are set on host b already"),
    ({"environment": {"TORCH_DISTRIBUTED_DEBUG": "detail"}}, "warning", "TORCH_DISTRIBUTED_DEBUG=detail on host b"),
    ({"environment": {"CUDA_LAUNCH_BLOCKING": "1"}}, "warning", "CUDA_LAUNCH_BLOCKING=1 on host b"),
    ({"environment": {"CUDA_VISIBLE_DEVICES": ""}, "has_gpus": True}, "warning", "CUDA_VISIBLE_DEVICES is empty"),
    ({"environment": {"http_proxy": "set"}}, "note", "a web proxy is set on host b"),
]


@pytest.mark.parametrize(("more", "level", "expected"), CONDITIONS, ids=[row[2] for row in CONDITIONS])
def test_condition_that_harms_a_run_is_named(more: dict[str, Any], level: str, expected: str) -> None:
    finding = only(host("a"), host("b", condition=reported(**more)))
    assert (finding.level, expected in finding.what) == (level, True), finding.what
    assert "host b" in finding.where


@pytest.mark.parametrize(
    "environment",
    [
        {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0,lo", "NCCL_SOCKET_IFNAME": "eth"},
        {"NCCL_SOCKET_IFNAME": "^docker0", "TORCH_DISTRIBUTED_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": ""},
        {"http_proxy": "set", "NO_PROXY": "a,b"},
    ],
)
def test_variables_that_do_no_harm_are_not_named(environment: dict[str, str]) -> None:
    assert found(host("a", condition=reported(environment=environment))) == []


@pytest.mark.parametrize(("free", "level"), [(10 << 20, "error"), (500 << 20, "warning")])
def test_disk_that_is_nearly_full_is_named_by_what_it_holds(free: int, level: str) -> None:
    disks = reported()["disks"]
    disks["run directory"]["free"] = free
    finding = only(host("a", condition=reported(disks=disks)))
    assert (finding.level, finding.check) == (level, "disk")
    assert finding.what.startswith("the disk of host a is nearly full: ")
    assert finding.where == "host a, /runs"


def test_disk_without_room_for_more_files_is_full_too() -> None:
    disks = reported()["disks"]
    disks["temporary files"]["files_left"] = 0
    finding = only(host("a", condition=reported(disks=disks)))
    assert (finding.level, "0 more files fit for the temporary files" in finding.what) == ("error", True)


def test_run_directory_that_is_not_shared_is_an_error_only_where_it_must_be() -> None:
    apart = {"path": "/runs", "trouble": "", "shared": False}
    hosts = [host("a"), host("b", run_dir=apart), host("c", run_dir=apart)]
    what = "the run directory is not shared: b, c do not see what a writes"
    assert [(each.level, each.what) for each in found(*hosts)] == [("error", what)]
    assert [each.level for each in found(*hosts, shares_disk=False)] == ["note"]


def test_run_directory_that_cannot_be_written_is_named_with_the_reason() -> None:
    finding = only(host("a"), host("b", run_dir={"path": "/runs", "trouble": "Read-only file system", "shared": None}))
    assert finding.what == "host b cannot write to the run directory: Read-only file system"


FILE = {"kind": "file", "bytes": 1000, "files": 1, "sha256": "aa", "sampled": False}


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        (None, "host c does not have /d"),
        ({"trouble": "Permission denied"}, "host c cannot read /d: Permission denied"),
        ({**FILE, "sha256": "bb"}, "/d on host c is not what it is on the others: both 1.0 kB, with other content"),
        ({**FILE, "bytes": 900, "sha256": "bb"}, "is not what it is on the others: 900 B there, 1.0 kB on a"),
    ],
)
def test_data_that_differ_on_one_host_are_named(theirs: dict[str, Any] | None, expected: str) -> None:
    hosts = [host("a", data={"/d": FILE}), host("b", data={"/d": FILE}), host("c", data={"/d": theirs})]
    finding = only(*hosts, data=("/d",))
    assert (finding.level, expected in finding.what) == ("error", True), finding.what


def test_script_that_differs_is_an_error_only_where_hosts_share_a_disk() -> None:
    hosts = [host("a", script=FILE), host("b", script={**FILE, "sha256": "bb"}), host("c", script=FILE)]
    other = "the script on host b is another one than that of most others"
    assert [(each.level, each.what) for each in found(*hosts)] == [("error", other)]
    assert [each.level for each in found(*hosts, shares_disk=False)] == ["note"]
    assert [each.what for each in found(*hosts, script={**FILE, "sha256": "bb"})] == [
        f"the script on host {name} is another one than this machine's" for name in "ac"
    ]


def test_slow_host_is_named_with_its_factor_and_its_cores() -> None:
    slow = host("d", speed={**SPEED, "cpu": 50.0}, condition=reported(cores=4))
    finding = only(host("a"), host("b"), host("c"), slow)
    what = "host d computes 2.0 times slower than the others; it has 4 cores, others have 8"
    assert (finding.level, finding.what) == ("warning", what)


def test_host_of_which_others_take_half_is_named_unless_it_is_the_same_machine() -> None:
    shared = {**SPEED, "share": 0.5}
    finding = only(host("a"), host("b"), host("c", speed=shared))
    assert finding.what == "host c computes 2.0 times slower than the others; other programs take 50% of it"
    assert found(host("a"), host("b", machine="one"), host("c", machine="one", speed=shared)) == []


def test_container_that_is_held_to_some_cores_is_named_with_them() -> None:
    held = host("c", speed={**SPEED, "cpu": 25.0}, condition=reported(cpu_quota=2.0))
    [quota, slow] = sorted(found(host("a"), host("b"), held), key=lambda finding: finding.check)
    assert (quota.check, quota.level, slow.check) == ("load", "note", "speed")
    assert slow.what.endswith("4.0 times slower than the others; it has 2 cores, others have 8")


def test_fast_host_among_slow_ones_does_not_make_them_slow() -> None:
    assert found(host("a"), host("b"), host("c", speed={**SPEED, "cpu": 300.0})) == []


def test_one_slow_gpu_of_many_is_named() -> None:
    speeds = [{**SPEED, "gpus": gpus} for gpus in ([10.0, 10.0], [10.0, 4.0])]
    graphics = {"gpus": [GPU, GPU], "trouble": ""}
    hosts = [host(name, speed=speed, graphics=graphics) for name, speed in zip("ab", speeds, strict=True)]
    for each in hosts:
        each["exercise"]["cuda"] = True
    assert only(*hosts).what == "GPU 1 of host b computes 2.5 times slower than the others"


@pytest.mark.parametrize(
    ("change", "level", "expected"),
    [
        ({"errors": 3}, "error", "GPU 0 of host a (NVIDIA H200) has had 3 memory errors"),
        ({"temperature": 93}, "warning", "slows itself down at 93 °C"),
        ({"slowed": True}, "warning", "slows itself down at 40 °C"),
        (
            {"memory_used": 70 << 30},
            "warning",
            "75.2 GB of 150.3 GB of GPU 0 of host a (NVIDIA H200) are taken already",
        ),
    ],
)
def test_gpu_in_bad_health_is_named(change: dict[str, Any], level: str, expected: str) -> None:
    graphics = {"gpus": [{**GPU, **change}], "trouble": ""}
    finding = only(host("a", graphics=graphics, exercise={"torch": "2.13.0", "cuda": True}))
    assert (finding.level, expected in finding.what) == (level, True), finding.what


def test_gpus_that_torch_does_not_use_and_other_gpus_elsewhere_are_named() -> None:
    graphics = {"gpus": [GPU], "trouble": ""}
    assert "does not use them" in only(host("a", graphics=graphics)).what
    using = host("a", graphics=graphics, exercise={"torch": "2.13.0", "cuda": True})
    assert only(using, host("b")).what == "hosts have different GPUs: a: 1 x NVIDIA H200; b: no GPU"


def test_driver_that_gives_no_answer_is_an_error() -> None:
    graphics = {"gpus": [], "trouble": "nvidia-smi says: Driver/library version mismatch"}
    assert only(host("a", graphics=graphics)).level == "error"


def test_hosts_of_one_machine_have_its_load_told_once() -> None:
    busy = reported(load=30.0)
    assert only(host("a", machine="one", condition=busy), host("b", machine="one", condition=busy)).check == "load"


def test_exit_code_and_order_go_by_what_is_worst() -> None:
    def finding(level: Any, kind: Any = "host") -> Finding:
        return Finding(level=level, check="c", what="w", where="h", fix="f", kind=kind)

    note, warning = finding("note"), finding("warning")
    assert exit_code([note, warning]) == 0
    assert exit_code([warning, finding("error", "network")]) == 4
    assert exit_code([finding("error"), finding("error", "network")]) == 4
    assert exit_code([finding("error", "reach"), finding("error", "network")]) == 3
    assert exit_code([finding("error")]) == 3
    assert [each.level for each in worst_first([note, warning, finding("error")])] == ["error", "warning", "note"]


def test_host_that_told_nothing_of_its_condition_is_left_out() -> None:
    alone = host("a")
    del alone["condition"]
    assert [each for each in found(alone) if each.check != "speed"] == []
    assert checks.host_findings("a", reported()) == []


@pytest.mark.parametrize(
    ("cgroup", "files", "quota"),
    [
        ("0::/user/job\n", {"cpu.max": "400000 100000", "user/job/cpu.max": "150000 100000"}, 1.5),
        ("0::/user/job\n", {"user/cpu.max": "200000 100000", "user/job/cpu.max": "max 100000"}, 2.0),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("3:cpu,cpuacct:/job\n", {"cpu/job/cpu.cfs_quota_us": "50000", "cpu/job/cpu.cfs_period_us": "100000"}, 0.5),
        ("", {}, None),
    ],
)
def test_quota_is_that_of_the_processs_own_cgroup_and_those_around_it(
    cgroup: str, files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    for path, text in {"proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{p}": t for p, t in files.items()}}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert host_state.cpu_quota(str(tmp_path)) == quota


def test_quota_below_the_cores_is_a_note() -> None:
    finding = only(host("a", condition=reported(cpu_quota=2.0)))
    assert (finding.level, finding.check) == ("note", "load")
    assert "has 8 cores, and the CPU quota of this cgroup is 2 of them:" in finding.what
