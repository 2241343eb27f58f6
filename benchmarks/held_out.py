"""How far off is `manyhosts plan` on models that compute for real, and that its model of a step was not made by?

    python benchmarks/held_out.py                                         # root, Linux: it makes hosts; 30 minutes
    python benchmarks/held_out.py --models gpt,lstm --links host --quick  # a part: its lines replace those recorded
    python benchmarks/held_out.py --page                                  # write everything again from what is recorded

Six kinds of models (`held_out_train.py`): a CNN with BatchNorm, an LSTM, a GPT, a recommender that is nearly all
embedding, a small CNN whose samples are slow to read, and a classifier with a huge last layer. On this host alone and
on hosts of it behind cables of 100 Mbit/s and 1 Gbit/s, `manyhosts plan` measures each for some seconds, and predicts
one worker, and more of them without compression, with bf16 and with PowerSGD. Each of these is trained, some seconds
after the start, when nothing is loaded any more, once right before the plan and once right after it, and the median of
the steps of both is compared. A shared machine is not equally fast in all minutes: a fixed computation on all cores is
timed before and after each start, and where its times differ by more than 15 % within a plan and its trainings, these
are measured again, once; the steadier of both is kept, whatever was predicted. Nothing sleeps: hosts of one machine
share its cores. Nothing is calibrated.

A size is a case for the advice: of one worker and of the ways of that size the one that `recommend` names is compared
with the fastest that was measured. How wide the interval of a prediction has to be is learned from the other kinds of
models, and then it is asked whether the measured step is inside.

What was cut is resumed by the same command: what is measured is kept in `held_out.part.jsonl` until all of it is there,
as long as the code stays as it is. A link that is recorded of other code is dropped with it.

Of two ways that a plan predicts within 2 % of each other, one is as right as the other where the measured steps do not
tell them apart either (Mann and Whitney 1947, at 5 %).

Writes `held_out.jsonl` (what was planned and measured), `held_out.md`, and what `manyhosts plan` says of its own past:
`src/manyhosts/planner/past.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from held_out_train import KINDS
from machine import origin, origins
from prediction_page import PROGRAM, Line, Row, kept, machines_of, measured_of, page_of, read, reported, write

from manyhosts.config.strategies import DDP
from manyhosts.lab import Lab, lab
from manyhosts.planner.interval import score, width_of
from manyhosts.planner.predict import Prediction, predictions, ways
from manyhosts.planner.recommend import SIZE_TOLERANCE, recommend
from manyhosts.planner.strategies.ddp import compared as compared_with_steps

HERE = Path(__file__).parent
SCRIPTS = ("held_out_train.py", "prediction_train.py")
RECORD, PART = HERE / "held_out.jsonl", HERE / "held_out.part.jsonl"
PAST = HERE.parent / "src" / "manyhosts" / "planner" / "past.json"
LINKS: Mapping[str, tuple[int, ...]] = {"host": (2,), "100mbit": (2, 4), "1gbit": (2,)}
"""Where workers are, and how many of them: on this machine, or one on each of its hosts."""
WAYS = ("none", "bf16", "powersgd")
RIGHT = 0.05
SETTLE = "9 seconds"
"""Of training before the first step is counted: see `prediction_train.train_each`."""
SECONDS, QUICK_SECONDS = 12.0, 8.0
"""That a plan may take to measure."""
STEPS, QUICK_STEPS = 15, 9
"""Of each training, the first three of them not counted."""
STEADY, TRIES = 0.15, 2
"""By how much the fixed computation may take longer at one moment than at another, and how often a kind is measured."""


class Place:
    """Where one link's plans and trainings run: this machine itself, or hosts of a lab."""

    def __init__(self, link: str, folder: str, hosts: Lab | None) -> None:
        self.link, self.folder, self.hosts = link, folder, hosts
        for script in SCRIPTS:
            shutil.copy(HERE / script, folder)

    def plan(self, kind: str, seconds: float) -> tuple[dict[str, Any], float]:
        """What `manyhosts plan` says of a kind, and how long it took."""
        sizes = ",".join(map(str, (1, *LINKS[self.link])))
        where = ["--hosts", ",".join(self.hosts.names), "--nodes", sizes] if self.hosts else ["--workers", sizes]
        began = time.monotonic()
        printed = self._run(["plan", *where, "--seconds", f"{seconds:g}", "--json", SCRIPTS[0], kind, "none"])
        return json.loads(printed), time.monotonic() - began

    def train(self, kinds: Sequence[str], workers: int, steps: int) -> list[dict[str, Any]]:
        """The steps of each kind in every way, on so many workers: one after another, in one start."""
        where = ["--hosts", ",".join(self.hosts.names[:workers])] if self.hosts else ["--workers", str(workers)]
        asked = WAYS if workers > 1 else WAYS[:1]
        words = ["run", *where, "--env", f"STEPS={steps}", "--env", f"SETTLE={SETTLE}", "--no-prefix"]
        # What is in `runs` is not brought to the hosts of the next start, as what else is in the folder.
        words += ["--run-dir", f"{self.folder}/runs/{time.time_ns()}", SCRIPTS[0], ",".join(kinds), ",".join(asked)]
        found = reported(self._run(words))
        if len(found) != len(kinds) * len(asked):
            raise SystemExit(f"{len(found)} trainings on {workers} workers, and {len(kinds) * len(asked)} were asked")
        return found

    def _run(self, words: Sequence[str]) -> str:
        command = [*PROGRAM, *words]
        if self.hosts is not None:
            done = self.hosts.desk.run(command, folder=self.folder, timeout_s=900, check=False)
        else:
            done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            raise SystemExit(f"{words} ended with {done.returncode}: {done.stderr[-2000:]} {done.stdout[-2000:]}")
        return str(done.stdout)


