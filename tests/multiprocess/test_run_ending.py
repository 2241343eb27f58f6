"""However a run is ended, no process of it stays, and its ports are free again."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from tempfile import mkdtemp

import psutil
import pytest
from launching import BEGINNING, agents, alive, family, start, templates, wait_until, workers

pytestmark = [pytest.mark.multiprocess, pytest.mark.starts_cold]  # whose processes these are is the question

SLEEP = """
import os, time
print("up", flush=True)
open("up-" + os.environ["RANK"], "w").close()
time.sleep(600)
"""

WITH_CHILDREN = """
import multiprocessing, os, subprocess, time
multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
subprocess.Popen(["sleep", "600"])
subprocess.Popen(["sleep", "600"], start_new_session=True)  # has left the group of its worker
open("up-" + os.environ["RANK"], "w").close()
time.sleep(600)
"""

WITH_STORE = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
open("up-" + os.environ["RANK"], "w").close()
dist.barrier() if dist.get_rank() == 0 else time.sleep(600)
"""

SAVES = """
import os, signal, sys, time
def save(number, frame):
    time.sleep(0.5)
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open("up-" + os.environ["RANK"], "w").close()
time.sleep(600)
"""

SCRATCH = "manyhosts-*"


def start_and_wait(folder: Path, source: str, *options: str, ranks: int = 2) -> subprocess.Popen[str]:
    head = start(folder, source, *options)
    wait_until(lambda: len(list(folder.glob("up-*"))) == ranks or head.poll() is not None, "all workers are up")
    assert head.poll() is None, head.communicate()
    return head


def one_of_ours(name: str, processes: list[psutil.Process]) -> psutil.Process:
    return {"head": processes[:1], "agent": agents(processes), "template": templates(processes)}[name][0]


def ports_of(processes: list[psutil.Process]) -> list[int]:
    connections = [c for process in processes for c in process.net_connections("tcp")]
    return [c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN]


def listened_to(ports: list[int]) -> list[int]:
    found = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return [port for port in ports if port in found]


@pytest.mark.parametrize(
    ("source", "number"),
    [
        pytest.param(WITH_CHILDREN, signal.SIGINT, id="with_children-2"),
        pytest.param(WITH_STORE, signal.SIGTERM, id="in_a_collective-15"),
        pytest.param(WITH_STORE, signal.SIGHUP, id="in_a_collective-1"),
        pytest.param(WITH_CHILDREN, signal.SIGTERM, id="with_children-15", marks=pytest.mark.slow),
        pytest.param(WITH_CHILDREN, signal.SIGHUP, id="with_children-1", marks=pytest.mark.slow),
        pytest.param(WITH_STORE, signal.SIGINT, id="in_a_collective-2", marks=pytest.mark.slow),
    ],
)
def test_signal_to_the_head_ends_everything(tmp_path: Path, number: signal.Signals, source: str) -> None:
    head = start_and_wait(tmp_path, source, "--workers", "2")
    processes = family(head)
    ports = ports_of(processes)
    assert ports, "the head and the store listen"
    head.send_signal(number)
    out, err = head.communicate(timeout=120)
    assert (head.returncode, alive(processes), listened_to(ports)) == (130, [], []), (out, err)
    assert number.name in err


def test_interrupt_at_the_terminal_reaches_the_head_alone(tmp_path: Path) -> None:
    head = start_and_wait(tmp_path, SLEEP, "--workers", "2")
    processes = family(head)
    os.killpg(head.pid, signal.SIGINT)  # what the terminal does on Ctrl-C
    out, err = head.communicate(timeout=120)
    assert (head.returncode, alive(processes)) == (130, []), out
    assert all(line.startswith("manyhosts: ") for line in err.splitlines()), err
    assert "SIGINT" in err


def test_workers_may_save_what_they_have_after_the_first_interrupt(tmp_path: Path) -> None:
    head = start_and_wait(tmp_path, SAVES, "--workers", "2")
    head.send_signal(signal.SIGINT)
    out, _ = head.communicate(timeout=120)
    assert (head.returncode, out.count("saved")) == (130, 2)


