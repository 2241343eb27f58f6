"""A look at the loss: is it a mean over samples, over labels that count, or none at all?

The loss of one piece is compared with the mean of the losses of parts of it, by each rule that it could follow.
What the script has written is in training mode there, and PyTorch's own layers in evaluation mode, for dropout and
BatchNorm are seen to elsewhere. A copy of the modules is looked at, what a loss or a step holds in plain Python is put
back (`held_values`), and a pass that would write into any other tensor breaks off before it does. What torch draws is
one value for all samples (`set_draws`). Differences that may be rounding are looked at in float64. There are three
ends: the loss is a mean, it is none, or that could not be tried, because of something that is said.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.shared_norm import acting, prepare
from manyhosts.communication.world import World
from manyhosts.data import randomness
from manyhosts.data.steps import LoadedPiece, mapped
from manyhosts.errors import ConfigError
from manyhosts.strategies.cut_model import without_graph
from manyhosts.training.consistency.held_values import asks_for_training
from manyhosts.training.evaluation.dataset_forward import in_evaluation
from manyhosts.training.loss_weights import comparison
from manyhosts.training.loss_weights.comparison import Comparison, Look, MakeBatch, Seen, words
from manyhosts.training.loss_weights.means import Rule, counted
from manyhosts.training.loss_weights.set_draws import NotTried
from manyhosts.training.setup.trained_module import model_of

ALL_SAMPLES = "all samples"
NO_MEAN = "no mean"
"""What is known of a loss that follows no rule."""
MOST_PIECES = 8
"""Of one worker, that are looked at."""
_MOST_COPIED = 1 << 28
"""Elements that are copied for a look; parameters that are trained are shared with the copy."""


def find_mean(
    look: Look, own: Sequence[LoadedPiece], world: World, rule: Rule | None, wide: Sequence[LoadedPiece] = ()
) -> Seen:
    """What the workers have seen together; `rule` is the user's, where there is one. All of them call this.

    `wide`: pieces larger than any that is trained on, which are looked at in less memory, and count for nothing where
    that fails.
    """
    plain = replace(look, gradients=False)
    pieces = [piece for piece in own if piece.plan.weight][:MOST_PIECES]
    mine = [look_at(plain if number else look, piece, rule) for number, piece in enumerate(pieces)]
    mine += [each for piece in wide if (each := look_at(plain, piece, rule, graph=False)).samples]
    reported = [Seen(**each) for row in gather_plain(world, list(map(asdict, mine))) for each in row]
    seen = [each for each in reported if each.samples]
    none = "" if seen else "no forward pass has two samples, or they come once, from a stream"
    shown = max(seen or [Seen()], key=lambda each: each.off)
    return replace(
        shown,
        because=next((each.because for each in seen or reported if each.because), none),
        holds=[name for name in shown.holds if all(name in each.holds for each in seen)],
        names=next((each.names for each in reported if each.names), [""]),
        beside={kind: name for each in reversed(reported) for kind, name in each.beside.items() if name},
    )


def choose(seen: Seen) -> str:
    """The rule to count by: the name of one, `NO_MEAN`, or `ALL_SAMPLES` where labels that are left out count, too."""
    ignores = seen.beside.get(comparison.IGNORES)
    if not seen.samples:
        return "samples"
    if ignores and seen.holds == ["samples"]:
        return ALL_SAMPLES
    names = ("labels", "shifted labels", "samples") if ignores else ("samples", "labels", "shifted labels")
    return next((name for name in names if name in seen.holds), NO_MEAN)


def no_mean(seen: Seen, *, given: bool = False) -> str:
    """What is wrong with such a loss, in a sentence. `given`: the user has given a weight."""
    if given:
        return (
            f"with this weight the loss is no mean: {seen.whole:.6g} over {seen.samples} samples, "
            f"{seen.by_parts:.6g} as the mean over parts of these"
        )
    return (
        f"the loss is no mean over the samples: {seen.whole:.6g} over {seen.samples} of them, {seen.by_parts:.6g} as "
        "the mean over parts of these, so it depends on how a batch is cut"
    )


def not_tried(seen: Seen) -> str:
    """What is said of a loss that could not be looked at, or not in training mode."""
    mode = " in training mode" if seen.samples and not seen.beside.get(comparison.KEEPS) else ""
    return (
        f"whether the loss is a mean over samples could not be tried{mode}, because {seen.because}: compare a run on "
        'one worker with one on two, give weight=function(batch) -> what it counts, or weight="samples" where you know '
        "that it is"
    )


KEPT = "{!r} is kept from one batch to the next, and is neither a parameter nor a buffer"
_FIXES = {
    "is no mean": (
        "{}",
        "give weight=function(batch) -> what a piece counts in the mean (tokens, class weights; for several losses "
        "a number for each, by name); or train in one piece (one worker, no micro_batch_size); or say that samples are "
        'to be counted all the same: weight="samples"',
    ),
    "mixes samples": (
        "{}; PyTorch's own losses are means, so the model looks at the other samples of a batch",
        "use nn.BatchNorm in place of a normalisation of your own, or sum over the workers what it is made of; "
        'train in one piece (one worker, no micro_batch_size); or say that it is meant so: weight="samples"',
    ),
    comparison.CHANGES_GRADIENTS: (
        "the gradient of {!r} over some samples is not the mean of those over parts of them, though the loss "
        "is: a hook, or a backward pass of the script's own, changes it by what it sees, which is a piece of a batch",
        "leave it to clip_gradients, or to a hook of the optimizer (register_step_pre_hook): these see the sum "
        'over all pieces; or train in one piece; or say that it is meant so: weight="samples"',
    ),
    comparison.IN_CHUNKS: (
        "the BatchNorm {!r} is called several times in a forward pass, with a part of the samples each time: over "
        "several workers others would meet in a call, and a worker with fewer calls would leave the others waiting",
        "call it once, with all samples; or set batch_norm='local', or virtual_workers, with which each part of a "
        "batch is normalised by itself; or train on one worker",
    ),
    comparison.KEEPS_STATE: (
        KEPT + ": each worker keeps its own, it changes once for each piece of a batch, and no snapshot has it",
        "set it in each forward pass; or change it once per step, in a callback (after_step); or register it as a "
        "buffer, and sum over the workers what goes into it; or train in one piece (one worker, no micro_batch_size)",
    ),
}


def refuse(seen: Seen, kinds: Sequence[str], *, own: str) -> None:
    """Refuse the first of `kinds` that there is in `seen`; `own`: the argument that the script computes its loss in.

    Raises:
        ConfigError: there is one.
    """
    for kind in kinds:
        if found := seen.beside.get(kind):
            what, fix = _FIXES[kind]
            where = own if kind == "is no mean" else "model"
            raise ConfigError(what.format(found), where=f"mh.Trainer({where}=…)", fix=fix)


def look_at(look: Look, piece: LoadedPiece, rule: Rule | None, *, graph: bool = True) -> Seen:
    """What one piece shows. Errors of the model show in the first step, and better.

    Without `graph` it takes less memory, and shows nothing of a loss that differentiates itself.
    """
    count, seen = len(piece.plan.indices), Seen()
    with suppress(Exception):  # what is wrong with a rule is said where it is used
        seen.names = sorted(counted(rule, piece.batch)) if rule else []
    if count < (least := 4 if look.in_stages else 2):
        seen.because = (
            f"a forward pass has fewer than {least} samples" if count > 1 else "a forward pass has one sample"
        )
        return seen
    # What differentiates within the loss needs the graph.
    with randomness.undisturbed(), torch.set_grad_enabled(look.copies and graph):
        try:
            make = _parts_of(look, piece)
            with _shown(look) as module:
                Comparison(look, module, seen).run(piece.batch, count, make, rule)
            own = [each for each in look.module.modules() if not type(each).__module__.startswith(_NOT_OF_SCRIPT)]
            if not look.copies and any(asks_for_training(type(each).forward) for each in own):
                seen.because = "the model asks for it, and its workers exchange something in each forward pass"
            return _surely(look, seen, make, rule)
        except Exception as error:
            # Where workers exchange something, collectives would not match; a loss that differentiates itself fails
            # alike on all of them.
            if not look.copies and "does not require grad" not in str(error):
                raise
            seen.because = words(error)
    return seen


def _surely(look: Look, seen: Seen, make: MakeBatch, rule: Rule | None) -> Seen:
    """The same in float64, where there were differences that may or may not be rounding."""
    is_large = sum(map(Tensor.numel, look.module.parameters())) > _MOST_COPIED
    if seen.off <= comparison.SURE or not look.copies or is_large:
        return seen

    def doubled(begin: int, end: int) -> Any:
        return mapped(make(begin, end), lambda each: each.double() if each.is_floating_point() else each)

    exact, default = Seen(), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with _shown(look, shares=False) as module:
            module.to(torch.float64)
            Comparison(look, module, exact).run(doubled(0, seen.samples), seen.samples, doubled, rule)
    except Exception:  # something is made in float32, and does not go with float64
        return seen
    finally:
        torch.set_default_dtype(default)
    beside = {**seen.beside, comparison.CHANGES_GRADIENTS: exact.beside.get(comparison.CHANGES_GRADIENTS, "")}
    return replace(exact, because=seen.because, names=seen.names, beside=beside)


_NOT_OF_SCRIPT = ("torch.", "manyhosts.")


@contextmanager
def _shown(look: Look, *, shares: bool = True) -> Iterator[nn.Module]:
    """A copy whose modules are in training mode where the script has written them. It `shares` what is trained.

    Without copies the model, in evaluation mode.
    """
    module = look.module
    if not look.copies:
        with in_evaluation(module), acting(_AsEvaluated()):
            yield module
        return
    if sum(each.numel() for each in module.parameters() if not each.requires_grad) > _MOST_COPIED:
        raise NotTried("its frozen parameters are too large for a copy")
    # Others that share their memory: gradients and hooks stay with those that are trained.
    trained = [each for each in module.parameters() if shares and each.requires_grad]
    plain = {id(each): nn.Parameter(each.detach()) for each in trained if type(each) is nn.Parameter}
    known: dict[int, Tensor] = {id(each): plain.get(id(each), each) for each in trained}
    copied = copy.deepcopy(module, known | without_graph(module))
    for each, own in zip(copied.parameters(), module.parameters(), strict=True):
        _hook(each, own)
    prepare(copied)  # copies are of PyTorch's own classes
    for part in copied.modules():
        part.training = any(part.children()) or not type(part).__module__.startswith("torch.")
    model_of(copied).training = True
    with acting(_AsEvaluated()):
        yield copied


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


def _hook(copied: Tensor, own: Tensor) -> None:
    """Give the copy of a parameter the hooks that the script has put on its own."""
    if copied is own:
        return
    for hook in (own._backward_hooks or {}).values():
        copied.register_hook(hook)
    for hook in (getattr(own, "_post_accumulate_grad_hooks", None) or {}).values():
        if not str(getattr(hook, "__module__", "")).startswith("manyhosts."):
            copied.register_post_accumulate_grad_hook(hook)


class _AsEvaluated:
    """BatchNorm layers normalise by their running values, as if each sample were alone."""

    def normalise(self, layer: _BatchNorm, input: Tensor, *, track: bool) -> Tensor:
        """See `shared_norm.Batch`."""
        mean, variance, eps = layer.running_mean, layer.running_var, layer.eps
        if mean is None or variance is None:
            mean, variance, eps = input.new_zeros(input.shape[1]), input.new_ones(input.shape[1]), 1e-5
        return nn.functional.batch_norm(input, mean, variance, layer.weight, layer.bias, eps=eps)
