"""`manyhosts doctor` examines every host and every pair of hosts; `manyhosts env` records what they have installed."""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import click

from manyhosts.cli.cluster import cluster_option, target_options, typed_first, with_table
from manyhosts.cli.progress import Progress
from manyhosts.cli.where import Where, pairs
from manyhosts.cluster.findings import LEVELS, Finding, worst_first
from manyhosts.control.job import Job
from manyhosts.doctor import fast_links, network
from manyhosts.doctor.examination import Examination
from manyhosts.errors import ConfigError, LaunchError
from manyhosts.launchers import scripts
from manyhosts.launchers.launcher import LAUNCHERS
from manyhosts.units import bytes_in_words, seconds_in_words


def places(command: Callable[..., int]) -> Callable[..., int]:
    """Options that say which hosts are examined, as `run` takes them."""
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
    callback=with_table,
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
    them, too. Hosts are compared with the manyhosts.lock of the working directory, which `manyhosts env lock` writes.

    Exit codes: 0 nothing is bad (there may be warnings), 2 the request was wrong, 3 a host cannot be reached or is not
    fit for a run, 4 hosts cannot talk to each other.
    """
    if script and not script.endswith(".py") and not Path(script).exists():
        fix = f"if it is a host: manyhosts doctor --hosts {shlex.quote(script)}"
        raise ConfigError(f"there is no script {script!r}", where=str(Path.cwd()), fix=fix)
    if script:
        scripts.check(script, "script")
    examination = examined(Where(**typed_first(words)), run_dir=run_dir, data=data, script=script, silent=as_json)
    if isinstance(examination, int):
        return examination
    if as_json:
        print(json.dumps(examination.to_json(), indent=1))
    else:
        print_examination(examination, sys.stdout)
    return examination.exit_code


def examined(
    where: Where,
    *,
    run_dir: str | None = None,
    data: Sequence[str] = (),
    script: str = "",
    silent: bool = False,
    compares: bool = True,
) -> Examination | int:
    """What the doctor finds there; or the exit code of this very command, where it was called again in an allocation.

    Raises:
        ConfigError, LaunchError: the request makes no sense, or no host could be reached.
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
    if compares and (kept := lock.in_folder(Path.cwd())) is not None:
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
    if most == 0:
        raise ConfigError("--nodes is 0", where="--nodes", fix="give 1 or more")
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


Facts = Mapping[str, Any]
_WIDTH = 96
_MOST_IN_A_MATRIX = 12
_COLOURS = {"error": "31", "warning": "33", "note": "36"}


def print_examination(found: Examination, stream: TextIO) -> None:
    """Print everything, for a terminal of 96 columns or less where the names of hosts are short."""
    lines = [*_hosts(found.hosts), *_ways(found.hosts, found.pairs), *_rendezvous(found)]
    for finding in found.findings:
        lines += ["", *_finding(finding, colour=stream.isatty())]
    lines += ["", _sum(found)]
    stream.write("\n".join(lines).strip("\n") + "\n")


def _hosts(hosts: Sequence[Facts]) -> list[str]:
    if not hosts:
        return []
    heads = ("host", "python", "torch", "cores", "memory free", "disk free", "GPUs", "fast links", "clock", "speed")
    return _table(heads, [_host_row(host) for host in hosts])


def _host_row(host: Facts) -> list[str]:
    reported = host.get("condition", {})
    memory, clock = reported.get("memory"), host.get("clock")
    disk = reported.get("disks", {}).get("run directory")
    speed = host.get("speed", {})
    return [
        host["name"],
        host["python"],
        host["torch"] or "none",
        str(reported.get("cores", "")),
        bytes_in_words(memory["available"]) if memory else "",
        bytes_in_words(disk["free"]) if disk else "",
        _gpus(host.get("graphics", {})),
        fast_links.of_host(host),
        _offset(clock) if clock else "",
        _speed(speed) if speed else "",
    ]


def _gpus(graphics: Facts) -> str:
    gpus = graphics.get("gpus", [])
    if not gpus:
        return "?" if graphics.get("trouble") else "no GPU"
    return f"{len(gpus)} x {gpus[0]['name'].removeprefix('NVIDIA ')}"


def _offset(clock: Facts) -> str:
    offset = clock["offset_s"]
    if abs(offset) < max(0.01, clock["unsure_s"]):
        return "right"
    return ("+" if offset > 0 else "-") + seconds_in_words(abs(offset))


def _speed(speed: Facts) -> str:
    if speed["gpus"]:
        return f"{min(speed['gpus']) / 1e12:.3g} TFLOP/s"
    return f"{speed['cpu'] / 1e9:.3g} GFLOP/s" if speed["unit"] == "operations" else f"{speed['cpu']:.0f} loops/s"


