"""Where two trials depart from each other: the first step, the first tensor, and by how much.

Two right runs on different numbers of workers add the same numbers in another order. In float32 that is 1e-7 of a
gradient in the first step, and grows from step to step: an optimizer that divides by a tiny gradient, a ReLU that
flips. So the first step is held to a tight bound, and a later one may depart by a multiple of what the step before did:
rounding grows, a fault jumps. What departs by more is looked at in float64, where a right script is equal to 1e-12 and
a wrong one as wrong as before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from manyhosts.prove.trace import Line, Trace

_NOISE = 1e-5
"""A gradient with less than this share of the full one's norm is noise in float32: that of a bias before BatchNorm."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Relative differences that are rounding."""

    gradient: float
    loss: float
    growth: float
    """A step may depart by so many times what the one before did."""
    noise: float = 0.0
    """Weights whose gradient has less than this share of the full gradient's norm are not looked at."""
    most: float = math.inf
    """Beyond this, rounding that has grown cannot be distinguished from a fault that has."""


FLOAT32 = Tolerance(gradient=1e-4, loss=2e-5, growth=20, noise=_NOISE, most=1e-3)
FLOAT32_ALONE = Tolerance(gradient=3e-3, loss=3e-4, growth=100, noise=_NOISE)
"""Where a script cannot be run in float64: beyond it a departure is a fault, and from `FLOAT32` up to it either."""
FLOAT64 = Tolerance(gradient=1e-5, loss=1e-6, growth=20, noise=1e-6, most=1e-3)
EXACT = replace(FLOAT64, noise=1e-12)
"""Where nothing was computed in float32 within, which shows in all larger gradients: they are equal to `PURE`."""
PURE = 1e-11


@dataclass(frozen=True, slots=True)
class Departure:
    """The first place where two trials, or two workers of one, are not the same."""

    step: int
    what: str
    """`samples`, `learning rate`, `loss`, `gradient`, `parameter` or `buffer`."""
    name: str = ""
    """Which gradient, parameter, buffer or logged value."""
    amount: float | None = None
    """The relative difference; None where two things are not to be subtracted."""
    seen: tuple[str, str] = ("", "")
    """The two values, in words."""

    def __str__(self) -> str:
        subject = {
            "gradient": f"the gradient of {self.name}",
            "parameter": f"parameter {self.name}",
            "buffer": f"buffer {self.name}",
            "value": f"the value {self.name!r}",
        }.get(self.what, f"the {self.what}")
        values = f" ({self.seen[0]} and {self.seen[1]})" if self.seen[0] else ""
        by = "" if self.amount is None else f" by {amount_in_words(self.amount)}"
        where = f"in step {self.step}" if self.step else "before the first step"
        return f"{where} {subject} departs{by}{values}"


def amount_in_words(amount: float) -> str:
    """`3.1e-04`, or `all of it` where nothing is alike."""
    return f"{amount:.1e}" if math.isfinite(amount) else "all of it"


def in_bits(one: Trace, other: Trace, *, since: int = 0) -> Departure | None:
    """The first departure of any bit of losses, weights and buffers in the steps after `since`."""
    if not since and (start := unequal(_first(one.begins), _first(other.begins), 0)):
        return start
    for step in sorted(one.steps.keys() & other.steps.keys()):
        if step > since and (found := _of_step(one, other, step)):
            return found
    return None


def _of_step(one: Trace, other: Trace, step: int) -> Departure | None:
    ours, theirs = one.of(step), other.of(step)
    if found := _inputs(one, other, step):
        return found
    for name, value in ours.get("values", {}).items():
        if not _equal_numbers(value, theirs["values"].get(name, math.nan)):
            return _of_value(step, name, value, theirs["values"].get(name, math.nan))
    return unequal(ours, theirs, step)


