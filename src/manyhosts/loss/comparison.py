"""A look at the loss of one piece: is it a mean over samples, over labels that count, or none at all?

The loss of a batch at once is compared with the mean of the losses of two parts of it, by each rule that it could
follow. What the script has written is in training mode there, and PyTorch's own layers in evaluation mode, for dropout
and BatchNorm are seen to elsewhere. A copy of the modules is looked at. Each pass begins alike: with the same buffers,
with what model, loss and step hold in plain Python as it was (`held_values`), and one value in place of all that torch
draws (`set_draws`); one more pass does not, so that it shows whether anything is kept. A pass that would write into any
other tensor breaks off before it does. Differences that may be rounding are looked at in float64. So is a loss that
several rules fit: before training it is nearly the same for all samples, and with a last layer of zeros it is the same.

There are three ends: the loss is a mean, it is none, or that could not be tried, because of something that is said. All
workers that compute a pass together make equally many: what cannot be compared is raised after the last one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from manyhosts.communication.shared_norm import acting, prepare
from manyhosts.data import randomness
from manyhosts.data.fetch import Fetcher
from manyhosts.data.steps import LoadedPiece, mapped
from manyhosts.errors import first_line
from manyhosts.loss.compute import ForwardPass, terms_of
from manyhosts.loss.set_draws import HALVES, Communicates, NotTried, SetDraws
from manyhosts.loss.weighing import Rule, counted, has_ignored, rules_for, targets_of
from manyhosts.model.held_values import HeldValues, differing
from manyhosts.model.trained_module import collective_forward, in_evaluation, model_of
from manyhosts.strategies.cut_model import without_graph

Losses = Mapping[str, float]
"""One or several, by name, or what a batch counts in each; one without a name is ""."""
MakeBatch = Callable[[int, int], Any]
"""Of the samples of a piece from one number to another."""
OTHER_AGAIN = "it has another value when it is computed again"
"""A pass moves something that cannot be put back."""
SURE = 1e-6
"""What differs by a smaller share is equal; what differs by more is looked at in float64, where that can be."""
_SURE_IN_DOUBLE = 1e-11
_NEAR = 30
"""Of two rules that hold, one that is off by so many times more than the other is not the loss's."""
_OF_NORMS = ("running_mean", "running_var", "num_batches_tracked")
_MOST_COPIED = 1 << 28
"""Elements of parameters that are copied for a look in float64; others share those of the model."""
_HOOKS = {"_backward_hooks": "register_hook", "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook"}
"""Where tensors keep hooks, and how they are given one."""
_MOST_GRADIENT = 1 << 22
"""Elements of gradients that are compared; more where the first parameter has more."""


@dataclass(slots=True)
class Seen:
    """What one worker has seen of the loss."""

    samples: int = 0
    """Of the piece that was compared with its parts; 0: that could not be tried."""
    because: str = ""
    """Why it could not be tried, or not in training mode; empty where it was."""
    holds: list[str] = field(default_factory=list)
    """The rules by which it is a mean."""
    offs: dict[str, float] = field(default_factory=dict)
    """By which share of it each rule is off."""
    sure: float = SURE
    """What differs by less says nothing of two rules, both of which hold."""
    is_open: bool = False
    """Whether several rules are likely that count the parts otherwise."""
    values: str = ""
    """In words: the loss of all samples of the piece, and the mean of the losses of its parts."""
    off: float = 0.0
    """The largest difference, as a share of the loss, or of the gradient."""
    names: list[str] = field(default_factory=list)
    """Of the losses that the rule gives a number each for; `""` where it gives one number."""
    findings: dict[str, str] = field(default_factory=dict)
    """What else there is, of the kinds below: the name of what it is in; empty where there is none of a kind."""

    @property
    def likely(self) -> list[str]:
        """Of the rules that hold, within rounding, those that are not off by many times more than another one."""
        offs = {name: self.offs.get(name, 0.0) for name in self.holds}
        most = max(self.sure, _NEAR * min(offs.values(), default=0.0))
        return [name for name, off in offs.items() if off <= most]


