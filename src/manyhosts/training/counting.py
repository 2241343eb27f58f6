"""Before each step: what its pieces count, by a rule that is settled before the first one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from manyhosts.communication.batch_norm import GlobalBatch
from manyhosts.config.local_steps import DiLoCo
from manyhosts.config.settings import Settings
from manyhosts.config.strategies import gathers_rounded
from manyhosts.data.fetch import Fetcher
from manyhosts.data.steps import DuePiece, LoadedPiece, PiecePlan, Step
from manyhosts.training import first_look
from manyhosts.training.build import Parts
from manyhosts.training.means import LOOKED_FOR
from manyhosts.training.plain_step import is_hidden
from manyhosts.training.source import IndexedSource
from manyhosts.training.state import RunState

GIVEN = "weight"
"""What `RunState.counts_by` says where the user has given a rule, and it has been looked at."""
_COUNTS_WORKERS_ALIKE = (
    "what samples count is kept inside each worker; diloco counts all workers alike, also where the samples of one "
    "count more than those of another"
)


_LOOKED_AT_IN_EVALUATION = (
    "step asks for training mode, and keeps something or calls what cannot be read, so it was not tried in that mode: "
    "whether its loss is a mean over samples there, too, is not known; `manyhosts prove` compares 1, 2 and 3 workers"
)


class Counting:
    """What one loop has its pieces count."""

    def __init__(self, parts: Parts, settings: Settings, state: RunState) -> None:
        self.parts, self.settings, self.state = parts, settings, state
        self.settled = False
        """Whether the rule is known for the workers of now."""
        self.noted = False

    def of(self, step: Step) -> tuple[Step, float | None]:
        """A step whose pieces have their weights, and what the batch counts; None: its samples.

        Raises:
            ConfigError: the loss is no mean, and a batch is cut.
            TrainingError: the user's rule gives no number.
        """
        weighing = self.parts.weighing
        if not self.settled:
            step = self.looked_at(step)
            self.settled = True
        if weighing.counts_samples:
            return step, None
        if isinstance(self.settings.strategy, DiLoCo) and self.parts.world.size > 1 and not self.noted:
            self.noted = True
            self.parts.world.notes.append(_COUNTS_WORKERS_ALIKE)
        weighed, weight = weighing.of(step, self.state.step + 1)
        return replace(weighed, pieces=self._computed(weighed.pieces)), weight

    def looked_at(self, step: Step) -> Step:
        """`step`, after the rule was found by looking at its first pieces, where that must be. All workers call this.

        Raises:
            ConfigError: as `of`.
        """
        weighing = self.parts.weighing
        known = weighing.knows or weighing.classes is not None
        mixes = known and weighing.said is None and self.cuts and not self.state.counts_by
        if weighing.knows and not mixes:
            return step
        most = None if weighing.must_look else 1 if known else first_look.MOST_PIECES
        look = self.look_of(step)
        if self.parts.strategy.traits.meets_in_forward:
            pieces = self.alike(step, look.fetcher)
        else:
            pieces = step.fetched(most)
            step = replace(step, pieces=[*pieces, *step.pieces[len(pieces) :]])
        if not weighing.knows:
            self.settle(pieces, look)
        if mixes:
            self.look_at_model(pieces[:1], look)
        return step

    def alike(self, step: Step, fetcher: Fetcher | None) -> list[LoadedPiece]:
        """A piece that is the same on every worker, for all make the same forward passes; none of a stream."""
        if fetcher is None:
            self.parts.world.notes.append(
                "samples of a stream come once, so it was not tried whether the loss is a mean over them"
            )
            return []
        own = -(-len(step.taken) // self.parts.strategy.mesh.size("replicate", "shard"))
        indices = step.taken[: max(2, min(own, self.settings.micro_batch_size or own))]
        return [LoadedPiece(PiecePlan(0, 0, indices, 1.0), fetcher(step.epoch, indices))]

    def _computed(self, pieces: Sequence[LoadedPiece | DuePiece]) -> Sequence[LoadedPiece | DuePiece]:
        """Those of `pieces` that must be computed: one that counts nothing only for a collective inside the model."""
        traits = self.parts.strategy.traits
        if isinstance(self.parts.batch_norm, GlobalBatch) or traits.computes_fixed_parts or traits.meets_in_forward:
            return pieces
        return [piece for piece in pieces if piece.plan.weight]

    @property
    def cuts(self) -> bool:
        """Whether a batch may be computed in several pieces."""
        settings = self.settings
        in_parts = max(self.parts.world.size, settings.virtual_workers or 1) > 1
        return in_parts or (settings.micro_batch_size or self.parts.batch) < self.parts.batch

    def look_of(self, step: Step) -> first_look.Look:
        """What is looked at before `step`."""
        parts, source = self.parts, self.parts.source
        fetcher = source.loader.fetcher if isinstance(source, IndexedSource) else None
        return first_look.Look(
            parts.compute,
            parts.trained,
            parts.world.device,
            step.epoch,
            fetcher,
            copies=not parts.strategy.traits.meets_in_forward,
            in_halves=gathers_rounded(self.settings.strategy),
        )

    def settle(self, pieces: Sequence[LoadedPiece], look: first_look.Look) -> None:
        """Find the rule, where it does not follow from the script. All workers call this before the same step."""
        weighing, state = self.parts.weighing, self.state
        if weighing.classes is not None:
            weighing.look_at_targets(pieces)
        elif callable(weighing.said):
            if not state.counts_by:
                self.look_at_given(pieces, look)
        else:
            if not state.counts_by:
                self.look(pieces, look)
            elif state.counts_by == first_look.NO_MEAN and self.cuts:
                raise first_look.refused("the loss is no mean over the samples", by_step=self.by_step)
            weighing.use(state.counts_by)
        if not self.cuts:
            weighing.guard, weighing.labels_guarded = None, False

    @property
    def by_step(self) -> bool:
        """Whether the user gives `step`, and not `loss`."""
        return self.parts.compute.step is not None

    def look_at_model(self, pieces: Sequence[LoadedPiece], look: first_look.Look) -> None:
        """See that a loss of PyTorch's is the mean of its parts: that no layer of the script's mixes samples."""
        parts = self.parts
        seen = first_look.find_mean(look, pieces, parts.world, parts.weighing.classes, trouble_only=True)
        self.heed_kept(seen)
        if seen.could_look and not seen.holds and not seen.writes:
            raise first_look.mixing(first_look.no_mean(seen))
        self.state.counts_by = self.state.counts_by or "samples"

    def heed_kept(self, seen: first_look.Seen) -> None:
        """Refuse, or say where a batch is in one piece, that the model keeps a tensor from batch to batch.

        Raises:
            ConfigError: each worker, or part, would keep its own.
        """
        if seen.keeps and self.cuts:
            raise first_look.keeps_state(seen.keeps)
        if seen.keeps:
            self.parts.world.notes.append(f"{first_look.KEEPS.format(seen.keeps)}: no snapshot has it")

    def look(self, pieces: Sequence[LoadedPiece], look: first_look.Look) -> None:
        """Find by trial what the loss is a mean over, and say it where it is not its samples."""
        parts = self.parts
        seen = first_look.find_mean(look, pieces, parts.world, None)
        self.heed_kept(seen)
        found = first_look.choose(seen)
        if self.cuts and parts.compute.step is not None and is_hidden(parts.compute.step, parts.model):
            parts.world.notes.append(_LOOKED_AT_IN_EVALUATION)
        if found == first_look.NO_MEAN:
            what = first_look.no_mean(seen)
            if self.cuts:
                raise first_look.refused(what, by_step=self.by_step)
            parts.world.notes.append(f"{what}; on several workers, or with micro_batch_size, it would be refused")
        elif found in LOOKED_FOR:
            among = "labels that are not -100" + (", but for the first of each sequence" * found.startswith("shifted"))
            parts.world.notes.append(f"the loss was found to be a mean over {among}: pieces count by those")
        self.state.counts_by = found

    def look_at_given(self, pieces: Sequence[LoadedPiece], look: first_look.Look) -> None:
        """See whether the user's rule makes the loss a mean, and say it where not."""
        parts = self.parts
        seen = first_look.find_mean(look, pieces, parts.world, parts.weighing.rule)
        self.heed_kept(seen)
        if seen.could_look and not seen.holds:
            parts.world.notes.append(
                f"with this weight the loss is no mean: {seen.whole:.6g} over {seen.samples} samples, "
                f"{seen.by_parts:.6g} as the mean over two parts of these"
            )
        self.state.counts_by = GIVEN
