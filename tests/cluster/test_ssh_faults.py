"""What is wrong with a host is said in one sentence with its name, before anything runs; and nothing stays behind."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import MANYHOSTS, wait_until
from remote import Ended, run, start
from testbed import needs

from manyhosts.lab import Host, Lab

QUICK = "print('hello')"


def sentence(ended: Ended, code: int = 3) -> str:
    """The first line of the one error that was told."""
    lines = [line for line in ended.err.splitlines() if line.startswith("manyhosts: ")]
    reported = [line for line in lines if "talk over" not in line]  # over which network, which is no error
    assert (ended.code, len(reported)) == (code, 1), ended.err
    assert "fix:" in ended.err
    assert "hello" not in ended.out, "nothing ran"
    return reported[0].removeprefix("manyhosts: ")


def test_name_that_does_not_resolve(four: Lab, tmp_path: Path) -> None:
    said = sentence(run(four, tmp_path, QUICK, "--hosts", "lab1,lab9"))
    assert said == "the name lab9 of host lab9 does not resolve"


def test_host_that_is_down(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    hosts = make_lab(2)
    hosts[1].kill()
    ended = run(hosts, tmp_path, QUICK, "--hosts", "lab1,lab2")
    assert sentence(ended) == "host lab2 does not answer"


def test_port_of_ssh_that_is_closed_and_firewall_before_it(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    hosts = make_lab(2)
    [server] = [process for process, words in hosts[1].processes().items() if "sshd" in words]
    os.kill(server, signal.SIGKILL)
    ended = run(hosts, tmp_path, QUICK, "--hosts", "lab1,lab2")
    assert sentence(ended) == "host lab2 is up, but no server listens on its port 22"


def test_key_that_a_host_does_not_take_and_a_host_that_shows_another_key(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    hosts = make_lab(2)
    hosts[1].run(["truncate", "--size=0", "/root/.ssh/authorized_keys"])
    ended = run(hosts, tmp_path, QUICK, "--hosts", "lab1,lab2")
    assert sentence(ended) == "host lab2 does not let us in: it takes none of our keys"
    known = hosts.folder.path / "known_hosts"
    one, two = known.read_text().splitlines()
    known.write_text(f"{one.split()[0]} {two.split(maxsplit=1)[1]}\n")
    ended = run(hosts, tmp_path, QUICK, "--hosts", "lab1")
    assert sentence(ended) == "host lab1 shows another key than the one that is known of it"


def test_host_without_python(four: Lab, tmp_path: Path) -> None:
    ended = run(four, tmp_path, QUICK, "--hosts", "lab1,lab2", "-o", "python=/opt/nowhere/python")
    assert sentence(ended) == "there is no Python on host lab1: neither /opt/nowhere/python"


@pytest.mark.parametrize(
    ("package", "version", "expected"),
    [
        ("torch", "1.13.0", "host lab2 has torch 1.13.0, and this machine has "),
        ("manyhosts", "0.0.1", "host lab2 has manyhosts 0.0.1, and this machine has "),
        ("manyhosts", "", "host lab2 has no manyhosts: "),
    ],
)
def test_host_with_other_packages(four: Lab, tmp_path: Path, package: str, version: str, expected: str) -> None:
    wrapper = f"""#!/bin/sh
