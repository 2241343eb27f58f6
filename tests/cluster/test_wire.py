"""Two hosts with two workers each: what really goes over the cable between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import free_port

from manyhosts.lab import Lab

SCRIPT = Path(__file__).with_name("wire_script.py")
PARAMETERS = 1024 * 1024
STEPS = 6


def bytes_on_the_cable(hosts: Lab, ways: list[str]) -> dict[str, float]:
    """What the first host's card has sent in a step of each way, on the mean."""
    port = free_port()
    processes = []
    for node, host in enumerate(hosts):
        for local in range(2):
            place = {"RANK": 2 * node + local, "WORLD_SIZE": 4, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": 2}
            place |= {"GROUP_RANK": node, "MASTER_ADDR": hosts[0].address, "MASTER_PORT": port}
            variables = {key: str(value) for key, value in place.items()}
            variables |= {"GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
            words = [sys.executable, str(SCRIPT), str(STEPS), *ways]
            processes.append(host.start(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    answers = [process.communicate(timeout=150) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, [error[-2000:] for _, error in answers]
    found: dict[str, float] = json.loads(answers[0][0])
    return found


@pytest.fixture
def sent(make_lab: Callable[..., Lab]) -> dict[str, float]:
    ways = ["none", "int8 exact", "int8 alike", "bf16 exact", "local-sgd exact", "local-sgd alike"]
    return bytes_on_the_cable(make_lab(2, prefix="wire"), ways)


def test_what_goes_between_hosts_is_what_a_node_sends_compressed(sent: dict[str, float]) -> None:
    gradient = 4 * PARAMETERS
    # A ring of four workers on two hosts passes each cable with 2 * 3/4 of the gradient, and headers.
    assert sent["none"] == pytest.approx(1.5 * gradient, rel=0.1)
    # Two nodes that exchange halves: there and back 2 * 1/2, a quarter of the bytes each.
    assert sent["int8 exact"] == pytest.approx(gradient / 3.94, rel=0.12)
    assert sent["bf16 exact"] == pytest.approx(gradient / 2, rel=0.12)
    assert sent["int8 alike"] == pytest.approx(2 * sent["int8 exact"], rel=0.15)
    # Models meet every third step; in between only the loss is told, whatever goes on inside the nodes.
    assert sent["local-sgd exact"] == pytest.approx(sent["none"] / 3, rel=0.15)
    assert sent["local-sgd alike"] == pytest.approx(sent["none"] / 3, rel=0.15)