@contextlib.contextmanager
def place_of(link: str) -> Iterator[Place]:
    """The place that a link's name stands for."""
    with tempfile.TemporaryDirectory(prefix="held-out-", dir="/var/tmp") as folder, contextlib.ExitStack() as stack:
        hosts = None if link == "host" else stack.enter_context(lab(max(LINKS[link]), bandwidth=link))
        yield Place(link, folder, hosts)


def measure(
    place: Place, kinds: Sequence[str], known: Sequence[Line], *, seconds: float, steps: int
) -> Iterator[list[dict[str, Any]]]:
    """What each kind gives: its trainings, its plan, and its trainings again, a line for each. A kind is left out that
    is `known` of this place.
    """
    there = {line["kind"] for line in known if line["link"] == place.link}
    for kind in (each for each in kinds if each not in there):
        tries: list[list[dict[str, Any]]] = []
        while len(tries) < TRIES and (not tries or unsteady(tries[-1]) > STEADY):
            tries.append(list(of_kind(place, kind, seconds=seconds, steps=steps)))
        yield min(tries, key=unsteady)


def of_kind(place: Place, kind: str, *, seconds: float, steps: int) -> Iterator[dict[str, Any]]:
    """What each start gives, with the times of the fixed computation before and after it."""
    common = {"kind": kind, "link": place.link, "settle": SETTLE, "recorded": {**origin(), "torch": torch.__version__}}
    common["asked"] = stamp(seconds=seconds, steps=steps)
    fixed = [fixed_seconds()]

    def condition(load: float) -> dict[str, Any]:
        fixed.append(fixed_seconds())
        return {"load": load, "fixed": fixed[-2:]}

    def trainings(moment: str) -> Iterator[dict[str, Any]]:
        for workers in (1, *LINKS[place.link]):
            load = os.getloadavg()[0]
            found = place.train([kind], workers, steps)
            more = {**common, **condition(load), "workers": workers, "moment": moment}
            yield from ({**more, "compression": line["compression"], "steps": line["seconds"]} for line in found)

    yield from trainings("before")
    load = os.getloadavg()[0]
    plan, took = place.plan(kind, seconds)
    yield {**common, **condition(load), "plan": kept(plan), "plan_seconds": round(took, 1)}
    yield from trainings("after")


def unsteady(lines: Sequence[Line]) -> float:
    """By which share the fixed computation took longer at one moment of these than at another."""
    times = [seconds for line in lines for seconds in line.get("fixed", ())]
    return max(times) / min(times) - 1 if times else math.inf


def fixed_seconds() -> float:
    """Of a fixed computation on every core at once: how fast the machine is just now."""
    cores = len(os.sched_getaffinity(0))
    # A multiprocessing.Pool waited for ever at its end, once in some hundred times.
    with ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("fork")) as pool:
        return statistics.mean(pool.map(_compute, range(cores)))


def _compute(_: int) -> float:
    torch.set_num_threads(1)
    matrix, times = torch.ones(256, 256), []
    for _ in range(25):
        begin = time.perf_counter()
        for _ in range(20):
            torch.mm(matrix, matrix)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def pooled(lines: Sequence[Line]) -> list[Line]:
    """One line for each training, with the steps of all moments."""
    groups: dict[Any, list[Line]] = {}
    for line in lines:
        groups.setdefault((line["kind"], line["link"], line["workers"], line["compression"]), []).append(line)
    steps = {labels: [second for line in own for second in line["steps"]] for labels, own in groups.items()}
    return [
        {**own[0], "steps": steps[labels], "measured": statistics.median(steps[labels])}
        for labels, own in groups.items()
    ]


