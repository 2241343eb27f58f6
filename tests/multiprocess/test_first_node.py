"""Nodes that an engine starts, in any order: they find each other, and their exit code says whether to come again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import environment, wait_until
from ranks import free_port

from manyhosts.control import first_node, job_file
from manyhosts.control.first_node import AGAIN, NodeInfo
from manyhosts.control.job import Job
from manyhosts.errors import ConfigError, LaunchError
from manyhosts.hosts import addresses, interfaces
from manyhosts.launchers import packing
from manyhosts.launchers.kubernetes import manifest
from manyhosts.launchers.kubernetes import node as kubernetes_node
from manyhosts.launchers.sagemaker import node as sagemaker_node

pytestmark = pytest.mark.multiprocess


def start(job: Job, index: int, port: int, address: str = "127.0.0.1", *words: str) -> subprocess.Popen[str]:
    """A pod's process, with a pod's environment. `words`: what Python is given in place of the pod's module."""
    own = {
        manifest.JOB: job_file.text_of(job),
        manifest.HEAD: addresses.place(address, port),
        manifest.ADDRESS: address,
        manifest.TOKEN: "a secret",
        "JOB_COMPLETION_INDEX": str(index),
    }
    words = words or ("-m", "manyhosts.launchers.kubernetes.node")
    return subprocess.Popen(
        [sys.executable, "-P", *words],
        env={**environment(), **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def job(folder: Path, source: str) -> Job:
    (folder / "script.py").write_text(source)
    return Job(program="script.py", folder=folder, run_dir=folder / "run", nodes=2, farewell_s=5)


def reported(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=120)
    return process.returncode, out


WAITS = """
import os, pathlib, time
pathlib.Path("begun-" + os.environ["RANK"]).touch()
while True:
    time.sleep(0.1)
"""


MEETS = """
import os
import torch
from torch import distributed as dist
dist.init_process_group("gloo")
rank = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(rank)
print(rank.item(), "a secret" in str(os.environ), os.environ["MASTER_ADDR"], os.environ["GLOO_SOCKET_IFNAME"])
"""


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_nodes_find_each_other_whoever_is_first_and_no_worker_sees_the_token(address: str, tmp_path: Path) -> None:
    """Also on a cluster that has addresses of IPv6 alone."""
    try:
        addresses.listen(address, 0, backlog=1).close()
    except OSError as trouble:
        pytest.skip(f"this machine has no {address}: {trouble}")
    wished, port = job(tmp_path, MEETS), free_port()
    later = start(wished, 1, port, address)
    time.sleep(0.5)  # it calls, and nobody answers yet
    code, out = reported(start(wished, 0, port, address))
    assert (code, reported(later)[0]) == (0, 0), out
    lines = [line for line in out.splitlines() if line.startswith("[")]  # not what is said of a machine that is busy
    assert [line.split("] ")[1] for line in lines] == [f"3.0 False {address} lo"] * 2, out


@pytest.mark.parametrize("asked", [0, 1])
def test_nodes_come_again_when_one_was_asked_to_end(asked: int, tmp_path: Path) -> None:
    wished, port = job(tmp_path, WAITS), free_port()
    nodes = [start(wished, index, port) for index in range(2)]
    wait_until(lambda: len(list(tmp_path.glob("begun-*"))) == 2, "both workers run")
    nodes[asked].send_signal(signal.SIGTERM)
    assert [reported(node)[0] for node in nodes] == [AGAIN, AGAIN]


def test_node_that_has_lost_the_first_comes_again(tmp_path: Path) -> None:
    wished, port = job(tmp_path, WAITS), free_port()
    nodes = [start(wished, index, port) for index in range(2)]
    wait_until(lambda: len(list(tmp_path.glob("begun-*"))) == 2, "both workers run")
    nodes[0].kill()
    assert reported(nodes[1])[0] == AGAIN
    reported(nodes[0])


def test_failure_of_the_script_is_final_on_all_nodes(tmp_path: Path) -> None:
    wished, port = (
        job(tmp_path, "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('a slip')"),
        free_port(),
    )
    nodes = [start(wished, index, port) for index in range(2)]
    code, out = reported(nodes[0])
    assert (code, reported(nodes[1])[0]) == (1, 1)
    assert "ValueError: a slip" in out


ENDED_BY_THE_ENGINE = """
import os, signal, sys
from manyhosts.control.head.run import Head
from manyhosts.launchers.kubernetes.node import main
result = Head._result
def asked_to_end(head):
    os.kill(os.getpid(), signal.SIGTERM)  # the other node has ended with the run's code, and its engine ends this one
    return result(head)
Head._result = asked_to_end
sys.exit(main())
"""


def test_node_that_is_ended_for_the_failure_of_the_run_says_what_it_was(tmp_path: Path) -> None:
    wished, port = job(tmp_path, "raise ValueError('a slip')"), free_port()
    first, other = start(wished, 0, port, "127.0.0.1", "-c", ENDED_BY_THE_ENGINE), start(wished, 1, port)
    code, out = reported(first)
    assert (code, reported(other)[0]) == (1, 1)
    assert "failed with ValueError: a slip" in out, out


def test_node_that_waits_for_the_first_ends_when_it_is_asked(tmp_path: Path) -> None:
    node = start(job(tmp_path, ""), 1, free_port())
    time.sleep(0.5)
    node.send_signal(signal.SIGTERM)
    assert reported(node)[0] in (AGAIN, -signal.SIGTERM)  # it may still be loading Python


def test_nodes_do_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in interfaces.VARIABLES:
        monkeypatch.setenv(name, "lo")
    port = free_port()
    alone = NodeInfo(number=1, hosts=["a", "b"], head=f"127.0.0.1:{port}", address="127.0.0.1", token="t")
    with pytest.raises(LaunchError, match="the first node was not to be reached within 0 s"):
        first_node.run(job(tmp_path, ""), alone, patience_s=0.1)


def test_pod_without_its_variables_says_that_it_is_not_to_be_started_by_hand(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert kubernetes_node.main({}) == 2
    assert "JOB_COMPLETION_INDEX is not set, so this process does not know" in capsys.readouterr().err


def test_instance_without_sagemakers_files_leaves_a_sentence_for_the_console(tmp_path: Path) -> None:
    assert sagemaker_node.main(tmp_path) == 2
    assert (tmp_path / "output" / "failure").read_text().startswith("manyhosts: cannot read what to run")
    own = tmp_path / "input" / "data" / "manyhosts"
    own.mkdir(parents=True)
    (own / "job.json").write_text(job_file.text_of(job(tmp_path, "")))
    (own / "token").write_text("t")
    assert sagemaker_node.main(tmp_path) == 2
    assert "SageMaker's description of the hosts" in (tmp_path / "output" / "failure").read_text()
    config = tmp_path / "input" / "config" / "resourceconfig.json"
    config.parent.mkdir()
    config.write_text(json.dumps({"hosts": ["a"], "current_host": "a", "network_interface_name": "lo"}))
    assert sagemaker_node.main(tmp_path) == 2
    assert "this job has 1 instances, and was sent for 2" in (tmp_path / "output" / "failure").read_text()


def test_packed_folder_is_the_same_there_and_holds_what_is_needed(tmp_path: Path) -> None:
    here = tmp_path / "here"
    (here / "part").mkdir(parents=True)
    (here / "runs" / "first").mkdir(parents=True)
    (here / "part" / "a.py").write_text("a = 1\n")
    (here / "runs" / "first" / "big").write_text("no")
    (here / "secret.bin").write_text("no")
    (here / ".manyhostsignore").write_text("*.bin\n")
    packed = packing.pack(here, leave_out=here / "runs" / "first")
    assert packed == packing.pack(here, leave_out=here / "runs" / "first"), "the same bytes for the same files"
    (tmp_path / "packed").write_bytes(packed)
    packing.unpack(tmp_path / "packed", tmp_path / "there")
    found = {str(path.relative_to(tmp_path / "there")) for path in (tmp_path / "there").rglob("*") if path.is_file()}
    assert found == {"part/a.py", ".manyhostsignore"}
    (tmp_path / "packed").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        packing.unpack(tmp_path / "packed", tmp_path / "elsewhere")
