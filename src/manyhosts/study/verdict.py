"""What a study says in words: what limits the job, what to change first and what that would give, how far it pays."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manyhosts.study.fits import Fit, best
from manyhosts.study.points import Asked, amount
from manyhosts.study.rows import Row, Size, loss_that_all_reached, samples_per_second
from manyhosts.units import bytes_in_words

PAYS = 0.5
"""A worker pays while it adds half of one worker's speed, or more."""
_HARDLY = 0.02
"""Shares of the time below this are not worth a change."""
_BEST = 1.05
_MORE_THAN_IDEAL = (
    "That is more than ideal: either something else slowed the smallest size (other programs on the machine?), or "
    "a part of the work fits into memory or a cache that all of it does not fit into; --repeat 3 shows which."
)
_SMALL_BYTES = 1e6
"""Of what is sent in a step: below, compression has next to nothing to save."""
_BEYOND = 4
"""Predictions go this many times beyond the largest size that was measured, and no further."""
_ONE_IS_SLOW = 0.5
"""The part of waiting for the slowest from which on it is one worker's."""
_FEW_STEPS = 20
"""Runs of fewer steps are mostly what is spent once: the first step, the last snapshot."""

CAUSES = {
    "compute": "computing",
    "communication_exposed": "waiting for gradients and other exchanges",
    "data_wait": "waiting for data",
    "straggler": "waiting for the slowest worker",
    "evaluation": "evaluation",
    "snapshot": "writing snapshots and the best model",
    "start_up": "the first step and what comes before it",
    "other": "what no clock measures by itself",
}
_COULD_GO = ("communication_exposed", "data_wait", "straggler", "evaluation", "snapshot")
"""What a run could do without, in principle."""
_CHANGES = {
    "data_wait": "Read ahead: --set loader_workers=auto, or samples that are quicker to read",
    "evaluation": 'Evaluate less often (--set validate_every="5 epochs"), or in larger pieces (evaluation_batch_size)',
    "start_up": "Train longer: it is spent once in a run, however long that is",
    "other": "Nothing known would help",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The answer for one variant, as words and as values."""

    text: str
    limit: str | None
    """What the largest size has most to gain from; None where that is next to nothing, or there is one size."""
    change: str
    speed_up_without: float | None
    """What the largest size would gain over the smallest without that cause; None where it is faster than ideal."""
    pays_up_to: int | None
    """Workers; None where there are too few sizes to say."""
    fastest: int | None
    """Workers beyond which it gets slower, as far as can be seen."""
    price: Mapping[str, float] | None = None
    """`per_epoch_smallest`, `per_epoch_largest`, `per_hour_saved`; with `loss`, the lowest that all runs of both sizes
    have reached, `per_loss_smallest` and `per_loss_largest`."""
    certainty: Certainty | None = None
    """How sure it is that the largest size is worth it; None where there is one size, or no size can be compared."""

    def to_json(self) -> dict[str, Any]:
        """For `study.json`."""
        return {
            "limit": self.limit, "change": self.change, "speed_up_without": self.speed_up_without,
            "pays_up_to": self.pays_up_to, "fastest": self.fastest,
            "price": None if self.price is None else dict(self.price),
            "certainty": None if self.certainty is None else self.certainty.to_json(),
        }  # fmt: skip


def verdict_on(group: Sequence[Size], laws: Mapping[str, Fit], asked: Asked, price: float | None) -> Verdict:
    """The verdict on the sizes of one variant, the smallest first."""
    small, large = group[0], group[-1]
    if len(group) == 1:
        text = (
            f"One size has ended well ({amount(small.row.workers, 'worker')}), so there is nothing to compare it with."
        )
        return Verdict(text=text, limit=None, change="", speed_up_without=None, pays_up_to=None, fastest=None)
    sentences = [
        f"{large.row.workers} workers are {large.speed_up:.2f} times as fast as {small.row.workers}: "
        f"{_percent(large.efficiency)} of what they could be at best."
    ]
    sure = None
    if large.efficiency > _BEST:
        sentences = [
            f"{large.row.workers} workers were {large.speed_up:.2f} times as fast as the runs of {small.row.workers}, "
            f"and {large.row.workers / small.row.workers:g} times is the most that they can be: the smallest size is "
            "no measure here, and what more workers gain is not known.",
            _MORE_THAN_IDEAL,
        ]
    else:
        sure = certainty(small, large, PAYS)
        sentences.append(sure.in_words(large.row.workers))
    limit, change, without = _limit(large, asked)
    if large.efficiency > _BEST:  # the smallest size is no measure of what there could be, either
        without = None
    sentences += [_what_limits(small, large, limit, change, without)]
    law = best(laws)
    pays = fastest = None
    if law is not None and large.efficiency <= _BEST:  # beyond, the smallest size is no measure for more of them
        pays, fastest, sentence = _how_far(law, group)
        sentences.append(sentence)
    cost = None if price is None else _cost(small, large, price)
    if cost is not None:
        sentences.append(_what_it_costs(cost, small, large))
    sentences += _other_programs(group)
    sentences += _what_is_short(group)
    launch = large.mean([row.measured.launch_seconds for row in large.rows if row.measured])
    if launch is not None:
        sentences.append(f"Starting took {launch:.1f} s before the training began, which is not counted.")
    return Verdict(
        text=" ".join(sentences), limit=limit, change=change, speed_up_without=without, pays_up_to=pays,
        fastest=fastest, price=cost, certainty=sure,
    )  # fmt: skip


def _limit(large: Size, asked: Asked) -> tuple[str | None, str, float | None]:
    """What there is most to gain from, what to change about it, and the speed-up that there would be without it."""
    gains = to_gain(large)
    limit = max(gains, key=lambda cause: gains[cause])
    if gains[limit] < _HARDLY:
        return None, "", None
    change = _CHANGES.get(limit, "")
    if limit == "compute":
        change = _of_computing(large, asked)
    elif limit == "communication_exposed":
        change = _of_exchanges(large)
    elif limit == "straggler":
        change = _of_slowest(large)
    elif limit == "snapshot":
        change = _of_snapshots(asked)
    return limit, change, large.speed_up / (1 - gains[limit])


def _of_snapshots(asked: Asked) -> str:
    """What has fewer of them written: a validation that is the best writes the model, too."""
    fewer = 'Validate less often, for each better one writes the best model: --set validate_every="5 epochs"'
    given = {*asked.settings, *asked.vary}
    return fewer if "snapshots.every" in given else f'Write less often: --set snapshots.every="30 min". {fewer}'


def to_gain(large: Size) -> dict[str, float]:
    """The share of its time that a size would be rid of without each cause.

    Waiting, evaluation and snapshots could go entirely, also what is shared out and so costs no efficiency. Of
    computing, and of what is spent once, only that could go which was lost.
    """
    times, causes = large.times_spent, large.causes
    return {cause: times[cause] if cause in _COULD_GO else causes[cause] for cause in causes}


def _of_computing(large: Size, asked: Asked) -> str:
    """What slows computing down: cores that are shared, or pieces of the batch that are small."""
    if asked.workers and large.row.point.nodes == 1:
        return "The workers share this machine and its cores: give them machines of their own with --hosts"
    batch = large.row.measured.summary.global_batch if large.row.measured else None
    each = "" if batch is None else f" ({batch / large.row.workers:g} samples on each worker)"
    return f"The batch is cut into pieces{each} that are too small to compute well: a larger batch_size helps"


def _of_slowest(large: Size) -> str:
    """Whether one worker is slow in every step, or all pause now and then and each step waits for the longest."""
    runs = [row.measured.spent for row in large.rows if row.measured and row.measured.spent.slowest]
    if not runs:
        return "manyhosts doctor looks for a worker that is slower than the others"
    worst = max(runs, key=lambda run: run.seconds["straggler"])
    assert worst.slowest is not None, "those that know it"
    name, share = worst.slowest
    if share >= _ONE_IS_SLOW:
        return f"It is {name}, all the time ({_percent(share)} of it): manyhosts doctor looks for the reason"
    return (
        f"No worker is slow all the time (the slowest, {name}, explains {_percent(share)} of it): pauses come on all "
        "in turn, and each step waits for the longest. Look for what else runs on every host; a larger batch_size has "
        "fewer steps that wait, and strategy=local-sgd waits less often"
    )


def _of_exchanges(large: Size) -> str:
    """What makes exchanges long: what is sent, or that they are many and small."""
    sent = large.mean([row.measured.summary.bytes_sent_per_step for row in large.rows if row.measured])
    if sent is not None and sent < _SMALL_BYTES:
        return (
            f"Exchanges are small ({bytes_in_words(sent)} a step), so it is their number that costs: "
            "a larger batch_size has fewer, and strategy=local-sgd exchanges less often"
        )
    return (
        "Send less: --vary compression=none,bf16,powersgd tries which compression helps; strategy=local-sgd or diloco "
        "exchanges less often, and so does a larger batch_size"
    )


def _what_limits(small: Size, large: Size, limit: str | None, change: str, without: float | None) -> str:
    ordered = sorted(large.causes.items(), key=lambda item: -item[1])
    lost = [f"{CAUSES[cause]} ({_percent(share)})" for cause, share in ordered if share >= _HARDLY]
    text = f"What is lost goes to {', '.join(lost)}. " if lost else ""
    if limit is None:
        return f"{text}No cause takes more than a fiftieth of the time."
    share = to_gain(large)[limit]
    takes = f"takes {_percent(share)} of their time" if limit in _COULD_GO else f"costs {_percent(share)} of their time"
    text = f"{text}There is most to gain from {CAUSES[limit]}, which {takes}. {change}."
    return (
        text
        if without is None
        else f"{text} Without it they would be {without:.2f} times as fast as {small.row.workers}."
    )


def _other_programs(group: Sequence[Size]) -> list[str]:
    """A sentence where other programs took cores from some runs: they make sizes look unlike that are alike."""
    runs = [row for size in group for row in size.rows if row.measured is not None]
    disturbed = [row for row in runs if row.measured is not None and row.measured.neighbours]
    if not disturbed:
        return []
    first = disturbed[0]
    assert first.measured is not None, "it has a note"
    words = first.measured.neighbours.partition(":")[0]
    return [
        f"CAREFUL: in {len(disturbed)} of {amount(len(runs), 'run')} others used the machine (with "
        f"{amount(first.workers, 'worker')}, {words}); run it again when it is quiet before you believe it."
    ]


def _what_is_short(group: Sequence[Size]) -> list[str]:
    """A sentence where runs have too few steps to show what a longer one would come to; else nothing."""
    steps = min(row.measured.summary.steps for size in group for row in size.rows if row.measured)
    if steps >= _FEW_STEPS:
        return []
    return [
        f"With {amount(steps, 'step')} a run is mostly what is spent once, at its start and its end: a longer --budget "
        "shows more."
    ]


def _how_far(law: Fit, group: Sequence[Size]) -> tuple[int, int | None, str]:
    """Up to how many workers a further one pays, where it stops to be faster at all, and both in words."""
    unit, measured = group[0].row.workers, group[-1].row.workers
    pays = law.pays_up_to(PAYS) * unit
    peak = law.fastest()
    fastest = None if peak is None else max(unit, round(peak) * unit)
    how = "predicted, not measured"
    if pays <= measured:
        # The law says where it ends; measured is only what was run, up to there and just beyond.
        ran = {size.row.workers for size in group}
        is_run = {min(pays, measured), min(pays + unit, measured)} <= ran
        how = "measured" if is_run else "by the law through the sizes run"
    if pays > _BEYOND * measured:
        sentence = (
            f"A further worker pays as far as can be seen from these sizes, {_BEYOND * measured} at least ({how})."
        )
        pays = _BEYOND * measured
    elif pays <= unit:
        sentence = (
            f"A further worker does not pay: the first one that is added gives less than half of one's speed ({how})."
        )
    else:
        sentence = f"A further worker pays up to {pays}: beyond, one adds less than half of one's speed ({how})."
    if fastest is not None and fastest <= _BEYOND * measured:
        sentence += f" With more than {fastest} it gets slower."
    return pays, fastest, sentence


def _cost(small: Size, large: Size, price: float) -> dict[str, float] | None:
    """What an epoch and the lowest loss that both reach cost at both ends, and each hour that is saved."""
    before, now = small.epoch_seconds, large.epoch_seconds
    if before is None or now is None:
        return None
    least, most = small.row.point.nodes * price * before / 3600, large.row.point.nodes * price * now / 3600
    saved = (before - now) / 3600
    found = {"per_epoch_smallest": least, "per_epoch_largest": most}
    goal = loss_that_all_reached([*small.rows, *large.rows])
    if goal is not None:
        found["loss"] = goal
        for name, size in (("smallest", small), ("largest", large)):
            until = size.mean([row.measured.spent.seconds_to(goal) for row in size.rows if row.measured])
            assert until is not None, "all have reached it"
            found[f"per_loss_{name}"] = size.row.point.nodes * price * until / 3600
    return found | ({"per_hour_saved": (most - least) / saved} if saved > 0 else {})


def _what_it_costs(cost: Mapping[str, float], small: Size, large: Size) -> str:
    first, last = amount(small.row.point.nodes, "machine"), large.row.point.nodes
    if last == small.row.point.nodes:
        first, last = amount(small.row.workers, "worker"), large.row.workers
    text = (
        f"An epoch costs {cost['per_epoch_smallest']:.3g} with {first} and {cost['per_epoch_largest']:.3g} with {last}"
    )
    if "loss" in cost:
        text = (
            f"The same result, a validation loss of {cost['loss']:.4g}, costs {cost['per_loss_smallest']:.3g} with "
            f"{first} and {cost['per_loss_largest']:.3g} with {last}. {text}"
        )
    if "per_hour_saved" not in cost:
        return f"{text}, and saves no time."
    if cost["per_hour_saved"] <= 0:
        return f"{text}, and is sooner over."
    return f"{text}; an hour less of waiting costs {cost['per_hour_saved']:.3g}."


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


_SURE = 0.95
_MOST_REPEATS = 30
_SLICES = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Certainty:
    """Of the sentence that the largest size reaches `limit` times the speed of the smallest."""

    limit: float
    probability: float | None
    """None where a size has one run alone, so that it is not known how much runs differ."""
    range: tuple[float, float] | None
    """The lowest and the highest ratio of a run of the largest size to one of the smallest."""
    repeat: int | None
    """Runs of each size that decide it, if they differ as those so far; None where they do already, or never."""

    def in_words(self, workers: int) -> str:
        """A sentence."""
        limit = f"{self.limit:.3g} times, from where {workers} workers are worth it"
        if self.probability is None or self.range is None:
            unknown = "How sure that is cannot be said from one run of each size"
            return f"{unknown} (the limit is {limit}): --repeat 3 shows it."
        low, high = (f"{each:.2f}" for each in self.range)
        if self.probability >= _SURE or self.probability <= 1 - _SURE:
            side = "above" if self.probability >= _SURE else "below"
            chance = max(self.probability, 1 - self.probability)
            return f"That is {side} {limit}, with a probability of {_as_percent(chance)} (runs: {low} to {high} times)."
        what = (
            f"--repeat {self.repeat} should tell"
            if self.repeat is not None
            else "it is so near that more runs would hardly tell: neither choice is much better"
        )
        return (
            f"Whether that is above {limit}, CANNOT BE TOLD: runs lie between {low} and {high} times, and the "
            f"probability is {_as_percent(self.probability)}; {what}."
        )

    def to_json(self) -> dict[str, Any]:
        """For `study.json`."""
        return {
            "limit": self.limit,
            "probability": self.probability,
            "range": None if self.range is None else list(self.range),
            "repeat": self.repeat,
        }


def certainty(small: Size, large: Size, pays: float) -> Certainty:
    """Whether each worker beyond the smallest size adds `pays` of its speed, by Welch's test of logarithms."""
    times = large.row.workers / small.row.workers
    limit = 1 + pays * (times - 1)
    before, now = _logarithms(small.rows), _logarithms(large.rows)
    if len(before) < 2 or len(now) < 2:
        return Certainty(limit=limit, probability=None, range=None, repeat=3)
    ratios = [math.exp(one - other) for one in now for other in before]
    variances = [statistics.variance(each) / len(each) for each in (before, now)]
    above = statistics.fmean(now) - statistics.fmean(before) - math.log(limit)
    error = math.sqrt(sum(variances))
    if error == 0:
        probability = 1.0 if above >= 0 else 0.0
    else:
        parts = [variance**2 / (len(each) - 1) for variance, each in zip(variances, (before, now), strict=True)]
        probability = _student(above / error, sum(variances) ** 2 / sum(parts))
    repeat = None
    if 1 - _SURE < probability < _SURE:
        spread = math.sqrt(sum(statistics.variance(each) for each in (before, now)))
        needed = math.ceil((2 * spread / abs(above)) ** 2) + 1 if above else _MOST_REPEATS + 1
        repeat = max(needed, len(now) + 1) if needed <= _MOST_REPEATS else None
    return Certainty(limit=limit, probability=probability, range=(min(ratios), max(ratios)), repeat=repeat)


def _logarithms(rows: Sequence[Row]) -> list[float]:
    rates = [samples_per_second(row.measured.spent) for row in rows if row.measured]
    return [math.log(rate) for rate in rates if rate]


def _student(t: float, freedom: float) -> float:
    """The probability that Student's t is below `t`: Simpson's rule over its density from 0 on."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    end = math.atan(abs(t) / math.sqrt(freedom))  # x = sqrt(freedom) tan u has a bounded range
    step = end / _SLICES

    def density(u: float) -> float:
        return float(scale * math.sqrt(freedom) * math.cos(u) ** (freedom - 1))

    inner = sum((4 if number % 2 else 2) * density(number * step) for number in range(1, _SLICES))
    area = step / 3 * (density(0) + inner + density(end))
    return 0.5 + math.copysign(min(area, 0.5), t)


def _as_percent(share: float) -> str:
    return f"{min(99.9, 100 * share):.3g} %"
