"""How long does the doctor take to examine four hosts, each pair of them included?

    python benchmarks/doctor.py [--rounds 5]            # as root, on Linux: it makes hosts of this machine

Four hosts of a lab, that share nothing but wires of 1 gbit; all of them on the processor of this machine. The clock
runs from the start of `manyhosts doctor --hosts` to its end. One warm-up is not counted. The answer is written to
doctor.md beside this file.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

from machine import describe

from manyhosts.lab import lab

REPORT = Path(__file__).with_suffix(".md")
HOSTS = 4
TABLE = """# How long the doctor takes

Written by `python benchmarks/doctor.py --rounds {rounds}`, whose first lines say what is done.

{machine} Load of the machine before it: {load:.1f}.

| hosts | pairs | n | median | least | most | found |
|---:|---:|---:|---:|---:|---:|---|
| {hosts} | {pairs} | {rounds} | {median:.1f} s | {least:.1f} s | {most:.1f} s | {found} |
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    rounds = options.parse_args().rounds
    load, seconds, codes = os.getloadavg()[0], [], set()
    with lab(HOSTS) as hosts:
        words = [sys.executable, "-P", "-m", "manyhosts.cli.main", "doctor", "--hosts", ",".join(hosts.names)]
        for _ in range(rounds + 1):
            began = time.perf_counter()
            done = hosts.desk.run(words, timeout_s=300, check=False)
            seconds.append(time.perf_counter() - began)
            codes.add(done.returncode)
            print(f"{seconds[-1]:.1f} s, exit code {done.returncode}", flush=True)
    text = TABLE.format(
        machine=describe(Path(sys.executable), ["torch", "manyhosts"]),
        load=load,
        rounds=rounds,
        hosts=HOSTS,
        pairs=HOSTS * (HOSTS - 1) // 2,
        median=statistics.median(seconds[1:]),
        least=min(seconds[1:]),
        most=max(seconds[1:]),
        found="nothing wrong" if codes == {0} else f"exit codes {sorted(codes)}",
    )
    REPORT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
