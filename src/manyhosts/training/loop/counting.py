"""Before each step: what its pieces count, by a rule that is settled before the first one and looked at again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial

from manyhosts.communication.batch_norm import GlobalBatch
from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.world import World
from manyhosts.config.settings import Settings
from manyhosts.data.steps import LoadedPiece, PiecePlan, Step
from manyhosts.errors import ConfigError
from manyhosts.events import LossLooked
from manyhosts.loss import comparison
from manyhosts.loss.comparison import Look, Seen, look_at
from manyhosts.loss.compute import LOSS, STEP
from manyhosts.loss.weighing import CLASSES, LOOKED_FOR, Rule, has_ignored
from manyhosts.training.loop.source import IndexedSource
from manyhosts.training.setup.build import Components
from manyhosts.training.state.run_state import RunState

ALL_SAMPLES, NO_MEAN = "all samples", "no mean"
"""What is known of a loss that counts labels, too, that are left out; and of one that follows no rule."""
_WIDE = 8
"""Pieces whose samples are looked at together, at most those of the batch: the mean of, say, the 16 largest losses is
that of all samples in a piece of 16."""
_SOON = (10, 100)
"""Steps that are looked at besides every `look_every`-th."""

KEPT = "{!r} is kept from one batch to the next, and is neither a parameter nor a buffer"
_OR_ELSE = (
    "train in one piece (one worker, neither micro_batch_size nor virtual_workers); or say that it is meant so: "
    'weight="samples"'
)
_FIXES = {
    comparison.COMMUNICATES: (
        "the script itself calls a collective of torch.distributed ({}) in a forward pass; of these a worker has one "
        "for each piece of a batch, and others may have more or fewer",
        'leave it out: return {"loss": loss, "name": value} from step, and the mean over all workers is logged; sums '
        "over the entire batch are for mh.Run: run.backward(rows, over_batch=loss); or "
        'where each worker calls it equally often, say weight="samples"',
    ),
    comparison.IN_CHUNKS: (
        "the BatchNorm {!r} is called several times in a forward pass, with a part of the samples each time: over "
        "several workers others would meet in a call, and a worker with fewer calls would leave the others waiting",
        "call it once, with all samples; or set batch_norm='local', or virtual_workers, with which each part of a "
        "batch is normalised by itself; or train on one worker",
    ),
    comparison.CHANGES_GRADIENTS: (
        "the gradient of {!r} over some samples is not the mean of those over parts of them, though the loss "
        "is: a hook, or a backward pass of the script's own, changes it by what it sees, which is a piece of a batch",
        "leave it to clip_gradients, or to a hook of the optimizer (register_step_pre_hook): these see the sum "
        f"over all pieces; or {_OR_ELSE}",
    ),
    comparison.KEEPS_STATE: (
        KEPT + ": each worker keeps its own, it changes once for each piece of a batch, and no snapshot has it",
        "set it in each forward pass; or change it once per step, in a callback (after_step); or register it as a "
        f'buffer, and sum over the workers what goes into it, with weight="samples"; or {_OR_ELSE}',
    ),
    comparison.PADS: (
        "{}. Collate pads the parts of a batch to other lengths than the batch: either padding counts in the loss, or "
        "the loss is a mean over labels, of which parts have other numbers",
        "leave padding out of the loss (a mask, ignore_index) and of what the model adds up over a text; where it is, "
        'say what a piece counts, its labels for instance: weight=lambda batch: (batch["labels"] != -100).sum(); or '
        f"pad all samples to one length in collate; or {_OR_ELSE}",
    ),
    comparison.ROWS: (
        "{}. Samples have different numbers of rows (atoms, nodes, tokens in one tensor), and the loss is a mean over "
        "rows",
        "say what a piece counts: weight=lambda batch: len(batch[1]), or the length of what else has the targets; "
        f"or {_OR_ELSE}",
    ),
    "mixes samples": (
        "{}; PyTorch's own losses are means, so the model looks at the other samples of a batch",
        "use nn.BatchNorm in place of a normalisation of your own, or sum over the workers what it is made of, with "
        f'weight="samples"; or {_OR_ELSE}',
    ),
    "is no mean": (
        "{}",
        "give weight=function(batch) -> what a piece counts in the mean (tokens, class weights; for several losses "
        f"a number for each, by name); or {_OR_ELSE}",
    ),
}
"""What is refused where a batch is cut, the first of these: in words, and what to do."""


class LossWeights:
    """What one loop has its pieces count."""

    def __init__(self, components: Components, settings: Settings, state: RunState) -> None:
        self.components, self.settings, self.state = components, settings, state
        self.settled = False
        """Whether the rule is known for the workers of now."""
        self.moves = False
        """Whether a look moves what cannot be put back (an iterator, a file): it does not come again."""
        self.said = "", ""
        """The outcome of the last look, and what was said of it."""

    def of(self, step: Step) -> tuple[Step, float | None]:
        """A step whose pieces have their weights, and what the batch counts; None: its samples.

        Raises:
            ConfigError: the loss is no mean, and a batch is cut.
            TrainingError: the user's rule gives no number.
        """
        weighing, number, every = self.components.weighing, self.state.step + 1, self.settings.look_every
        later = every and self.cuts and not self.moves and (number % every == 0 or number in _SOON)
        if not self.settled or later:
            step = self.looked_at(step, first=not self.settled)
            self.settled = True
        if weighing.rule is None and not weighing.checks:
            return step, None
        weighed, weight = weighing.of(step, number)
        communicates = isinstance(self.components.batch_norm, GlobalBatch) or self.components.compute.is_collective
        # What counts nothing is computed only for collectives within.
        if not (communicates or self.settings.virtual_workers):
            weighed = replace(weighed, pieces=[each for each in weighed.pieces if each.plan.weight])
        return weighed, weight if weighing.rule is not None else None

    def looked_at(self, step: Step, *, first: bool) -> Step:
        """`step`, after its first piece was looked at: on a `first` look the rule is found. All workers call this.

        Raises:
            ConfigError: as `of`.
        """
        weighing, state, world = self.components.weighing, self.state, self.components.world
        known = weighing.knows or weighing.classes is not None
        if weighing.said == "samples" or (weighing.knows and not self.cuts):
            return step
        if first:
            weighing.take_up(state.counts_by)
        source, settings, strategy = self.components.batches.source, self.settings, self.components.strategy
        copies, finds = not self.components.compute.is_collective, first and not known and not state.counts_by
        own = -(-self.components.batches.size // strategy.mesh.size("replicate", "shard"))
        micro = min(own, settings.micro_batch_size or own)
        look = Look(
            self.components.compute, self.components.trained, world.device, step.epoch,
            source.loader.fetcher if isinstance(source, IndexedSource) else None, copies=copies,
            gradients=first and self.cuts, accumulates=settings.virtual_workers is not None or micro < own,
            in_halves=settings.strategy.gathers_rounded, least=strategy.least_samples,
        )  # fmt: skip
        pieces: list[LoadedPiece] = []
        if copies:
            pieces = step.fetched(None if first and weighing.must_look else 1)
            step = replace(step, pieces=[*pieces, *step.pieces[len(pieces) :]])
        looked = [each for each in pieces[:1] if len(each.plan.indices) > 1] or _alike(step, look, micro) or pieces[:1]
        if first and weighing.must_look:
            weighing.look_at_targets(pieces or looked)
            state.counts_by = CLASSES if weighing.rule is not None else state.counts_by
        if self.cuts or not known:  # else it was only to be seen which targets count
            rule = weighing.classes or weighing.rule or (None if known else LOOKED_FOR.get(state.counts_by))
            # By one worker, or by all where they compute together: such a model has little room.
            wide = (_WIDE * world.is_rank_0 if copies else 2) if finds and self.cuts else 0
            self.heed(find_mean(look, looked, world, rule, _alike(step, look, wide * micro)), known, finds)
        if first and weighing.said is None and not known:
            weighing.take_up(state.counts_by)
            weighing.guard = has_ignored if state.counts_by == "samples" else None
        weighing.checks = self.cuts and weighing.said is None
        if first and weighing.rule is not None and world.size > 1 and (text := settings.strategy.about_weights):
            world.notes.append(text)
        return step

    def heed(self, seen: Seen, known: bool, finds: bool) -> None:
        """Refuse what is wrong where a batch is cut, say what could not be tried, and know the rule from now on.

        `known`: what the loss is a mean over follows from the script; `finds`: it is what this look is to find.

        Raises:
            ConfigError: the loss is no mean, or the model keeps something, and a batch is cut.
        """
        components, notes = self.components, self.components.world.notes
        given, is_mean = callable(components.weighing.said), bool(seen.holds) or not seen.samples
        found = choose(seen) if finds else self.state.counts_by or "samples"
        keeps = seen.findings.get(comparison.KEEPS)
        what = "with this weight the loss is no mean" if given else "the loss is no mean over the samples"
        what += f": {seen.values}, so it depends on how a batch is cut{seen.findings.get(comparison.WRITES, '')}"
        guessed_wrong = not known and not given and (not is_mean or found == NO_MEAN)
        in_chunks = seen.findings.get(comparison.IN_CHUNKS, "")
        no_mean = what * (not is_mean and not given)
        wrong = {
            **seen.findings,
            **{kind: no_mean for kind in (comparison.PADS, comparison.ROWS) if seen.findings.get(kind)},
            comparison.IN_CHUNKS: in_chunks * isinstance(components.batch_norm, GlobalBatch),
            "mixes samples": what * (known and not is_mean),
            "is no mean": what * guessed_wrong,
        }
        of_loss = LOSS if components.compute.step is None else STEP
        places = {"is no mean": of_loss, comparison.COMMUNICATES: of_loss, comparison.PADS: "mh.Data(collate=…)"}
        self.moves = seen.because == comparison.OTHER_AGAIN
        for kind, (text, fix) in _FIXES.items() if self.cuts else ():
            if found_in := wrong.get(kind):
                raise ConfigError(text.format(found_in), where=places.get(kind, "mh.Trainer(model=…)"), fix=fix)
        if keeps and self.cuts:
            seen.because = seen.because or f"{KEPT.format(keeps)}, and what it changes later is not known"
        elif keeps:
            notes.append(f"{KEPT.format(keeps)}: no snapshot has it")
        if given:
            components.weighing.names = tuple(seen.names)
        if given and not is_mean:
            notes.append(what)
        elif guessed_wrong and finds:
            notes.append(
                f"{what}; on several workers, or with micro_batch_size, it would be refused, and a validation has that "
                "of evaluation_batch_size samples at a time"
            )
        elif finds and found in LOOKED_FOR and not given:
            among = "labels that are not -100" + (", but for the first of each sequence" * found.startswith("shifted"))
            notes.append(f"the loss was found to be a mean over {among}: pieces count by those")
        self.state.counts_by = "weight" if given else found
        outcome = ("mean", "") if is_mean else ("no mean", what)
        self.report(*(("not tried", not_tried(seen)) if seen.because and self.cuts else outcome))

    def report(self, outcome: str, text: str) -> None:
        """Have the outcome of a look in `run.json`, and on the screen where it could not be tried."""
        if self.said != (outcome, text):
            self.said = outcome, text
            self.components.world.notes += [text] * (outcome == "not tried")
            self.components.world.news.append(partial(LossLooked, outcome=outcome, text=text))

    @property
    def cuts(self) -> bool:
        """Whether a batch may be computed in several pieces."""
        in_parts = max(self.components.world.size, self.settings.virtual_workers or 1) > 1
        return (
            in_parts or (self.settings.micro_batch_size or self.components.batches.size) < self.components.batches.size
        )


def _alike(step: Step, look: Look, samples: int) -> list[LoadedPiece]:
    """A piece of so many samples, the same on every worker that asks for it; none of a stream."""
    indices = step.taken[: max(look.least, samples)]
    fetched = [] if look.fetcher is None or not samples else [look.fetcher(step.epoch, indices)]
    return [LoadedPiece(PiecePlan(0, 0, indices, 1.0), batch) for batch in fetched]


def find_mean(
    look: Look, own: Sequence[LoadedPiece], world: World, rule: Rule | None, wide: Sequence[LoadedPiece]
) -> Seen:
    """What the workers have seen together; `rule` is the user's, where there is one. All of them call this.

    `wide`: pieces larger than any that is trained on, which are looked at in less memory, and count for nothing where
    that fails.
    """
    mine = [look_at(look, piece, rule) for piece in own if piece.plan.weight]
    mine += [each for piece in wide if (each := look_at(look, piece, rule, graph=False)).samples]
    reported = [Seen(**each) for row in gather_plain(world, list(map(asdict, mine))) for each in row]
    seen = [each for each in reported if each.samples]
    if not look.copies and len(seen) < len(reported):  # what one of them cannot try, none has: each pass is of them all
        seen = []
    none = "" if seen else "no forward pass has two samples, or they come once, from a stream"
    shown = max(seen or [Seen()], key=lambda each: each.off)
    return replace(
        shown,
        because=next((each.because for each in seen or reported if each.because), none),
        holds=[name for name in shown.holds if all(name in each.holds for each in seen)],
        offs={name: max(each.offs.get(name, 0.0) for each in seen) for name in shown.offs} if seen else {},
        sure=max((each.sure for each in seen), default=shown.sure),
        names=next((each.names for each in reported if each.names), [""]),
        findings={kind: name for each in reversed(reported) for kind, name in each.findings.items() if name},
    )


def choose(seen: Seen) -> str:
    """The rule to count by: the name of one, `NO_MEAN`, or `ALL_SAMPLES` where labels that are left out count, too."""
    ignores = seen.findings.get(comparison.IGNORES)
    if not seen.samples:
        return "samples"
    if ignores and seen.likely == ["samples"]:
        return ALL_SAMPLES
    names = ("labels", "shifted labels", "samples") if ignores else ("samples", "labels", "shifted labels")
    return next((name for name in names if name in seen.likely), NO_MEAN)


def not_tried(seen: Seen) -> str:
    """What is said of a loss that could not be looked at, or not in training mode."""
    mode = " in training mode" if seen.samples and not seen.findings.get(comparison.KEEPS) else ""
    return (
        f"whether the loss is a mean over samples could not be tried{mode}, because {seen.because}: compare a run on "
        'one worker with one on two, give weight=function(batch) -> what it counts, or weight="samples" where you know '
        "that it is"
    )
