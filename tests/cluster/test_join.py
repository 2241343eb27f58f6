"""Hosts that the desk cannot reach: they join from behind an address translation, or are told why they cannot."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from containers import digits, weights, weights_here
from launching import MANYHOSTS, wait_until
from remote import start
from testbed import needs

from manyhosts.lab import Host, Lab

ROUTER = "10.77.0.1"
DESK = "10.77.0.254"
VIRTUAL = ("--set", "virtual_workers=4")


def in_network_of(host: Host, words: str) -> None:
    """A command of this machine, in the network of a host."""
    subprocess.run(["nsenter", "--target", str(host.process), "--net", "sh", "-ec", words], check=True)


def translate(router: Host, inside: str, forwarded: int) -> None:
    """Make a host a router for the network `inside`/24, as at home; the port `forwarded` leads to the desk's 29400."""
    gateway = f"{inside.rpartition('.')[0]}.1"
    in_network_of(
        router,
        f"""
        ip addr add {gateway}/24 dev eth0
        echo 1 > /proc/sys/net/ipv4/ip_forward
        echo 0 > /proc/sys/net/ipv4/conf/all/send_redirects
        echo 0 > /proc/sys/net/ipv4/conf/eth0/send_redirects
        nft add table ip nat
        nft 'add chain ip nat pre {{ type nat hook prerouting priority -100 ; }}'
        nft 'add chain ip nat post {{ type nat hook postrouting priority 100 ; }}'
        nft add rule ip nat pre tcp dport {forwarded} dnat to {DESK}:29400
        nft add rule ip nat post masquerade
        """,
    )


def move_behind(host: Host, address: str) -> None:
    """Give a host one address, in a network that only its router is in, too."""
    in_network_of(
        host,
        f"""
        ip addr flush dev eth0
        ip addr add {address}/24 dev eth0
        ip route add default via {address.rpartition(".")[0]}.1
        """,
    )


def give(host: Host, project: Path, secret: str) -> None:
    """What the user of a host has there: the project and the secret."""
    there = host.path("/root/project")
    there.mkdir()
    shutil.copy(project / "digits.py", there)
    host.path("/root/secret").write_text(secret)


def join(host: Host, at: str) -> subprocess.Popen[str]:
    words = [*MANYHOSTS, "join", at, "--secret-file", "/root/secret"]
    return host.start(
        words,
        folder="/root/project",
        env={"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def started(hosts: Lab, project: Path, *words: str) -> tuple[subprocess.Popen[str], str]:
    """A run at the desk, when it listens, and its secret."""
    secret = project / "secret"
    options = ["--on", "join", "-o", f"bind={DESK}", "-o", f"secret-file={secret}", "--run-dir", "run", *words]
    process = start(hosts, project, None, *options, into=project / "said", script="digits.py")
    wait_until(lambda: process.poll() is not None or 29400 in hosts.desk.ports(), "the head listens")
    assert process.poll() is None, (project / "said").read_text()
    return process, secret.read_text()


@needs("nft")
def test_host_behind_a_translation_trains_with_one_that_has_a_disk_of_its_own(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    here, project = tmp_path / "alone", tmp_path / "project"
    for folder in (here, project):
        folder.mkdir()
        digits(folder, epochs=3)
    alone = weights_here(here, *VIRTUAL)
    hosts = make_lab(3)
    router, behind, beside = hosts
    translate(router, "192.168.77.0", 4000)
    move_behind(behind, "192.168.77.2")
    process, secret = started(hosts, project, "--nodes", "3", *VIRTUAL, "-o", f"advertise={ROUTER}:4000")
    assert f"manyhosts join {ROUTER}:4000\n" in (project / "said").read_text()
    for host in (behind, beside):
        give(host, project, secret)
    joined = [join(behind, f"{ROUTER}:4000"), join(beside, f"{DESK}:29400")]
    wait_until(lambda: any(each.poll() is not None for each in (process, *joined)), "somebody ends", timeout_s=150)
    for each in joined:
        said, _ = each.communicate(timeout=120)
        assert each.returncode == 0, said
    assert process.wait(timeout=120) == 0, (project / "said").read_text()
    assert weights(project / "run") == alone
    said = (project / "said").read_text()
    assert "lab2 (192.168.77.2) has joined" in said
    assert "lab3 (10.77.0.3) has joined" in said
    with_snapshots = [host.name for host in hosts if list(host.path("/root/project/run/snapshots").glob("step-*"))]
    assert len(with_snapshots) == 1, "two disks keep each snapshot: the desk's and one other"
    for host in (behind, beside):
        assert list(host.path("/root/project/run/logs").glob(f"{host.name}-*.log"))
        assert not list(host.path("/root/project/run").glob(".manyhosts-disk*"))


@pytest.mark.slow
@needs("nft")
def test_host_that_no_worker_can_reach_is_named_before_the_first_step(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    digits(tmp_path, epochs=3)
    hosts = make_lab(2)
    router, behind = hosts
    translate(router, "10.1.1.0", 4000)
    move_behind(behind, "10.1.1.2")  # below the desk's address: the desk would have to open the connection
    process, secret = started(hosts, tmp_path, "--nodes", "2")
    give(behind, tmp_path, secret)
    joined = join(behind, f"{DESK}:29400")
    assert process.wait(timeout=120) == 4, (tmp_path / "said").read_text()
    joined.communicate(timeout=120)
    said = " ".join((tmp_path / "said").read_text().split())
    assert "cannot open a connection to host lab2 at 10.1.1.2 port" in said
    assert "between" in said
    assert "WireGuard" in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "no step was made"
    # One that comes while others train is turned away, and they continue.
    shutil.rmtree(tmp_path / "run")
    process, secret = started(hosts, tmp_path, "--nodes", "1:2", "--env", "PAUSE=0.3")
    behind.path("/root/secret").write_text(secret)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and '"step"' in metrics.read_text(), "it trains alone")
    said, _ = join(behind, f"{DESK}:29400").communicate(timeout=120)
    assert "the run continues without this host: host" in said
    assert "cannot open a connection to host lab2 at 10.1.1.2 port" in said
    assert process.wait(timeout=120) == 0, (tmp_path / "said").read_text()
    assert "the run continues without host lab2" in (tmp_path / "said").read_text()
