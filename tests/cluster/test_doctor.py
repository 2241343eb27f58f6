"""The doctor among hosts that have something: each ailment is named with its host, and all of them in one go."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from launching import MANYHOSTS, wait_until
from testbed import needs

from manyhosts.lab import Host, Lab

HAS_FAKETIME = shutil.which("faketime") is not None
BY_CHANCE = {"speed", "bandwidth", "latency", "loss", "load", "memory", "shared memory", "descriptors", "disk"}
"""Checks that this machine may fail by itself, or while it has other work."""


@dataclass(frozen=True)
class Examined:
    code: int
    report: dict[str, Any]

    def of(self, check: str, level: str = "error") -> list[str]:
        """What was found by a check, and is that bad."""
        findings = self.report["findings"]
        return [each["what"] for each in findings if each["check"] == check and each["level"] == level]

    def host(self, name: str) -> dict[str, Any]:
        [found] = [host for host in self.report["hosts"] if host["name"] == name]
        return found


def examine(hosts: Lab, folder: Path, *words: str, timeout_s: float = 170) -> Examined:
    done = hosts.desk.run(
        [*MANYHOSTS, "doctor", *words, "--json"], folder=str(folder), timeout_s=timeout_s, check=False
    )
    assert done.stdout, done.stderr
    return Examined(done.returncode, json.loads(done.stdout))


def python_of(host: Host, *lines: str) -> None:
    """Give a host a Python at /opt/python in which `lines` have run first: one that is not like the others."""
    host.run(["mkdir", "-p", "/opt/own"])
    host.path("/opt/own/sitecustomize.py").write_text("\n".join(lines))
    start = f'PYTHONPATH=/opt/own${{PYTHONPATH:+:$PYTHONPATH}} exec {shlex.quote(sys.executable)} "$@"'
    host.path("/opt/python").write_text(f"#!/bin/sh\n{start}\n")
    host.run(["chmod", "+x", "/opt/python"])


def set_clock(host: Host, offset_s: int) -> None:
    """Let every program that comes to a host through ssh see another time, whatever it is and whatever it starts.

    The ssh server itself keeps the right one: its sandbox kills a child that loads the library. How time passes stays
    as it is, as on a real host whose clock is off.
    """
    [library] = Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")
    variables = {"LD_PRELOAD": library, "FAKETIME": f"{offset_s:+d}", "FAKETIME_DONT_FAKE_MONOTONIC": 1}
    lines = [f"export {name}={value}\n" for name, value in variables.items()]
    host.path("/root/.bashrc").write_text("".join(lines))  # read by what the ssh server starts


OTHER_TORCH = """
import importlib.metadata
told = importlib.metadata.version
importlib.metadata.version = lambda name: "1.13.0" if name == "torch" else told(name)
"""


@pytest.fixture(scope="module")
def ailing(tmp_path_factory: pytest.TempPathFactory) -> Examined:
    """One look at hosts of which only lab1 is well."""
    folder = tmp_path_factory.mktemp("project")
    with lab_of(6) as hosts:
        python_of(hosts[0])
        python_of(hosts[1], OTHER_TORCH)
        python_of(hosts[2], "import os; os.environ['GLOO_SOCKET_IFNAME'] = 'ib0'")
        python_of(hosts[3])
        for host in hosts:
            host.run(["mkdir", "-p", "/data/train", f"{folder}/runs"])
            host.path("/data/train/images").write_bytes(b"\7" * 100_000)
        hosts[2].run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", f"{folder}/runs"])
        hosts[2].path("/data/train/images").write_bytes(b"\7" * 99_999 + b"\1")
        hosts[3].path("/data/train/images").unlink()
        hosts[3].run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", f"{folder}/runs"])
        hosts[2].block(hosts[3])
        if HAS_FAKETIME:
            set_clock(hosts[1], 3600)
            seen = hosts.desk.run(["ssh", "-o", "BatchMode=yes", "lab2", "date +%s"]).stdout
            assert abs(int(seen) - time.time() - 3600) < 60, "other programs than Python see that time, too"
        hosts[4].kill()
        [server] = [process for process, words in hosts[5].processes().items() if "sshd" in words]
        os.kill(server, signal.SIGKILL)
        names = ",".join([*hosts.names, "lab9"])
        found = examine(hosts, folder, "--hosts", names, "-o", "python=/opt/python", "--data", "/data/train")
        for host in hosts.hosts[:4]:
            wait_until(lambda host=host: "python" not in str(host.processes()), f"{host.name} is left alone")
            assert [path.name for path in host.path(f"{folder}/runs").iterdir()] == []
            assert not [path for path in host.path("/tmp").glob("manyhosts-*")]
        return found


def lab_of(count: int, **more: Any) -> Any:
    from manyhosts.lab import lab

    return lab(count, **more)


def test_hosts_that_are_down_closed_or_unknown_are_all_named_and_the_others_examined(ailing: Examined) -> None:
    assert sorted(ailing.of("reach")) == [
        "host lab5 does not answer",
        "host lab6 is up, but no server listens on its port 22",
        "the name lab9 of host lab9 does not resolve",
    ]
    assert ailing.code == 3
    assert [host["name"] for host in ailing.report["hosts"]] == ["lab1", "lab2", "lab3", "lab4"]


@needs("faketime")
def test_clock_that_is_an_hour_ahead_is_named(ailing: Examined) -> None:
    assert ailing.of("clock", "warning") == ["the clock of host lab2 is 1 h 00 min ahead of this machine's"]
    assert abs(ailing.host("lab2")["clock"]["offset_s"] - 3600) < 5


def test_other_torch_is_named(ailing: Examined) -> None:
    [what] = ailing.of("versions")
    assert what.startswith("host lab2 has torch 1.13.0, and this machine has ")


def test_data_that_are_missing_or_different_are_named(ailing: Examined) -> None:
    one, two = sorted(ailing.of("data"))
    differs = "is not what it is on the others"
    assert one == f"/data/train on host lab3 {differs}: both 1 file, 100.0 kB, with other content"
    assert two == f"/data/train on host lab4 {differs}: 0 files, 0 B there, 1 file, 100.0 kB on lab1"


def test_disk_that_is_nearly_full_is_named(ailing: Examined) -> None:
    assert [what for what in ailing.of("disk") if "lab3" in what] == [
        "the disk of host lab3 is nearly full: 21.0 MB are left for the run directory"
    ]


def test_run_directory_that_cannot_be_written_or_is_not_shared_is_named(ailing: Examined) -> None:
    assert ailing.of("run directory") == ["host lab4 cannot write to the run directory: Read-only file system"]
    [shared] = ailing.of("run directory", "note")
    assert shared.startswith("the run directory is not shared: lab2, lab3, lab4 do not see what lab1 writes")


def test_firewall_between_two_hosts_is_named_once(ailing: Examined) -> None:
    [what] = ailing.of("connection")
    assert re.fullmatch(r"host lab3 cannot open a connection to host lab4 at 10\.77\.0\.4: .+", what)
    closed = {(pair["from"], pair["to"]) for pair in ailing.report["pairs"] if pair["trouble"]}
    assert closed == {("lab3", "lab4"), ("lab4", "lab3")}
    assert len(ailing.report["pairs"]) == 12


def test_interface_that_is_not_there_is_named(ailing: Examined) -> None:
    [what] = ailing.of("environment")
    assert what == "GLOO_SOCKET_IFNAME names ib0, an interface that host lab3 does not have"


def test_nothing_else_is_called_wrong(ailing: Examined) -> None:
    known = {"reach", "versions", "data", "run directory", "connection", "environment"}
    known |= {"clock"} if HAS_FAKETIME else set()
    assert {each["check"] for each in ailing.report["findings"]} - BY_CHANCE == known
    assert all(each["fix"] and each["where"] for each in ailing.report["findings"])


def drop(host: Host, *rules: str) -> None:
    """Have `host` lose what each rule of nft says, both of what comes and of what goes."""
    chains = (
        f"chain {way} {{\ntype filter hook {way} priority 0;\n{rule} drop\n}}\n"
        for way in ("input", "output")
        for rule in rules
    )
    host.path("/root/drop").write_text(f"table inet lossy {{\n{''.join(chains)}}}\n")
    host.run(["nft", "-f", "/root/drop"])


@needs("nft")
def test_host_that_loses_packets_and_host_that_large_ones_do_not_reach_are_named(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    """lab2 loses one in twenty of what comes and of what it sends, lab4 all that is larger than a tunnel would take."""
    hosts = make_lab(4)
    (tmp_path / "train.py").write_text("print(1)\n")
    for host in hosts:
        host.run(["mkdir", "-p", str(tmp_path)])
        host.path(tmp_path / "train.py").write_text("print(2)\n" if host is hosts[2] else "print(1)\n")
    drop(hosts[1], "numgen random mod 20 < 1")
    drop(hosts[3], "meta length > 1300")
    found = examine(hosts, tmp_path, "--hosts", ",".join(hosts.names), "train.py")
    assert found.of("reach") == ["small packets reach host lab4, and large ones do not"]
    said = found.of("loss", "warning")
    shares = [float(share) for what in said for share in re.findall(r"^([\d.]+)% of the packets", what)]
    assert len(shares) == len(said) >= 1, found.report["findings"]
    assert all("host lab2" in what for what in said), said
    assert all(1 < share < 15 for share in shares), said
    assert found.of("script", "note") == ["the script on host lab3 is another one than this machine's"]


@pytest.mark.slow  # factors: tests/unit/doctor; what hosts measure: `ailing` and the test below
def test_half_the_bandwidth_and_half_the_speed_are_named_with_their_factors(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    """Half the speed: lab4 may use one of the two cores that the others use."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores, to take one away")
    hosts = make_lab(4, bandwidth="200mbit")
    hosts[2].slow("100mbit")
    for process in [hosts[3].process, *hosts[3].processes()]:
        os.sched_setaffinity(process, {min(os.sched_getaffinity(0))})
    found = examine(hosts, tmp_path, "--hosts", ",".join(hosts.names))
    [narrow] = found.of("bandwidth", "warning")
    [slow] = found.of("speed", "warning")
    assert re.match(r"host lab3 sends and takes (\S+) times slower than the others", narrow), narrow
    assert re.match(r"host lab4 computes (\S+) times slower than the others; it has 1 core, others have 2", slow), slow
    for what in (narrow, slow):
        assert 1.6 <= float(re.search(r"(\S+) times", what)[1]) <= 2.4, what
    assert found.code == 0, "warnings do not keep anybody from running"