def _ways(hosts: Sequence[Facts], pairs: Sequence[Facts]) -> list[str]:
    known = [pair for pair in pairs if "bandwidth" in pair]
    if not pairs:
        return []
    latencies = [pair["latency_s"] * 1e3 for pair in known]
    sizes = sorted({str(host["mtu"]) for host in hosts if host.get("mtu")})
    over = sorted({host["interface"] for host in hosts if host["interface"]})
    facts = [f"over {', '.join(over)}"] if over else []
    facts += [f"latency {statistics.median(latencies):.2g} ms, {max(latencies):.2g} at most"] if known else []
    facts += [f"MTU {', '.join(sizes)}"] if sizes else []
    names = [host["name"] for host in hosts]
    unit, scale = ("Gbit/s", 8e-9) if known and max(p["bandwidth"] for p in known) > 1e9 / 4 else ("Mbit/s", 8e-6)
    lines = ["", f"From the row to the column, in {unit} ({'; '.join(facts)}):" if facts else "Ways:"]
    if len(names) > _MOST_IN_A_MATRIX:
        speeds = [pair["bandwidth"] * scale for pair in known]
        said = (
            f"median {_number(statistics.median(speeds))}, from {_number(min(speeds))} to {_number(max(speeds))}"
            if speeds
            else "none"
        )
        return [*lines, f"{len(known)} of {len(pairs)} ways are open: {said}; --json has each"]
    by_pair = {(pair["from"], pair["to"]): pair for pair in pairs}
    rows = [[one, *(_cell(hosts, pairs, by_pair.get((one, other)), scale) for other in names)] for one in names]
    starred = any("*" in cell for row in rows for cell in row)
    return [*lines, *_table(("", *names), rows), *(["* far below the median"] if starred else [])]


def _cell(hosts: Sequence[Facts], pairs: Sequence[Facts], pair: Facts | None, scale: float) -> str:
    if pair is None:
        return "-"
    if "bandwidth" not in pair:
        return "closed"
    return _number(pair["bandwidth"] * scale) + ("*" if network.is_slow(hosts, pairs, pair) else "")


def _number(value: float) -> str:
    """With three digits that matter, and never as a power of ten."""
    return f"{value:.0f}" if value >= 99.5 else f"{value:.3g}"


def _rendezvous(found: Examination) -> list[str]:
    rendezvous = found.rendezvous
    if "seconds" not in rendezvous:
        return []
    met, summed = seconds_in_words(rendezvous["seconds"]), f"{rendezvous['sum_s'] * 1e3:.3g} ms"
    return ["", f"All {len(rendezvous['hosts'])} met within {met}; a sum of 1 MiB over them takes {summed}."]


def _finding(finding: Finding, *, colour: bool) -> list[str]:
    word = f"\x1b[{_COLOURS[finding.level]}m{finding.level}\x1b[0m" if colour else finding.level
    begin = " " * 9
    what = textwrap.wrap(finding.what, _WIDTH - len(begin), break_long_words=False, break_on_hyphens=False)
    fix = textwrap.wrap(finding.fix, _WIDTH - 16, break_long_words=False, break_on_hyphens=False)
    lines = [word + " " * (len(begin) - len(finding.level)) + what[0], *(begin + line for line in what[1:])]
    lines.append(f"{begin}where: {finding.where}")
    return [*lines, f"{begin}fix:   {fix[0]}", *(begin + " " * 7 + line for line in fix[1:])]


def _sum(found: Examination) -> str:
    counts = [(sum(finding.level == level for finding in found.findings), level) for level in LEVELS]
    said = ", ".join(f"{count} {level}{'s' * (count > 1)}" for count, level in counts if count)
    hosts = len(found.hosts)
    looked = f"{hosts} host{'s' * (hosts != 1)} examined in {seconds_in_words(found.seconds)}"
    return f"{said or 'Nothing is wrong'}; {looked}."


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they must be; those with nothing in them are left out."""
    kept = [number for number in range(len(heads)) if any(row[number] for row in rows)]
    table = [[row[number] for number in kept] for row in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


_TRACE = click.option("--trace", is_flag=True, help="Show where in manyhosts an error was raised.")


@click.group()
def env() -> None:
    """Record what hosts have installed, and compare hosts with that record."""


@env.command()
@places
@click.option("--output", default="manyhosts.lock", show_default=True, metavar="FILE", help="Where to write it.")
@_TRACE
def lock(output: str, trace: bool, **words: str | None) -> int:
    """Write down what hosts have: Python, every package, cores, GPUs.

    It takes the words that `run` takes to say where. From then on `manyhosts doctor` compares hosts with
    manyhosts.lock of the working directory: another version is an error, other hardware a warning.
    """
    from manyhosts.doctor import lock as locks

    found = examined(Where(**typed_first(words)), compares=False)
    if isinstance(found, int):
        return found
    lost = [finding for finding in found.findings if finding.check == "reach"]
    if lost or not found.hosts:
        what = lost[0].what if lost else "no host was reached"
        raise LaunchError(what, where="--hosts", fix="mend that first: a lock holds all hosts that are named")
    kept = None
    with contextlib.suppress(ConfigError):  # one that cannot be read is written again
        kept = locks.in_folder(Path(output).parent) if Path(output).name == locks.NAME else None
    locks.write(Path(output), found.hosts)
    if gone := sorted((kept or {}).keys() - {host["name"] for host in found.hosts}):
        print(f"{output} had {', '.join(gone)}, too, and has not any more: name all hosts at once", file=sys.stderr)
    print(f"{output}: {', '.join(host['name'] for host in found.hosts)}")
    return 0


@env.command()
@click.option("--output", default=".", metavar="FOLDER", help="Where to write it.  [default: here]")
@_TRACE
def container(output: str, trace: bool) -> int:
    """Write a Dockerfile, and the versions it installs, of what manyhosts.lock says."""
    from manyhosts.doctor import lock as locks

    if place := locks.in_the_way(Path(output)):
        fix = "give --output FOLDER, or move it away"
        raise ConfigError(f"{place.name} is there already, and is none of ours", where=str(place.absolute()), fix=fix)
    for path in locks.write_recipe(Path(output), locks.read(Path(locks.NAME))):
        print(path)
    return 0
