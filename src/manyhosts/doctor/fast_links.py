"""What hosts have of InfiniBand, RoCE, EFA and NVLink, what of it a run uses, and what of it is down or unlike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from manyhosts.cluster.findings import Finding

Facts = Mapping[str, Any]
_UP = "ACTIVE"


def findings(hosts: Sequence[Facts]) -> Iterator[Finding]:
    """What to know of the fast links of `hosts`."""
    seen = [host for host in hosts if "fabric" in host]
    for host in seen:
        yield from _of_ports(host)
    with_gpus = [host for host in seen if host["graphics"]["gpus"]]
    kinds = {
        host["name"]: tuple(sorted({port["kind"] for port in host["fabric"]["rdma"] if port["state"] == _UP}))
        for host in with_gpus
    }
    if len(set(kinds.values())) > 1:
        reported = "; ".join(f"{name}: {' and '.join(kind) or 'none'}" for name, kind in kinds.items())
        yield Finding(
            level="warning",
            check="fabric",
            what=f"hosts with GPUs have different fast networks, so NCCL can use none between all of them: {reported}",
            where="between the hosts",
            fix="see the adapters of those that have none, and their cables; or run on the others alone",
        )
    yield from _of_nvlinks(with_gpus)


def _of_ports(host: Facts) -> Iterator[Finding]:
    name, has_gpus = host["name"], bool(host["graphics"]["gpus"])
    where = f"host {name}"
    for port in host["fabric"]["rdma"]:
        if port["state"] != _UP and has_gpus:
            yield Finding(
                level="warning",
                check="fabric",
                what=f"{port['kind']} port {port['port']} of {port['adapter']} on host {name} is not up:"
                f" {port['state'].lower() or 'its state is not known'}",
                where=where,
                fix=f"see its cable and, for InfiniBand, the subnet manager: `ibstat {port['adapter']}` there",
            )
    up = in_words(host["fabric"]["rdma"])
    if not up:
        return
    over = f"TCP over {host['interface']}" if host.get("interface") else "TCP"
    if not has_gpus:
        use, fix = f"it has no GPU, so workers talk {over}, by Gloo", "nothing need be done"
    elif host.get("condition", {}).get("environment", {}).get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        use, fix = f"NCCL_IB_DISABLE keeps NCCL from it, so GPUs talk {over}", "unset NCCL_IB_DISABLE there"
    else:
        use = "NCCL uses it between GPUs where it has its plugin"
        fix = "NCCL_DEBUG=INFO in the run shows in one line what it took: NET/IB, NET/OFI or NET/Socket"
    yield Finding(level="note", check="fabric", what=f"host {name} has {up}: {use}", where=where, fix=fix)


def _of_nvlinks(hosts: Sequence[Facts]) -> Iterator[Finding]:
    for host in hosts:
        links = {each["gpu"]: each["links"] for each in host["fabric"]["nvlink"]}
        counts = [links.get(number, 0) for number in range(len(host["graphics"]["gpus"]))]
        if links and len(set(counts)) > 1:
            reported = ", ".join(f"GPU {number} {count}" for number, count in enumerate(counts))
            yield Finding(
                level="warning",
                check="fabric",
                what=f"GPUs of host {host['name']} have different numbers of NVLinks up: {reported}",
                where=f"host {host['name']}",
                fix="`nvidia-smi nvlink --status` and `--errorcounters` there say which are down",
            )


def in_words(ports: Sequence[Facts]) -> str:
    """`2 x InfiniBand, 200 Gb/sec (4X HDR)` for the ports that are up; nothing where there is none."""
    counts = Counter((port["kind"], port["rate"]) for port in ports if port["state"] == _UP)
    return " and ".join(
        f"{f'{count} x ' if count > 1 else ''}{kind}{f', {rate}' if rate else ''}"
        for (kind, rate), count in counts.items()
    )


def of_host(host: Facts) -> str:
    """For the table of hosts: `NVLink, InfiniBand 200 Gb/sec`."""
    fabric = host.get("fabric", {"rdma": [], "nvlink": []})
    up = [port for port in fabric["rdma"] if port["state"] == _UP]
    kinds = dict.fromkeys(f"{port['kind']} {port['rate'].partition(' (')[0]}".strip() for port in up)
    return ", ".join([*(["NVLink"] if fabric["nvlink"] else []), *kinds])
