"""One batch at once, and the same in parts: whether the loss of the one is the mean of those of the others.

Each pass begins alike: with the same buffers, and with what model, loss and step hold in plain Python as it was. One
more does not, so that it shows whether anything is kept that way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook

from manyhosts.data import randomness
from manyhosts.data.fetch import Fetcher
from manyhosts.data.steps import mapped
from manyhosts.training.consistency.held_values import HeldValues, differing
from manyhosts.training.loop.compute import ForwardPass, terms_of
from manyhosts.training.loss_weights.means import Rule, counted, has_ignored, rules_for
from manyhosts.training.loss_weights.set_draws import NotTried, SetDraws
from manyhosts.training.setup.trained_module import collective_forward, model_of

MakeBatch = Callable[[int, int], Any]
"""Of the samples of a piece from one number to another."""
OTHER_AGAIN = "it has another value when it is computed again"
"""A pass moves something that cannot be put back."""
SURE = 1e-6
"""What differs by a smaller share is equal; what differs by more is looked at in float64, where that can be."""
_MOST_GRADIENT = 1 << 22
"""Elements of gradients that are compared; more where the first parameter has more."""
_ROUNDING = {"cpu": 1e-4, "cuda": 3e-3}
"""Differences of this share of the loss are rounding; GPUs multiply in TF32."""
_ROUNDING_OF_HALVES = 3e-2
"""The same, where something is computed in 16 bits."""


@dataclass(slots=True)
class Seen:
    """What one worker has seen of the loss."""

    samples: int = 0
    """Of the piece that was compared with its parts; 0: that could not be tried."""
    because: str = ""
    """Why it could not be tried, or not in training mode; empty where it was."""
    holds: list[str] = field(default_factory=list)
    """The rules by which it is a mean."""
    whole: float = 0.0
    """The loss of all samples of the piece."""
    by_parts: float = 0.0
    """The mean of the losses of its parts, by their samples or the user's rule."""
    off: float = 0.0
    """The largest difference, as a share of the loss, or of the gradient."""
    names: list[str] = field(default_factory=list)
    """Of the losses that the rule gives a number each for; `""` where it gives one number."""
    beside: dict[str, str] = field(default_factory=dict)
    """What else there is, of the kinds below: the name of what it is in; empty where there is none of a kind."""


KEEPS = "keeps"
"""Model, loss or step hold something from batch to batch that is neither parameter nor buffer."""
KEEPS_STATE = "keeps state"
"""The loss depends on it, and it depends on the samples, or changes several times in a step of one worker."""
WRITES_BUFFERS = "writes buffers"
"""A forward pass changes buffers, of which more is found out in the first steps."""
IGNORES = "ignores labels"
CHANGES_GRADIENTS = "changes gradients"
"""The gradient of a parameter is not the mean of those of the parts, though the loss is."""
IN_CHUNKS = "is called in chunks"
"""A BatchNorm is called several times in a forward pass, with a part of the samples each time."""


@dataclass(frozen=True, slots=True)
class Look:
    """What is looked at, and how a batch of some samples of a piece is made."""

    forward: ForwardPass
    module: nn.Module
    device: torch.device
    epoch: int = 0
    fetcher: Fetcher | None = None
    """None: the dataset is a stream, whose samples come once."""
    copies: bool = True
    """Whether the model may be copied for a look: not where workers exchange something in its forward pass. Without a
    copy it writes into memory that outlasts a pass, as where parameters are gathered, and no gradients are compared."""
    gradients: bool = False
    """Whether these are compared, too."""
    accumulates: bool = False
    """Whether one worker computes several pieces, one after the other."""
    in_halves: bool = False
    """Whether passes see parameters of 16 bits, whatever is kept of them."""
    in_stages: bool = False
    """Whether a worker computes a stage of each pass: an error of one leaves the others waiting within it, so that no
    other cut can be tried behind it."""