def test_signal_that_comes_twice_at_once_is_one_wish(tmp_path: Path) -> None:
    head = start_and_wait(tmp_path, SAVES, "--workers", "2")
    for _ in range(3):
        head.send_signal(signal.SIGTERM)  # `timeout` sends it to the process and to its group
        time.sleep(0.02)  # else the system makes one of them
    out, _ = head.communicate(timeout=120)
    assert (head.returncode, out.count("saved")) == (130, 2)


def test_agent_that_is_asked_to_end_lets_the_workers_save_what_they_have(tmp_path: Path) -> None:
    head = start_and_wait(tmp_path, SAVES, "--workers", "2")
    agents(family(head))[0].terminate()
    out, _ = head.communicate(timeout=120)
    assert (head.returncode, out.count("saved")) == (130, 2)


def test_second_interrupt_does_not_ask(tmp_path: Path) -> None:
    source = """
        import os, signal, time
        signal.signal(signal.SIGTERM, lambda *_: open("asked-" + os.environ["RANK"], "w").close())
        open("up-" + os.environ["RANK"], "w").close()
        while True:
            time.sleep(1)
    """
    head = start_and_wait(tmp_path, source, "--workers", "2")
    processes = family(head)
    head.send_signal(signal.SIGINT)
    wait_until(lambda: len(list(tmp_path.glob("asked-*"))) == 2, "both workers were asked")
    assert head.poll() is None
    time.sleep(1)  # else it counts as one
    head.send_signal(signal.SIGINT)
    head.communicate(timeout=120)  # well under the 30 s that one interrupt allows
    assert (head.returncode, alive(processes)) == (130, [])


def test_interrupt_while_the_template_loads_ends_everything(tmp_path: Path) -> None:
    head = start(tmp_path, "import torch", "--workers", "2")
    wait_until(lambda: bool(templates(family(head))), "the template has begun")
    processes = family(head)
    head.send_signal(signal.SIGINT)
    head.communicate(timeout=120)
    assert (head.returncode, alive(processes)) == (130, [])


@pytest.mark.parametrize(
    "source",
    [pytest.param(WITH_CHILDREN, marks=pytest.mark.slow), WITH_STORE],
    ids=["with_children", "in_a_collective"],
)
@pytest.mark.parametrize("victim", ["head", "agent", "template"])
def test_death_of_any_of_ours_ends_everything(tmp_path: Path, victim: str, source: str) -> None:
    head = start_and_wait(tmp_path, source, "--workers", "2")
    processes = family(head)
    ports = ports_of(processes)
    one_of_ours(victim, processes).kill()
    _, err = head.communicate(timeout=120)  # also waits until nobody holds the head's output any more
    wait_until(lambda: not alive(processes) and not listened_to(ports), "every process is gone, every port is free")
    if victim != "head":
        assert head.returncode == 4, err
        assert re.search(r"rank [01] on host \S+ was lost: ", err), err


@pytest.mark.parametrize("victim", ["agent", "template"])
def test_run_goes_on_in_a_restart_after_the_death_of(tmp_path: Path, victim: str) -> None:
    source = """
        import os, time
        count = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("start", count, flush=True)
        open("up-" + os.environ["RANK"], "w").close()
        if count == "0":
            time.sleep(600)
    """
    head = start_and_wait(tmp_path, source, "--workers", "2", "--restarts", "1")
    one_of_ours(victim, family(head)).kill()
    out, err = head.communicate(timeout=120)
    assert (head.returncode, out.count("] start 1")) == (0, 2), err


def test_one_of_two_agents_lost_ends_the_workers_of_the_other(tmp_path: Path) -> None:
    head = start_and_wait(tmp_path, SLEEP, "--nodes", "2", "--workers", "1")
    processes = family(head)
    [agent] = [each for each in agents(processes) if "node 1:" in " ".join(each.cmdline())]
    agent.kill()
    _, err = head.communicate(timeout=120)
    assert head.returncode == 4
    wait_until(lambda: not alive(processes), "the template, which waited for another agent, ends with the head")
    assert "rank 1 on host node1 was lost: its agent is gone: killed by SIGKILL; 1 other worker was ended" in err


def told_of(host: str, head: subprocess.Popen[str]) -> str:
    """The next line about a host: on a machine that is busy another may be silent for a while, too."""
    return next(line for line in iter(head.stderr.readline, "") if host in line)


