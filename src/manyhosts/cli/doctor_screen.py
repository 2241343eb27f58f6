"""What `manyhosts doctor` shows: a table of hosts, a matrix of the ways between them, and what is wrong."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from manyhosts.cluster.findings import LEVELS, Finding
from manyhosts.doctor import fast_links, network
from manyhosts.doctor.examination import Examination
from manyhosts.units import bytes_in_words, seconds_in_words

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
    meeting = found.meeting
    if "seconds" not in meeting:
        return []
    met, summed = seconds_in_words(meeting["seconds"]), f"{meeting['sum_s'] * 1e3:.3g} ms"
    return ["", f"All {len(meeting['hosts'])} met within {met}; a sum of 1 MiB over them takes {summed}."]


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
