"""Examines hosts that cannot connect to the user's machine: the job itself is the doctor, and its log the report.

The first node examines the others in place of a run. Its findings are lines of the log that begin with `MARK`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from manyhosts.cluster.findings import Finding
from manyhosts.control import first_node
from manyhosts.control.first_node import NodeInfo
from manyhosts.control.head.state import PORT
from manyhosts.control.job import Job
from manyhosts.doctor import host_probe as doctor_station
from manyhosts.doctor.examination import Examination, Request
from manyhosts.doctor.examination import examine as examine_hosts
from manyhosts.doctor.probe_server import ProbeServer, Reached, unreachable
from manyhosts.errors import LaunchError
from manyhosts.launchers import background
from manyhosts.launchers.detached import Jobs
from manyhosts.launchers.engine import Engine

_LOOK_S = 1.0
_PATIENCE_S = 900.0
"""How long an engine may take to start the first node."""
_LAST_WORDS = 3


def examine(engine: Engine, job: Job, request: Request, report: Callable[[str], None]) -> Examination:
    """Submit the doctor as a job, read its findings, and remove the job. `report` gets lines on the progress.

    Raises:
        ManyhostsError: the engine refused, or was not reached.
    """
    request = _there(engine, job, request)
    own = replace(job, in_place=__name__, environment={REQUEST: json.dumps(asdict(request))})
    jobs = background.jobs_of(engine)
    report(f"sending the doctor to {request.target}")
    name = jobs.send(engine.plan(own))
    begin = time.monotonic()
    reported = False
    try:
        found = _read_findings(jobs, name, request, report)
        reported = True
    except LaunchError as error:
        lost = [unreachable(error, request.target)]
        found = Examination(request=request, findings=lost, seconds=time.monotonic() - begin)
    finally:
        if not reported:  # else it is ending by itself
            jobs.cancel(name)
        engine.forget(name)
    return found


def _read_findings(jobs: Jobs, name: str, request: Request, report: Callable[[str], None]) -> Examination:
    deadline = time.monotonic() + _PATIENCE_S
    while (status := jobs.status(name)).state == "waiting":
        report(f"waiting for {request.target}: {status.reason}")
        if time.monotonic() > deadline:
            raise LaunchError(
                f"the first node was not started within {_PATIENCE_S:.0f} s: {status.reason}",
                where=f"{request.target}://{name}",
                fix="ask for less, or see what the engine waits for",
            )
        time.sleep(_LOOK_S)
    said: deque[str] = deque(maxlen=_LAST_WORDS)
    for kind, text in read(jobs.logs(name, follow=True)):
        if kind == "does":
            report(text)
        elif kind == "found":
            found = Examination.of_json(request, json.loads(text))
            if any(one.check == "reach" for one in found.findings):
                why = jobs.status(name).reason
                found.findings = [
                    replace(one, where=f"{one.where}; {request.target}: {why}") if one.check == "reach" else one
                    for one in found.findings
                ]
            return found
        elif text.strip():
            said.append(text.strip())
    status = jobs.status(name)
    raise LaunchError(
        f"the doctor's job ended without a report: {status.reason}",
        where=f"{request.target}://{name}, which printed: {'; '.join(said) or 'nothing'}",
        fix="see that manyhosts is in the image, of this version, and that -o python= names the right Python",
    )


def _there(engine: Engine, job: Job, request: Request) -> Request:
    """`request` as the nodes see it: what is below the working directory is below theirs."""

    def path(given: str) -> str:
        below = given and Path(given).is_relative_to(job.folder)
        return os.path.relpath(given, job.folder) if below else given

    run = replace(job, run_dir=Path(request.run_dir))
    there = engine.there(run)
    kept = there.run_dir.is_relative_to(there.folder)
    return replace(
        request,
        run_dir=os.path.relpath(there.run_dir, there.folder) if kept else str(there.run_dir),
        script=path(request.script),
        data=tuple(path(each) for each in request.data),
        shares_disk=engine.shares_disk(run),
    )


MARK = "manyhosts-doctor "
REQUEST = "MANYHOSTS_DOCTOR_REQUEST"
"""The variable with the request, as JSON; paths below the working directory are relative to it."""
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
        found = examine_hosts(reached, _missing(here, reached), request, lambda text: _say("does", text))
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