def stamp(*, seconds: float, steps: int) -> str:
    """What a line was measured by: the code, the seconds of a plan, and the steps of a training."""
    own = sorted([*(HERE.parent / "src").rglob("*.py"), *(HERE / script for script in SCRIPTS)])
    code = hashlib.sha256(b"".join(path.read_bytes() for path in own)).hexdigest()[:10]
    return f"{code}, {seconds:g} s, {steps} steps"


@dataclass(frozen=True)
class Compared:
    """One training, and what is predicted of it by the model as it is now."""

    line: Line
    prediction: Prediction

    @property
    def row(self) -> Row:
        """For the page."""
        labels = (self.line["kind"], self.line["link"], str(self.line["workers"]), self.line["compression"])
        return Row(labels, self.prediction.step.seconds, self.line["measured"], self.line["steps"])

    @property
    def score(self) -> float:
        """How far off it is, in multiples of what was uncertain."""
        return score(self.line["measured"], self.prediction.step.seconds, self.prediction.deviation)


def predicted(plan: Line, link: str, workers: int) -> list[Prediction]:
    """Of so many workers by each way."""
    measured, nodes = compared_with_steps(measured_of(plan), DDP()), 1 if link == "host" else workers
    asked = [way for way in ways(measured, DDP()) if way.strategy == "ddp" and way.compression in WAYS]
    return predictions(measured, machines_of(plan), [(nodes, workers // nodes)], asked)


def compared(lines: Sequence[Line], plans: Mapping[Any, Line]) -> list[Compared]:
    """What was measured, each beside what is predicted; what a plan had no time for is left out, and counted."""
    found = []
    for line in pooled(lines):
        each = predicted(plans[line["kind"], line["link"]], line["link"], line["workers"])
        found += [Compared(line, one) for one in each if one.compression == line["compression"]]
    return found


def inside(all_of_them: Sequence[Compared]) -> list[bool]:
    """Whether each measured step is in its interval, whose width the other kinds of models have taught."""
    found = []
    for each in all_of_them:
        others = [one.score for one in all_of_them if one.line["kind"] != each.line["kind"]]
        found.append(each.score <= width_of(others or [each.score]))
    return found


def cases(all_of_them: Sequence[Compared]) -> list[tuple[tuple[str, str, str], Compared, Compared]]:
    """For each size of each model on each link: what is advised of it and of one worker, and the fastest measured."""
    groups: dict[tuple[str, str, int], list[Compared]] = {}
    for each in all_of_them:
        groups.setdefault((each.line["kind"], each.line["link"], each.line["workers"]), []).append(each)
    found = []
    for (kind, link, workers), own in groups.items():
        if workers == 1:
            continue
        known = [*groups.get((kind, link, 1), ()), *own]
        best = recommend([each.prediction for each in known]).best
        advised = next(each for each in known if each.prediction is best)
        fastest = min(known, key=lambda each: float(each.line["measured"]))
        found.append(((kind, link, str(workers)), advised, fastest))
    return found


def is_right(advised: Compared, fastest: Compared) -> bool:
    """Whether what was advised is about as fast as the fastest, or as far as the plan and the steps can tell."""
    return advised.line["measured"] <= (1 + RIGHT) * fastest.line["measured"] or are_equal(advised, fastest)


def are_equal(one: Compared, other: Compared) -> bool:
    """Whether a plan predicts the same of both, and their measured steps do not contradict it."""
    alike = abs(math.log(one.prediction.step.seconds / other.prediction.step.seconds)) <= math.log(SIZE_TOLERANCE)
    return alike and one is not other and not differ(one.line["steps"], other.line["steps"])


def differ(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether steps of `one` are longer than those of `other`, or shorter, by the rank sum test at 5 %."""
    pairs = len(one) * len(other)
    longer = sum((a > b) + (a == b) / 2 for a in one for b in other)
    return abs(longer - pairs / 2) - 0.5 > 1.96 * math.sqrt(pairs * (len(one) + len(other) + 1) / 12)


def past(all_of_them: Sequence[Compared]) -> dict[str, Any]:
    """What `manyhosts plan` says of itself, and makes its intervals by."""
    errors = [abs(each.row.off) for each in all_of_them]
    return {
        "record": "benchmarks/held_out.md",
        "kinds": len({each.line["kind"] for each in all_of_them}),
        "steps": len(errors),
        "median": round(statistics.median(errors), 3),
        "worst": round(max(errors), 3),
        "width": round(width_of([each.score for each in all_of_them]), 3),
    }


def written() -> str:
    """The page of what is recorded."""
    recorded, plans, trained = read(RECORD, lambda line: (line["kind"], line["link"]))
    known = compared(trained, plans)
    said, held = past(known), inside(known)
    advice = cases(known)
    right = sum(is_right(advised, fastest) for _, advised, fastest in advice)
    alike = right - sum(a.line["measured"] <= (1 + RIGHT) * f.line["measured"] for _, a, f in advice)
    loads = sorted(line["load"] for line in recorded)
    cores = Counter(plan["measured"]["cores"] for plan in plans.values()).most_common(1)[0][0]
    where = f"{origins(recorded, 'lines')}, load {statistics.median(loads):.1f} of {cores} cores in the median minute "
    where += f"before ({loads[0]:.1f} to {loads[-1]:.1f}), torch {recorded[-1]['recorded']['torch']}."
    kinds = {(line["kind"], line["link"]) for line in recorded if "fixed" in line}
    unlike = [unsteady([line for line in recorded if (line["kind"], line["link"]) == each]) for each in kinds]
    if restless := sum(each > STEADY for each in unlike):
        where += f" In {restless} of {len(unlike)} plans the machine was less steady than that in both tries, "
        where += f"by {100 * max(unlike):.0f} % at most."
    if any("settle" not in line for line in recorded):
        where += " Steps were counted from the start on, when hosts still load what a lost worker would need."
    equal = f" (in {alike} both are predicted alike, and their steps vary by more than they differ)" if alike else ""
    took = [line["plan_seconds"] for line in recorded if "plan" in line]
    found = (
        f" {100 * sum(held) / len(held):.0f} % of them are inside an interval whose width the other kinds of models "
        f"taught. What is advised is the fastest measured, or within 5 % of it, in {right} of {len(advice)} cases"
        f"{equal}.** "
        f"A plan took {statistics.median(took):.0f} s ({min(took):.0f} to {max(took):.0f}); in "
        f"{len(pooled(trained)) - len(known)} trainings its time was over before their way had been measured."
    )
    head = ("model", "link", "workers", "compression")
    text = page_of(
        [each.row for each in known], head, title="How far off a plan is on models that it was not made by",
        about=(__doc__ or ""), where=where, found=found,
    )  # fmt: skip
    text += f"\nIntervals are {said['width']:g} times as wide as what was uncertain in each plan.\n"
    text += "\n| model | link | workers | advised | fastest | slower by |\n|---|---|---|---|---|---|\n"
    for labels, advised, fastest in advice:
        slower = advised.line["measured"] / fastest.line["measured"] - 1
        names = [f"{each.line['workers']}, {each.line['compression']}" for each in (advised, fastest)]
        how = ", by no more than steps vary" if are_equal(advised, fastest) else ""
        text += f"| {' | '.join([*labels, *names])} | {100 * slower:.1f} %{how} |\n"
    PAST.write_text(json.dumps(said, indent=1) + "\n")
    return text


def record(models: Sequence[str], links: Sequence[str], seconds: float, steps: int) -> None:
    """Measure what is not measured yet of this code, and put it in the place of what is recorded."""
    asked = stamp(seconds=seconds, steps=steps)

    def of_this_code(path: Path) -> list[dict[str, Any]]:
        lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        return [line for line in lines if line.get("asked") == asked]

    new = of_this_code(PART)
    for link in links:
        with place_of(link) as place:
            for lines in measure(place, models, new, seconds=seconds, steps=steps):
                new += lines
                write(PART, new)
        print(link, *(f"{line['kind']} {line['workers']} {line['compression']} {line['measured']:.3f};"
                      for line in pooled([each for each in new if "plan" not in each and each["link"] == link])),
              flush=True)  # fmt: skip
    others = [line for line in of_this_code(RECORD) if line["link"] not in links or line["kind"] not in models]
    write(RECORD, [*others, *new])
    PART.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps, and plans of eight seconds")
    parser.add_argument("--models", default=",".join(KINDS), help="some of these")
    parser.add_argument("--links", default=",".join(LINKS), help="some of these")
    parser.add_argument("--page", action="store_true", help="write the page again from what is recorded")
    asked = parser.parse_args()
    models, links = asked.models.split(","), asked.links.split(",")
    if unknown := [name for name in [*models, *links] if name not in {*KINDS, *LINKS}]:
        parser.error(f"there is no {', '.join(unknown)}: models are {', '.join(KINDS)}; links {', '.join(LINKS)}")
    if not asked.page:
        record(models, links, *((QUICK_SECONDS, QUICK_STEPS) if asked.quick else (SECONDS, STEPS)))
    text = written()
    (HERE / "held_out.md").write_text(text)
    print(next(line for line in text.splitlines() if line.startswith("**Steps are off")))


if __name__ == "__main__":
    main()
