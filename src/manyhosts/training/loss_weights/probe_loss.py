"""A look at the loss: is it a mean over samples, over labels that count, or none at all?

The loss of one piece is compared with the mean of the losses of two parts of it, by each rule that it could follow.
What the script has written is in training mode there, and PyTorch's own layers in evaluation mode, for dropout and
BatchNorm are seen to elsewhere. A copy of the modules is looked at, so that nothing which they count or keep is changed
(a user's step, which nobody can copy, is told that it is in evaluation, unless it is plain: see `plain_step`); what
torch draws is one value for all samples (`set_draws`). Differences that may be rounding are looked at in float64.
There are three ends: the loss is a mean, it is none, or that could not be tried, because of something that is said.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
from manyhosts.training.evaluation.dataset_forward import in_evaluation
from manyhosts.training.loop.compute import ForwardPass, terms_of
from manyhosts.training.loss_weights.means import Rule, has_ignored, rules_for
from manyhosts.training.loss_weights.set_draws import SetDraws
from manyhosts.training.loss_weights.step_purity import asks_for_training, is_hidden, is_plain
from manyhosts.training.setup.collective_forward import collective_forward
from manyhosts.training.setup.trained_module import model_of

MakeBatch = Callable[[int, int], Any]
"""Of the samples of a piece from one number to another."""
ALL_SAMPLES = "all samples"
NO_MEAN = "no mean"
"""What is known of a loss that follows no rule."""
MOST_PIECES = 8
"""Of one worker, that are looked at."""
_ROUNDING = {"cpu": 1e-4, "cuda": 3e-3}
"""Differences of this share of the loss are rounding; GPUs multiply in TF32."""
_ROUNDING_OF_HALVES = 3e-2
"""The same, where something is computed in 16 bits."""
_SURE = 1e-6
"""What differs by a smaller share is equal; what differs by more is looked at in float64, where that can be."""
_MOST_COPIED = 1 << 28
"""Elements that are copied for a look; parameters that are trained are shared with the copy."""


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
    """A tensor that the model keeps from batch to batch and that is neither parameter nor buffer, by name."""
    writes: bool = False
    """Whether a forward pass changes buffers, of which more is found out in the first steps."""


def find_mean(
    look: Look,
    own: Sequence[LoadedPiece],
    world: World,
    rule: Rule | None,
    *,
    cuts: int = 3,
    trouble_only: bool = False,
) -> Seen:
    """What the workers have seen together; `rule` is the user's, where there is one. All of them call this.

    `trouble_only`: they tell each other what they have seen where one of them has seen something wrong.
    """
    mine = [look.at(piece, rule, cuts=cuts) for piece in own if piece.plan.weight][:MOST_PIECES]
    if trouble_only and not world.any(not mine or any(each.keeps or each.because or not each.holds for each in mine)):
        return Seen(could_look=True, holds=["samples"])
    reported = [Seen(**each) for row in gather_plain(world, list(map(asdict, mine))) for each in row]
    seen = [each for each in reported if each.could_look]
    keeps = next((each.keeps for each in reported if each.keeps), "")
    because = next((each.because for each in seen or reported if each.because), "")
    if not seen:
        return Seen(because=because or "no forward pass has two samples, or they come once, from a stream", keeps=keeps)
    shown = max(seen, key=lambda each: each.off)
    shown.holds = [name for name in shown.holds if all(name in each.holds for each in seen)]
    shown.ignores = any(each.ignores for each in seen)
    shown.keeps, shown.writes, shown.because = keeps, any(each.writes for each in seen), because
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


NOT_TRIED = "whether the loss is a mean over samples could not be tried"


def not_tried(seen: Seen) -> str:
    """What is said of a loss that could not be looked at, or not in training mode."""
    mode = " in training mode" if seen.could_look else ""
    return (
        f"{NOT_TRIED}{mode}, because {seen.because}: compare a run on one worker with one on two, give "
        'weight=function(batch) -> what it counts, or weight="samples" where you know that it is'
    )


def refused(what: str, *, by_step: bool) -> ConfigError:
    """The error of such a loss where a batch is cut."""
    return ConfigError(
        what,
        where="mh.Trainer(step=…)" if by_step else "mh.Trainer(loss=…)",
        fix="give weight=function(batch) -> what a piece counts in the mean (tokens, class weights; for several losses "
        "a number for each, by name); or train in one piece (one worker, no micro_batch_size); or say that samples are "
        'to be counted all the same: weight="samples"',
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
        fix="set it again in each forward pass; or register it as a buffer, and sum over the workers what goes into it; "
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

    def at(self, piece: LoadedPiece, rule: Rule | None, *, cuts: int = 3) -> Seen:
        """What one piece shows, cut in `cuts` ways. Errors of the model show in the first step, and better."""
        if len(piece.plan.indices) < 2:
            return Seen(because="a forward pass has one sample")
        found = Seen()
        with randomness.undisturbed():
            try:
                make = self._parts_of(piece)
            except Exception as error:
                self._go_on_after(error)
                make = _words(error)
            if isinstance(make, str):
                return Seen(because=make)
            how, keeps = self._copied if self.copies else _in_evaluation, ""
            for graph in (False, True):  # what differentiates within the loss needs the graph
                try:
                    with how(self.module) as module, torch.set_grad_enabled(graph):
                        found = self._compare(module, piece.batch, len(piece.plan.indices), make, rule, cuts)
                    keeps = found.keeps = found.keeps or keeps
                except Exception as error:
                    self._go_on_after(error)
                    found = Seen(because=_words(error), keeps=keeps)
                if found.could_look:
                    found.because = self._not_in_training()
                    return self._surely(found, piece, make, rule, cuts, graph=graph)
        return found

    def _go_on_after(self, error: Exception) -> None:
        """Raise `error` where workers exchange in forward passes: one that continued would meet the others elsewhere."""
        if not self.copies:
            raise error

    def _not_in_training(self) -> str:
        """Why what the script has written was looked at in evaluation mode, and might do something else in training."""
        step = self.forward.step
        if step is not None and is_hidden(step, model_of(self.module)):
            return "step asks for training mode, and keeps something or calls what cannot be read"
        own = [each for each in self.module.modules() if not type(each).__module__.startswith(("torch.", "manyhosts."))]
        asks = not self.copies and any(asks_for_training(type(each).forward) for each in own)
        return "the model asks for it, and its workers exchange something in each forward pass" if asks else ""

    def _surely(
        self,
        seen: Seen,
        piece: LoadedPiece,
        make: MakeBatch,
        rule: Rule | None,
        cuts: int,
        *,
        graph: bool,
    ) -> Seen:
        """The same in float64, where there were differences that may or may not be rounding."""
        if seen.off <= _SURE or not self.copies or sum(map(Tensor.numel, self.module.parameters())) > _MOST_COPIED:
            return seen
        default = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.float64)
            with self._copied(self.module, shares=False) as module, torch.set_grad_enabled(graph):
                module.to(torch.float64)
                count = len(piece.plan.indices)

                def doubled(begin: int, end: int) -> Any:
                    return mapped(make(begin, end), _doubled)

                exact = self._compare(module, doubled(0, count), count, doubled, rule, cuts)
        except Exception:  # something is made in float32, and does not go with float64
            return seen
        finally:
            torch.set_default_dtype(default)
        if not exact.could_look:
            return seen
        exact.because, exact.keeps, exact.writes = seen.because, seen.keeps, seen.writes
        return exact

    @contextmanager
    def _copied(self, module: nn.Module, *, shares: bool = True) -> Iterator[nn.Module]:
        """A copy whose modules are in training mode where the script has written them. It `shares` what is trained.

        A user's step sees a model in evaluation mode, where it may do more in training than compute: what it counts
        there it is not to count here.
        """
        if sum(each.numel() for each in module.parameters() if not each.requires_grad) > _MOST_COPIED:
            raise ValueError("its frozen parameters are too large for a copy")
        known: dict[int, Tensor] = {id(each): each for each in module.parameters() if shares and each.requires_grad}
        kept = [each for part in module.modules() for held in vars(part).values() for each in _members(held)]
        # Activations that a module keeps, for pictures say, have a graph, and no copy is made of such.
        known |= {id(each): each.detach() for each in kept if isinstance(each, Tensor) and not each.is_leaf}
        copied = copy.deepcopy(module, known)
        prepare(copied)  # copies are of PyTorch's own classes
        for each in copied.modules():
            each.training = any(each.children()) or not type(each).__module__.startswith("torch.")
        step, model = self.forward.step, model_of(copied)
        model.training = step is None or is_plain(step, model)
        with acting(_AsEvaluated()), _in_evaluation(module, within=copied):
            yield copied

    def _parts_of(self, piece: LoadedPiece) -> MakeBatch | str:
        """What makes a batch of the samples of `piece` from one number to another; why nothing does, in words."""
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
            drawn = fetcher is not None and fetcher.collates
            return "collate draws random numbers" if drawn else "its batch cannot be cut, and comes from a stream"
        return lambda begin, end: _rows(batch, begin, end)

    def _compare(
        self, module: nn.Module, batch: Any, count: int, make: MakeBatch, given: Rule | None, most: int
    ) -> Seen:
        rules: dict[str, Rule | None] = (
            {"weight": given} if given is not None else {"samples": None, **rules_for(batch)}
        )
        cuts = sorted({1, count // 2, count - 1} if most > 1 else {count // 2})
        draws = SetDraws(0.3, {count, *cuts, *(count - cut for cut in cuts)})
        kept, buffers = _kept(module), {name: each.clone() for name, each in module.named_buffers()}
        norms = [each for each in module.modules() if isinstance(each, _BatchNorm)]
        values = [(each, each.clone()) for norm in norms for each in norm.buffers(recurse=False)]
        whole = self._loss(module, batch, draws)
        if not all(map(math.isfinite, whole.values())):  # which the step itself will say, or leave out
            return Seen(because="the loss of these samples is not finite")
        with torch.no_grad():
            for value, before in values:  # those that a layer of the script's changes by itself
                value.copy_(before)
        again = self._loss(module, make(0, count), draws)
        if draws.left:
            return Seen(because=f"{_DRAWS}{draws.left}, for which no value stands that goes for all samples")
        if not _near(whole, again):
            return self._another(module, make(0, count), whole, kept, draws)
        seen = Seen(could_look=True, samples=count, ignores=has_ignored(batch))
        parts = [[make(0, cut), make(cut, count)] for cut in cuts]
        losses, failed = self._losses_of(module, parts, draws)
        if draws.left or not any(losses):
            return Seen(because=f"{_DRAWS}{draws.left}" if draws.left else failed)
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
        if not all(map(_is_number, whole.values())) and given is None:
            return Seen(because=f"the loss of a piece is {sum(whole.values())}")
        rounding = self._rounding(draws.rounds)
        seen.holds = [name for name, share in off.items() if share <= rounding]
        seen.off = min(off.values()) if seen.holds == list(off) else max(off.values())
        inside = {id(value) for value, _ in values}
        seen.writes = any(
            _differ(buffers.get(name), each) for name, each in module.named_buffers() if id(each) not in inside
        )
        return seen

    def _another(
        self, module: nn.Module, batch: Any, whole: Mapping[str, float], kept: Mapping[str, Tensor], draws: SetDraws
    ) -> Seen:
        """What is said of a loss that has another value when it is computed again, as one that keeps a tensor has."""
        for name, each in kept.items():
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, each)
        is_why = _near(whole, self._loss(module, batch, draws))
        keeps = next((name for name, each in _kept(module).items() if _differ(kept.get(name), each)), "")
        return Seen(because="it has another value when it is computed again", keeps=keeps if is_why else "")

    def _losses_of(self, module: nn.Module, parts: Sequence[Any], draws: SetDraws) -> tuple[list[Any], str]:
        """The losses of both parts of each cut, none of one that fails; and why it does."""
        losses: list[Any] = []
        failed = ""
        for pair in parts:
            try:  # a single sample has no variance, say
                losses.append([self._loss(module, part, draws) for part in pair])
            except Exception as error:
                losses.append([])
                failed = _words(error)
        return losses, failed

    def _rounding(self, rounds: bool) -> float:
        parameters = {each.dtype for each in self.module.parameters()}
        if rounds or self.in_halves or parameters & {torch.bfloat16, torch.float16}:
            return _ROUNDING_OF_HALVES
        if torch.get_default_dtype() == torch.float64:
            return _SURE
        return _ROUNDING.get(self.device.type, 3e-3)

    def _loss(self, module: nn.Module, batch: Any, draws: SetDraws) -> dict[str, float]:
        """The loss, or several by name."""
        on_device = mapped(batch, lambda tensor: tensor.to(self.device))
        randomness.seed_compute(0)
        with draws, collective_forward(model_of(module)):
            values = self.forward.values(module, on_device)
        drawn = (torch.get_rng_state(), *(draws.ends or randomness.states()[1:]))
        if randomness.drawn_since(drawn):  # one number for each sample, which those of a part are not
            draws.left = draws.left or "numpy.random or random"
        draws.ends = drawn[1:]
        return {name: float(each.detach()) for name, each in (terms_of(values) or {"": values["loss"]}).items()}


_DRAWS = "the forward pass draws "


def _words(error: Exception) -> str:
    text = (str(error).strip() or "no more was said").splitlines()[0]
    return f"a part of a batch raises {type(error).__name__}: {text[:160]}"


def _members(held: Any) -> list[Any]:
    return [held, *(held.values() if isinstance(held, dict) else held if isinstance(held, list | tuple) else ())]


def _doubled(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _is_number(value: float) -> bool:
    return abs(value) < float("inf")


def _near(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    pairs = [(each, other.get(name, 0.0)) for name, each in one.items()]
    return all(a == b or a != a or abs(a - b) <= _SURE * max(abs(a), abs(b)) for a, b in pairs)


def _counts(rule: Rule | None, part: Any, samples: int) -> Mapping[str, float]:
    """What a part counts, for each loss by name; `""` where there is one number for all."""
    found = samples if rule is None else rule(part)
    return {name: float(each) for name, each in (found if isinstance(found, Mapping) else {"": found}).items()}


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


def _is_cuttable(batch: Any, count: int) -> bool:
    """Whether `batch` is made of nothing but tensors with `count` rows each, and lists of as many texts or the like."""
    if isinstance(batch, Tensor):
        return batch.dim() > 0 and batch.shape[0] == count
    if isinstance(batch, Mapping):
        return bool(batch) and all(_is_cuttable(value, count) for value in batch.values())
    if isinstance(batch, list | tuple):
        return bool(batch) and (_is_column(batch, count) or all(_is_cuttable(value, count) for value in batch))
    return False


def _is_column(values: Sequence[Any], count: int) -> bool:
    """Whether it is a list of one text or the like for each sample, as `default_collate` makes it."""
    return len(values) == count and not any(isinstance(each, Tensor | Mapping | list | tuple) for each in values)


def _rows(batch: Any, begin: int, end: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[begin:end]
    if isinstance(batch, Mapping):
        return {key: _rows(value, begin, end) for key, value in batch.items()}
    if not any(isinstance(each, Tensor | Mapping | list | tuple) for each in batch):
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
    buffers = [each for each in module.buffers() if not each.is_meta]  # those are another stage's
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