class Comparison:
    """The passes of one look, all through one module."""

    def __init__(self, look: Look, module: nn.Module, seen: Seen) -> None:
        """Note how all is before the first pass. What is found is written into `seen`."""
        self.look, self.module, self.seen = look, module, seen
        self.places = HeldValues(module, look.forward.step, look.forward.loss)
        self.held = self.places.now()
        there = ((name, each) for name, each in module.named_buffers() if not each.is_meta)  # else another stage has it
        self.buffers = {name: (each, each.clone()) for name, each in there}
        norms = [each for each in module.modules() if isinstance(each, _BatchNorm)]
        self.of_norms = {id(each) for norm in norms for each in norm.buffers(recurse=False)}

    def run(self, batch: Any, count: int, make: MakeBatch, given: Rule | None) -> None:
        """See what a `batch` of `count` samples is beside its parts, by the rule that is `given`.

        Raises:
            NotTried: that is not to be seen.
        """
        half = count // 2
        fixed = (each for each in self.module.parameters() if not each.requires_grad)
        own = [*self.module.buffers(), *fixed] if self.look.copies else None
        self.draws = SetDraws(0.3, {count, 1, half - 1, half, count - half}, own)
        try:
            whole = self._whole(batch, count)
            self._see_kept(whole, made := make(0, count))
            halves = {0, half, count}
            parts, losses = self._parts(make, [halves] if self.look.in_stages else [halves | {1}, halves])
            rules: dict[str, Rule | None] = {"weight": given} if given else {"samples": None, **rules_for(batch)}
            counts = {
                name: [counted(rule, part) if rule else {"": float(size)} for part, size in parts]
                for name, rule in rules.items()
            }
            self._compare(whole, losses, counts)
            if self.look.gradients and self.look.copies and self.seen.holds and list(whole) == [""]:
                own_counts = [each[""] for each in counts[self.seen.holds[0]]]
                shares = [count / sum(own_counts) for count in own_counts]
                self._compare_gradients(made, [(part, share) for (part, _), share in zip(parts, shares, strict=True)])
            self.seen.samples = count
        finally:
            self._begin()

    def _whole(self, batch: Any, count: int) -> Mapping[str, float]:
        """The loss of all samples, and what layers do meanwhile."""
        rows: dict[nn.Module, list[int]] = {}

        def note_rows(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            if isinstance(layer, _BatchNorm):
                rows.setdefault(layer, []).append(len(inputs[0]))

        with register_module_forward_pre_hook(note_rows):
            whole = self._loss(batch)
        if not all(map(math.isfinite, whole.values())):  # which the step itself will say, or leave out
            raise NotTried("the loss of these samples is not finite")
        written = (name for name, (each, before) in self.buffers.items() if _differ(before, each))
        parted = {layer for layer, calls in rows.items() if len(calls) > 1 and any(each % count for each in calls)}
        self.seen.beside |= {
            IGNORES: "labels" * has_ignored(batch),
            WRITES_BUFFERS: next((name for name in written if id(self.buffers[name][0]) not in self.of_norms), ""),
            IN_CHUNKS: next((name for name, each in model_of(self.module).named_modules() if each in parted), ""),
        }
        return whole

    def _see_kept(self, whole: Mapping[str, float], batch: Any) -> None:
        """See whether anything is other after a second pass over the same batch than after the first."""
        first = self.places.now()
        again, second = self._loss(batch, begins=False), self.places.now()
        self.kept_matters = not _near(whole, again)
        if self.kept_matters and not _near(whole, self._loss(batch)):
            raise NotTried(OTHER_AGAIN)
        # What is set in the first pass and then used, too: with it, the second one has another value.
        changed = differing(first, second) or (self.kept_matters and differing(self.held, first)) or [""]
        self.seen.beside[KEEPS] = changed[0]

    def _parts(self, make: MakeBatch, cuts: Sequence[set[int]]) -> tuple[list[tuple[Any, int]], list[Any]]:
        """The parts, each with its samples, by the first of `cuts` that can be computed; and their losses."""
        for cut in cuts:
            parts = [(make(begin, end), end - begin) for begin, end in pairwise(sorted(cut))]
            losses, held = [], []
            try:  # a single sample has no variance, say
                for part, _ in parts:
                    losses.append(self._loss(part))
                    held.append(self.places.now())
                break
            except Exception:
                if cut == cuts[-1]:
                    raise
        name = self.seen.beside[KEEPS]
        if self.kept_matters and (self.look.accumulates or any(name in differing(held[0], each) for each in held)):
            self.seen.beside[KEEPS_STATE] = name
        return parts, losses

    def _compare(
        self, whole: Mapping[str, float], losses: Sequence[Any], counts: Mapping[str, Sequence[Mapping[str, float]]]
    ) -> None:
        """See by which of the rules that `counts` are of the loss is a mean."""
        seen, found = self.seen, {name: _difference(whole, losses, each) for name, each in counts.items()}
        _, seen.whole, seen.by_parts = next(iter(found.values()))
        off = {name: share for name, (share, *_) in found.items()}
        seen.holds = [name for name, share in off.items() if share <= self._rounding()]
        seen.off = min(off.values()) if seen.holds == list(off) else max(off.values())

    def _compare_gradients(self, batch: Any, parts: Sequence[tuple[Any, float]]) -> None:
        """See whether hooks, or backward passes of the script's own, do to a batch what they do to its parts."""
        seen = self.seen
        together = [parts] if self.look.accumulates else [[each] for each in parts if each[1]]
        try:
            whole, *pieces = [self._gradient(each) for each in ([(batch, 1.0)], *together)]
        except Exception as error:
            seen.because = words(error)
            return
        size = max(math.hypot(*(float(each.norm()) for each in given.values())) for given in (whole, *pieces)) or 1.0
        off = {name: float((sum(piece[name] for piece in pieces) - each).norm()) / size for name, each in whole.items()}
        worst = max(off, key=off.__getitem__, default="")
        seen.off = max(seen.off, off.get(worst, 0.0))
        seen.beside[CHANGES_GRADIENTS] = worst if off.get(worst, 0.0) > self._rounding() else ""

    def _gradient(self, batches: Sequence[tuple[Any, float]]) -> dict[str, Tensor]:
        """By name, that of the first parameters, over batches with their shares: what hooks have done is in it.

        None where a forward pass has gone backward by itself: the first step refuses that.
        """
        chosen: dict[str, nn.Parameter] = {}
        room = _MOST_GRADIENT
        for name, each in self.module.named_parameters():
            if type(each) is nn.Parameter and each.requires_grad and (not chosen or each.numel() <= room):
                chosen[name], each.grad = each, None
                room -= each.numel()
        with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):  # which takes training mode for that
            for number, (batch, share) in enumerate(batches if chosen else ()):
                loss = self._values(batch)["loss"] * share
                if not number and any(each.grad is not None for each in chosen.values()):
                    return {}
                with self.draws:
                    loss.backward(inputs=list(chosen.values()))
        found = {}
        for name, each in chosen.items():
            gradient, each.grad = each.grad, None
            found[name] = torch.zeros_like(each) if gradient is None else gradient.to_dense()
        return found

    def _rounding(self) -> float:
        parameters = {each.dtype for each in self.module.parameters()}
        if self.draws.rounds or self.look.in_halves or parameters & {torch.bfloat16, torch.float16}:
            return _ROUNDING_OF_HALVES
        if torch.get_default_dtype() == torch.float64:
            return SURE
        return _ROUNDING.get(self.look.device.type, 3e-3)

    def _begin(self, *, norms_alone: bool = False) -> None:
        """Have all as it was before the first pass."""
        with torch.no_grad():
            for each, before in self.buffers.values():
                if (not norms_alone or id(each) in self.of_norms) and _differ(before, each):
                    each.copy_(before)  # an expanded one, which nothing writes to, could not be written to
        if not norms_alone:
            self.places.put_back(self.held)

    def _loss(self, batch: Any, *, begins: bool = True) -> dict[str, float]:
        """The loss, or several by name; with all that is kept as it `begins`."""
        values = self._values(batch, begins=begins)
        return {name: float(each.detach()) for name, each in (terms_of(values) or {"": values["loss"]}).items()}

    def _values(self, batch: Any, *, begins: bool = True) -> Mapping[str, Tensor]:
        self._begin(norms_alone=not begins)
        draws = self.draws
        draws.may_write(tensor for each in self.held.values() for tensor in each.tensors())  # as put back
        randomness.seed_compute(0)
        with draws, collective_forward(model_of(self.module)):
            on_device = mapped(batch, lambda tensor: tensor.to(self.look.device, copy=True))
            values = self.look.forward.values(self.module, on_device)
        drawn = (torch.get_rng_state(), *(draws.ends or randomness.states()[1:]))
        if randomness.drawn_since(drawn):  # one number for each sample, which those of a part are not
            draws.left = draws.left or "numpy.random or random"
        draws.ends = drawn[1:]
        if draws.left:
            raise NotTried(f"the forward pass draws {draws.left}, and no one value of it goes for all samples")
        return values