def test_host_that_is_silent_for_a_while_or_whose_disk_hangs_is_named_and_costs_nothing(tmp_path: Path) -> None:
    source = """
        import os, time
        open(f"running-{os.environ['RANK']}", "w").close()
        while not os.path.exists("go-on"):
            time.sleep(0.05)
            if os.environ["RANK"] == "1" and os.path.exists("flood"):
                os.unlink("flood")
                print("\\n".join("f" * 99 for _ in range(3000)), flush=True)
    """
    log = tmp_path / "run" / "logs" / "node1-1.log"
    log.parent.mkdir(parents=True)
    os.mkfifo(log)
    disk = os.open(log, os.O_RDWR)  # one that takes what there is room for in a pipe, and hangs then
    head = start(tmp_path, source, "--nodes", "2", "--workers-per-node", "1", "--show", "0")
    assert head.stderr is not None
    assert BEGINNING.match(head.stderr.readline())
    try:
        wait_until(lambda: len(list(tmp_path.glob("running-*"))) == 2, "all run")
        [agent] = [each for each in agents(family(head)) if "node 1:" in " ".join(each.cmdline())]
        agent.suspend()
        named = told_of("node1", head)
        agent.resume()
        back = told_of("node1", head)
        (tmp_path / "flood").touch()
        held = told_of("node1", head)
        logged = bytearray()
        while logged.count(b"f" * 99) < 3000:
            logged += os.read(disk, 1 << 16)
        held_no_more = told_of("node1", head)
    finally:
        (tmp_path / "go-on").touch()
        _, rest = head.communicate(timeout=120)
        os.close(disk)
    assert re.fullmatch(r"manyhosts: host node1 has not been heard from for (?!0|1\.)\d+\.\d s\n", named)
    assert re.fullmatch(r"manyhosts: host node1 is back after (?!0|1\.)\d+\.\d s\n", back)
    assert re.fullmatch(
        r"manyhosts: host node1 is there, but its agent has waited for a disk or the like for \d+ s;"
        r" its workers continue if they can\n",
        held,
    )
    assert re.fullmatch(r"manyhosts: the agent of host node1 continues after \d+ s\n", held_no_more)
    assert (head.returncode, "node1" in rest) == (0, False), rest


def test_stopped_workers_are_ended_too(tmp_path: Path) -> None:
    head = start_and_wait(tmp_path, SLEEP, "--workers", "2")
    processes = family(head)
    for each in workers(processes):
        each.suspend()
    head.send_signal(signal.SIGINT)
    time.sleep(1)
    head.send_signal(signal.SIGINT)
    head.communicate(timeout=120)
    assert (head.returncode, alive(processes)) == (130, [])


def test_nothing_is_left_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = Path(mkdtemp())  # short: where the path of a socket would be too long, the agent goes elsewhere
    monkeypatch.setenv("TMPDIR", str(scratch))
    for victim in ("head", "agent", "template"):
        head = start_and_wait(tmp_path, SLEEP, "--workers", "1", ranks=1)
        processes = family(head)
        assert list(scratch.glob(SCRATCH)), "the agent has its socket there"
        one_of_ours(victim, processes).kill()
        head.communicate(timeout=120)
        wait_until(lambda: not list(scratch.iterdir()), f"all is removed after the death of the {victim}")
        (tmp_path / "up-0").unlink()
    scratch.rmdir()


def test_closed_output_does_not_end_the_run(tmp_path: Path) -> None:
    source = """
        import os, time
        open("up-" + os.environ["RANK"], "w").close()
        for number in range(1000):
            print("line", number)
            time.sleep(0.001)
        open("done", "w").close()
    """
    head = start_and_wait(tmp_path, source, ranks=1)
    assert head.stdout is not None
    head.stdout.close()
    head.stdout = None
    head.communicate(timeout=120)
    assert (head.returncode, (tmp_path / "done").exists()) == (0, True)


def test_agent_that_its_head_does_not_take_in_says_so_and_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        head = f"127.0.0.1:{listening.getsockname()[1]}"
        words = [sys.executable, "-P", "-m", "manyhosts.control.agent.agent", "--head", head, "--node", "0"]
        agent = subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert agent.stdin is not None
        agent.stdin.write("no such secret\n")
        agent.stdin.flush()
        listening.accept()[0].close()
    _, said = agent.communicate(timeout=120)
    assert (agent.returncode, said) == (3, f"manyhosts: the head at {head} did not take this agent in\n")
