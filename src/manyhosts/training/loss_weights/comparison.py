"""One batch, and the same in two parts: whether the loss of the one is the mean of those of the others.

Each pass begins alike: with the same buffers, and with what model, loss and step hold in plain Python as it was. One
more does not, so that it shows whether anything is kept that way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook

from manyhosts.data import randomness
from manyhosts.data.steps import mapped
from manyhosts.training.consistency.held_values import HeldValues, differing
from manyhosts.training.loop.compute import ForwardPass, terms_of
from manyhosts.training.loss_weights.means import Rule, counted, has_ignored, rules_for
from manyhosts.training.loss_weights.set_draws import SetDraws, WouldWrite
from manyhosts.training.setup.collective_forward import collective_forward
from manyhosts.training.setup.trained_module import model_of

MakeBatch = Callable[[int, int], Any]
"""Of the samples of a piece from one number to another."""
Gradients = Literal["", "apart", "accumulated"]
"""Whether these are compared, too: those of two parts that two workers compute, or one after the other."""
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

    could_look: bool = False
    because: str = ""
    """Why it could not be tried, or not in training mode; empty where it was."""
    holds: list[str] = field(default_factory=list)
    """The rules by which it is a mean."""
    ignores: bool = False
    """Whether there were labels that do not count."""
    samples: int = 0
    whole: float = 0.0
    """The loss of all samples of the piece."""
    by_parts: float = 0.0
    """The mean of the losses of its parts, by their samples or the user's rule, where it differs most."""
    off: float = 0.0
    """The largest difference, as a share of the loss."""
    keeps: str = ""
    """What model, loss or step hold from batch to batch and is neither parameter nor buffer, by name."""
    kept_matters: bool = False
    """Whether the loss depends on it."""
    kept_differs: bool = False
    """Whether it depends on the samples."""
    writes: bool = False
    """Whether a forward pass changes buffers, of which more is found out in the first steps."""
    gradient: str = ""
    """A parameter whose gradient is not the mean of those of two parts, though the loss is, by name."""
    gradient_off: float = 0.0
    """By which share of it."""
    in_chunks: str = ""
    """A BatchNorm that is called several times in a forward pass, with a part of the samples each time, by name."""


