"""Starts `manyhosts run --hosts` at the desk of a lab, as a user of a real cluster does."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from launching import BEGINNING, MANYHOSTS, write_script

from manyhosts.lab import Lab

EXAMPLES = Path(__file__).parents[1] / "examples"


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
    seconds: float


def words(*options: str, script: str = "script.py", arguments: Sequence[str] = ()) -> list[str]:
    """What is typed. One thread for each worker: the hosts of a lab share this machine's cores."""
    return [*MANYHOSTS, "run", "--env", "OMP_NUM_THREADS=1", *options, script, *arguments]


def start(
    hosts: Lab,
    folder: Path,
    source: str | None,
    *options: str,
    variables: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
    into: Path | None = None,
    script: str = "script.py",
) -> subprocess.Popen[str]:
    """Start it, and do not wait. `source` None: the script is there already; `into`: a file for all that it prints."""
    if source is not None:
        write_script(folder, source)
    with nullcontext(subprocess.PIPE) if into is None else into.open("w") as stream:
        return hosts.desk.start(
            words(*options, script=script, arguments=arguments),
            folder=str(folder),
            env=variables,
            stdout=stream,
            stderr=stream,
            process_group=0,
        )


def run(
    hosts: Lab,
    folder: Path,
    source: str | None,
    *options: str,
    variables: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
    timeout_s: float = 120,
) -> Ended:
    """Run it to its end."""
    begin = time.monotonic()
    process = start(hosts, folder, source, *options, variables=variables, arguments=arguments)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        hosts.desk.end(process)
        out, err = process.communicate()
        raise AssertionError(f"no end after {timeout_s} s:\n{out}\n{err}") from None
    return Ended(process.returncode, out, BEGINNING.sub("", err), time.monotonic() - begin)
