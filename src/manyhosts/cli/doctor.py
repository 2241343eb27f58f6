"""`manyhosts doctor`: looks at every host and every pair of hosts before a run."""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from manyhosts.cli.cluster import beside_table, cluster_option, target_options
from manyhosts.cli.doctor_screen import print_examination
from manyhosts.cli.progress import Progress
from manyhosts.cli.where import Where, pairs
from manyhosts.cluster.findings import worst_first
from manyhosts.control.job import Job
from manyhosts.errors import ConfigError, LaunchError
from manyhosts.launchers import scripts
from manyhosts.launchers.launcher import LAUNCHERS

if TYPE_CHECKING:
    from manyhosts.doctor.examination import Examination


def places(command: Callable[..., int]) -> Callable[..., int]:
    """Options that say which hosts are looked at, as `run` takes them."""
    for option in reversed(
        (
            click.option(
                "--on", "target", metavar="TARGET", help="Where to look.  [default: ssh with --hosts, else local]"
            ),
            cluster_option,
            click.option("--hosts", metavar="A,B,C", help="Hosts that ssh reaches."),
            click.option("--hostfile", metavar="FILE", help="A file with a host on each line."),
            click.option("--nodes", metavar="N", help="Hosts; on local, several are rehearsed here.  [default: 1]"),
            target_options("An option of the target, as `run` takes it."),
        )
    ):
        command = option(command)
    return command


@click.command()
@places
@click.option("--run-dir", metavar="DIR", help="Where the record will be kept.  [default: runs]")
@click.option(
    "--data",
    multiple=True,
    metavar="PATH",
    callback=beside_table,
    help="A file or folder that all hosts must have alike.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--trace", is_flag=True, help="Show where in manyhosts an error was raised.")
@click.argument("script", default="", metavar="[SCRIPT]")
def doctor(
    run_dir: str | None, data: tuple[str, ...], as_json: bool, trace: bool, script: str, **words: str | None
) -> int:
    """Look at every host and every pair of hosts: what is wrong there, and what to type to mend it.

    It takes the words that `run` takes to say where, and leaves nothing on the hosts. A SCRIPT is compared between
    them, too. Hosts are held to the manyhosts.lock of the working directory, which `manyhosts env lock` writes.

    Exit codes: 0 nothing is bad (there may be warnings), 2 the request was wrong, 3 a host cannot be reached or is not
    fit for a run, 4 hosts cannot talk to each other.
    """
    if script and not script.endswith(".py") and not Path(script).exists():
        fix = f"if it is a host: manyhosts doctor --hosts {shlex.quote(script)}"
        raise ConfigError(f"there is no script {script!r}", where=str(Path.cwd()), fix=fix)
    if script:
        scripts.check(script, "script")
    examination = examined(Where(**words), run_dir=run_dir, data=data, script=script, silent=as_json)  # type: ignore[arg-type]  # click's words by name
    if isinstance(examination, int):
        return examination
    if as_json:
        print(json.dumps(examination.to_json(), indent=1))
    else:
        print_examination(examination, sys.stdout)
    return examination.exit_code


def examined(
    where: Where, *, run_dir: str | None = None, data: Sequence[str] = (), script: str = "", silent: bool = False
) -> Examination | int:
    """What the doctor finds there; or the exit code of this very command, where it was called again in an allocation.

    Raises:
        ConfigError, LaunchError: the request makes no sense, or nobody could be asked.
    """
    from manyhosts.doctor import access, as_job, host_probe, lock
    from manyhosts.doctor.examination import Request, examine

    scratch = Path(tempfile.gettempdir(), f"{host_probe.SCRATCH}{secrets.token_hex(8)}")
    target, job = _job(where, host_probe.__name__, scratch)
    engine = LAUNCHERS.load(target)()
    if words_before := engine.allocation(job):
        return _in_an_allocation(words_before)
    request = Request(
        target=target,
        run_dir=str(Path(run_dir or "runs").absolute()),
        script=str(Path(script).absolute()) if script else "",
        data=tuple(str(Path(path).absolute()) for path in data),
        shares_disk=engine.SHARES_DISK,
    )
    engine.plan(replace(job, least_nodes=None))  # refuses what makes no sense
    with contextlib.closing(Progress(sys.stderr, silent=silent)) as progress:
        if not engine.CALLS_BACK:
            examination = as_job.examine(engine, replace(job, least_nodes=None), request, progress.doing)
        else:
            with access.over_ssh(job) if engine.USES_SSH else access.in_a_job(engine, job) as (reached, lost):
                examination = examine(reached, lost, request, progress.doing)
    if (kept := lock.in_folder(Path.cwd())) is not None:
        examination.findings = worst_first([*examination.findings, *lock.findings(kept, examination.hosts)])
    return examination


def _in_an_allocation(before: Sequence[str]) -> int:
    """Have the engine give hosts, by the words `before`, and call this very command there. Returns its exit code."""
    try:
        return subprocess.call([*before, sys.executable, "-P", "-m", "manyhosts.cli.main", *sys.argv[1:]])
    except FileNotFoundError as cause:
        raise LaunchError(
            f"there is no {before[0]} on this machine", where="PATH", fix="start this on the login node of the cluster"
        ) from cause


def _job(where: Where, program: str, scratch: Path) -> tuple[str, Job]:
    """The target, and a job of one host probe on each of its hosts."""
    hosts, _ = where.named()
    _, most = where.least_and_most()
    nodes = len(hosts) or most or 1
    job = Job(
        program=program,
        kind="module",
        folder=Path.cwd(),
        run_dir=scratch,
        nodes=nodes,
        least_nodes=1 if nodes > 1 and not hosts else None,  # the others are examined where one does not come
        check=False,
        nodes_are_chosen=bool(hosts) or most is not None,
        hosts=hosts,
        options=pairs(where.options, "-o"),
    )
    return where.target_or(hosts), job