def words(error: Exception) -> str:
    """Why a pass could not be tried."""
    if isinstance(error, NotTried):
        return str(error)
    text = (str(error).strip() or "no more was said").splitlines()[0]
    return f"a part of a batch raises {type(error).__name__}: {text[:160]}"


def _near(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    pairs = [(each, other.get(name, 0.0)) for name, each in one.items()]
    return all(a == b or a != a or abs(a - b) <= SURE * max(abs(a), abs(b)) for a, b in pairs)


def _difference(
    whole: Mapping[str, float], losses: Sequence[Mapping[str, float]], counts: Sequence[Mapping[str, float]]
) -> tuple[float, float, float]:
    """By which share the loss differs from the mean of the parts' by what they count; and both."""
    all_of_it = by_parts = size = 0.0
    for name, value in whole.items():
        weights = [each[name if name in each else ""] for each in counts]
        terms = [(loss[name], weight) for loss, weight in zip(losses, weights, strict=True) if weight]
        if len(whole) > 1 and not terms:
            continue
        total = sum(weights)
        all_of_it += value
        by_parts += sum(loss * weight for loss, weight in terms) / total if total else float("nan")
        size = max(size, abs(value), *(abs(loss) for loss, _ in terms))
    difference = abs(all_of_it - by_parts)
    if difference <= 1e-12 or difference <= 1e-7 * min(1.0, size):
        return 0.0, all_of_it, by_parts
    return (difference / size if difference == difference else float("inf")), all_of_it, by_parts


def _differ(before: Tensor | None, now: Tensor) -> bool:
    return before is None or before.shape != now.shape or not torch.equal(before, now)
