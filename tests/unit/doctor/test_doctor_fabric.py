"""InfiniBand, RoCE, EFA and NVLink: read from the system, and what is said of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from manyhosts.doctor import fabric, fast_links

NVLINK = """\
GPU 0: NVIDIA H200 (UUID: GPU-11111111-2222-3333-4444-555555555555)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H200 (UUID: GPU-66666666-7777-8888-9999-000000000000)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
"""


def adapter(sysfs: Path, name: str, layer: str, state: str, rate: str, driver: str, interface: str = "") -> None:
    port = sysfs / "class" / "infiniband" / name / "ports" / "1"
    port.mkdir(parents=True)
    for file, text in (("link_layer", layer), ("state", state), ("rate", rate)):
        (port / file).write_text(f"{text}\n")
    device = port.parents[1] / "device"
    device.mkdir()
    (device / "driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")
    if interface:
        (device / "net" / interface).mkdir(parents=True)


def test_adapters_and_links_are_read_from_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter(tmp_path, "mlx5_0", "InfiniBand", "4: ACTIVE", "200 Gb/sec (4X HDR)", "mlx5_core", "ib0")
    adapter(tmp_path, "mlx5_1", "Ethernet", "1: DOWN", "100 Gb/sec (4X EDR)", "mlx5_core", "eth1")
    adapter(tmp_path, "rdmap0s6", "Unspecified", "4: ACTIVE", "100 Gb/sec (4X EDR)", "efa")
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n[ \"$1\" = nvlink ] && /bin/cat <<'END'\n{NVLINK}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setattr(fabric, "SYSFS", str(tmp_path))
    found = fabric.probe()
    assert [(port["adapter"], port["kind"], port["state"], port["interfaces"]) for port in found["rdma"]] == [
        ("mlx5_0", "InfiniBand", "ACTIVE", ["ib0"]),
        ("mlx5_1", "RoCE", "DOWN", ["eth1"]),
        ("rdmap0s6", "EFA", "ACTIVE", []),
    ]
    assert found["rdma"][0]["rate"] == "200 Gb/sec (4X HDR)"
    assert [(each["gpu"], each["links"]) for each in found["nvlink"]] == [(0, 2), (1, 1)]
    assert found["nvlink"][0]["bandwidth"] == pytest.approx(53.124e9)
    host = {"fabric": found}
    assert fast_links.of_host(host) == "NVLink, InfiniBand 200 Gb/sec, EFA 100 Gb/sec"


def test_host_without_any_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric, "SYSFS", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fabric.probe() == {"rdma": [], "nvlink": []}
    assert fast_links.of_host({"fabric": fabric.probe()}) == ""
    assert list(fast_links.findings([host("a")])) == []


def host(name: str, *ports: tuple[str, str], gpus: int = 0, links: tuple[int, ...] = (), **variables: str) -> Any:
    rdma = [
        {"adapter": f"mlx5_{number}", "port": "1", "kind": kind, "rate": "200 Gb/sec", "state": state, "interfaces": []}
        for number, (kind, state) in enumerate(ports)
    ]
    nvlink = [{"gpu": number, "links": count, "bandwidth": 1e9} for number, count in enumerate(links)]
    return {
        "name": name,
        "interface": "eth0",
        "fabric": {"rdma": rdma, "nvlink": nvlink},
        "graphics": {"gpus": [{"name": "NVIDIA H200"}] * gpus},
        "condition": {"environment": variables},
    }


def said(*hosts: Any) -> list[tuple[str, str]]:
    return [(finding.level, finding.what) for finding in fast_links.findings(hosts)]


def test_what_is_there_is_named_with_what_will_use_it() -> None:
    infiniband = ("InfiniBand", "ACTIVE")
    [(level, what)] = said(host("a", infiniband, infiniband, gpus=2, links=(18, 18)))
    assert (level, what) == (
        "note",
        "host a has 2 x InfiniBand, 200 Gb/sec: NCCL uses it between GPUs where it has its plugin",
    )
    [(_, what)] = said(host("a", infiniband))
    assert what.endswith("it has no GPU, so workers talk TCP over eth0, by Gloo")
    [(_, what)] = said(host("a", infiniband, gpus=1, NCCL_IB_DISABLE="1"))
    assert "NCCL_IB_DISABLE keeps NCCL from it" in what


def test_what_is_down_or_unlike_is_a_warning() -> None:
    warnings = [what for level, what in said(host("a", ("RoCE", "DOWN"), gpus=1)) if level == "warning"]
    assert warnings == ["RoCE port 1 of mlx5_0 on host a is not up: down"]
    unlike = said(host("a", ("InfiniBand", "ACTIVE"), gpus=1), host("b", gpus=1))
    assert [what for level, what in unlike if level == "warning"] == [
        "hosts with GPUs have different fast networks, so NCCL can use none between all of them: a: InfiniBand; b: none"
    ]
    [(level, what)] = said(host("a", gpus=2, links=(18, 17)))
    assert (level, what) == ("warning", "GPUs of host a have different numbers of NVLinks up: GPU 0 18, GPU 1 17")
