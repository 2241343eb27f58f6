"""Does a kill at any moment of a run, of any of eleven models, lose a sample or change a bit?

    python benchmarks/kills.py --kills 200 --workers 2,3,4
    python benchmarks/kills.py --kills 8 --models gpt,mixup --seed 7
    python benchmarks/kills.py --page               # only the page, from what is recorded

Each run trains one model of `faults_train.py` on this machine for 120 steps with 8 virtual workers, a snapshot every
15 steps and a validation every 20, and ends with a test. SIGKILL hits one worker, an agent, the command itself or
everything at once, at a moment that is drawn: at start-up, in a step, in a validation, while a snapshot is written, at
the end of training and in the test. Where the command has ended, it is typed again. When the run is done, its samples,
losses, weights and test values are compared with those of one process to which nothing happened. Each run is a line in
`kills.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from faults_train import MODELS
from machine import describe

from manyhosts.records.line_file import read_lines
from manyhosts.records.samples import counted

HERE = Path(__file__).parent
RECORDED, PAGE = HERE / "kills.jsonl", HERE / "kills.md"
STEPS, SNAPSHOT_EVERY, VALIDATE_EVERY = 120, 15, 20
WAIT_S = 240.0
"""A run in which nothing happens for so long hangs."""
MOMENTS = ("start-up", "step", "validation", "snapshot", "end", "test")
VICTIMS = ("worker", "worker", "worker", "agent", "command", "everything")
KILLS_A_RUN = 6
MOST_TYPED = 25


class Hangs(Exception):
    """Nothing has happened for too long."""


class Run:
    """The command that a user types, and types again where it has ended."""

    def __init__(self, model: str, workers: int, folder: Path) -> None:
        self.folder, self.run_dir, self.pids = folder, folder / "run", folder / "pids"
        self.pids.mkdir()
        self.words = [sys.executable, "-P", "-m", "manyhosts.cli.main", "run", "--workers", str(workers)]
        self.words += ["--restarts", "20", "--run-dir", str(self.run_dir), str(HERE / "faults_train.py")]
        self.variables = environment(model) | {"PIDS": str(self.pids), "PAUSE": "0.01"}
        self.log = (folder / "output.log").open("a")
        self.typed = 0
        self.type()

    def type(self) -> None:
        """Start the command."""
        self.typed += 1
        if self.typed > MOST_TYPED:
            raise Hangs(f"the command has ended {MOST_TYPED} times")
        self.command = subprocess.Popen(
            self.words, env=self.variables, stdout=self.log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )

    def lines(self) -> list[dict[str, Any]]:
        """The record, as far as it is written."""
        return list(read_lines(self.run_dir / "metrics.jsonl"))

    def last_step(self) -> int:
        """The last step that the record holds."""
        return max((line["step"] for line in self.lines() if line["event"] == "step"), default=0)

    def wait(self, for_what: Callable[[], bool], *, every_s: float = 0.01) -> None:
        """Until it is so, or the command ends with success; typed again where it ends otherwise."""
        deadline, last = time.monotonic() + WAIT_S, -1
        while not for_what():
            code = self.command.poll()
            if code == 0:
                return
            if code is not None:
                self.type()
            if (now := self.last_step()) != last:
                deadline, last = time.monotonic() + WAIT_S, now
            if time.monotonic() > deadline:
                raise Hangs(f"nothing after step {now} for {WAIT_S:.0f} s")
            time.sleep(every_s)

    def family(self) -> list[psutil.Process]:
        """The command and all that it has started."""
        with suppress(psutil.Error):
            command = psutil.Process(self.command.pid)
            return [command, *command.children(recursive=True)]
        return []

    def kill(self, whom: str, draw: random.Random) -> bool:
        """SIGKILL; whether there was anybody."""
        family = self.family()
        own = {int(path.name.rpartition("-")[2]) for path in self.pids.iterdir()}
        workers = [process for process in family if process.pid in own]
        victims = {
            "worker": [draw.choice(workers)] if workers else [],
            "agent": [process for process in family if _words(process).startswith("manyhosts agent")][:1],
            "command": family[:1],
            "everything": family,
        }[whom]
        if family and not victims:  # at start-up not everybody is there yet
            victims = [draw.choice(family[1:] or family)]
        for process in victims:
            with suppress(psutil.Error):
                process.kill()
        if whom in ("command", "everything"):
            self.command.wait(timeout=30)
            psutil.wait_procs(family[1:], timeout=30)
            left = [process for process in family[1:] if _alive(process)]
            if left:
                raise Hangs(f"outlived the command: {[_words(process) for process in left]}")
        return bool(victims)

    def close(self) -> None:
        """End what is left."""
        for process in self.family():
            with suppress(psutil.Error):
                process.kill()
        self.command.wait()
        self.log.close()


def _words(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def environment(model: str) -> dict[str, str]:
    """What the training script reads."""
    own = {
        "MODEL": model, "DURATION": f"{STEPS} steps", "SNAPSHOTS": f"{SNAPSHOT_EVERY} steps",
        "VALIDATE": f"{VALIDATE_EVERY} steps", "TEST": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return {**os.environ, **own}


def wait_for(run: Run, moment: str, at_step: int, draw: random.Random) -> None:
    """Until the run has come to that moment."""
    snapshots = run.run_dir / "snapshots"
    if moment == "start-up":
        time.sleep(draw.uniform(0, 6))
    elif moment == "step":
        run.wait(lambda: run.last_step() >= at_step)
        time.sleep(draw.uniform(0, 0.1))
    elif moment == "validation":
        boundary = -(-at_step // VALIDATE_EVERY) * VALIDATE_EVERY
        run.wait(lambda: run.last_step() >= boundary - 1)
        time.sleep(draw.uniform(0, 0.15))
    elif moment == "snapshot":  # what is being written has another name than what is whole
        run.wait(lambda: run.last_step() >= at_step)
        run.wait(
            lambda: any(not path.name.removeprefix("step-").isdigit() for path in _listed(snapshots)), every_s=0.001
        )
    elif moment == "end":
        run.wait(lambda: run.last_step() >= STEPS - 1)
        time.sleep(draw.uniform(0, 0.3))
    else:
        run.wait(lambda: any(line["event"] == "end" for line in run.lines()[-3:]))
        time.sleep(draw.uniform(0, 0.1))


def _listed(folder: Path) -> list[Path]:
    with suppress(FileNotFoundError):
        return list(folder.iterdir())
    return []


def undisturbed(model: str, folder: Path) -> Path:
    """The run directory of one process to which nothing happens."""
    run_dir = folder / model
    if not (run_dir / "summary.json").exists():
        script = str(HERE / "faults_train.py")
        variables = environment(model) | {"MANYHOSTS_RUN_DIR": str(run_dir)}
        done = subprocess.run([sys.executable, script], env=variables, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{model} alone: {done.stderr[-3000:]}")
    return run_dir


def compare(one: Path, other: Path) -> dict[str, Any]:
    """Whether all that must be equal is equal."""
    ended = [json.loads((folder / "summary.json").read_text()) for folder in (one, other)]
    lines = [
        [line for line in read_lines(folder / "metrics.jsonl") if line["event"] == "step"] for folder in (one, other)
    ]
    samples = [counted(folder / "logs") for folder in (one, other)]
    return {
        "weights_equal": ended[0]["weights_sha256"] == ended[1]["weights_sha256"],
        "test_equal": ended[0]["test"] == ended[1]["test"] != {},
        "losses_equal": [line["loss"] for line in lines[0]] == [line["loss"] for line in lines[1]],
        "steps_once": [line["step"] for line in lines[0]] == list(range(1, STEPS + 1)),
        "samples_once": samples[0] == samples[1],
    }


def disturbed(model: str, workers: int, seed: int, whole: Path) -> dict[str, Any]:
    """One run and its kills, compared with the run in `whole`."""
    draw = random.Random(seed)
    found: dict[str, Any] = {"model": model, "workers": workers, "seed": seed, "kills": []}
    moments = ["start-up", *draw.choices(MOMENTS[1:4], k=KILLS_A_RUN - 3), "end", "test"]
    with tempfile.TemporaryDirectory(prefix="manyhosts-kills-") as folder:
        run = Run(model, workers, Path(folder))
        try:
            for number, moment in enumerate(moments):
                wait_for(run, moment, STEPS * number // len(moments) + draw.randint(0, 10), draw)
                whom = draw.choice(VICTIMS)
                if run.command.poll() is None and run.kill(whom, draw):
                    found["kills"].append([moment, whom, run.last_step()])
            run.wait(lambda: False)
            left = [int(path.name.rpartition("-")[2]) for path in run.pids.iterdir()]
            found["left_behind"] = sum(psutil.pid_exists(pid) and _alive(psutil.Process(pid)) for pid in left)
            found |= compare(run.run_dir, whole)
        except Exception as trouble:
            found["trouble"] = f"{type(trouble).__name__}: {trouble}"
        finally:
            run.close()
            good = well(found)
            if not good:
                kept = Path(tempfile.gettempdir(), f"kills-{model}-{seed}.log")
                kept.write_text((Path(folder) / "output.log").read_text())
                print(f"what it printed is in {kept}", flush=True)
    return found | {"typed": run.typed, "load": round(os.getloadavg()[0], 1)}


def well(found: dict[str, Any]) -> bool:
    """Whether the run ended as the undisturbed one did."""
    wanted = ("weights_equal", "test_equal", "losses_equal", "steps_once", "samples_once")
    return "trouble" not in found and all(found[name] for name in wanted) and not found["left_behind"]


def page(record: Path) -> str:
    """The table of what is recorded."""
    runs = list(read_lines(record))
    rows = ["| model | runs | kills | as the undisturbed run, in every bit |", "|---|---:|---:|---:|"]
    for model in MODELS:
        own = [run for run in runs if run["model"] == model]
        if own:
            count = sum(len(run["kills"]) for run in own)
            rows.append(f"| {model} | {len(own)} | {count} | {sum(map(well, own))} of {len(own)} |")
    kills = [tuple(kill) for run in runs for kill in run["kills"]]
    by_moment, by_victim = Counter(kill[0] for kill in kills), Counter(kill[1] for kill in kills)
    bad = [run for run in runs if not well(run)]
    sizes = ", ".join(map(str, sorted({run["workers"] for run in runs})))
    text = [
        "# Kills at every moment of a run",
        "",
        f"Made by `python benchmarks/kills.py`. {describe(Path(sys.executable), ['torch'])}",
        "",
        f"{len(kills)} kills in {len(runs)} runs on {sizes} workers.",
        "By moment: " + ", ".join(f"{moment} {by_moment[moment]}" for moment in MOMENTS) + ".",
        "By victim: " + ", ".join(f"{whom} {count}" for whom, count in by_victim.most_common()) + ".",
        f"Load of the machine: {min(run['load'] for run in runs)} to {max(run['load'] for run in runs)}.",
        "",
        *rows,
        "",
        *(
            f"* {run['model']} on {run['workers']}, seed {run['seed']}: {run.get('trouble', 'not equal')}."
            for run in bad
        ),
    ]
    return "\n".join(text).rstrip() + "\n"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=KILLS_A_RUN, help="at least so many")
    parser.add_argument("--workers", default="2,3,4", help="numbers of workers, in turn")
    parser.add_argument("--models", default=",".join(MODELS), help="which models, in turn")
    parser.add_argument("--seed", type=int, default=None, help="what is drawn by  [default: drawn, and said]")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no run after so many minutes")
    parser.add_argument("--record", type=Path, default=RECORDED, help="the file that lines are added to")
    parser.add_argument("--page", action="store_true", help="only make the page from what is recorded")
    asked = parser.parse_args(words)
    until, good = time.monotonic() + 60 * asked.minutes, True
    seed = random.SystemRandom().randrange(1 << 31) if asked.seed is None else asked.seed
    draw, done, number = random.Random(seed), 0, 0
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    models, sizes = asked.models.split(","), [int(size) for size in asked.workers.split(",")]
    with tempfile.TemporaryDirectory(prefix="manyhosts-undisturbed-") as folder:
        while not asked.page and done < asked.kills and time.monotonic() < until:
            model, workers = models[number % len(models)], sizes[number % len(sizes)]
            found = disturbed(model, workers, draw.randrange(1 << 31), undisturbed(model, Path(folder)))
            with asked.record.open("a") as file:
                file.write(json.dumps(found) + "\n")
            print(json.dumps(found), flush=True)
            done, number, good = done + len(found["kills"]), number + 1, good and well(found)
    text = page(asked.record)
    PAGE.write_text(text) if asked.record == RECORDED else print(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
