"""A look at the loss before the first step: is it a mean over samples, over labels that count, or none at all?

The loss of one piece is compared with the mean of the losses of two parts of it, by each rule that it could follow. It
is done in evaluation mode, without gradients, in full precision; buffers and random generators are given back. Whatever
cannot be looked at (batches of an odd structure, losses that draw random numbers) is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from manyhosts.communication.gathering import gather_words
from manyhosts.communication.world import World
from manyhosts.data import randomness
from manyhosts.data.steps import LoadedPiece, mapped
from manyhosts.errors import ConfigError
from manyhosts.training.compute import ForwardPass
from manyhosts.training.evaluate import in_evaluation
from manyhosts.training.means import Rule, has_ignored, rules_for

ALL_SAMPLES = "all samples"
NO_MEAN = "no mean"
"""What is known of a loss that follows no rule."""
MOST_PIECES = 8
"""Of one worker, that are looked at."""
_ROUNDING = {"cpu": 1e-4, "cuda": 3e-3}
"""Differences of this share of the loss are rounding; GPUs multiply in TF32."""


@dataclass(slots=True)
class Seen:
    """What one worker has seen of the loss."""

    could_look: bool = False
    holds: list[str] = field(default_factory=list)
    """The rules by which it is a mean."""
    ignores: bool = False
    """Whether there were labels that do not count."""
    samples: int = 0
    whole: float = 0.0
    """The loss of all samples of the piece."""
    by_parts: float = 0.0
    """The mean of the losses of its parts, by their samples or the user's rule, where it differs most."""


def find_mean(
    forward: ForwardPass, module: nn.Module, own: Sequence[LoadedPiece], world: World, rule: Rule | None
) -> Seen:
    """What the workers have seen together; `rule` is the user's, where there is one. All of them call this."""
    mine = []
    for piece in [piece for piece in own if piece.plan.weight][:MOST_PIECES]:
        with suppress(Exception), _left_as_it_was(module):
            mine.append(_look(forward, module, piece, world.device, rule))
    words = gather_words(world, json.dumps([asdict(each) for each in mine if each.could_look]))
    seen = [Seen(**each) for word in words for each in json.loads(word)]
    if not seen:
        return Seen()
    shown = max(seen, key=lambda each: abs(each.whole - each.by_parts))
    shown.holds = [name for name in shown.holds if all(name in each.holds for each in seen)]
    shown.ignores = any(each.ignores for each in seen)
    return shown


def choose(seen: Seen) -> str:
    """The rule to count by: the name of one, `NO_MEAN`, or `ALL_SAMPLES` where labels that are left out count, too."""
    if not seen.could_look:
        return "samples"
    if seen.ignores and seen.holds == ["samples"]:
        return ALL_SAMPLES
    names = ("labels", "shifted labels", "samples") if seen.ignores else ("samples", "labels", "shifted labels")
    return next((name for name in names if name in seen.holds), NO_MEAN)


def no_mean(seen: Seen) -> str:
    """What is wrong with such a loss, in a sentence."""
    return (
        f"the loss is no mean over the samples: {seen.whole:.6g} over {seen.samples} of them, {seen.by_parts:.6g} as "
        "the mean over two parts of these, so it depends on how a batch is cut"
    )


def refused(what: str, *, by_step: bool) -> ConfigError:
    """The error of such a loss where a batch is cut."""
    return ConfigError(
        what,
        where="mh.Trainer(step=…)" if by_step else "mh.Trainer(loss=…)",
        fix="give weight=function(batch) -> what a piece counts in the mean (tokens, class weights); or train in one "
        'piece (one worker, no micro_batch_size); or say that samples are to be counted all the same: weight="samples"',
    )


def _look(
    forward: ForwardPass,
    module: nn.Module,
    piece: LoadedPiece,
    device: torch.device,
    given: Rule | None,
) -> Seen:
    batch, count = piece.batch, len(piece.plan.indices)
    if count < 2 or not _is_cuttable(batch, count):
        return Seen()
    rules: dict[str, Rule | None] = {"weight": given} if given is not None else {"samples": None, **rules_for(batch)}
    on_device = mapped(batch, lambda tensor: tensor.to(device))
    randomness.seed_compute(0)
    before = randomness.states()
    whole = _loss(forward, module, on_device)
    if randomness.drawn_since(before) or whole != _loss(forward, module, on_device) or not abs(whole) < float("inf"):
        return Seen()
    seen = Seen(could_look=True, holds=list(rules), samples=count, whole=whole, by_parts=whole)
    seen.ignores = has_ignored(batch)
    allowed = _ROUNDING.get(device.type, 3e-3)
    for cut in sorted({1, count // 2, count - 1}):
        parts = [_rows(batch, 0, cut), _rows(batch, cut, count)]
        losses = [_loss(forward, module, mapped(part, lambda tensor: tensor.to(device))) for part in parts]
        for name, rule in rules.items():
            counts = [float(cut), float(count - cut)] if rule is None else [float(rule(part)) for part in parts]
            mean = _mean(losses, counts)
            size = max([abs(whole), *(abs(loss) for loss, weight in zip(losses, counts, strict=True) if weight)])
            if not abs(mean - whole) <= allowed * size + 1e-7:  # no number where nothing counts, by this rule
                seen.holds = [each for each in seen.holds if each != name]
                if name in ("samples", "weight"):
                    seen.by_parts = max(mean, seen.by_parts, key=lambda found: abs(found - whole))
    return seen


def _mean(losses: list[float], counts: list[float]) -> float:
    total = sum(counts)
    terms = [weight * loss for loss, weight in zip(losses, counts, strict=True) if weight]
    return sum(terms) / total if total else float("nan")


def _loss(forward: ForwardPass, module: nn.Module, batch: Any) -> float:
    return float(forward.values(module, batch)["loss"])


def _is_cuttable(batch: Any, count: int) -> bool:
    """Whether `batch` is made of nothing but tensors of which each has `count` rows."""
    if isinstance(batch, Tensor):
        return batch.dim() > 0 and batch.shape[0] == count
    if isinstance(batch, dict):
        return bool(batch) and all(_is_cuttable(value, count) for value in batch.values())
    if isinstance(batch, list | tuple):
        return bool(batch) and all(_is_cuttable(value, count) for value in batch)
    return False


def _rows(batch: Any, begin: int, end: int) -> Any:
    return mapped(batch, lambda tensor: tensor[begin:end])


@contextmanager
def _left_as_it_was(module: nn.Module) -> Iterator[None]:
    """Within, evaluation mode without gradients; afterwards every buffer and generator is as before."""
    buffers = list(module.buffers())
    kept = [buffer.clone() for buffer in buffers]
    with torch.no_grad(), randomness.undisturbed(), in_evaluation(module):
        try:
            yield
        finally:
            for buffer, before in zip(buffers, kept, strict=True):
                if not torch.equal(buffer, before):  # an expanded one cannot be written to
                    buffer.copy_(before)
