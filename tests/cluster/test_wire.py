"""Hosts: what really goes over the cable between them, and what their workers count of it."""

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
HEADERS = 30_000
"""Of the messages of a step, at most: what a worker counts is payload."""


def bytes_on_the_cable(hosts: Lab, ways: list[str], each: int) -> dict[str, tuple[float, float]]:
    """What the first host's card has sent in a step of each way, on the mean, and what its first worker has counted.

    `each`: workers of a host.
    """
    port = free_port()
    processes = []
    for node, host in enumerate(hosts):
        for local in range(each):
            place = {"RANK": each * node + local, "WORLD_SIZE": len(hosts) * each, "LOCAL_RANK": local}
            place |= {"LOCAL_WORLD_SIZE": each}
            place |= {"GROUP_RANK": node, "MASTER_ADDR": hosts[0].address, "MASTER_PORT": port}
            variables = {key: str(value) for key, value in place.items()}
            variables |= {"GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
            words = [sys.executable, str(SCRIPT), str(STEPS), *ways]
            processes.append(host.start(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    answers = [process.communicate(timeout=150) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), [
        error[-2000:] for _, error in answers
    ]
    found: dict[str, tuple[float, float]] = json.loads(answers[0][0])
    return found


@pytest.fixture
def sent(make_lab: Callable[..., Lab]) -> dict[str, float]:
    ways = ["none", "int8 exact", "int8 alike", "bf16 exact", "local-sgd exact", "local-sgd alike"]
    return {way: sent for way, (sent, _) in bytes_on_the_cable(make_lab(2, prefix="wire"), ways, 2).items()}


@pytest.mark.slow  # what nodes send: test_nodes of tests/multiprocess; real cables: the test below
def test_what_goes_between_hosts_is_what_a_node_sends_compressed(sent: dict[str, float]) -> None:
    gradient = 4 * PARAMETERS
    # A ring of four workers on two hosts passes each cable with 2 * 3/4 of the gradient, and headers.
    assert sent["none"] == pytest.approx(1.5 * gradient, rel=0.1)
    # Two nodes that exchange halves: there and back 2 * 1/2, a quarter of the bytes each.
    assert sent["int8 exact"] == pytest.approx(gradient / 3.94, rel=0.12)
    assert sent["bf16 exact"] == pytest.approx(gradient / 2, rel=0.12)
    assert sent["int8 alike"] == pytest.approx(2 * sent["int8 exact"], rel=0.15)
    # Models meet every third step; in between only the loss is told, whatever continues inside the nodes.
    assert sent["local-sgd exact"] == pytest.approx(sent["none"] / 3, rel=0.15)
    assert sent["local-sgd alike"] == pytest.approx(sent["none"] / 3, rel=0.15)


def test_workers_count_what_goes_over_their_cable_under_every_strategy(make_lab: Callable[..., Lab]) -> None:
    ways = ["none", "int8", "powersgd", "virtual", "fsdp 1", "fsdp 2", "fsdp 3", "local-sgd exact", "diloco"]
    found = bytes_on_the_cable(make_lab(3, prefix="count"), ways, 1)
    assert found.keys() == set(ways)
    for way, (sent, counted) in found.items():
        assert counted < sent < 1.02 * counted + HEADERS, f"{way}: {found}"