KEEPS = "keeps"
"""Model, loss or step hold something from batch to batch that is neither parameter nor buffer."""
KEEPS_STATE = "keeps state"
"""The loss depends on it, and it depends on the samples, or changes several times in a step of one worker."""
IGNORES = "ignores labels"
CHANGES_GRADIENTS = "changes gradients"
"""The gradient of a parameter is not the mean of those of the parts, though the loss is."""
WRITES = "writes"
"""A forward pass changes a buffer, which is none of BatchNorm's."""
COMMUNICATES = "communicates"
"""Model, loss or step call a collective of `torch.distributed`."""
PADS = "pads"
ROWS = "rows"
"""`collate` gives a part of a batch another shape for each sample than the batch."""
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
    least: int = 2
    """Samples of the smallest piece that is looked at: more where a worker computes a stage of each pass, so that an
    error of one, which has no variance of a single sample, say, leaves the others waiting within it."""


def look_at(look: Look, piece: LoadedPiece, rule: Rule | None, *, graph: bool = True) -> Seen:
    """What one piece shows. Errors of the model show in the first step, and better.

    Without `graph` it takes less memory, and shows nothing of a loss that differentiates itself.
    """
    count, seen = len(piece.plan.indices), Seen()
    with suppress(Exception):  # what is wrong with a rule is said where it is used
        seen.names = sorted(counted(rule, piece.batch)) if rule else []
    # What differentiates within the loss needs the graph.
    with randomness.undisturbed(), torch.set_grad_enabled(look.copies and graph):
        try:
            if count < look.least:
                raise NotTried(f"a forward pass has fewer than {look.least} samples")
            make = _parts_of(look, piece)
            with _shown(look) as module:
                Comparison(look, module, seen).run(count, make, rule)
            size = sum(map(Tensor.numel, look.module.parameters()))
            # There is a difference, which may be rounding; or there should be one, between rules.
            if (seen.off > SURE or seen.is_open) and look.copies and size <= _MOST_COPIED:
                exact = Seen(names=seen.names, sure=_SURE_IN_DOUBLE)
                with suppress(Exception), _shown(look, double=True) as module:
                    if seen.is_open:
                        _fill_zeros(module)
                    Comparison(look, module, exact, double=True).run(count, make, rule)
                    seen = exact  # else something is made in float32, and does not go with float64
        except Communicates as call:
            seen.findings[COMMUNICATES] = str(call)
            seen.because = f"it calls torch.distributed ({call})"
        except Exception as error:
            # Where workers exchange something, collectives would not match; a loss that differentiates itself fails
            # alike on all of them.
            if not (look.copies or isinstance(error, NotTried) or "does not require grad" in str(error)):
                raise
            raised = f"a part of a batch raises {type(error).__name__}: {first_line(error)[:160]}"
            seen.because = str(error) if isinstance(error, NotTried) else raised
    return seen


@contextmanager
def _shown(look: Look, *, double: bool = False) -> Iterator[nn.Module]:
    """A copy whose modules are in training mode where the script has written them; its parameters are the model's own.

    With `double` it has its own, and all is computed in float64. Without copies it is the model, in evaluation mode.
    """
    module = look.module
    if not look.copies:
        with in_evaluation(module), acting(_AsEvaluated()):
            yield module
        return
    # Others that share their memory: gradients and hooks stay with those of the model.
    known: dict[int, Tensor] = {
        id(each): nn.Parameter(each.detach(), each.requires_grad) if type(each) is nn.Parameter else each
        for each in (() if double else module.parameters())
    }
    copied = copy.deepcopy(module, known | without_graph(module))
    for each, own in zip(copied.parameters(), module.parameters(), strict=True):
        for kind, register in _HOOKS.items() if each is not own else ():
            for hook in (getattr(own, kind, None) or {}).values():
                if not str(getattr(hook, "__module__", "")).startswith("manyhosts."):  # else those of a strategy
                    getattr(each, register)(hook)
    prepare(copied)  # copies are of PyTorch's own classes
    for part in copied.modules():
        part.training = any(part.children()) or not type(part).__module__.startswith("torch.")
    model_of(copied).training = True
    with acting(_AsEvaluated()), ExitStack() as undo:
        if double:
            undo.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
        yield copied.double() if double else copied


