"""What a plan advises: the size and the way to train, whether to scale up or out, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from manyhosts.config.strategies import CUTS, OF_SAME_SAMPLES
from manyhosts.errors import ConfigError
from manyhosts.planner.predict import VIRTUAL, Prediction, by_size
from manyhosts.units import seconds_in_words

BY_CHANGE = ("none", "fp16", "bf16", "int8", "powersgd", "topk")
"""From the compression that changes nothing about a step to the one that changes most: the order of `auto`, too."""
SAME_STEPS = ("single", "ddp", *CUTS, *OF_SAME_SAMPLES, VIRTUAL)
"""Strategies whose workers hold the same model after every step."""
SIZE_TOLERANCE = 1.02
"""A larger size must be faster by more than that than a smaller one to be worth its machines."""
TOLERANCE = 1.05
"""What is advised takes at most so many times the time of the fastest."""

_BEYOND = 1.15
"""Caches may make several workers as much faster than one; more has another cause."""
LIMITS = {
    "compute": "computing",
    "straggler": "waiting for the slowest worker",
    "communication_exposed": "exchanges that no computing hides",
    "data_wait": "waiting for data",
    "update": "the optimizer's step",
    "other": "what a step does besides all that",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """The advice."""

    best: Prediction
    next: Prediction | None
    """The fastest of another size or way; None where there is none."""
    otherwise: Prediction | None
    """One that is faster because workers do not wait for each other in each step, and trains another way."""
    up: Prediction | None
    """The best on one machine with several workers."""
    out: Prediction | None
    """The best on several machines."""
    why: str

    def to_json(self) -> dict[str, Any]:
        """For `plan --json`."""
        return {
            **self.best.to_json(),
            "why": self.why,
            "next": None if self.next is None else self.next.to_json(),
            "otherwise": None if self.otherwise is None else self.otherwise.to_json(),
            "up": None if self.up is None else self.up.to_json(),
            "out": None if self.out is None else self.out.to_json(),
        }


def recommend(found: Sequence[Prediction]) -> Recommendation:
    """The fastest size that fits, smaller where that is as fast, and there the way that changes least, as fast as any.

    Raises:
        ConfigError: nothing fits.
    """
    steady = [each for each in found if each.strategy in SAME_STEPS]
    uncut = [each for each in steady if each.strategy not in (*CUTS, *OF_SAME_SAMPLES)]
    if any(each.fits for each in uncut):
        steady = uncut  # parts are for models that no worker can hold: a lost worker takes its part with it
    best = _best(steady)
    if best is None:
        least = min(found, key=lambda each: each.memory.total, default=None)
        of_memory = least is None or "there are" in least.why_not
        raise ConfigError(
            "the training fits on none of these machines" + ("" if least is None else f": {least.why_not}"),
            where="--machines" if any(each.machines for each in found) else "--workers",
            fix="take machines with more memory, or cut the passes: --set micro_batch_size=…"
            if of_memory
            else "ask for fewer workers, or a larger batch: --set batch_size=…"
            if least is not None and "share a batch" in least.why_not
            else "ask for other numbers of workers or machines",
        )
    others = [each for each in steady if each.fits and each is not best]
    alone = [each for each in found if each.fits and each.strategy not in SAME_STEPS]
    fastest_alone = min(alone, key=_time, default=None)
    if fastest_alone is not None and fastest_alone.epoch_seconds * TOLERANCE > best.epoch_seconds:
        fastest_alone = None
    runner_up = min(others, key=_time, default=None)
    up = _best(each for each in steady if each.nodes == 1 and each.workers > 1)
    out = _best(each for each in steady if each.nodes > 1)
    sentences = [_what(best), _doubt(best), _limit(best), _margin(best, runner_up), _up_or_out(up, out)]
    sentences += [_cheapest(best, steady), _otherwise(best, fastest_alone)]
    return Recommendation(
        best=best, next=runner_up, otherwise=fastest_alone, up=up, out=out,
        why=" ".join(sentence for sentence in sentences if sentence),
    )  # fmt: skip


def _time(each: Prediction) -> float:
    return each.epoch_seconds


def _best(found: Iterable[Prediction]) -> Prediction | None:
    sizes = by_size(found)
    if not sizes:
        return None
    fastest = {size: min(map(_time, each)) for size, each in sizes.items()}
    limit = SIZE_TOLERANCE * min(fastest.values())
    priced = all(each[0].price is not None for each in sizes.values())

    def cost(size: tuple[str, int, int]) -> tuple[float, ...]:
        return (sizes[size][0].price or 0.0) if priced else 0.0, size[1], size[2], fastest[size]

    size = min((each for each in sizes if fastest[each] <= limit), key=cost)
    enough = fastest[size] * TOLERANCE / SIZE_TOLERANCE
    return min((each for each in sizes[size] if each.epoch_seconds <= enough), key=_change)


def _change(each: Prediction) -> tuple[int, str, float]:
    known = each.compression in BY_CHANGE
    change = BY_CHANGE.index(each.compression) if known else len(BY_CHANGE)
    return change, each.setting, each.epoch_seconds


def _what(best: Prediction) -> str:
    percent = round(100 * best.efficiency)
    return f"{name_of(best)}: an epoch in {seconds_in_words(best.epoch_seconds)}, at {percent} % efficiency."


def _doubt(best: Prediction) -> str:
    """Of workers that share out what one does, and are said to be far faster than that."""
    if best.efficiency <= _BEYOND:
        return ""
    return (
        f"That is more than {best.workers} times as fast as one, which was slow when it was measured: by other load, or"
        " by threads that wait for each other. Plan again on a quiet machine, and try one worker with --set threads=1."
    )


def _limit(best: Prediction) -> str:
    limit = best.limit()
    takes = f"{round(100 * best.step.parts()[limit] / best.step.seconds)} % of a step"
    return f"The limit is {LIMITS[limit]}, {takes} of {seconds_in_words(best.step.seconds)}."


def _margin(best: Prediction, runner_up: Prediction | None) -> str:
    if runner_up is None:
        return ""
    slower = runner_up.epoch_seconds / best.epoch_seconds - 1
    if slower < 0:
        return f"{name_of(runner_up)} would be {round(-100 * slower)} % faster, which is not worth what it changes."
    return f"Next comes {name_of(runner_up)}, {round(100 * slower)} % slower."


def _up_or_out(up: Prediction | None, out: Prediction | None) -> str:
    if up is None or out is None:
        return ""
    (word, first), (other, second) = sorted((("up", up), ("out", out)), key=lambda each: _time(each[1]))
    times = second.epoch_seconds / first.epoch_seconds
    if times < TOLERANCE:
        reported = f"Up or out is the same: {name_of(up)} and {name_of(out)} differ by {round(100 * (times - 1))} %."
    else:
        lost = second.limit()
        reported = (
            f"Scale {word}: {name_of(first)} is {times:.2g} times as fast as {name_of(second)}, "
            f"the best way {other}, whose limit is {LIMITS[lost]}."
        )
    if first.price is not None and second.price is not None and second.price < first.price:
        reported += f" Scaling {other} costs {second.price:.3g} an epoch instead of {first.price:.3g}."
    return reported


def _cheapest(best: Prediction, steady: Sequence[Prediction]) -> str:
    priced = [each for each in steady if each.fits and each.price is not None]
    if not priced or best.price is None:
        return ""
    cheapest = min(priced, key=lambda each: (each.price or 0.0, each.epoch_seconds))
    if (cheapest.price or 0.0) * TOLERANCE >= best.price:
        return f"An epoch costs {best.price:.3g}, and nothing here is cheaper by much."
    return (
        f"An epoch costs {best.price:.3g}; the cheapest, {name_of(cheapest)}, costs {cheapest.price:.3g} "
        f"and takes {seconds_in_words(cheapest.epoch_seconds)}."
    )


def _otherwise(best: Prediction, alone: Prediction | None) -> str:
    if alone is None:
        return ""
    times = best.epoch_seconds / alone.epoch_seconds
    steps_alone = alone.strategy in ("local-sgd", "diloco")
    how = "step alone between exchanges" if steps_alone else "do not wait for each other's updates"
    return (
        f"{name_of(alone)} would be {times:.2g} times as fast, but its workers {how}: what is learned in an epoch is "
        "another thing, and has to be tried."
    )


def name_of(each: Prediction) -> str:
    """In words: `4 workers on 2 machines (dgx) with ddp and bf16`."""
    workers = f"{each.workers} worker{'' if each.workers == 1 else 's'}"
    where = f" on {each.nodes} machines" if each.nodes > 1 else ""
    kind = f" ({each.machines})" if each.machines else ""
    way = "" if each.strategy == "single" else f" with {each.strategy}"
    way += f" ({each.setting})" if each.setting else ""
    compression = "" if each.compression == "none" else f" and {each.compression}"
    return f"{workers}{where}{kind}{way}{compression}"
