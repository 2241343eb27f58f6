"""A lab's hosts are real: names, disks, processes and wires of their own, which can be cut, slowed and frozen."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from launching import alive, wait_until
from testbed import needs

from manyhosts.errors import ConfigError
from manyhosts.lab import Host, Lab, lab
from manyhosts.lab.folder import PLACE, clean, living

PING = "import socket, sys; socket.create_connection((sys.argv[1], 22), timeout=2).close()"


def reaches(host: Host, other: Host) -> bool:
    return host.run([sys.executable, "-c", PING, other.name], check=False).returncode == 0


def test_hosts_have_their_own_names_addresses_and_processes(four: Lab) -> None:
    said = [host.run(["sh", "-c", "hostname; hostname -i; cat /proc/1/cmdline | tr '\\0' ' '"]).stdout for host in four]
    assert [words.split()[:2] for words in said] == [[f"lab{n}", f"10.77.0.{n}"] for n in range(1, 5)]
    assert all("manyhosts.lab.machine" in words for words in said)


def test_what_one_host_writes_no_other_host_sees(four: Lab) -> None:
    name = f"mine-{uuid.uuid4().hex}"  # the desk has this machine's folders, in which others may have a "mine"
    places = [f"{place}/{name}" for place in ("/root", "/tmp", "/etc", Path.cwd())]
    for place in places:
        four[0].run(["touch", place])
    script = "; ".join(f"ls {shlex.quote(place)}" for place in places)
    seen = [host.run(["sh", "-c", script], check=False).stdout for host in (four[1], four.desk)]
    for place in places:
        four[0].run(["rm", place])
    assert seen == ["", ""]


def test_hosts_have_this_python_with_its_packages(four: Lab) -> None:
    code = 'import sys, importlib.util, manyhosts; print(sys.prefix, importlib.util.find_spec("torch").origin)'
    here = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True).stdout
    assert four[0].run([sys.executable, "-P", "-c", code]).stdout == here
    assert four[1].run(["ssh", "lab3", shlex.join([sys.executable, "-P", "-c", code])]).stdout == here


def test_desk_has_this_machines_disk_and_reaches_every_host_by_ssh(four: Lab, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("here")
    assert four.desk.run(["cat", str(tmp_path / "note")]).stdout == "here"
    assert [four.desk.run(["ssh", name, "hostname"]).stdout.strip() for name in four.names] == four.names


def test_signal_reaches_what_was_started(four: Lab) -> None:
    started = four[0].start(["sleep", "60"])
    wait_until(lambda: "sleep 60" in four[0].processes().values(), "it sleeps")
    four[0].end(started, signal.SIGTERM)
    started.communicate()
    assert "sleep 60" not in four[0].processes().values()


def test_unknown_name_does_not_resolve(four: Lab) -> None:
    assert four[0].run(["getent", "hosts", "lab9"], check=False).returncode == 2


def test_cut_cable_ends_the_way_to_a_host_until_it_is_mended(make_lab: Callable[..., Lab]) -> None:
    one, two = make_lab(2)
    assert reaches(one, two)
    two.cut()
    assert not reaches(one, two)
    two.mend()
    wait_until(lambda: reaches(one, two), "it answers again")


def test_firewall_stands_between_two_hosts_only(make_lab: Callable[..., Lab]) -> None:
    one, two, three = make_lab(3)
    one.block(two)
    assert not reaches(one, two)
    assert not reaches(two, one)
    assert reaches(one, three)
    one.unblock(two)
    assert reaches(one, two)


def read_all(pipe: int) -> bytes:
    """What stands in a pipe at this moment."""
    found = b""
    try:
        while chunk := os.read(pipe, 1 << 16):
            found += chunk
    except BlockingIOError:
        return found
    raise AssertionError("the process has ended")


def test_frozen_host_does_nothing_until_it_is_thawed(make_lab: Callable[..., Lab]) -> None:
    [host] = make_lab(1)
    ticking = host.start(["sh", "-c", "while echo; do sleep 0.01; done"], stdout=subprocess.PIPE)
    pipe = ticking.stdout.fileno()
    os.set_blocking(pipe, False)
    wait_until(lambda: read_all(pipe), "it ticks")
    host.freeze()
    # A tick may have ended where the shell can no longer bury it, or be stopped before its exec, for which it waits.
    still = {psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DISK_SLEEP}
    now = [psutil.Process(process).status for process in host.processes()]
    wait_until(lambda: {status() for status in now} <= still, "the last tick is over")
    read_all(pipe)
    time.sleep(0.3)
    assert read_all(pipe) == b""
    host.thaw()
    wait_until(lambda: read_all(pipe), "it ticks again")
    host.end(ticking)
    ticking.stdout.close()
    ticking.wait()


def test_host_without_power_is_gone_and_comes_back_with_an_empty_disk(make_lab: Callable[..., Lab]) -> None:
    one, two = make_lab(2)
    two.run(["touch", "/root/note"])
    sleeping = two.start(["sleep", "60"])
    two.kill()
    assert sleeping.wait(timeout=120) != 0
    assert not reaches(one, two)
    two.boot()
    wait_until(lambda: reaches(one, two), "it answers again")  # the others ask for its address once a second
    assert two.run(["ls", "/root"]).stdout == ""


@needs("iperf3")
def test_wire_is_as_fast_as_it_was_asked_for(make_lab: Callable[..., Lab]) -> None:
    """A busy machine may need several tries: it sends too late, or begins too late to count what has come."""
    one, two = make_lab(2, bandwidth="200mbit")
    for rate in (200, 50):
        two.slow(f"{rate}mbit")
        rates = [measured(one, two)]
        while not 0.85 * rate <= rates[-1] <= 1.15 * rate and len(rates) < 10:
            rates.append(measured(one, two))
        assert 0.85 * rate <= rates[-1] <= 1.15 * rate, rates


def measured(one: Host, two: Host) -> float:
    """What iperf3 brings from one host to another, in Mbit/s."""
    server = two.start(["iperf3", "--server", "--one-off"], stdout=subprocess.DEVNULL)
    wait_until(lambda: 5201 in two.ports(), "iperf3 listens")
    said = one.run(["iperf3", "--client", two.name, "--time", "1", "--format", "m"]).stdout
    server.wait(timeout=120)
    [line] = [line for line in said.splitlines() if "receiver" in line]
    return float(line.split("MBytes")[1].split()[0])


def test_lab_whose_owner_was_killed_leaves_no_process_and_the_next_one_tidies_up() -> None:
    code = "from manyhosts.lab import lab\nwith lab(2):\n    print('up', flush=True)\n    input()"
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout.readline() == "up\n"
    family = psutil.Process(owner.pid).children(recursive=True)
    assert any("sshd" in process.name() for process in family)
    before = living()
    owner.kill()
    owner.communicate()
    wait_until(lambda: not alive(family), "all have ended")
    assert len(clean()) >= 1
    assert len(living()) == len(before) - 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_lab_whose_owner_is_ended_leaves_no_file(number: signal.Signals) -> None:
    code = "from manyhosts.lab import lab\nwith lab(1) as hosts:\n    print(hosts.folder.path, flush=True)\n    input()"
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    folder = Path(owner.stdout.readline().strip())
    assert folder.is_dir()
    owner.send_signal(number)
    owner.communicate()
    assert owner.returncode == 128 + number
    assert not folder.exists()


def test_lab_leaves_nothing_on_this_machine() -> None:
    with lab(1) as hosts:
        folder = hosts.folder.path
        assert folder in PLACE.iterdir()
    assert not folder.exists()


@pytest.mark.parametrize(("hosts", "bandwidth"), [(0, "1gbit"), (65, "1gbit"), (2, "fast"), (2, "0mbit")])
def test_lab_that_cannot_be_is_refused_in_a_sentence(hosts: int, bandwidth: str) -> None:
    with pytest.raises(ConfigError) as raised, lab(hosts, bandwidth=bandwidth):
        pass
    assert raised.value.fix