@torch.no_grad()
def _fill_zeros(module: nn.Module) -> None:
    """Give trained tensors that are all zeros small random values."""
    generator = torch.Generator().manual_seed(0)
    for each in module.parameters():
        if each.requires_grad and each.numel() and not each.is_meta and not each.any():
            values = torch.randn(each.shape, generator=generator, dtype=torch.float64)
            each.copy_(0.1 / math.sqrt(each.shape[-1] if each.dim() else 1) * values)


def _parts_of(look: Look, piece: LoadedPiece) -> MakeBatch:
    """What makes a batch of the samples of `piece` from one number to another.

    Raises:
        NotTried: nothing does.
    """
    batch, count, fetcher = mapped(piece.batch, lambda each: each), len(piece.plan.indices), look.fetcher
    # A column may be of texts, one for each sample, as `default_collate` makes it.
    cannot = any(not _is_column(each) or len(each) != count for each in tree_leaves(batch, is_leaf=_is_column))
    if fetcher is not None and (fetcher.collates or cannot):
        samples = fetcher.samples(look.epoch, piece.plan.indices)
        randomness.seed_compute(0)
        before = randomness.states()
        fetcher.collate(samples)
        if not randomness.drawn_since(before):
            return lambda begin, end: fetcher.collate(samples[begin:end])
    if cannot:
        raise NotTried(
            "its batch cannot be cut, and comes from a stream" if fetcher is None else "collate draws random numbers"
        )
    return lambda begin, end: tree_map(lambda each: each[begin:end], batch, is_leaf=_is_column)


def _is_column(each: Any) -> bool:
    if isinstance(each, list | tuple):
        return bool(each) and not any(isinstance(item, Tensor | Mapping | list | tuple) for item in each)
    return isinstance(each, Tensor) and each.dim() > 0


class _AsEvaluated:
    """BatchNorm layers normalise by their running values, as if each sample were alone."""

    def normalise(self, layer: _BatchNorm, input: Tensor, *, track: bool) -> Tensor:
        """See `shared_norm.Batch`."""
        mean, variance = layer.running_mean, layer.running_var
        if mean is None or variance is None:
            mean, variance = input.new_zeros(input.shape[1]), input.new_ones(input.shape[1])
        return nn.functional.batch_norm(input, mean, variance, layer.weight, layer.bias, eps=layer.eps)


