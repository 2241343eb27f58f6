"""What `manyhosts plan` shows: what was measured, a table of predictions, the advice."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

from manyhosts.listeners.paint import paint, writable
from manyhosts.planner import fit
from manyhosts.planner.interval import past
from manyhosts.planner.recommend import SAME_STEPS
from manyhosts.units import bytes_in_words, seconds_in_words

if TYPE_CHECKING:
    from manyhosts.planner.plan import Plan
    from manyhosts.planner.predict import Prediction

_WIDTH = 80
_ALIKE = 1.02
"""A way must be faster by more than that than one that changes less to be shown beside it."""


COMPRESSIONS = ("fp16", "bf16", "int8", "powersgd", "topk")
"""Those that a plan measures, the least lossy first, as far as its time allows."""


def print_plan(plan: Plan, stream: TextIO, *, everything: bool) -> None:
    """Print everything, in colours on a terminal. `everything`: every way, not only those that are worth a look."""

    def title(text: str) -> str:
        return paint(text, "bold") if stream.isatty() else text

    lines = [*_wrapped([f"{past()} A study measures."]), "", title("measured"), *_wrapped(_measured(plan)), ""]
    for kind in plan.machines:
        own = [each for each in plan.predictions if each.machines == kind.name]
        shown = own if everything else worth_a_look(own)
        lines += [title(f"predicted{f' for {kind.name}' if kind.name else ''}"), *table(shown), ""]
        workers = max(each.workers for each in own)
        lines += [title(f"memory of one of {workers} worker{'s' * (workers > 1)}"), *memory_of(own), ""]
    if left := sorted({each.why_not for each in plan.predictions if each.why_not}):
        lines += [*_wrapped(f"* does not fit: {reason}" for reason in left), ""]
    if plan.calibration is not None:
        lines += [title("calibrated"), *_wrapped([f"{plan.calibration}."]), ""]
    lines += [title("advice"), *_wrapped([plan.recommendation.why])]
    stream.write(writable("\n".join(lines) + "\n", stream.encoding))


def worth_a_look(found: Iterable[Prediction]) -> list[Prediction]:
    """Of each size: the way that changes nothing about a step, then each that is faster than all before it."""
    shown: list[Prediction] = []
    fastest: dict[tuple[int, int], float] = {}
    for each in found:
        size = (each.nodes, each.workers)
        if size not in fastest or (each.fits and each.epoch_seconds * _ALIKE < fastest[size]):
            shown.append(each)
            fastest[size] = each.epoch_seconds if each.fits else float("inf")
    return shown


def table(found: Sequence[Prediction]) -> list[str]:
    """One row for each, in columns of at most 80 characters in all."""
    priced = any(each.price is not None for each in found)
    head = [
        "machines",
        "workers",
        "how",
        "step",
        "9 of 10 in",
        "epoch",
        "effic.",
        "memory",
        *(["price"] if priced else []),
    ]
    rows = [head, *(_row(each, priced=priced) for each in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return [
        " ".join(f"{cell:<{width}}" if column == 2 else f"{cell:>{width}}" for column, (cell, width) in
                 enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]  # fmt: skip


def _how(each: Prediction) -> str:
    words = (each.strategy, "" if each.compression == "none" else each.compression, each.setting)
    return " ".join(word for word in words if word)


def memory_of(found: Sequence[Prediction]) -> list[str]:
    """What a worker holds where there are most of them, in each way whose workers hold one model."""
    most = max(each.workers for each in found)
    shown = {_how(each): each.memory for each in found if each.workers == most and each.strategy in SAME_STEPS}
    return fit.table(shown.items())


def _row(each: Prediction, *, priced: bool) -> list[str]:
    row = [
        str(each.nodes),
        str(each.workers),
        _how(each) + ("" if each.fits else " *"),
        _time(each.step.seconds),
        _range(*each.step_range),
        _time(each.epoch_seconds),
        f"{100 * each.efficiency:.0f} %",
        bytes_in_words(each.memory.total),
    ]
    return [*row, "" if each.price is None else f"{each.price:.3g}"] if priced else row


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else seconds_in_words(seconds)


def _range(low: float, high: float) -> str:
    """Two digits of both, in the unit of the larger one: `31-45 ms`."""
    unit, times = ("ms", 1000.0) if high < 1 else ("s", 1.0)
    first, last = (float(f"{times * seconds:.2g}") for seconds in (low, high))
    return f"{first:g}-{last:g} {unit}"


def _measured(plan: Plan) -> Iterable[str]:
    """The facts, a sentence each."""
    measured = plan.measured
    if measured.load > measured.cores + 1:  # the start of this measurement is the one
        yield (
            f"careful: {measured.load:.0f} processes wanted the {measured.cores} cores in the minute before, so all of "
            "this is slower than on a quiet machine, and what is predicted from it, too"
        )
    largest = measured.compute[-1]
    where = f"{measured.threads} threads of a CPU" if measured.device == "cpu" else measured.device
    yield (
        f"forward and backward pass of {largest.samples} samples: {_time(largest.forward_s)} and "
        f"{_time(largest.backward_s)} on {where}; the update: {_time(measured.update_s)}"
    )
    first = measured.buckets[0]
    count = len(measured.buckets)
    yield (
        f"gradient: {bytes_in_words(measured.gradient_bytes)} in {count} bucket{'s' * (count > 1)}, the first of which "
        f"is ready after {100 * first.ready:.0f} % of the backward pass"
    )
    processes = measured.loader_processes
    by = f"{processes} process{'es' * (processes > 1)}" if processes else "the worker itself"
    yield f"loader: {measured.loader_samples_per_second:,.0f} samples/s, by {by}"
    for workers, times in measured.contention.items():
        yield f"{workers} workers at once on this machine: each computes {times:.2f} times as long"
    for hosts, times in measured.contention_of_hosts.items():
        yield f"{hosts} hosts that are one machine: each worker computes {times:.2f} times as long"
    if measured.batch_norm_layers:
        yield (
            f"BatchNorm over the batch of all workers: {2 * measured.batch_norm_layers} exchanges in each pass over "
            "the model, on one host through shared memory"
        )
    dropped = [name for name in COMPRESSIONS if name not in measured.compression]
    if measured.compression and dropped:
        yield (
            f"careful: the time of --seconds was over before {', '.join(dropped)} could be measured, so no way with "
            f"{'it' if len(dropped) == 1 else 'them'} is predicted; a longer --seconds measures all"
        )
    for kind in plan.machines:
        name = f" of {kind.name}" if kind.name else ""
        if kind.hosts_per_machine > 1:
            yield f"{kind.hosts_per_machine} of the hosts are one machine{name}, and share its {measured.cores} cores"
        if kind.workers > 1:
            yield f"network within a machine{name}: {kind.within}"
        if kind.count > 1:
            yield f"network between machines{name}: {kind.between}"


def _wrapped(sentences: Iterable[str]) -> list[str]:
    return [
        line
        for sentence in sentences
        for line in textwrap.wrap(sentence, _WIDTH, initial_indent="  ", subsequent_indent="  ")
    ]