cat > /opt/other.py <<'END'
import importlib.metadata, importlib.util, sys
told, found = importlib.metadata.version, importlib.util.find_spec
importlib.metadata.version = lambda name: "{version}" if name == "{package}" else told(name)
importlib.util.find_spec = lambda name: None if name == "{package}" and not "{version}" else found(name)
END
shift; exec {shlex.quote(sys.executable)} -c "exec(open('/opt/other.py').read()); $1"
"""
    for host in four:
        text = wrapper if host.name == "lab2" else f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'
        host.path("/opt/python").write_text(text)
        host.run(["chmod", "+x", "/opt/python"])
    ended = run(four, tmp_path, QUICK, "--hosts", "lab1,lab2", "-o", "python=/opt/python")
    assert sentence(ended).startswith(expected)


def test_script_that_is_missing_on_a_host(four: Lab, tmp_path: Path) -> None:
    ended = run(four, tmp_path, QUICK, "--hosts", "lab1,lab2", "--no-sync")
    assert sentence(ended) == f"there is no script {tmp_path}/script.py on host lab1, lab2"


def test_firewall_between_two_of_the_hosts(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    hosts = make_lab(3)
    hosts[1].block(hosts[2])
    ended = run(hosts, tmp_path, QUICK, "--hosts", "lab1,lab2,lab3")
    said = sentence(ended)
    assert said.startswith("host lab2 cannot open a connection to host lab3 at 10.77.0.3 port")
    assert "where: between lab2 and lab3" in ended.err


def test_link_that_is_not_encrypted_is_refused_where_encryption_is_required(four: Lab, tmp_path: Path) -> None:
    said = sentence(run(four, tmp_path, QUICK, "--hosts", "lab1,lab2", "--encrypt", "required"), code=2)
    assert said.startswith("--encrypt required, but host lab1 talks to the others over eth0 (10.77.0.1)")


@needs("wireguard-go", "wg", "nft")
def test_encrypted_link_is_chosen_by_the_way_hosts_are_named_and_waited_for_where_its_first_packet_is_lost(
    make_lab: Callable[..., Lab],
) -> None:
    hosts = make_lab(3)
    join_by_wireguard(hosts)
    for host, other in ((hosts[1], hosts[2]), (hosts[2], hosts[1])):
        handshake = "udp dport 51820 @th,64,8 1"  # 176 bytes, and the first byte of its content is a 1
        drop(host, f"ip saddr {other.address} {handshake} quota until 200 bytes counter")
    user = hosts[0]  # sits at lab1, and names the others by their addresses on the encrypted link
    config = "".join(f"Host w{n}\n HostName 10.99.0.{n}\n HostKeyAlias lab{n}\n" for n in (2, 3))
    keys = f"Host w*\n IdentityFile {hosts.folder.path}/key\n UserKnownHostsFile {hosts.folder.path}/known_hosts\n"
    user.path("/root/.ssh/config").write_text(config + keys)
    user.path("/root/script.py").write_text("import os; print('over', os.environ['GLOO_SOCKET_IFNAME'])")
    words = [*MANYHOSTS, "run", "--hosts", "w2,w3", "--encrypt", "required", "script.py"]
    ended = user.run(words, check=False)
    assert (ended.returncode, ended.stdout.count("] over wg0")) == (0, 2), ended.stderr
    assert "packets 1 " in hosts[1].run(["nft", "list ruleset"]).stdout, "one was lost"


def drop(host: Host, packets: str) -> None:
    """Have a host drop what comes to it and is so."""
    chain = "{ type filter hook input priority 0; policy accept; }"
    host.run(["nft", f"add table inet t; add chain inet t in {chain}; add rule inet t in {packets} drop"])


def join_by_wireguard(hosts: Lab) -> None:
    """A WireGuard link between all hosts: lab1 is 10.99.0.1 on it, and so on."""
    public = []
    for number, host in enumerate(hosts, start=1):
        host.run(["sh", "-c", "wg genkey > /root/wg.key && wireguard-go wg0"], env={"LOG_LEVEL": "silent"})
        host.run(["wg", "set", "wg0", "private-key", "/root/wg.key", "listen-port", "51820"])
        host.run(["ip", "addr", "add", f"10.99.0.{number}/24", "dev", "wg0"])
        host.run(["ip", "link", "set", "wg0", "up"])
        public.append(host.run(["sh", "-c", "wg pubkey < /root/wg.key"]).stdout.strip())
    for host in hosts:
        for number, (other, key) in enumerate(zip(hosts, public, strict=True), start=1):
            if other is not host:
                endpoint = ["allowed-ips", f"10.99.0.{number}/32", "endpoint", f"{other.address}:51820"]
                host.run(["wg", "set", "wg0", "peer", key, *endpoint])


@needs("nft")
def test_head_that_hosts_cannot_reach_is_reached_through_ssh(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    hosts = make_lab(2)
    drop(hosts.desk, "ct state new iif eth0")
    ended = run(hosts, tmp_path, QUICK, "--hosts", "lab1,lab2")
    assert (ended.code, ended.out.count("hello")) == (0, 2), ended.err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--hosts", "a,b", "--workers", "2"], "--workers counts workers on this machine"),
        (["--hosts", "a,a"], "host a is named twice"),
        (["--hosts", "a", "-o", "pyhton=x"], "ssh has no option 'pyhton'"),
        (["--hosts", ","], "no host is named"),
        (["--hosts", "-oProxyCommand=x"], "is no name of a host"),
        (["--hostfile", "nothing"], "cannot read the hostfile"),
        (["--on", "ssh"], "ssh needs to know the hosts"),
    ],
)
def test_wrong_request_is_refused(four: Lab, tmp_path: Path, options: list[str], expected: str) -> None:
    assert expected in sentence(run(four, tmp_path, QUICK, *options), code=2)


ENDLESS = """
import os, time
print("running", flush=True)
if os.environ["RANK"] == "1" and "{fault}":
    time.sleep(0.5)
    {fault}
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("fault", "code", "expected"),
    [
        ("os.kill(os.getpid(), 9)", 1, "rank 1 on host lab2 was killed by SIGKILL; 1 other worker was ended"),
        pytest.param(
            "raise ValueError('boom')",
            1,
            "rank 1 on host lab2 failed with ValueError: boom; 1 other worker was ended",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "os._exit(5)",
            1,
            "rank 1 on host lab2 ended with exit code 5; 1 other worker was ended",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_rank_that_fails_on_a_host_is_named_and_the_others_end(
    four: Lab, tmp_path: Path, fault: str, code: int, expected: str
) -> None:
    ended = run(four, tmp_path, ENDLESS.format(fault=fault), "--hosts", "lab1,lab2")
    assert sentence(ended, code) == expected


@pytest.mark.slow  # a host that falls silent: test_hangs; that nothing stays behind: the test below
def test_cable_that_is_cut_while_workers_run(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    """The run ends as soon as that is noticed; the host that is cut off waits for it as long as it was told to."""
    hosts = make_lab(2)
    process = running(hosts, tmp_path, "--head-timeout", "5")
    hosts[1].cut()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 4, err
    assert "rank 1 on host lab2 was lost" in err
    for host in hosts:
        wait_until(lambda host=host: not ours(host), f"nothing of the run is left on {host.name}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGKILL], ids=lambda number: number.name)
def test_end_of_the_command_is_the_end_on_every_host(four: Lab, tmp_path: Path, number: signal.Signals) -> None:
    process = running(four, tmp_path, "--head-timeout", "3")  # one that is killed may be typed again, and is waited for
    four.desk.end(process, number)
    process.communicate(timeout=120)
    assert process.returncode in (130, 128 + number, -number)
    for host in four:
        wait_until(lambda host=host: not ours(host), f"nothing of the run is left on {host.name}")


def running(hosts: Lab, folder: Path, *options: str) -> subprocess.Popen[str]:
    """A run on lab1 and lab2 whose workers have all begun."""
    process = start(hosts, folder, ENDLESS.format(fault=""), "--hosts", "lab1,lab2", *options)
    said = ""
    while said.count("running") < 2:
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        said += line
    return process


def ours(host) -> list[str]:
    """What a run has started there."""
    return [
        words
        for words in host.processes().values()
        if "python" in words or "notty" in words or words.startswith("manyhosts ")
    ]