class Comparison:
    """The passes of one look, all through one module."""

    def __init__(self, look: Look, module: nn.Module, seen: Seen, *, double: bool = False) -> None:
        """Note how all is before the first pass. What is found is written into `seen`. `double`: in float64."""
        self.look, self.module, self.seen, self.double = look, module, seen, double
        self.places = HeldValues(module, look.forward.step, look.forward.loss)
        self.saved = self.places.now()
        if not look.copies and self.places.asks_for_training:
            seen.because = "the model asks for it, and its workers exchange something in each forward pass"
        self.parameters = dict(module.named_parameters())
        self.buffers = [  # of what is there: else another stage has it
            (name, each, each.clone()) for name, each in module.named_buffers() if not each.is_meta
        ]

    def run(self, count: int, make: MakeBatch, given: Rule | None) -> None:
        """See what a batch of `count` samples is compared with its parts, by the rule that is `given`.

        Raises:
            NotTried: that is not to be seen.
        """
        cut = max(2, (count - 1) // 2) if count > 3 else 1  # uneven, and seldom as many as something has features
        sizes = (cut, count - cut)
        self.draws = SetDraws(0.3, {count, *sizes}, self.module.buffers() if self.look.copies else None)
        try:
            full = self._full(batch := make(0, count), count)
            parts = [make(0, cut), make(cut, count)]
            if other := _of_samples(parts) - _of_samples(batch):
                self.seen.findings[PADS] = str(min(other))
            rows = [len(each) for each in map(targets_of, (batch, *parts)) if each is not None]
            if len(rows) > len(parts) and rows[0] == sum(rows[1:]) and rows[1] * count != rows[0] * cut:
                self.seen.findings[ROWS] = str(rows[0])
            losses = self._losses(full, make(0, count), parts)
            if self.draws.left:
                raise NotTried(f"the forward pass draws {self.draws.left}, and no one value of it goes for all samples")
            counts = {} if given else {"samples": [{"": float(each)} for each in sizes]}
            for name, rule in ({"weight": given} if given else rules_for(batch)).items():
                counts[name] = [counted(rule, each) for each in parts]
            self._compare(count, full, losses, counts)
            self.seen.samples = count
            if self.look.gradients and torch.is_grad_enabled() and self.seen.holds and list(full) == [""]:
                self._compare_gradients(make(0, count), parts, counts)
        finally:
            self._begin()

    def _full(self, batch: Any, count: int) -> Losses:
        """The loss of all samples, and what layers do meanwhile."""
        rows: dict[nn.Module, list[int]] = {}

        def note_rows(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            if isinstance(layer, _BatchNorm):
                rows.setdefault(layer, []).append(len(inputs[0]))

        with register_module_forward_pre_hook(note_rows):
            full = self._loss(batch)
        if not all(map(math.isfinite, full.values())):  # which the step itself will say, or leave out
            raise NotTried("the loss of these samples is not finite")
        if late := [name for name, _ in self.module.named_parameters() if name not in self.parameters]:
            raise NotTried(f"the model makes the parameter {late[0]!r} in its forward pass")
        parted = {layer for layer, calls in rows.items() if len(calls) > 1 and any(each % count for each in calls)}
        self.seen.findings |= {
            IGNORES: "labels" * has_ignored(batch),
            IN_CHUNKS: next((name for name, each in model_of(self.module).named_modules() if each in parted), ""),
        }
        return full

    def _losses(self, full: Losses, again: Any, parts: Sequence[Any]) -> list[Losses]:
        """Those of the parts; and see whether anything is other after a second pass over the same batch."""
        first, one = self.places.now(), [{"": 1.0}]
        second, then = self._loss(again, kept=True), self.places.now()
        matters = _difference(full, [second], one)[0] > SURE
        if matters and _difference(full, [self._loss(again)], one)[0] > SURE:
            raise NotTried(OTHER_AGAIN)
        # What is set in the first pass and then used, too: with it, the second one has another value.
        changed = differing(first, then) or (matters and differing(self.saved, first)) or [""]
        losses: list[Losses] = [self._loss(part) for part in parts]
        by_samples = changed[0] in differing(first, self.places.now())
        self.seen.findings |= {
            KEEPS: changed[0],
            KEEPS_STATE: changed[0] * (matters and (self.look.accumulates or by_samples)),
        }
        return losses

    def _compare(self, count: int, full: Losses, losses: Sequence[Losses], counts: Mapping[str, Any]) -> None:
        """See by which of the rules that `counts` are of the loss is a mean."""
        seen, found = self.seen, {name: _difference(full, losses, each) for name, each in counts.items()}
        _, at_once, by_parts = next(iter(found.values()))
        seen.values = f"{at_once:.6g} over {count} samples, {by_parts:.6g} as the mean over parts of these"
        seen.offs = off = {name: share for name, (share, *_) in found.items()}
        seen.holds = [name for name, share in off.items() if share <= self._rounding()]
        seen.is_open = len({_shares(counts[name]) for name in seen.likely}) > 1
        seen.off = min(off.values()) if seen.holds == list(off) else max(off.values())

    def _compare_gradients(self, batch: Any, parts: Sequence[Any], counts: Mapping[str, Sequence[Losses]]) -> None:
        """See whether hooks, or backward passes of the script's own, do to a batch what they do to its parts.

        A rule by which the gradient is that of the parts is the loss's, also where others go for its value.
        """
        full = self._gradient([(batch, 1.0)])
        seen, found = self.seen, {}
        for shares in {_shares(counts[name]) for name in seen.likely}:
            pairs = list(zip(parts, shares, strict=True))
            together = [pairs] if self.look.accumulates else [[each] for each in pairs if each[1]]
            pieces = [self._gradient(each) for each in together]
            size = max(math.hypot(*(float(each.norm()) for each in given.values())) for given in (full, *pieces)) or 1.0
            off = {
                name: float((sum(piece[name] for piece in pieces) - each).norm()) / size for name, each in full.items()
            }
            found[shares] = max(off.items(), key=itemgetter(1), default=("", 0.0))
        worst, least = min(found.values(), key=itemgetter(1))
        seen.off = max(seen.off, least)
        seen.findings[CHANGES_GRADIENTS] = worst * (least > self._rounding())
        if least <= self._rounding():
            fits = [shares for shares, (_, off) in found.items() if off <= self._rounding()]
            seen.holds = [name for name in seen.holds if _shares(counts[name]) in fits]

    def _gradient(self, batches: Sequence[tuple[Any, float]]) -> dict[str, Tensor]:
        """By name, that of the first parameters, over batches with their shares: what hooks have done is in it.

        Empty where a forward pass has gone backward by itself: the first step refuses that.
        """
        chosen: dict[str, nn.Parameter] = {}
        room = _MOST_GRADIENT
        for name, each in self.parameters.items():
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
        return {
            name: torch.zeros_like(each) if each.grad is None else each.grad.to_dense() for name, each in chosen.items()
        }

    def _rounding(self) -> float:
        """Which share of the loss, or of a gradient, may be rounding: GPUs multiply in TF32."""
        if self.draws.rounds or self.look.in_halves or any(each.dtype in HALVES for each in self.parameters.values()):
            return 3e-2
        return SURE if torch.get_default_dtype() == torch.float64 else 1e-4 if self.look.device.type == "cpu" else 3e-3

    def _begin(self, *, kept: bool = False) -> None:
        """Have all as it was before the first pass; but for what is `kept` in plain Python."""
        with torch.no_grad():
            for name, each, before in self.buffers:
                if not torch.equal(before, each):
                    if name.split(".")[-1] not in _OF_NORMS:
                        self.seen.findings[WRITES] = f", and a forward pass changes the buffer {name!r}"
                    each.copy_(before)  # an expanded one, which nothing writes to, could not be written to
        if not kept:
            self.places.put_back(self.saved)

    def _loss(self, batch: Any, *, kept: bool = False) -> dict[str, float]:
        """The loss, or several by name."""
        values = self._values(batch, kept=kept)
        return {name: float(each.detach()) for name, each in (terms_of(values) or {"": values["loss"]}).items()}

    def _values(self, batch: Any, *, kept: bool = False) -> Mapping[str, Tensor]:
        self._begin(kept=kept)
        draws = self.draws
        draws.may_write(tensor for each in self.saved.values() for tensor in each.tensors())  # as put back
        randomness.seed_compute(0)
        with draws, collective_forward(model_of(self.module)):
            batch = mapped(batch, lambda each: each.to(self.look.device, copy=True))
            if self.double:
                batch = mapped(batch, lambda each: each.double() if each.is_floating_point() else each)
            values = self.look.forward.values(self.module, batch)
        drawn = (torch.get_rng_state(), *(draws.ends or randomness.states()[1:]))
        if randomness.drawn_since(drawn):  # one number for each sample, which those of a part are not
            draws.left = draws.left or "numpy.random or random"
        draws.ends = drawn[1:]
        return values


def _of_samples(batches: Any) -> set[tuple[int, ...]]:
    """The shapes of all tensors in `batches`, without the first side."""
    return {tuple(each.shape[1:]) for each in tree_leaves(batches) if isinstance(each, Tensor)}


def _shares(counts: Sequence[Losses]) -> tuple[float, ...]:
    """What each part has of what they all count, where that is one number."""
    own = [each.get("", 0.0) for each in counts]
    return tuple(each / (sum(own) or 1.0) for each in own)


def _difference(full: Losses, losses: Sequence[Losses], counts: Sequence[Losses]) -> tuple[float, float, float]:
    """By which share the loss differs from the mean of the parts' by what they count; and both."""
    all_of_it = by_parts = size = 0.0
    for name, value in full.items():
        weights = [each[name if name in each else ""] for each in counts]
        terms = [(loss[name], weight) for loss, weight in zip(losses, weights, strict=True) if weight]
        if len(full) > 1 and not terms:
            continue
        all_of_it += value
        by_parts += sum(loss * weight for loss, weight in terms) / sum(weights) if terms else math.nan
        size = max(size, abs(value), *(abs(loss) for loss, _ in terms))
    difference = abs(all_of_it - by_parts)
    if difference <= 1e-12 or difference <= 1e-7 * min(1.0, size):
        return 0.0, all_of_it, by_parts
    return (difference / size if difference == difference else math.inf), all_of_it, by_parts