def test_hosts_that_are_well_are_told_apart_and_meet(four: Lab, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    words = [*MANYHOSTS, "doctor", "--hosts", "lab1,lab2,lab3", "train.py"]
    done = four.desk.run(words, folder=str(tmp_path), check=False, timeout_s=120)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "All 3 met within" in done.stdout
    assert re.search(r"^lab1 +3\.\d+\.\d+ .* no GPU +right", done.stdout, re.MULTILINE), done.stdout
    assert len(re.findall(r"^lab\d +[\d.*-]+ +[\d.*-]+ +[\d.*-]+$", done.stdout, re.MULTILINE)) == 3, done.stdout
    assert "error" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


@pytest.mark.slow
def test_hosts_that_cannot_talk_to_each_other_end_with_4(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    hosts = make_lab(2)
    hosts[0].block(hosts[1])
    found = examine(hosts, tmp_path, "--hosts", "lab1,lab2")
    assert (found.code, len(found.of("connection"))) == (4, 1), found.report["findings"]


@pytest.mark.slow  # a firewall: `ailing`; words: tests/unit/doctor/test_doctor_closed.py
@needs("nft")
def test_firewalls_are_named_with_their_host_direction_and_ports(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    """lab2 drops what comes in, but for ssh; lab4 rejects what lab1 asks."""
    hosts = make_lab(4)
    asks = "tcp flags & (syn | ack) == syn tcp dport 1024-65535"
    for host, rule in (
        (hosts[1], f"{asks} drop"),
        (hosts[3], f"ip saddr {hosts[0].address} {asks} reject with tcp reset"),
    ):
        table = f"table inet wall {{\nchain in {{\ntype filter hook input priority 0;\n{rule}\n}}\n}}\n"
        host.path("/root/wall").write_text(table)
        host.run(["nft", "-f", "/root/wall"])
    found = examine(hosts, tmp_path, "--hosts", ",".join(hosts.names))
    assert found.code == 4
    findings = {each["where"]: each for each in found.report["findings"] if each["check"] == "connection"}
    assert findings.keys() == {"host lab2", "between lab1 and lab4"}
    first, last = found.host("lab2")["ports"]
    into, between = findings["host lab2"], findings["between lab1 and lab4"]
    assert into["what"] == (
        "host lab2 takes no connection from lab1, lab3 and lab4: packets get no answer"
        " (a firewall or security group drops them), while port 22 answers"
    )
    assert f"open TCP ports {first}-{last} of 10.77.0.2 to 10.77.0.1, 10.77.0.3 and 10.77.0.4" in into["fix"]
    assert "connections are refused" in between["what"]
    assert between["what"].endswith("; lab4 can to lab1")
    assert f"open TCP ports {first}-{last} of 10.77.0.4 to 10.77.0.1" in between["fix"]
