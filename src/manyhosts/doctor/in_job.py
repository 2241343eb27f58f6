"""What the nodes of an engine's job do in place of a run, where none of them can connect to the user's machine.

The first node examines, and the user's machine reads what it has found in the job's log: lines that begin with `MARK`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from manyhosts.cluster.findings import Finding
from manyhosts.control import first_node
from manyhosts.control.first_node import NodeInfo
from manyhosts.control.head.state import PORT
from manyhosts.control.job import Job
from manyhosts.doctor import host_probe as doctor_station
from manyhosts.doctor.examination import Request, examine
from manyhosts.doctor.probe_server import ProbeServer, Reached, unreachable
from manyhosts.errors import LaunchError

MARK = "manyhosts-doctor "
REQUEST = "MANYHOSTS_DOCTOR_REQUEST"
"""The variable with what is to be looked at, as JSON; paths below the working directory are relative to it."""
LATE_S = 90.0
"""How long the other nodes are waited for once the first is up: images may still have to be brought there."""
_MOST_PATIENCE_S = 600.0
_MOST_IN_A_LINE = 8000  # an engine's log may cut longer ones


def be_node(job: Job, here: NodeInfo, patience_s: float) -> int:
    """Examine all nodes on the first one; answer its questions on the others. Returns 0: the doctor judges."""
    os.environ["GROUP_RANK"] = str(here.number)
    os.chdir(job.folder)
    if here.number > 0:
        doctor_station.speak(first_node.call(here.head, min(patience_s, _MOST_PATIENCE_S)), here.token)
        return 0
    probe_server = ProbeServer(here.address, PORT, here.token)
    place = {doctor_station.DOCTOR: probe_server.place, doctor_station.TOKEN: here.token}
    own = subprocess.Popen(
        [sys.executable, "-P", "-m", doctor_station.__name__], env={**os.environ, **place}, stdin=subprocess.DEVNULL
    )
    try:
        _say("does", "waiting for the other nodes")
        reached = probe_server.greet(
            job.nodes, lambda hellos: _names(here, hellos), patience_s=_MOST_PATIENCE_S, late_s=LATE_S
        )
        request = _request(json.loads(job.environment[REQUEST]))
        found = examine(reached, _missing(here, reached), request, lambda text: _say("does", text))
        first = f"host {here.hosts[0]}"  # is what 'this machine' is, seen from here
        findings = [replace(one, what=one.what.replace("this machine", first)) for one in found.findings]
        _say("found", json.dumps(replace(found, findings=findings).to_json()))
    finally:
        probe_server.close()
        own.wait(timeout=30)
    return 0


def read(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """What a first node has said, from its log: (`does`, what it does), (`found`, JSON), and (`else`, other lines)."""
    found = ""
    for line in lines:
        kind, _, text = line.removeprefix(MARK).partition(" ") if line.startswith(MARK) else ("else", "", line)
        found += text if kind == "found" else ""
        if kind == "end":
            yield "found", found
            found = ""
        elif kind != "found":
            yield kind, text


def _say(kind: str, text: str) -> None:
    for begin in range(0, len(text), _MOST_IN_A_LINE):
        sys.stdout.write(f"{MARK}{kind} {text[begin : begin + _MOST_IN_A_LINE]}\n")
    if kind == "found":
        sys.stdout.write(f"{MARK}end \n")
    sys.stdout.flush()


def _request(asked: Mapping[str, Any]) -> Request:
    def here(path: str) -> str:
        return str(Path(path).absolute())

    return Request(
        target=asked["target"],
        run_dir=here(asked["run_dir"]),
        script=here(asked["script"]) if asked["script"] else "",
        data=tuple(here(path) for path in asked["data"]),
        shares_disk=asked["shares_disk"],
    )


def _names(here: NodeInfo, hellos: Sequence[Mapping[str, Any]]) -> list[str]:
    return [here.hosts[int(hello["group_rank"])] for hello in hellos]


def _missing(here: NodeInfo, reached: Sequence[Reached]) -> list[Finding]:
    return [
        unreachable(
            LaunchError(
                f"host {name} did not report to {here.hosts[0]} within {LATE_S:.0f} s",
                where=f"host {name}",
                fix=f"see whether it was started, what it has printed, and that it may talk to {here.head}",
            ),
            name,
        )
        for name in here.hosts
        if name not in {each.name for each in reached}
    ]
