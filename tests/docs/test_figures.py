"""Each measured figure of README and docs is what its record says, and each record says where, when and of what."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
RECORDS = sorted(path for path in (ROOT / "benchmarks").glob("*.md") if path.name != "README.md")


def words(path: Path | str) -> str:
    """A page, its lines joined."""
    return " ".join((ROOT / path).read_text().split())


def cells(record: str, row: str, after: str = "") -> list[list[float]]:
    """The numbers of each cell of the first table row that begins with `row`, behind the text `after`."""
    text = (ROOT / "benchmarks" / record).read_text()
    text = text[text.index(after) :] if after else text
    line = next(line for line in text.splitlines() if line.startswith(f"| {row} |"))
    return [[float(each) for each in re.findall(r"[-+]?\d+(?:\.\d+)?", cell)] for cell in line.strip("| ").split("|")]


def first(record: str, row: str, column: int, after: str = "") -> float:
    """The first number of one cell, columns counted from 0."""
    return cells(record, row, after)[column][0]


def nodes(row: str, column: int = 1) -> tuple[float, ...]:
    return tuple(first("replay.md", row, column, f"## {count} nodes") for count in (2, 4, 8))


def published() -> tuple[float, ...]:
    text = words("benchmarks/replay.md")
    return tuple(float(each) for each in re.findall(r"## \d nodes, published (\d\.\d+)", text))


def grown(workers: int) -> tuple[float, ...]:
    """Points of accuracy that a batch as large as that of so many workers loses, on images and letters."""
    found = []
    for task, samples in (("## Images", 64), ("## Letters", 16)):
        one, many = (first("batch_growth.md", f"{each} ({each * samples})", 1, task) for each in (1, workers))
        found.append(one - many)
    return tuple(round(each) for each in found)


def lost(row: str, column: int, digits: int = 1) -> tuple[float, ...]:
    """Points of accuracy that a way of sending less loses, on images and letters."""
    found = (-first("accuracy.md", row, column, task) for task in ("## Images", "## Letters"))
    return tuple(round(each + 1e-9, digits) for each in found)


def more_memory() -> tuple[float, ...]:
    ours, plain = (first("bits_cost.md", row, 4) for row in ("virtual 4", "ddp"))
    return (round(100 * (ours / plain - 1)),)


def longer(row: str) -> float:
    return round(100 * (first("bits_cost.md", row, 2) - 1))


def off_by(record: str) -> tuple[str, ...]:
    text = words(f"benchmarks/{record}")
    found = re.search(r"off by ([\d.]+) % \(median of (\d+)\), at worst by ([\d.]+) %", text)
    assert found is not None, record
    return found.groups()


def searched() -> tuple[str, ...]:
    found = re.search(r"as good as random in (\d+) of (\d+) seeds", words("benchmarks/tuning.md"))
    assert found is not None
    return found.groups()


def share_of_looks() -> tuple[str, ...]:
    found = re.search(r"The looks take at most ([\d.]+) % of a run of 10 minutes", words("benchmarks/guards.md"))
    assert found is not None
    return found.groups()


def moved_loops() -> tuple[int, int]:
    """Most lines in the place of theirs, and how many loops end with equal bits in every way that is tried."""
    text = (ROOT / "benchmarks" / "foreign_loops.md").read_text()
    rows = [line.split(" | ") for line in text[text.index("| loop |") :].split("\n\n")[0].splitlines()[2:]]
    return max(int(row[2]) for row in rows), sum(" | ".join(row).count("equal bits") == 3 for row in rows)


CLAIMS: dict[tuple[str, str], Callable[[], tuple[float | str, ...]]] = {
    ("docs/slow-networks.md", "kept {:.2f}, {:.2f} and {:.2f} of the ideal speed on 2, 4 and 8 nodes"): published,
    ("docs/slow-networks.md", "plain data parallelism kept {:.2f}, {:.2f} and {:.2f}"): lambda: nodes("ddp"),
    ("docs/slow-networks.md", "`auto` {:.2f}, {:.2f} and {:.2f}"): lambda: nodes("ddp auto"),
    ("docs/own-loop.md", "by at most {} lines each. {} of them ended with equal bits"): moved_loops,
    ("docs/clusters.md", "LSF in one file of {} lines"): lambda: (
        len((ROOT / "tests" / "lsf_plugin.py").read_text().splitlines()),
    ),
    ("docs/tune.md", "as the best of 20 random ones in {} of {} seeds"): searched,
    ("docs/bits.md", "{:.0f} % more memory where every worker has one part"): more_memory,
    ("docs/bits.md", "a step that is {:.0f} % to {:.0f} % longer"): lambda: (longer("virtual 4"), longer("virtual 8")),
    ("docs/data.md", "In 10 minutes of small models looks take at most {} % of the time"): share_of_looks,
    ("docs/growing-batches.md", "by {:.0f} and {:.0f} points at two workers"): lambda: grown(2),
    ("docs/growing-batches.md", "by {:.0f} and {:.0f} at sixteen"): lambda: grown(16),
    ("docs/growing-batches.md", "on text {:.1f} points behind, {:.1f} at rank 4"): lambda: (
        lost("powersgd, warmed up", 4)[1],
        lost("powersgd of rank 4, warmed up", 4)[1],
    ),
    ("docs/growing-batches.md", "Without it, at rank 4, {:.1f} and {:.1f} points"): lambda: lost(
        "powersgd of rank 4", 2
    ),
    ("docs/growing-batches.md", "`local-sgd` loses {:.1f} points on images and {:.1f} on text"): lambda: lost(
        "local-sgd, warmed up", 3
    ),
    ("docs/growing-batches.md", "and `diloco` {:.1f} and {:.1f}. The synchronisation"): lambda: lost(
        "diloco, warmed up", 3
    ),
    ("docs/growing-batches.md", "every 4 steps `local-sgd` loses {:.1f} and {:.1f}"): lambda: lost(
        "local-sgd, every 4, warmed up", 3
    ),
    ("docs/growing-batches.md", "every 32 steps `diloco` {:.1f} and {:.1f}"): lambda: lost(
        "diloco, every 32, warmed up", 3
    ),
    ("docs/growing-batches.md", "`local-sgd` loses {:.1f} and {:.1f} points on 4 workers"): lambda: lost(
        "local-sgd", 2
    ),
    ("docs/growing-batches.md", "and `diloco` {:.1f} and {:.1f}. The learning"): lambda: lost("diloco", 2),
    ("docs/serving.md", "64 clients got {:.1f} times the answers that plain uvicorn"): lambda: (
        first("serving.md", "manyhosts, batch 16 | 64", 4),
    ),
    ("docs/serving.md", "killed under load, an export of {} MB"): lambda: tuple(
        re.findall(r"The model has (\d+) MB of weights", words("benchmarks/serving_killed.md"))
    ),
    ("docs/serving.md", "{:.1f} s later, a model cut over two processes {:.1f} s later"): lambda: (
        first("serving_killed.md", "an export, one process", 2),
        first("serving_killed.md", "a run, cut over two processes", 2),
    ),
    ("docs/serving.md", "kept {:.2f} of what they gave the bare forward pass, and {:.2f} per second"): lambda: (
        first("serving.md", "time", 3),
        first("serving.md", "time with a core", 3),
    ),
    ("docs/plan.md", "{} % (median), and at worst {} %, of {} steps"): lambda: (
        lambda median, count, worst: (median, worst, count)
    )(*off_by("prediction.md")),
    ("docs/plan.md", "{} % (median), and at worst {} %, of {} steps of `fsdp`"): lambda: (
        lambda median, count, worst: (median, worst, count)
    )(*off_by("prediction_sharded.md")),
}


LIMITS: dict[str, str] = {
    "README.md": "80 lines",
    "docs/analyse.md": "95 %",
    "docs/clusters.md": "10 MB | 20 s | 200 MB | 30 s | 5 s | 90 seconds",
    "docs/doctor.md": "0.5 % | 1.3 times below | 1.4 times below | 20 % | 5 s | 5 times above | 90 s | 15 min",
    "docs/errors.md": "1 MB | 90 s",
    "docs/hangs.md": "10 s | 2 s | 2.25 s | 3 s | 30 s | 600 s",
    "docs/kubernetes.md": "1 MB | 8s",
    "docs/large-models.md": "64 MB",
    "docs/plan.md": "2 % | 2 MB | 5 % | 6 % | 68 % | 8 MB | 1 Gbit/s | 100 Mbit/s | 2.37 minutes",
    "docs/security.md": "30 s | 5 s",
    "docs/serving.md": "1 % | 99 %",
    "docs/slow-networks.md": "0.8 s | 1.5 times as | 100 MB | 5 % | 5 s | 1 Gbit/s",
    "docs/study.md": "10 % | 90 % | 95 %",
    "docs/tune.md": "95 %",
    "docs/when-something-dies.md": "10 s | 15 s | 2 s | 30 s | 300 s | 2 min",
    "docs/where-time-goes.md": "5 s",
}
"""By page, what is no measurement: limits, durations and tolerances of the code, and examples with round numbers."""
_FIGURE = r"\d[\d,.]* ?(?:%|ms\b|s\b|seconds\b|times (?:as|the|below|above|longer)\b|points\b|[kMG]B\b"
_FIGURE += r"|min\b|minutes\b|hours\b|lines\b|(?:unit )?tests\b|[kMG]bit/s)"
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]


def figures_of(page: str) -> set[str]:
    """Numbers with a unit that a page has outside of code, and that no record is read for."""
    text = " ".join(re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL).split())
    for of, sentence in CLAIMS:
        if of == page:
            text = text.replace(sentence.format(*CLAIMS[of, sentence]()), "")
    text = re.sub(r"<!-- made by .*? -->.*?<!-- end -->", "", text)  # a script writes it: see below
    return set(re.findall(_FIGURE, re.sub(r"`[^`]*`", "", text)))


@pytest.mark.parametrize("page", PAGES)
def test_figure_that_no_record_is_read_for_is_a_limit_and_no_measurement(page: str) -> None:
    known = set(filter(None, LIMITS.get(page, "").split(" | ")))
    found = figures_of(page)
    assert found <= known, f"{sorted(found - known)}: read it from a record in CLAIMS, or name it in LIMITS"
    assert found == known, f"{sorted(known - found)} stands there no more"


@pytest.mark.parametrize(("page", "sentence"), CLAIMS)
def test_figure_is_the_one_in_its_record(page: str, sentence: str) -> None:
    reported = sentence.format(*CLAIMS[page, sentence]())
    assert reported in words(page), f"{page} is to say {reported!r}"


@pytest.mark.parametrize("page", PAGES)
def test_figure_beside_a_link_to_a_record_is_read_from_it(page: str) -> None:
    """A sentence that names a record may have no figure of its own that no line of `CLAIMS` reads."""
    text = words(page)
    for of, sentence in CLAIMS:
        if of == page:
            text = text.replace(sentence.format(*CLAIMS[of, sentence]()), "")
    for made in re.findall(r"<!-- made by .*? -->.*?<!-- end -->", text):
        text = text.replace(made, "")  # a script writes it: see below
    for sentence in re.split(r"(?<=[.:]) ", text):
        if re.search(r"benchmarks/\w+\.md", sentence):
            assert not re.findall(r"\d+(?:\.\d+)? ?(?:%|ms\b|s\b|points|times)", sentence), sentence


@pytest.mark.parametrize("page", ["README.md", "docs/when-something-dies.md", "benchmarks/faults.md"])
def test_table_of_faults_is_made_from_its_record(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    made = importlib.import_module("faults_table")
    try:
        record = ROOT / "benchmarks" / "faults.jsonl"
        expected = made.table(record) if page.startswith("benchmarks") else made.short_table(record)
    finally:
        for name in ("faults_table", "faults_kinds", "machine"):
            sys.modules.pop(name, None)
    assert " ".join(expected.split()) in words(page)


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_record_names_machine_date_commit_and_condition(record: Path) -> None:
    text = " ".join(record.read_text().split())
    assert re.search(r"Machine: \d+ cores of ", text), "on what"
    assert re.search(r"Recorded: \d{4}-\d\d-\d\d(?: to \d{4}-\d\d-\d\d)?, commit [0-9a-f]{7,}\+?\b", text), (
        "when, of what"
    )
    condition = re.search(r"Recorded: [^.]*?(?:under the load|load [\d.]+ of \d+ cores|its load was not noted)", text)
    assert condition, "how busy the machine was"


def test_figure_that_is_not_in_its_record_would_be_found() -> None:
    assert "a tenth more memory" not in words("docs/bits.md")
    assert more_memory() == (38,)
    assert nodes("ddp")[0] == 0.90 != published()[0]


class Way:
    """One that was predicted, and measured."""

    def __init__(self, seconds: float, steps: Sequence[float]) -> None:
        self.prediction = SimpleNamespace(step=SimpleNamespace(seconds=seconds))
        self.line = {"steps": steps}


class MadePlace:
    """Plans and trains without doing so."""

    link = "host"

    def plan(self, kind: str, seconds: float) -> tuple[dict[str, object], float]:
        return {"measured": {"of": kind}, "machines": []}, seconds

    def train(self, kinds: Sequence[str], workers: int, steps: int) -> list[dict[str, object]]:
        ways = ("none", "bf16") if workers > 1 else ("none",)
        line = {"median": float(workers), "seconds": [float(workers)] * steps}
        return [{"kind": kind, "compression": way, **line} for kind in kinds for way in ways]


def test_a_record_that_was_cut_is_resumed_with_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    made = importlib.import_module("held_out")
    try:
        monkeypatch.setattr(made, "origin", dict)
        monkeypatch.setattr(made.os, "getloadavg", lambda: (0.5, 0.5, 0.5))
        asked = {"seconds": 1.0, "steps": 2}
        monkeypatch.setattr(made, "fixed_seconds", lambda: 1.0)
        starts = list(made.measure(MadePlace(), ["cnn", "gpt"], [], **asked))
        assert [len(lines) for lines in starts] == [7, 7], "one worker, two in two ways, twice; and the plan"
        for cut in range(len(starts) + 1):
            known = [line for lines in starts[:cut] for line in lines]
            rest = [line for lines in made.measure(MadePlace(), ["cnn", "gpt"], known, **asked) for line in lines]
            assert [*known, *rest] == [line for lines in starts for line in lines]
        assert {line["asked"] for lines in starts for line in lines} == {made.stamp(**asked)}
        assert made.stamp(seconds=1.0, steps=3) != made.stamp(**asked), "of fewer steps it is another record"
    finally:
        forget_held_out()


def test_a_kind_is_measured_again_where_the_machine_was_not_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    made = importlib.import_module("held_out")
    try:
        monkeypatch.setattr(made, "origin", dict)
        times = iter([*[1.0] * 5, 1.4, *[1.0] * 5, 1.2, *[1.0] * 6])
        monkeypatch.setattr(made, "fixed_seconds", lambda: next(times))
        first, second = made.measure(MadePlace(), ["cnn", "gpt"], [], seconds=1.0, steps=2)
        assert made.unsteady(first) == pytest.approx(0.2), "the steadier of two"
        assert made.unsteady(second) == 0.0
        assert not list(times), "two tries of the first, one of the second"
    finally:
        forget_held_out()


def forget_held_out() -> None:
    for name in ("held_out", "held_out_train", "prediction_train", "prediction_page", "machine"):
        sys.modules.pop(name, None)


def test_what_plan_says_of_its_past_is_what_its_record_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    made = importlib.import_module("held_out")
    try:
        _, plans, trained = made.read(made.RECORD, lambda line: (line["kind"], line["link"]))
        expected = made.past(made.compared(trained, plans))
    finally:
        forget_held_out()
    assert json.loads(made.PAST.read_text()) == expected, "python benchmarks/held_out.py --page"
    (median, count, worst) = off_by("held_out.md")
    assert (100 * expected["median"], 100 * expected["worst"]) == pytest.approx((float(median), float(worst)), abs=0.06)
    assert expected["steps"] == int(count)


def test_ways_that_a_plan_predicts_alike_are_equal_unless_their_steps_contradict_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    made = importlib.import_module("held_out")
    try:
        slow = [100.0 + number for number in range(12)]
        assert not made.differ(slow, [seconds - 3 for seconds in slow]), "the medians are 3 % apart, the steps 11 %"
        assert made.differ(slow, [seconds - 8 for seconds in slow])
        assert not made.differ(slow, slow)
        ways = [
            Way(seconds, steps) for seconds, steps in ((1.0, slow), (1.019, slow), (1.03, slow), (1.0, [50.0] * 12))
        ]
        assert [made.are_equal(ways[0], other) for other in ways] == [False, True, False, False]
    finally:
        forget_held_out()
