"""How long from the command to the first training step on four hosts, against torchrun typed by hand on each?

    sudo python benchmarks/start_four_hosts.py [--rounds 7]

Four hosts of a lab, that share nothing but wires of 1 gbit. One plain DDP script on Gloo, one worker on each host,
started in turn by `manyhosts run --hosts` from a fifth host, and by torchrun on every host at the same moment: with
static rendezvous, and with c10d whose host is named. The clock runs from the start of the command until rank 0 has
made its first optimizer step. For torchrun the script is there already, no host is asked anything, and nobody needs
time to type. One warm-up of each is not counted. The answer is written to start_four_hosts.md beside this file.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from machine import describe
from startup import SCRIPT

from manyhosts.lab import Lab, lab

REPORT = Path(__file__).with_suffix(".md")
STAMP = "/tmp/first-step"
PLACE = "/root/first_step.py"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
OURS = "manyhosts run --hosts"
PORTS = itertools.count(29600)


def by_hand(hosts: Lab, options: Callable[[int, int], list[str]]) -> None:
    """torchrun on every host at the same moment, to its end."""
    port = next(PORTS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(hosts)), "--nproc-per-node", "1"]
    started = [
        host.start(
            [*torchrun, *options(node, port), PLACE, STAMP],
            env=ONE_THREAD,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for node, host in enumerate(hosts)
    ]
    codes = [process.wait(timeout=180) for process in started]
    if any(codes):
        raise SystemExit(f"torchrun ended with {codes}")


def static(hosts: Lab, _: Path) -> None:
    first = hosts[0].address
    by_hand(hosts, lambda node, port: ["--node-rank", str(node), "--master-addr", first, "--master-port", str(port)])


def c10d(hosts: Lab, _: Path) -> None:
    def options(node: int, port: int) -> list[str]:
        words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].address}:{port}", "--rdzv-id", str(port)]
        return [*words, "--rdzv-conf", f"is_host={int(node == 0)}", "--local-addr", hosts[node].address]

    by_hand(hosts, options)


def ours(hosts: Lab, project: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="manyhosts-start-") as run_dir:
        words = ["run", "--hosts", ",".join(hosts.names), "--run-dir", run_dir, "--env", "OMP_NUM_THREADS=1"]
        hosts.desk.run(
            [sys.executable, "-P", "-m", "manyhosts.cli.main", *words, "first_step.py", STAMP],
            folder=str(project),
            timeout_s=180,
        )


WAYS = {"torchrun, static": static, "torchrun, c10d": c10d, OURS: ours}


def seconds_to_first_step(hosts: Lab, name: str, project: Path) -> float:
    stamps = [Path(host.path(STAMP)) for host in hosts]
    for stamp in stamps:
        stamp.unlink(missing_ok=True)
    began = time.time()
    WAYS[name](hosts, project)
    [written] = [stamp for stamp in stamps if stamp.exists()]  # on whichever host rank 0 was
    return float(written.read_text()) - began


def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds of each start, by what started it."""
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    names = list(WAYS)
    with tempfile.TemporaryDirectory() as folder, lab(4) as hosts:
        project = Path(folder)
        (project / "first_step.py").write_text(SCRIPT)
        for host in hosts:
            Path(host.path(PLACE)).write_text(SCRIPT)
        for name in names:
            seconds_to_first_step(hosts, name, project)
        for turn in range(rounds):
            for name in names[turn % 3 :] + names[: turn % 3]:  # nobody always goes first
                seconds[name].append(seconds_to_first_step(hosts, name, project))
    return seconds


def report(seconds: dict[str, list[float]]) -> str:
    theirs = min((name for name in WAYS if name != OURS), key=lambda name: statistics.median(seconds[name]))
    pairs = [mine / other for mine, other in zip(seconds[OURS], seconds[theirs], strict=True)]
    ratio = statistics.median(seconds[OURS]) / statistics.median(seconds[theirs])
    rows = "\n".join(
        f"| `{name}` | {statistics.median(taken):.2f} s | {min(taken):.2f} s | {max(taken):.2f} s |"
        for name, taken in seconds.items()
    )
    return f"""# From the command to the first training step on four hosts

A plain DDP script on Gloo, one worker on each of four hosts of a lab on 1 gbit, started by each in turn. From the
start of the command until rank 0 has made its first optimizer step; n = {len(pairs)} each, after one warm-up. torchrun
is started on all hosts at the same moment, with the script in place.

| started by | median | least | most |
|---|---|---|---|
{rows}

`manyhosts run` takes **{ratio:.2f}** of the time of the faster torchrun ({theirs.partition(", ")[2]}); by round
{min(pairs):.2f} to {max(pairs):.2f}. In its time it reaches the hosts by ssh, compares their versions, tries the way
between every two of them, and brings what has changed in the working directory. All hosts share this machine's cores,
so what counts is work: torchrun loads torch twice on every host, in its agent and in the worker.

{describe(Path(sys.executable), ["torch", "manyhosts"])}
Again: `sudo python benchmarks/start_four_hosts.py`.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    REPORT.write_text(report(measure(parser.parse_args().rounds)))
    print(REPORT.read_text())


if __name__ == "__main__":
    main()
