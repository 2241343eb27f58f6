"""What does each kind of fault cost a run on several hosts, and does it end with the same bits?

    python benchmarks/faults.py --workers 2,4,8 --faults 36        # as root, on Linux: it makes hosts of this machine
    python benchmarks/faults.py --workers 4 --faults 12 --kinds worker,agent --seed 7
    python benchmarks/faults.py --workers 8 --faults 36 --minutes 10     # no fault begins after that
    python benchmarks/faults.py --workers 2,4,8 --faults 4 --kinds agent --pause 0.3   # processors mostly idle
    python benchmarks/faults.py --table

A digits ConvNet (BatchNorm, dropout, augmentation, AdamW), or another `--model` of faults_train.py, trains on practice
hosts that share one disk, with 8 virtual workers and a snapshot every 50 steps. Chapter by chapter, faults drawn from
the seed happen to it at random steps, each when the one before is healed; at the end of a chapter it is asked to stop,
and one process here, to which nothing happens, trains as many steps. Samples, losses and weights of the two must be the
same. Every fault is a line in `faults.jsonl`, to which runs add; the table in `faults.md` is made from all of them. A
chapter that fails keeps its line, says why, and is counted. The hosts and their disk are in a mount namespace of this
program's own, so that nothing of them is left, however it ends. Kills of every moment of a run, start and end included,
and of eleven models: `kills.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from faults_kinds import ENDS_THE_COMMAND, KINDS, Scene, workers
from faults_table import MOST_HOSTS, publish, table
from faults_train import MODELS
from machine import origin

from manyhosts.lab import Lab, lab
from manyhosts.records.line_file import read_lines
from manyhosts.records.samples import counted

HERE = Path(__file__).parent
RECORDED = HERE / "faults.jsonl"
VERSION = 5
"""Of what is measured; 2: the template loads what the script imports, so that replacements find it loaded; 3: a worker
that is ready while another one is just being taken in is heard; 4: how long a host may be silent is learned; 5: a
template outlives its agent."""
CHAPTER = 12
"""Faults until a run is stopped and compared."""
DISK_MB = 96
_NEW_MOUNTS = 0x20000
WAIT_S = 240.0
"""A run that makes no step for so long after a fault counts as lost."""
MOST_TYPED = 6
SETTLED_S = 15.0
"""How long a run has trained before a worker or an agent is killed: its template has loaded what the script imports."""
SCRIPT = HERE / "faults_train.py"


class Broken(Exception):
    """The run does not do what it must."""


class Run:
    """The command that a user types, and types again where it has ended."""

    def __init__(self, hosts: Lab, shared: Path, workers: int, draw: random.Random, pause_s: float, model: str) -> None:
        self.hosts, self.shared = hosts, shared
        self.run_dir = shared / f"run-{time.time_ns()}"
        (shared / "pids").mkdir(exist_ok=True)
        each = workers // len(hosts)
        self.words = [sys.executable, "-P", "-m", "manyhosts.cli.main", "run", "--hosts", ",".join(hosts.names)]
        self.words += ["--workers-per-node", str(each), "--restarts", "20", "--run-dir", str(self.run_dir)]
        variables = {"OMP_NUM_THREADS": 1, "PIDS": shared / "pids", "DURATION": "1000000 steps", "PAUSE": pause_s}
        variables |= {"MODEL": model}
        for name, value in variables.items():
            self.words += ["--env", f"{name}={value}"]
        self.log = (shared.parent / "output.log").open("a")
        self.typed: list[float] = []
        self.workers = workers
        self.scene = Scene(hosts, shared, self.run_dir, self._start(), draw)

    def _start(self) -> subprocess.Popen[str]:
        self.began = 0.0
        return self.hosts.desk.start(
            [*self.words, "train.py"],
            folder=str(self.shared),
            stdout=self.log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )

    def type_again(self) -> None:
        """Start it again if it has ended; but not for ever where it ends again and again."""
        if self.scene.command.poll() is None:
            return
        self.typed.append(time.monotonic())
        if len(self.typed) >= MOST_TYPED and self.typed[-1] - self.typed[-MOST_TYPED] < WAIT_S:
            raise Broken(f"it ended {MOST_TYPED} times in {WAIT_S:.0f} s, with {self.scene.command.returncode} at last")
        self.scene.command = self._start()

    def lines(self) -> list[dict[str, Any]]:
        return list(read_lines(self.run_dir / "metrics.jsonl"))

    def last_step(self) -> int:
        return max((line["step"] for line in self.lines() if line["event"] == "step"), default=0)

    def wait_for(self, step: int) -> None:
        """Until `step` is done, or nothing has happened for too long."""
        deadline, last = time.monotonic() + WAIT_S, -1
        while (now := self.last_step()) < step:
            if now > last:
                deadline, last = time.monotonic() + WAIT_S, now
            if time.monotonic() > deadline:
                raise TimeoutError(f"no step after step {now} for {WAIT_S:.0f} s")
            self.type_again()
            time.sleep(0.02)

    def wait_until_told(self, since: float) -> None:
        """Until the record says that it continued, or began again."""
        deadline = time.monotonic() + WAIT_S
        while not any(line["event"] in ("restart", "start") and line["time"] > since for line in self.lines()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing was told for {WAIT_S:.0f} s")
            self.type_again()
            time.sleep(0.02)

    def wait_until_whole(self) -> None:
        """Until as many workers as were asked for train again."""
        deadline = time.monotonic() + WAIT_S
        while len(workers(self.scene)) < self.workers or _size(self.lines()) not in (0, self.workers):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(workers(self.scene))} of {self.workers} workers train after {WAIT_S:.0f} s")
            self.type_again()
            time.sleep(0.02)

    def stop(self) -> None:
        self.hosts.desk.end(self.scene.command, signal.SIGTERM)
        self.scene.command.wait(timeout=WAIT_S)

    def close(self) -> None:
        self.hosts.desk.end(self.scene.command)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.scene.command.wait(timeout=30)
        self.log.close()


def _size(lines: Sequence[dict[str, Any]]) -> int:
    """How many workers the last change left; 0 where there was none since the last start."""
    size = 0
    for line in lines:
        words = (line.get("how") or line.get("text") or "").split()
        if line["event"] == "start":
            size = 0
        elif line["event"] in ("restart", "note") and "with" in words:
            with contextlib.suppress(ValueError, IndexError):
                size = int(words[words.index("with") + 1])
    return size


def one_fault(run: Run, kind: str, steps: int, settled_s: float) -> dict[str, Any]:
    """Let `steps` steps pass, do harm, and see what it costs."""
    run.wait_for(run.last_step() + steps)
    run.wait_until_whole()
    run.began = run.began or time.monotonic()
    if kind in ("worker", "agent"):
        time.sleep(max(0.0, run.began + settled_s - time.monotonic()))
    while kind == "bit-flip" and len(list((run.run_dir / "snapshots").glob("step-*/manifest.json"))) < 2:
        run.wait_for(run.last_step() + 1)  # with the only one damaged, nothing continues, and a sentence says so
    time.sleep(run.scene.draw.uniform(0, 0.5))  # lines come to the disk in bundles, with a snapshot for one
    at_step = run.last_step()
    began = time.time()
    KINDS[kind](run.scene)
    if kind in ENDS_THE_COMMAND:
        run.scene.command.wait(timeout=WAIT_S)
        began = began if kind != "sigterm" else time.time()
        run.type_again()
        run.typed.clear()  # this end was meant
    for undo in run.scene.undo:
        undo()
    run.scene.undo.clear()
    if kind != "disk-full":
        run.wait_until_told(began)
    run.wait_until_whole()
    run.wait_for(max(at_step, run.last_step()) + 2)
    after = [line for line in run.lines() if line["time"] > began]
    restarts = [line for line in after if line["event"] == "restart"]
    joined = [line for line in after if line["event"] in ("note", "restart") and "new" in _how(line)]
    return {
        "kind": kind,
        "step": at_step,
        "next_step_s": _next_step(after, restarts[0]["time"] if restarts else began) - began,
        "whole_s": _next_step(after, joined[-1]["time"]) - began if joined else None,
        "steps_redone": sum(line["steps_redone"] for line in restarts),
        "load": os.getloadavg()[0],
        "version": VERSION,
    }


def _how(line: dict[str, Any]) -> str:
    return str(line.get("how") or line.get("text") or "")


def _next_step(lines: Sequence[dict[str, Any]], after: float) -> float:
    return float(min(line["time"] for line in lines if line["event"] == "step" and line["time"] > after))


def undisturbed(shared: Path, steps: int, model: str) -> Path:
    """A run of one process here that nothing happens to."""
    folder = shared.parent / "undisturbed"
    variables = {**os.environ, "DURATION": f"{steps} steps", "OMP_NUM_THREADS": "1", "MANYHOSTS_RUN_DIR": str(folder)}
    variables |= {"MODEL": model}
    script = shared / "train.py"  # the same file, or the run directory would be another script's
    done = subprocess.run([sys.executable, str(script)], env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return folder


def compare(broken: Path, whole: Path) -> dict[str, Any]:
    """What must be equal: every sample of every step, every loss, and the weights."""
    one, other = (json.loads((folder / "summary.json").read_text()) for folder in (broken, whole))
    steps = [
        [line for line in read_lines(folder / "metrics.jsonl") if line["event"] == "step"] for folder in (broken, whole)
    ]
    numbers = [[line["step"] for line in lines] for lines in steps]
    taken = [counted(folder / "logs") for folder in (broken, whole)]
    wrong = [step for step in taken[1] if taken[0].get(step) != taken[1][step]]
    return {
        "steps": one["steps"],
        "samples_wrong": sum(len(set(taken[0].get(step, [])) ^ set(taken[1][step])) for step in wrong),
        "lines_wrong": len(set(numbers[0]) ^ set(numbers[1])) + len(numbers[0]) - len(set(numbers[0])),
        "losses_equal": [line["loss"] for line in steps[0]] == [line["loss"] for line in steps[1]],
        "weights_equal": one["weights_sha256"] == other["weights_sha256"],
    }


@contextmanager
def stage(hosts: int) -> Iterator[tuple[Lab, Path]]:
    """Hosts, and a small disk that all of them share with this machine."""
    with tempfile.TemporaryDirectory(prefix="manyhosts-faults-") as folder:
        shared = Path(folder, "shared")
        shared.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(shared)], check=True)
        before = os.environ.get("PYTHONPATH", "")
        # what Python looks through is shown to every host
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [before, str(shared)]))
        try:
            (shared / "train.py").write_text(SCRIPT.read_text())
            with lab(hosts) as made:
                for host in made:
                    host.run(["mount", "-o", "remount,bind,rw", str(shared)])
                yield made, shared
        finally:
            os.environ["PYTHONPATH"] = before
            subprocess.run(["umount", "--lazy", str(shared)], check=True)


def chapter(workers: int, kinds: Sequence[str], seed: int, until: float, asked: argparse.Namespace) -> bool:
    """One run and its faults, each written down when it is over; none begins after `until`. Whether all was well."""
    draw = random.Random(seed)
    output = Path(tempfile.gettempdir(), f"faults-{seed}.log")
    reported = {"pause_s": asked.pause} if asked.pause else {}
    if asked.model != "digits":
        reported["model"] = asked.model
    ended: dict[str, Any] = {"chapter": seed, "workers": workers, "faults": 0, "version": VERSION, **reported}
    with stage(min(workers, MOST_HOSTS)) as (hosts, shared):
        ended["import_torch_s"] = import_seconds(hosts)
        run = Run(hosts, shared, workers, draw, asked.pause, asked.model)
        try:
            run.wait_for(5)
            ended["import_torch_busy_s"] = import_seconds(hosts)
            for kind in kinds:
                if time.monotonic() > until:
                    break
                ended["trouble"] = f"in the middle of {kind}"
                found = one_fault(run, kind, draw.randint(5, 60), asked.settled)
                write(asked.record, {"chapter": seed, "workers": workers, **found, **reported})
                ended["faults"] += 1
                whole = "" if found["whole_s"] is None else f", all train after {found['whole_s']:.2f} s"
                say(f"{workers} workers, {kind:>9} at step {found['step']}: {found['next_step_s']:.2f} s{whole}")
            del ended["trouble"]
            run.stop()
            steps = json.loads((run.run_dir / "summary.json").read_text())["steps"]
            ended |= compare(run.run_dir, undisturbed(shared, steps, asked.model))
        except BaseException as trouble:
            ended["trouble"] = f"{ended.get('trouble', 'at the end')}: {type(trouble).__name__}: {trouble}"
            if not isinstance(trouble, Exception):  # somebody has stopped this program
                ended["cut_short"] = True
                raise
        finally:
            run.close()
            printed = (shared.parent / "output.log").read_text()
            if "trouble" in ended:
                output.write_text(printed)
                ended["printed"] = printed.splitlines()[-5:]
                say(f"what it printed is in {output}")
            write(asked.record, ended)
            say(json.dumps(ended))
    return bool(ended.get("weights_equal")) and not ended["samples_wrong"] and not ended["lines_wrong"]


def import_seconds(hosts: Lab) -> float:
    """How long Python needs on a host to import torch, the way everybody does."""
    began = time.perf_counter()
    hosts[0].run([sys.executable, "-c", "import torch"])
    return time.perf_counter() - began


def apart() -> None:
    """Have mounts of this process and its children end with them, also where nobody is left to take them down."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS):
        raise SystemExit(f"only root may make hosts of this machine: {os.strerror(ctypes.get_errno())}")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def write(record: Path, line: dict[str, Any]) -> None:
    """Add a line, with the machine, the date and the commit of its own: lines of several machines stand in one file."""
    line = {**line, "recorded": origin()}
    with record.open("a") as file:
        file.write(json.dumps(line) + "\n")


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", default="2,4,8", help="numbers of workers, each with as many faults")
    parser.add_argument("--faults", type=int, default=CHAPTER, help="faults for each number of workers")
    parser.add_argument("--kinds", default=",".join(KINDS), help="which kinds are drawn from")
    parser.add_argument(
        "--seed", type=int, default=None, help="what the faults are drawn by  [default: drawn, and said]"
    )
    parser.add_argument("--record", type=Path, default=RECORDED, help="the file that lines are added to")
    parser.add_argument(
        "--settled",
        type=float,
        default=SETTLED_S,
        metavar="SECONDS",
        help=f"how long a run has trained before a worker or an agent is killed  [default: {SETTLED_S:.0f}]",
    )
    parser.add_argument(
        "--pause",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="let each step take so much longer, so that the host that is hurt finds idle processors  [default: 0]",
    )
    parser.add_argument("--model", default="digits", choices=MODELS, help="which model trains")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no fault after so many minutes")
    parser.add_argument("--table", action="store_true", help="only make the table from what is recorded")
    asked = parser.parse_args()
    unknown = set(asked.kinds.split(",")) - set(KINDS)
    if unknown:
        parser.error(f"unknown kinds {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    good = True
    if not asked.table:
        until = time.monotonic() + 60 * asked.minutes
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        apart()
        seed = random.SystemRandom().randrange(1 << 31) if asked.seed is None else asked.seed
        say(f"seed {seed}")
        draw = random.Random(seed)
        for count in map(int, asked.workers.split(",")):
            known = asked.kinds.split(",")
            kinds = (known * -(-asked.faults // len(known)))[: asked.faults]  # each kind about equally often
            draw.shuffle(kinds)
            for begin in range(0, len(kinds), CHAPTER):
                if time.monotonic() < until:
                    some = kinds[begin : begin + CHAPTER]
                    good &= chapter(count, some, draw.randrange(1 << 31), until, asked)
    if asked.record == RECORDED:
        publish(asked.record)
    else:
        say(table(asked.record))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
