"""Before each step: what its pieces count, by a rule that is settled before the first one and looked at again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from manyhosts.communication.batch_norm import GlobalBatch
from manyhosts.config.local_steps import DiLoCo
from manyhosts.config.settings import Settings
from manyhosts.config.strategies import gathers_rounded
from manyhosts.data.steps import DuePiece, LoadedPiece, PiecePlan, Step
from manyhosts.events import LossLooked
from manyhosts.training.loop.source import IndexedSource
from manyhosts.training.loss_weights import comparison, probe_loss
from manyhosts.training.loss_weights.comparison import Look, Seen
from manyhosts.training.loss_weights.means import LOOKED_FOR
from manyhosts.training.setup.build import Parts
from manyhosts.training.state.run_state import RunState

GIVEN = "weight"
"""What `RunState.counts_by` says where the user has given a rule, and it has been looked at."""
_COUNTS_WORKERS_ALIKE = (
    "what samples count is kept inside each worker; diloco counts all workers alike, also where the samples of one "
    "count more than those of another"
)
_WIDE = 8
"""Pieces whose samples are looked at together, at most those of the batch: the mean of, say, the 16 largest losses is
that of all samples in a piece of 16."""
_SOON = (10, 100)
"""Steps that are looked at beside every `look_every`-th."""


class LossWeights:
    """What one loop has its pieces count."""

    def __init__(self, parts: Parts, settings: Settings, state: RunState) -> None:
        self.parts, self.settings, self.state = parts, settings, state
        self.settled = False
        """Whether the rule is known for the workers of now."""
        self.noted = False
        self.moves = False
        """Whether a look moves what cannot be put back (an iterator, a file): it does not come again."""
        self.said = ""
        """What was said last of the look."""

    def of(self, step: Step) -> tuple[Step, float | None]:
        """A step whose pieces have their weights, and what the batch counts; None: its samples.

        Raises:
            ConfigError: the loss is no mean, and a batch is cut.
            TrainingError: the user's rule gives no number.
        """
        weighing, number, every = self.parts.weighing, self.state.step + 1, self.settings.look_every
        later = every and self.cuts and not self.moves and (number % every == 0 or number in _SOON)
        if not self.settled or later:
            step = self.looked_at(step, first=not self.settled)
            self.settled = True
        if weighing.counts_samples:
            return step, None
        if isinstance(self.settings.strategy, DiLoCo) and self.parts.world.size > 1 and not self.noted:
            self.noted = True
            self.parts.world.notes.append(_COUNTS_WORKERS_ALIKE)
        weighed, weight = weighing.of(step, number)
        return replace(weighed, pieces=self._computed(weighed.pieces)), weight if weighing.rule is not None else None

    def looked_at(self, step: Step, *, first: bool) -> Step:
        """`step`, after its first pieces were looked at: on a `first` look the rule is found. All workers call this.

        Raises:
            ConfigError: as `of`.
        """
        weighing, state = self.parts.weighing, self.state
        known = weighing.knows or weighing.classes is not None
        if weighing.said == "samples" or (weighing.knows and not self.cuts):
            return step
        many = first and not known and not state.counts_by
        look = self.look_of(step, gradients=first and self.cuts)
        step, looked = self._looked_pieces(step, look, first=first, many=many)
        if self.cuts or not known:  # else it was only to be seen which targets count
            rule = weighing.classes or weighing.rule or (None if known else LOOKED_FOR.get(state.counts_by))
            wide = self.alike(step, look, self._wide) if many and self.cuts else []
            self.heed(probe_loss.find_mean(look, looked, self.parts.world, rule, wide), known=known, many=many)
        if first and weighing.said is None and not known:
            weighing.use(state.counts_by)
        if not self.cuts:
            weighing.guard = None
        elif weighing.said is None and look.copies:
            weighing.looks = partial(_why_no_mean, look)
        return step

    def _looked_pieces(self, step: Step, look: Look, *, first: bool, many: bool) -> tuple[Step, list[LoadedPiece]]:
        """Which pieces are looked at; and the step with the batches of those that were fetched for it."""
        weighing = self.parts.weighing
        if look.copies:
            pieces = step.fetched(None if first and weighing.must_look else probe_loss.MOST_PIECES if many else 1)
            step = replace(step, pieces=[*pieces, *step.pieces[len(pieces) :]])
            looked = pieces if many else pieces[:1]
            if all(len(each.plan.indices) < 2 for each in looked):
                looked = self.alike(step, look) or looked
        else:
            pieces = looked = self.alike(step, look)
        if weighing.classes is not None and first and not weighing.knows:
            weighing.look_at_targets(pieces)
        return step, looked

    def heed(self, seen: Seen, *, known: bool, many: bool) -> None:
        """Refuse what is wrong where a batch is cut, say what could not be tried, and know the rule from now on.

        Raises:
            ConfigError: the loss is no mean, or the model keeps something, and a batch is cut.
        """
        parts, state, notes = self.parts, self.state, self.parts.world.notes
        given, is_mean = callable(parts.weighing.said), bool(seen.holds) or not seen.samples
        found = probe_loss.choose(seen) if many else state.counts_by or "samples"
        what, keeps = probe_loss.no_mean(seen, given=given), seen.beside.get(comparison.KEEPS)
        guessed_wrong = not known and not given and (not is_mean or found == probe_loss.NO_MEAN)
        seen.beside["mixes samples"] = what * (known and not is_mean and not seen.beside.get(comparison.WRITES_BUFFERS))
        seen.beside["is no mean"] = what * guessed_wrong
        self.moves = seen.because == comparison.OTHER_AGAIN
        own = "loss" if parts.compute.step is None else "step"
        probe_loss.refuse(seen, [comparison.IN_CHUNKS] * isinstance(parts.batch_norm, GlobalBatch), own=own)
        if self.cuts:
            probe_loss.refuse(
                seen, [comparison.CHANGES_GRADIENTS, comparison.KEEPS_STATE, "mixes samples", "is no mean"], own=own
            )
        if keeps and self.cuts:
            seen.because = seen.because or f"{probe_loss.KEPT.format(keeps)}, and what it changes later is not known"
        elif keeps:
            notes.append(f"{probe_loss.KEPT.format(keeps)}: no snapshot has it")
        if given:
            parts.weighing.names = tuple(seen.names)
        if given and not is_mean:
            notes.append(what)
        elif guessed_wrong and many:
            notes.append(f"{what}; on several workers, or with micro_batch_size, it would be refused")
        elif many and found in LOOKED_FOR and not given:
            among = "labels that are not -100" + (", but for the first of each sequence" * found.startswith("shifted"))
            notes.append(f"the loss was found to be a mean over {among}: pieces count by those")
        state.counts_by = GIVEN if given else found
        if seen.because and self.cuts:
            self.tell("not tried", probe_loss.not_tried(seen))
        else:
            self.tell(*(("mean", "") if is_mean else ("no mean", what)))

    def tell(self, outcome: str, text: str) -> None:
        """Have the outcome of a look in `run.json`, and on the screen where it could not be tried."""
        if (reported := f"{outcome}: {text}") == self.said:
            return
        self.said, world = reported, self.parts.world
        if outcome == "not tried":
            world.notes.append(text)
        world.news.append(partial(LossLooked, outcome=outcome, text=text))

    @property
    def _wide(self) -> int:
        """The pieces whose samples are looked at together: by one worker, or by all where they compute together."""
        if self.parts.strategy.traits.communicates_in_forward:
            return 2  # such a model has little room
        return _WIDE * self.parts.world.is_leader

    def alike(self, step: Step, look: Look, pieces: int = 1) -> list[LoadedPiece]:
        """One of the samples of so many pieces, the same on every worker that asks for it; none of a stream."""
        if look.fetcher is None or not pieces:
            return []
        own = -(-len(step.taken) // self.parts.strategy.mesh.size("replicate", "shard"))
        indices = step.taken[: max(2, pieces * min(own, self.settings.micro_batch_size or own))]
        return [LoadedPiece(PiecePlan(0, 0, indices, 1.0), look.fetcher(step.epoch, indices))]

    def _computed(self, pieces: Sequence[LoadedPiece | DuePiece]) -> Sequence[LoadedPiece | DuePiece]:
        """Those of `pieces` that must be computed: one that counts nothing only for a collective inside the model."""
        traits = self.parts.strategy.traits
        if (
            isinstance(self.parts.batch_norm, GlobalBatch)
            or traits.computes_fixed_parts
            or traits.communicates_in_forward
        ):
            return pieces
        return [piece for piece in pieces if piece.plan.weight]

    @property
    def cuts(self) -> bool:
        """Whether a batch may be computed in several pieces."""
        settings = self.settings
        in_parts = max(self.parts.world.size, settings.virtual_workers or 1) > 1
        return in_parts or (settings.micro_batch_size or self.parts.batch) < self.parts.batch

    @property
    def cuts_in_worker(self) -> bool:
        """Whether one worker may compute a batch in several pieces."""
        own = -(-self.parts.batch // self.parts.strategy.mesh.size("replicate", "shard"))
        return self.settings.virtual_workers is not None or (self.settings.micro_batch_size or own) < own

    def look_of(self, step: Step, *, gradients: bool) -> Look:
        """What is looked at before `step`; `gradients`, too."""
        parts, source = self.parts, self.parts.source
        fetcher = source.loader.fetcher if isinstance(source, IndexedSource) else None
        return Look(
            parts.compute,
            parts.trained,
            parts.world.device,
            step.epoch,
            fetcher,
            copies=not parts.strategy.traits.communicates_in_forward,
            gradients=gradients,
            accumulates=self.cuts_in_worker,
            in_halves=gathers_rounded(self.settings.strategy),
            in_stages=parts.strategy.traits.computes_in_stages,
        )


def _why_no_mean(look: Look, piece: LoadedPiece) -> str:
    seen = probe_loss.look_at(look, piece, None)
    return "" if not seen.samples or "samples" in seen.holds else probe_loss.no_mean(seen)
