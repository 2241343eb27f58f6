"""How long it takes until each fault of a cluster is told: the tests that put it in, timed.

    sudo python benchmarks/fault_matrix.py            # some minutes; writes fault_matrix.md
    python benchmarks/fault_matrix.py --from LOG      # from what such a run of pytest has printed

Each test starts a run (or finds it refused), puts in one fault, and checks the sentence that is told, with its host and
rank. The seconds are those of the whole test: from typing the command to the end of the command.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from machine import describe

HERE = Path(__file__).parent
TESTS = (
    "tests/cluster/test_ssh_faults.py",
    "tests/cluster/test_hangs.py",
    "tests/cluster/test_precheck.py",
    "tests/cluster/test_ssh.py::test_port_that_torchrun_would_take_may_be_taken",
    "tests/cluster/test_mpi.py::test_host_of_mpi_that_does_not_share_the_folder_is_named_with_what_it_lacks",
    "tests/cluster/test_mpi.py::test_firewall_between_two_hosts_of_mpi_is_named_before_workers_start",
    "tests/cluster/test_slurm.py::test_host_of_slurm_that_does_not_share_the_folder_is_named_with_what_it_lacks",
    "tests/cluster/test_ray.py::test_host_of_ray_that_does_not_share_the_folder_is_named_with_what_it_lacks",
    "tests/cluster/test_doctor.py::test_half_the_bandwidth_and_half_the_speed_are_named_with_their_factors",
    "tests/multiprocess/test_hangs.py",
)
_LINE = re.compile(r"^(?P<seconds>[\d.]+)s call +(?P<file>[\w/]+\.py)::test_(?P<name>[^\[@\s]+)(\[(?P<case>[^\]]+)\])?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="log", type=Path, help="what pytest --durations=0 -vv printed")
    log = parser.parse_args().log
    if log is None:
        words = [sys.executable, "-m", "pytest", "--durations=0", "-vv", *TESTS]
        text = subprocess.run(words, cwd=HERE.parent, capture_output=True, text=True, check=True).stdout
    else:
        text = log.read_text()
    rows = [found for line in text.splitlines() if (found := _LINE.match(line))]
    (HERE / "fault_matrix.md").write_text(page(rows, re.findall(r"\d+ (?:passed|failed)[^=]*", text)[-1].strip()))


def page(rows: list[re.Match[str]], verdict: str) -> str:
    lines = [
        "# How long until a fault is told",
        "",
        "Written by `sudo python benchmarks/fault_matrix.py`. Each line is a test: it starts a run on practice hosts",
        "(or on this machine), puts one fault in, and checks the sentence that is told, with its host and rank. The",
        "seconds are those of the whole test, with the start of the run and with the making of hosts that the fault",
        "ruins. Where a worker hangs, `--hang-timeout` is a few seconds.",
        "",
        f"{describe(Path(sys.executable), ('torch', 'manyhosts'))} {verdict}.",
        "",
        "| fault | seconds | test |",
        "|---|---:|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["file"], float(row["seconds"]))):
        fault = row["name"].replace("_", " ") + (f" ({row['case']})" if row["case"] else "")
        fault = fault.replace("|", "\\|")
        lines.append(f"| {fault} | {float(row['seconds']):.1f} | [{Path(row['file']).stem}](../{row['file']}) |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