def _inputs(one: Trace, other: Trace, step: int) -> Departure | None:
    """What goes into a step and must be equal in all trials: its samples, and the learning rate."""
    ours, theirs = one.of(step), other.of(step)
    if ours.get("samples") != theirs.get("samples"):
        return Departure(step, "samples", seen=(f"{ours['samples']}", f"{theirs['samples']}"))
    if not ours.get("shards") and (mine := one.taken(step)) != (yours := other.taken(step)):
        return Departure(step, "samples", seen=(_few(mine), _few(yours)))
    for mine, yours in zip(ours["lr"], theirs["lr"], strict=False):
        if not math.isclose(mine, yours, rel_tol=1e-9):
            return Departure(
                step, "learning rate", "", abs(yours / mine - 1) if mine else None, (f"{mine:g}", f"{yours:g}")
            )
    return None


def unequal(ours: Line, theirs: Line, step: int) -> Departure | None:
    """The first gradient, parameter or buffer in two lines that is not equal in every bit."""
    for what, key in (("gradient", "gradients"), ("parameter", "weights"), ("buffer", "buffers")):
        mine, yours = ours.get(key, {}), theirs.get(key, {})
        for name in mine:
            if name not in yours:
                return Departure(step, what, name, math.inf)
            if mine[name][0] != yours[name][0]:
                return Departure(step, what, name, distance(mine[name], yours[name]))
    return None


def between_ranks(trace: Trace, *, ignore: Sequence[str] = ()) -> tuple[Departure, int, int] | None:
    """The first parameter or buffer that two workers of one trial hold differently after a step, and the two ranks."""
    for step, lines in trace.steps.items():
        first = min(lines)
        for rank in sorted(lines):
            for what, key in (("parameter", "weights"), ("buffer", "buffers")):
                mine, yours = lines[first][key], lines[rank][key]
                for name in mine:
                    if name in yours and mine[name][0] != yours[name][0] and name not in ignore:
                        return Departure(step, what, name, distance(mine[name], yours[name])), first, rank
    return None