@dataclass
class Comparison:
    """The passes of one look, all through one module."""

    forward: ForwardPass
    module: nn.Module
    device: torch.device
    in_halves: bool = False
    """Whether parameters are seen in 16 bits."""
    gradients: Gradients = ""
    may_write: bool = False
    """Whether forward passes write into memory that outlasts them, as where parameters are gathered."""

    def __post_init__(self) -> None:
        """Note how all is before the first pass."""
        module = self.module
        self.places = HeldValues(module, self.forward.step, self.forward.loss)
        self.held = self.places.now()
        there = ((name, each) for name, each in module.named_buffers() if not each.is_meta)  # else another stage has it
        self.buffers = {name: (each, each.clone()) for name, each in there}
        norms = [each for each in module.modules() if isinstance(each, _BatchNorm)]
        self.of_norms = {id(each) for norm in norms for each in norm.buffers(recurse=False)}

    def run(self, batch: Any, count: int, make: MakeBatch, given: Rule | None, most: int) -> Seen:
        """Compare `batch`, of `count` samples, with its parts, cut in `most` ways; by the rule that is `given`."""
        cuts = sorted({1, count // 2, count - 1} if most > 1 else {count // 2})
        fixed = (each for each in self.module.parameters() if not each.requires_grad)
        own = None if self.may_write else [*self.module.buffers(), *fixed]
        draws = SetDraws(0.3, {count, *cuts, *(count - cut for cut in cuts)}, own)
        try:
            return self._seen(batch, count, make, given, cuts, draws)
        finally:
            self._begin()

    def _seen(
        self, batch: Any, count: int, make: MakeBatch, given: Rule | None, cuts: Sequence[int], draws: SetDraws
    ) -> Seen:
        rows: dict[nn.Module, list[int]] = {}

        def note_rows(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            if isinstance(layer, _BatchNorm):
                rows.setdefault(layer, []).append(len(inputs[0]))

        with register_module_forward_pre_hook(note_rows):
            whole = self._loss(batch, draws)
        if not all(map(math.isfinite, whole.values())):  # which the step itself will say, or leave out
            return Seen(because="the loss of these samples is not finite")
        seen = Seen(could_look=True, samples=count, ignores=has_ignored(batch))
        seen.writes = any(
            _differ(before, each) for each, before in self.buffers.values() if id(each) not in self.of_norms
        )
        parted = {layer for layer, calls in rows.items() if len(calls) > 1 and any(each % count for each in calls)}
        seen.in_chunks = next((name for name, each in model_of(self.module).named_modules() if each in parted), "")
        made = make(0, count)
        self._keeps(seen, whole, made, draws)
        if draws.left:
            return Seen(because=f"{_DRAWS}{draws.left}, and no one value of it goes for all samples")
        if not _near(whole, self._loss(made, draws)):
            return Seen(because=OTHER_AGAIN)
        parts = [[make(0, cut), make(cut, count)] for cut in cuts]
        losses, failed = self._losses_of(parts, draws, seen)
        if draws.left or not any(losses):
            return Seen(because=f"{_DRAWS}{draws.left}" if draws.left else failed, keeps=seen.keeps)
        rules: dict[str, Rule | None] = {"weight": given} if given else {"samples": None, **rules_for(batch)}
        off = {}
        for name, rule in rules.items():
            found = [
                _difference(whole, each, [_counts(rule, pair[0], cut), _counts(rule, pair[1], count - cut)])
                for cut, pair, each in zip(cuts, parts, losses, strict=True)
                if each
            ]
            off[name], all_of_it, by_parts = max(found)
            if name in ("samples", "weight"):
                seen.whole, seen.by_parts = all_of_it, by_parts
        rounding = self._rounding(draws.rounds)
        seen.holds = [name for name, share in off.items() if share <= rounding]
        seen.off = min(off.values()) if seen.holds == list(off) else max(off.values())
        if self.gradients and seen.holds and list(whole) == [""]:
            rule, half = rules[seen.holds[0]], count // 2
            sizes = zip(parts[cuts.index(half)], (half, count - half), strict=True)
            self._compare_gradients(seen, made, [(part, _counts(rule, part, size)[""]) for part, size in sizes], draws)
        return seen

    def _compare_gradients(self, seen: Seen, batch: Any, parts: Sequence[tuple[Any, float]], draws: SetDraws) -> None:
        """See whether hooks, or backward passes of the script's own, do to a batch what they do to its parts."""
        total = sum(count for _, count in parts)
        try:
            whole = self._gradient([(batch, 1.0)], draws)
            shares = [(part, count / total) for part, count in parts if count]
            together = [shares] if self.gradients == "accumulated" else [[each] for each in shares]
            pieces = [self._gradient(each, draws) for each in together]
        except _WritesGradients:  # by itself: the first step refuses that
            return
        except Exception as error:
            seen.because = words(error)
            return
        size = max(math.hypot(*(float(each.norm()) for each in given.values())) for given in (whole, *pieces))
        for name, each in whole.items():
            off = float((sum(piece[name] for piece in pieces) - each).norm()) / size if size else 0.0
            if off > seen.gradient_off:
                seen.gradient_off, worst = off, name
        if seen.gradient_off > self._rounding(draws.rounds):
            seen.gradient = worst

    def _gradient(self, batches: Sequence[tuple[Any, float]], draws: SetDraws) -> dict[str, Tensor]:
        """By name, that of the first parameters, over batches with their shares: what hooks have done is in it."""
        chosen: dict[str, nn.Parameter] = {}
        room = _MOST_GRADIENT
        for name, each in self.module.named_parameters():
            if type(each) is nn.Parameter and each.requires_grad and (not chosen or each.numel() <= room):
                chosen[name], each.grad = each, None
                room -= each.numel()
        with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):  # which takes training mode for that
            for number, (batch, share) in enumerate(batches if chosen else ()):
                loss = self._values(batch, draws)["loss"] * share
                if not number and any(each.grad is not None for each in chosen.values()):
                    raise _WritesGradients
                with draws:
                    loss.backward(inputs=list(chosen.values()))
        found = {}
        for name, each in chosen.items():
            gradient, each.grad = each.grad, None
            found[name] = torch.zeros_like(each) if gradient is None else gradient.to_dense()
        return found

    def _keeps(self, seen: Seen, whole: Mapping[str, float], batch: Any, draws: SetDraws) -> None:
        """See whether anything is other after a second pass over the same batch than after the first."""
        first = self.places.now()
        again = self._loss(batch, draws, begins=False)
        seen.kept_matters = not _near(whole, again)
        # What is set in the first pass and then used, too: with it, the second one has another value.
        changed = differing(first, self.places.now()) or (seen.kept_matters and differing(self.held, first)) or [""]
        seen.keeps = changed[0]

    def _losses_of(self, parts: Sequence[Any], draws: SetDraws, seen: Seen) -> tuple[list[Any], str]:
        """The losses of both parts of each cut, none of one that fails; and why it does."""
        losses: list[Any] = []
        failed = ""
        for pair in parts:
            try:  # a single sample has no variance, say
                one = self._loss(pair[0], draws)
                held = self.places.now()
                losses.append([one, self._loss(pair[1], draws)])
                seen.kept_differs = seen.kept_differs or seen.keeps in differing(held, self.places.now())
            except Exception as error:
                losses.append([])
                failed = words(error)
        return losses, failed

    def _rounding(self, rounds: bool) -> float:
        parameters = {each.dtype for each in self.module.parameters()}
        if rounds or self.in_halves or parameters & {torch.bfloat16, torch.float16}:
            return _ROUNDING_OF_HALVES
        if torch.get_default_dtype() == torch.float64:
            return SURE
        return _ROUNDING.get(self.device.type, 3e-3)

    def _begin(self, *, norms_alone: bool = False) -> None:
        """Have all as it was before the first pass."""
        with torch.no_grad():
            for each, before in self.buffers.values():
                if (not norms_alone or id(each) in self.of_norms) and _differ(before, each):
                    each.copy_(before)  # an expanded one, which nothing writes to, could not be written to
        if not norms_alone:
            self.places.put_back(self.held)

    def _loss(self, batch: Any, draws: SetDraws, *, begins: bool = True) -> dict[str, float]:
        """The loss, or several by name; with all that is kept as it `begins`."""
        values = self._values(batch, draws, begins=begins)
        return {name: float(each.detach()) for name, each in (terms_of(values) or {"": values["loss"]}).items()}

    def _values(self, batch: Any, draws: SetDraws, *, begins: bool = True) -> Mapping[str, Tensor]:
        self._begin(norms_alone=not begins)
        draws.may_write(tensor for each in self.held.values() for tensor in each.tensors())  # as put back
        randomness.seed_compute(0)
        with draws, collective_forward(model_of(self.module)):
            on_device = mapped(batch, lambda tensor: tensor.to(self.device, copy=True))
            values = self.forward.values(self.module, on_device)
        drawn = (torch.get_rng_state(), *(draws.ends or randomness.states()[1:]))
        if randomness.drawn_since(drawn):  # one number for each sample, which those of a part are not
            draws.left = draws.left or "numpy.random or random"
        draws.ends = drawn[1:]
        return values


class _WritesGradients(Exception):
    """A forward pass has gone backward."""


_DRAWS = "the forward pass draws "
WRITES = "a forward pass would change what is to be kept"


class NotTried(Exception):
    """Why a look cannot be tried, in words."""


def words(error: Exception) -> str:
    """Why a pass could not be tried."""
    if isinstance(error, NotTried):
        return str(error)
    if isinstance(error, WouldWrite):
        return f"{WRITES}: {error}"
    text = (str(error).strip() or "no more was said").splitlines()[0]
    return f"a part of a batch raises {type(error).__name__}: {text[:160]}"


def _near(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    pairs = [(each, other.get(name, 0.0)) for name, each in one.items()]
    return all(a == b or a != a or abs(a - b) <= SURE * max(abs(a), abs(b)) for a, b in pairs)


def _counts(rule: Rule | None, part: Any, samples: int) -> Mapping[str, float]:
    return {"": float(samples)} if rule is None else counted(rule, part)


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
