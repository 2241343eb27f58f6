"""Examines hosts that cannot connect to the user's machine: the job itself is the doctor, and its log the report."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from manyhosts.control.job import Job
from manyhosts.doctor import in_job
from manyhosts.doctor.examination import Examination, Request
from manyhosts.doctor.probe_server import unreachable
from manyhosts.errors import LaunchError
from manyhosts.launchers import handles
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
    own = replace(job, in_place=in_job.__name__, environment={in_job.REQUEST: json.dumps(asdict(request))})
    jobs = handles.jobs_of(engine)
    report(f"sending the doctor to {request.target}")
    name = jobs.send(engine.plan(own))
    begin = time.monotonic()
    reported = False
    try:
        found = _hear(jobs, name, request, report)
        reported = True
    except LaunchError as error:
        lost = [unreachable(error, request.target)]
        found = Examination(request=request, findings=lost, seconds=time.monotonic() - begin)
    finally:
        if not reported:  # else it is ending by itself
            jobs.cancel(name)
        engine.forget(name)
    return found


def _hear(jobs: Jobs, name: str, request: Request, report: Callable[[str], None]) -> Examination:
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
    for kind, text in in_job.read(jobs.logs(name, follow=True)):
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