class Comparison:
    """Compares two trials within a tolerance, step after step."""

    def __init__(self, one: Trace, other: Trace, tolerance: Tolerance) -> None:
        self.one, self.other, self.tolerance = one, other, tolerance
        self.allowed = {"gradient": tolerance.gradient, "loss": tolerance.loss, "parameter": tolerance.gradient}
        self.largest = 0.0
        """The largest relative difference of a loss or a gradient."""
        self.largest_gradient = 0.0
        """Of the gradients that are no noise."""
        self.noise: set[str] = set()
        """Weights that were not looked at, for their gradient is as small as rounding."""

    @property
    def grew(self) -> bool:
        """Whether they have departed by more than rounding does in a few steps, a little more in each."""
        return self.largest > self.tolerance.most

    def first_departure(self) -> Departure | None:
        """Where the two depart; None where they do not."""
        one, other = self.one, self.other
        if found := self._weights(_first(one.begins), _first(other.begins), 0):
            return found
        for step in sorted(one.steps.keys() & other.steps.keys()):
            found = _inputs(one, other, step) or self._step(one.of(step), other.of(step), step)
            if found is not None:
                return found
        return None

    def _step(self, ours: Line, theirs: Line, step: int) -> Departure | None:
        seen = {"loss": 0.0, "gradient": 0.0, "parameter": 0.0}
        full = _norm(ours.get("gradients", {}))
        scale = abs(_first(self.one.steps[min(self.one.steps)]).get("values", {}).get("loss", 0.0))
        for name, value in ours.get("values", {}).items():
            other = theirs["values"].get(name, math.nan)
            difference = (
                abs(value - other) / max(abs(value), 0.01 * scale, 1e-12) if not _equal_numbers(value, other) else 0.0
            )
            seen["loss"] = max(seen["loss"], difference)
            if not difference <= self.allowed["loss"]:
                return _of_value(step, name, value, other)
        for name, facts in ours.get("gradients", {}).items():
            if name not in theirs["gradients"]:
                return Departure(step, "gradient", name, math.inf)
            if facts[1] <= self.tolerance.noise * full:
                self.noise.add(name)
                continue
            difference = distance(facts, theirs["gradients"][name], floor=1e-3 * self.tolerance.gradient * full)
            seen["gradient"] = max(seen["gradient"], difference)
            if not difference <= self.allowed["gradient"]:
                return Departure(step, "gradient", name, difference)
        found = self._weights(ours, theirs, step, seen)
        for what, difference in seen.items():
            floor = self.tolerance.loss if what == "loss" else self.tolerance.gradient
            self.allowed[what] = max(floor, self.tolerance.growth * difference)
        self.largest = max(self.largest, seen["loss"], seen["gradient"])
        self.largest_gradient = max(self.largest_gradient, seen["gradient"])
        return found

    def _weights(self, ours: Line, theirs: Line, step: int, seen: dict[str, float] | None = None) -> Departure | None:
        """Weights are compared with how far they have come, buffers with how large they are."""
        start = _first(self.one.begins)
        for what, key in (("parameter", "weights"), ("buffer", "buffers")):
            begun = start.get(key, {})
            for name, facts in ours.get(key, {}).items():
                if name in self.noise:
                    continue
                if self.noise and what == "buffer" and name.endswith(("running_mean", "running_var")):
                    continue  # of a BatchNorm layer: the mean holds the bias before it, which is noise
                other = theirs.get(key, {}).get(name)
                if other is None:
                    return Departure(step, what, name, math.inf)
                if facts[0] == other[0]:
                    continue
                moved = _length(facts, begun[name]) if step and name in begun else facts[1]
                difference = _length(facts, other) / max(moved, 1e-3 * self.tolerance.gradient * facts[1], 1e-30)
                if seen is not None:
                    seen["parameter"] = max(seen["parameter"], difference)
                if not difference <= self.allowed["parameter"] * 3:
                    return Departure(step, what, name, difference)
        return None


def small(trace: Trace) -> bool:
    """Whether a weight's gradient in float64 is too small to be seen in float32, and no rounding for all that."""
    for step in trace.steps:
        gradients = trace.of(step)["gradients"]
        full = _norm(gradients)
        if any(EXACT.noise * full < facts[1] <= FLOAT32.noise * full for facts in gradients.values()):
            return True
    return False


def distance(one: Sequence[Any], other: Sequence[Any], floor: float = 0.0) -> float:
    """The norm of the difference of two tensors over the larger of their norms, or of `floor`; from their facts."""
    if one[0] == other[0]:
        return 0.0
    if not math.isfinite(one[1]) or not math.isfinite(other[1]):
        return math.inf
    return float(_length(one, other) / max(one[1], other[1], floor, 1e-30))


def _length(one: Sequence[Any], other: Sequence[Any]) -> float:
    return math.dist(one[2:], other[2:])


def _norm(tensors: Mapping[str, Sequence[Any]]) -> float:
    return math.sqrt(sum(facts[1] ** 2 for facts in tensors.values()))


def _of_value(step: int, name: str, mine: float, yours: float) -> Departure:
    amount = abs(mine - yours) / max(abs(mine), 1e-12) if math.isfinite(mine) and math.isfinite(yours) else math.inf
    what = "loss" if name == "loss" else "value"
    return Departure(step, what, name, amount, (f"{mine:.7g}", f"{yours:.7g}"))


def _equal_numbers(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _first(lines: Mapping[int, Line]) -> Line:
    return lines[min(lines)] if lines else {}


def _few(indices: Sequence[int]) -> str:
    return f"[{', '.join(map(str, indices[:6]))}{', …' if len(indices) > 6 else ''}]"


def steps_of(*traces: Trace) -> Iterator[int]:
    """The steps that all of them have."""
    yield from sorted(set.intersection(*(set(trace.steps) for trace in traces)))
