"""A look at the loss before the first step: is it a mean over samples, over labels that count, or none at all?

The loss of one piece is compared with the mean of the losses of two parts of it, by each rule that it could follow.
What the script has written is in training mode there, and PyTorch's own layers in evaluation mode, for dropout and
BatchNorm are seen to elsewhere. A copy of the modules is looked at, so that nothing which they count or keep is changed
(a user's step, which nobody can copy, is told that it is in evaluation, unless it is plain: see `plain_step`); what
torch draws is one value for all samples (`set_draws`). Whatever cannot be looked at so is looked at in evaluation mode,
in the model itself; buffers and random generators are given back. What still cannot (a model that draws by NumPy, or
chooses samples at random) is passed over.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.shared_norm import acting, prepare
from manyhosts.communication.world import World
from manyhosts.data import randomness
from manyhosts.data.fetch import Fetcher
from manyhosts.data.steps import LoadedPiece, mapped
from manyhosts.errors import ConfigError
from manyhosts.training.compute import ForwardPass
from manyhosts.training.means import Rule, has_ignored, rules_for
from manyhosts.training.passes import in_evaluation
from manyhosts.training.plain_step import is_plain
from manyhosts.training.set_draws import SetDraws
from manyhosts.training.trained import model_of

ALL_SAMPLES = "all samples"
NO_MEAN = "no mean"
"""What is known of a loss that follows no rule."""
MOST_PIECES = 8
"""Of one worker, that are looked at."""
_ROUNDING = {"cpu": 1e-4, "cuda": 3e-3}
"""Differences of this share of the loss are rounding; GPUs multiply in TF32."""
_ROUNDING_OF_HALVES = 3e-2
"""The same, where weights have 16 bits."""
_MOST_COPIED = 1 << 28
"""Elements of frozen parameters that are copied for a look; those that are trained are shared with the copy."""


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
    keeps: str = ""
    """A tensor that the model keeps from batch to batch and that is neither parameter nor buffer, by name."""
    writes: bool = False
    """Whether a forward pass changes buffers, of which more is found out in the first steps."""


def find_mean(
    look: Look, own: Sequence[LoadedPiece], world: World, rule: Rule | None, *, trouble_only: bool = False
) -> Seen:
    """What the workers have seen together; `rule` is the user's, where there is one. All of them call this.

    `trouble_only`: they tell each other what they have seen where one of them has seen something wrong.
    """
    mine = [look.at(piece, rule) for piece in own if piece.plan.weight][:MOST_PIECES]
    if trouble_only and not world.any(any(each.keeps or (each.could_look and not each.holds) for each in mine)):
        return Seen()
    rows = gather_plain(world, [asdict(each) for each in mine if each.could_look or each.keeps])
    told = [Seen(**each) for row in rows for each in row]
    seen = [each for each in told if each.could_look]
    keeps = next((each.keeps for each in told if each.keeps), "")
    if not seen:
        return Seen(keeps=keeps)
    shown = max(seen, key=lambda each: abs(each.whole - each.by_parts))
    shown.holds = [name for name in shown.holds if all(name in each.holds for each in seen)]
    shown.ignores = any(each.ignores for each in seen)
    shown.keeps, shown.writes = keeps, any(each.writes for each in seen)
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


def mixing(what: str) -> ConfigError:
    """The error of a model that mixes samples, with a loss that is known to be a mean, where a batch is cut."""
    return ConfigError(
        f"{what}; PyTorch's own losses are means, so the model looks at the other samples of a batch",
        where="mh.Trainer(model=…)",
        fix="use nn.BatchNorm in place of a normalisation of your own, or sum over the workers what it is made of; "
        'train in one piece (one worker, no micro_batch_size); or say that it is meant so: weight="samples"',
    )


KEEPS = "the model keeps the tensor {!r} from one batch to the next, and it is neither a parameter nor a buffer"


def keeps_state(name: str) -> ConfigError:
    """The error of a model that keeps a tensor from batch to batch, where a batch is cut."""
    return ConfigError(
        f"{KEEPS.format(name)}: each worker would keep its own, and no snapshot has it",
        where="mh.Trainer(model=…)",
        fix="set it anew in each forward pass; or register it as a buffer, and sum over the workers what goes into it; "
        "or train in one piece (one worker, no micro_batch_size)",
    )


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
    """Whether the model may be copied for a look: not where workers exchange something in its forward pass."""
    in_halves: bool = False
    """Whether passes see parameters of 16 bits, whatever is kept of them."""

    def at(self, piece: LoadedPiece, rule: Rule | None) -> Seen:
        """What one piece shows. Whatever is wrong with the model shows in the first step, and better."""
        if len(piece.plan.indices) < 2:
            return Seen()
        seen = Seen()
        # Where workers exchange in forward passes, one that goes on by itself meets the others elsewhere.
        passed_over = (Exception,) if self.copies else ()
        with suppress(*passed_over), randomness.undisturbed():
            make = self._parts_of(piece)
            if make is None:
                return seen
            for graph in (False, True) if self.copies else (True,):  # what differentiates within the loss needs it
                for how in (self._copied, _in_evaluation) if self.copies else (_in_evaluation,):
                    with suppress(*passed_over), how(self.module) as module, torch.set_grad_enabled(graph):
                        found = self._compare(module, piece, make, rule)
                        found.keeps = found.keeps or seen.keeps
                        seen = found
                    if seen.could_look:
                        return seen
        return seen

    @contextmanager
    def _copied(self, module: nn.Module) -> Iterator[nn.Module]:
        """A copy whose modules are in training mode where the script has written them. It shares what is trained.

        A user's step sees a model in evaluation mode, where it may do more in training than compute: what it counts
        there it is not to count here.
        """
        if sum(each.numel() for each in module.parameters() if not each.requires_grad) > _MOST_COPIED:
            raise ValueError("too much would be copied")
        copied = copy.deepcopy(module, {id(each): each for each in module.parameters() if each.requires_grad})
        prepare(copied)  # copies are of PyTorch's own classes
        for each in copied.modules():
            each.training = any(each.children()) or not type(each).__module__.startswith("torch.")
        step, model = self.forward.step, model_of(copied)
        model.training = step is None or is_plain(step, model)
        with acting(_AsEvaluated()), _in_evaluation(module, within=copied):
            yield copied

    def _parts_of(self, piece: LoadedPiece) -> Callable[[int, int], Any] | None:
        """What makes a batch of the samples of `piece` from one number to another; None where nothing does."""
        batch, count = piece.batch, len(piece.plan.indices)
        fetcher = self.fetcher
        if fetcher is not None and (fetcher.collates or not _is_cuttable(batch, count)):
            samples = fetcher.samples(self.epoch, piece.plan.indices)
            randomness.seed_compute(0)
            before = randomness.states()
            fetcher.collate(samples)
            if not randomness.drawn_since(before):
                return lambda begin, end: fetcher.collate(samples[begin:end])
        if not _is_cuttable(batch, count):
            return None
        return lambda begin, end: _rows(batch, begin, end)

    def _compare(
        self, module: nn.Module, piece: LoadedPiece, make: Callable[[int, int], Any], given: Rule | None
    ) -> Seen:
        batch, count = piece.batch, len(piece.plan.indices)
        rules: dict[str, Rule | None] = (
            {"weight": given} if given is not None else {"samples": None, **rules_for(batch)}
        )
        cuts = sorted({1, count // 2, count - 1})
        draws = SetDraws(0.3, {count, *cuts, *(count - cut for cut in cuts)})
        kept, buffers = _kept(module), {name: each.clone() for name, each in module.named_buffers()}
        norms = [each for each in module.modules() if isinstance(each, _BatchNorm)]
        values = [(each, each.clone()) for norm in norms for each in norm.buffers(recurse=False)]
        whole = self._loss(module, batch, draws)
        with torch.no_grad():
            for value, before in values:  # those that a layer of the script's changes by itself
                value.copy_(before)
        again = self._loss(module, make(0, count), draws)
        if draws.left or not abs(whole) < float("inf"):
            return Seen()
        if whole != again:
            return Seen(keeps=next((name for name, each in _kept(module).items() if _differ(kept.get(name), each)), ""))
        seen = Seen(could_look=True, holds=list(rules), samples=count, whole=whole, by_parts=whole)
        seen.ignores = has_ignored(batch)
        looked = 0
        for cut in cuts:
            parts = [make(0, cut), make(cut, count)]
            losses: list[float] = []
            with suppress(Exception):  # a single sample has no variance, say
                losses += [self._loss(module, part, draws) for part in parts]
            if not losses or draws.left:
                continue
            looked += 1
            counted = {
                name: [float(cut), float(count - cut)] if rule is None else [float(rule(part)) for part in parts]
                for name, rule in rules.items()
            }
            self._note_differences(seen, losses, counted)
        seen.could_look = looked > 0 and not draws.left
        inside = {id(value) for value, _ in values}
        seen.writes = any(
            _differ(buffers.get(name), each) for name, each in module.named_buffers() if id(each) not in inside
        )
        return seen

    def _note_differences(self, seen: Seen, losses: list[float], counted: dict[str, list[float]]) -> None:
        """Strike out the rules by which the losses of two parts have another mean than that of the whole."""
        for name, counts in counted.items():
            mean = _mean(losses, counts)
            size = max([abs(seen.whole), *(abs(each) for each, one in zip(losses, counts, strict=True) if one)])
            if not abs(mean - seen.whole) <= self._rounding() * size + 1e-7:  # no number where nothing counts, by it
                seen.holds = [each for each in seen.holds if each != name]
                if name in ("samples", "weight"):
                    seen.by_parts = max(mean, seen.by_parts, key=lambda found: abs(found - seen.whole))

    def _rounding(self) -> float:
        if self.in_halves or any(each.dtype in (torch.bfloat16, torch.float16) for each in self.module.parameters()):
            return _ROUNDING_OF_HALVES
        return _ROUNDING.get(self.device.type, 3e-3)

    def _loss(self, module: nn.Module, batch: Any, draws: SetDraws) -> float:
        on_device = mapped(batch, lambda tensor: tensor.to(self.device))
        randomness.seed_compute(0)
        before = randomness.states()
        with draws:
            loss = float(self.forward.values(module, on_device)["loss"].detach())
        # NumPy's and Python's numbers are not set: there may be one for each sample.
        draws.left = draws.left or randomness.drawn_since((torch.get_rng_state(), *before[1:]))
        return loss


def _mean(losses: list[float], counts: list[float]) -> float:
    total = sum(counts)
    terms = [weight * loss for loss, weight in zip(losses, counts, strict=True) if weight]
    return sum(terms) / total if total else float("nan")


def _is_cuttable(batch: Any, count: int) -> bool:
    """Whether `batch` is made of nothing but tensors with `count` rows each, and lists of as many texts or the like."""
    if isinstance(batch, Tensor):
        return batch.dim() > 0 and batch.shape[0] == count
    if isinstance(batch, dict):
        return bool(batch) and all(_is_cuttable(value, count) for value in batch.values())
    if isinstance(batch, list | tuple):
        return bool(batch) and (_is_column(batch, count) or all(_is_cuttable(value, count) for value in batch))
    return False


def _is_column(values: Sequence[Any], count: int) -> bool:
    """Whether it is a list of one text or the like for each sample, as `default_collate` makes it."""
    return len(values) == count and not any(isinstance(each, Tensor | dict | list | tuple) for each in values)


def _rows(batch: Any, begin: int, end: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[begin:end]
    if isinstance(batch, dict):
        return {key: _rows(value, begin, end) for key, value in batch.items()}
    if not any(isinstance(each, Tensor | dict | list | tuple) for each in batch):
        return batch[begin:end]
    rows = [_rows(value, begin, end) for value in batch]
    return type(batch)(*rows) if hasattr(batch, "_fields") else type(batch)(rows)


class _AsEvaluated:
    """BatchNorm layers normalise by their running values, as if each sample were alone."""

    def normalise(self, layer: _BatchNorm, input: Tensor, *, track: bool) -> Tensor:
        """See `shared_norm.Batch`."""
        mean, variance = layer.running_mean, layer.running_var
        if mean is None or variance is None:
            return nn.functional.batch_norm(
                input, input.new_zeros(input.shape[1]), input.new_ones(input.shape[1]), layer.weight, layer.bias
            )
        return nn.functional.batch_norm(input, mean, variance, layer.weight, layer.bias, eps=layer.eps)


@contextmanager
def _in_evaluation(module: nn.Module, within: nn.Module | None = None) -> Iterator[nn.Module]:
    """Within, evaluation mode; afterwards every buffer is as before. Gives `module`, or `within`."""
    buffers = list(module.buffers())
    kept = [buffer.clone() for buffer in buffers]
    with in_evaluation(module) if within is None else nullcontext():
        try:
            yield module if within is None else within
        finally:
            for buffer, before in zip(buffers, kept, strict=True):
                if not torch.equal(buffer, before):  # an expanded one cannot be written to
                    with torch.no_grad():
                        buffer.copy_(before)


def _kept(module: nn.Module) -> dict[str, Tensor]:
    """The tensors that modules hold beside their parameters and buffers, by name, as they are now."""
    return {
        f"{path}.{name}" if path else name: each.detach().clone()
        for path, part in module.named_modules()
        for name, each in vars(part).items()
        if isinstance(each, Tensor)
    }


def _differ(before: Tensor | None, now: Tensor) -> bool:
    return before is None or before.shape != now.shape or not torch.equal(before, now)
