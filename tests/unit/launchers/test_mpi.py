"""What mpirun is told, and what an agent makes of what mpirun tells it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from manyhosts.control.agent import node
from manyhosts.control.job import Job
from manyhosts.errors import ConfigError, LaunchError
from manyhosts.hosts import addresses
from manyhosts.launchers.mpi import Mpi
from manyhosts.launchers.placed import Placement


def job(folder: Path = Path("/work"), **more: object) -> Job:
    hosts = more.pop("hosts", ("a", "b"))
    return Job(program="train.py", folder=folder, run_dir=folder / "run", nodes=len(hosts), hosts=hosts, **more)


def test_plan_is_one_mpirun_with_one_agent_on_each_host() -> None:
    assert " ".join(Mpi({"PATH": "/bin", "HOME": "/root"}).plan(job()).command) == (
        "mpirun --bind-to none --mca plm_rsh_agent ssh --mca orte_abort_on_non_zero_status 0"
        " -np 1 --host a:1 -x PATH"
        f" {sys.executable} -P -m manyhosts.control.agent.node --head ADDRESS:PORT"
        " --certificate FINGERPRINT --forget OMPI_*,PMIX_*,PMI_*,PRTE_* --nodes 0"
        " : -np 1 --host b:1 -x PATH"
        f" {sys.executable} -P -m manyhosts.control.agent.node --head ADDRESS:PORT"
        " --certificate FINGERPRINT --forget OMPI_*,PMIX_*,PMI_*,PRTE_* --nodes 1"
    )


def test_options_reach_mpirun() -> None:
    options = {"mpirun": "/opt/mpirun", "mca": "btl_tcp_if_include:eth1", "python": "/opt/python"}
    command = " ".join(Mpi().plan(job(options=options)).command)
    assert command.startswith("/opt/mpirun ")
    assert "--mca btl_tcp_if_include eth1" in command
    assert " /opt/python -P -m " in command


def test_no_worker_takes_itself_for_a_rank_of_mpirun() -> None:
    variables = {"OMPI_COMM_WORLD_RANK": "2", "PMIX_RANK": "2", "OMPI_MCA_plm": "rsh", "PATH": "/bin"}
    node.forget_task(Mpi.TASK_VARIABLES, variables)
    assert variables == {"PATH": "/bin"}


def test_agent_that_was_started_by_hand_says_so() -> None:
    with pytest.raises(ConfigError, match="SLURM_PROCID is not set"):
        node.number_in("SLURM_PROCID", {})


def test_workers_use_the_interface_that_leads_to_the_head() -> None:
    variables: dict[str, str] = {}
    assert node.use_interface("127.0.0.1", variables) == "127.0.0.1"
    assert variables == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def test_name_that_does_not_resolve_is_told_with_the_host() -> None:
    with pytest.raises(LaunchError, match=r"nowhere\.invalid does not resolve"):
        addresses.towards(["nowhere.invalid"])


def placement(nodes: int) -> tuple[Placement, list[list[int]]]:
    started: list[list[int]] = []

    def start(which: Sequence[int], head: str) -> subprocess.Popen[bytes]:
        started.append(list(which))
        return subprocess.Popen(["sleep", "60"])

    return Placement(nodes, start), started


def test_one_process_starts_all_agents_and_a_lost_one_is_started_alone() -> None:
    placed, started = placement(3)
    node_agents = [placed.start_agent(number, "h:1", "secret") for number in range(3)]
    node_agents[1].kill()  # the head gives the lost one up before it starts it again
    assert node_agents[1].wait() == 0
    again = placed.start_agent(1, "h:1", "secret")
    still_there = node_agents[0].poll() is None
    again.kill()
    again.wait()
    for node_agent in (node_agents[0], node_agents[2]):
        node_agent.kill()
    assert (started, still_there, node_agents[0].wait()) == ([[0, 1, 2], [1]], True, -15)


def test_waiting_in_vain_for_all_takes_as_long_as_for_one() -> None:
    placed, _ = placement(8)
    node_agents = [placed.start_agent(number, "h:1", "secret") for number in range(8)]
    with pytest.raises(subprocess.TimeoutExpired):
        node_agents[0].wait(timeout=0.1)
    for node_agent in node_agents[1:]:
        with pytest.raises(subprocess.TimeoutExpired):
            node_agent.wait(timeout=120)  # the test's own time limit would end this
    for node_agent in node_agents:
        node_agent.kill()
    assert node_agents[0].wait(timeout=120) == -15


def test_engine_is_left_alone_while_agents_tidy_up_and_killed_where_it_does_not_end_when_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("manyhosts.launchers.placed._END_S", 0.2)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    engine = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
    node_agent = Placement(1, lambda *_: engine).start_agent(0, "h:1", "secret")
    assert engine.stdout is not None
    with engine.stdout:
        engine.stdout.readline()  # it is deaf now
    node_agent.terminate()
    time.sleep(0.5)
    assert node_agent.poll() is None
    node_agent.kill()
    assert node_agent.wait(timeout=120) == -9
