"""Streams: datasets without an index, read in the order in which they come.

Every worker reads the entire stream and keeps its part of each global batch, so that a stream is cut like any other
dataset. One that offers `shard(index, count)` is read in shards instead: see `shards`. Continuing from a snapshot skips
what was read, or uses the dataset's `state_dict` and `load_state_dict` where it has them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from manyhosts import refusals
from manyhosts.data import loader_process, randomness
from manyhosts.data.cut import Cuts
from manyhosts.data.fetch import Collate, collated
from manyhosts.data.first_samples import are_alike, numbers_of
from manyhosts.data.one_pass import Pass
from manyhosts.data.order import Indices, Position
from manyhosts.data.steps import Failed, LoadedAudit, LoadedPiece, PiecePlan, Step, Steps, plan_audits, plan_pieces
from manyhosts.errors import DataError, ManyhostsError

Made = TypeVar("Made")


class Stream:
    """The steps of an `IterableDataset`."""

    def __init__(  # what a map-style dataset spreads over Order, Fetcher and Loader
        self,
        dataset: IterableDataset[Any],
        *,
        batch: int,
        seed: int,
        name: str,
        collate: Collate | None = None,
        drop_last: bool = False,
        processes: int = 0,
    ) -> None:
        self.dataset = dataset
        self.batch = batch
        self.seed = seed
        self.name = name
        self.collate = collate or default_collate
        self.drop_last = drop_last
        self.processes = min(processes, 1)  # a second process would read the same samples again

    def steps(self, cuts: Cuts, position: Position, state: Mapping[str, Any]) -> Steps:
        """Every step from `position` on; `state` is what the last step's `stream` was, empty at the beginning."""
        return self.ahead(partial(self._steps, cuts, position, state))

    def ahead(self, make: Callable[[], Iterator[Made]]) -> Generator[Made, None, None]:
        """What `make` gives, made ahead of time in a loader process where that was asked for."""
        reported = partial(self._reported, make)
        if not self.processes:
            made: Iterator[Made | Failed] = reported()
        else:
            made = iter(
                DataLoader(
                    _Produced(reported),
                    batch_size=None,
                    num_workers=1,
                    multiprocessing_context=loader_process.context(),
                    worker_init_fn=loader_process.outlive,
                    generator=torch.Generator(),
                )
            )
        for each in made:
            if isinstance(each, Failed):
                raise each.error
            yield each

    def _reported(self, make: Callable[[], Iterator[Made]]) -> Iterator[Made | Failed]:
        """What `make` gives, and at its end the error that it raised, where it did: in a sentence."""
        try:
            yield from make()
        except ManyhostsError as error:
            yield Failed(error)
        except Exception as cause:
            what = f"the {self.name} stream cannot be read: {type(cause).__name__}: {cause}"
            place = refusals.place_in_script(cause) or type(self.dataset).__name__
            fix = "read the stream alone up to there to see the entire error"
            yield Failed(refusals.explained(cause) or DataError(what, where=place, fix=fix))

    def _steps(self, cuts: Cuts, position: Position, state: Mapping[str, Any]) -> Iterator[Step]:
        cuts.begin(position)
        epoch, first = position.epoch, True
        while True:
            empty = True
            for step in self._epoch(cuts, Position(epoch, position.sample), state, look=first):
                yield step
                empty = False
            if empty and not position.sample:
                raise self.no_sample(epoch)
            epoch, position, state, first = epoch + 1, Position(epoch + 1), {}, False

    def _epoch(self, cuts: Cuts, position: Position, state: Mapping[str, Any], *, look: bool) -> Iterator[Step]:
        """The steps from `position` to the end of its epoch. Reads one step ahead, to know which one is the last.

        `look`: at the samples of the first one, so that they can be compared with those of other workers.
        """
        source = Pass(self.dataset, seed=self.seed, epoch=position.epoch, state=state)
        asked = int(state.get("read", position.sample))
        is_long = source.skip_to(asked)
        begin, samples = source.read, source.take(self.batch)
        if not is_long or (asked and not samples):
            raise DataError(
                f"the {self.name} stream ends after {source.read} samples, and when {asked} had been read of it there "
                "were more",
                where=type(self.dataset).__name__,
                fix="let it give the same samples each time that an epoch is read, and load_state_dict go where it was",
            )
        said = (
            ""
            if are_alike(numbers_of(samples[:1]), state.get("next") or numbers_of(samples[:1]))
            else (
                f"the {self.name} stream does not continue where it was: after {asked} samples another one comes than "
                "before; an epoch that is resumed repeats some and leaves others out, unless __iter__, state_dict and "
                "load_state_dict lead to the same samples"
            )
        )
        while samples and not (self.drop_last and len(samples) < self.batch):
            left_at = source.state()
            following = source.take(self.batch)
            ends = len(following) < (self.batch if self.drop_last else 1)
            after = Position(position.epoch + 1) if ends else Position(position.epoch, begin + len(samples))
            rows, at = np.arange(len(samples)), Position(position.epoch, begin)
            cut = cuts.plan(at, after)
            pieces = self._loaded(plan_pieces(rows, cut), samples, at)
            audits = [
                LoadedAudit(audit, self._loaded(plans, samples, at)) for audit, plans in plan_audits(rows, cut, at)
            ]
            kept = {} if ends else {**left_at, "next": numbers_of(following[:1])}
            seen = numbers_of(samples) if look else ()
            yield Step(
                position.epoch,
                len(samples),
                after,
                ends,
                pieces,
                rows + begin,
                kept,
                first_samples=seen,
                said=said,
                audits=audits,
                assignment=cut.assignment,
            )
            look, said = False, ""
            begin, samples = begin + len(samples), following

    def _loaded(self, plans: list[PiecePlan], samples: list[Any], at: Position) -> list[LoadedPiece]:
        """The pieces of `plans`, which name the `samples` of a step that begins `at` there by their places."""
        return [self.piece(at.epoch, samples, plan, plan.indices + at.sample) for plan in plans]

    def piece(self, epoch: int, samples: list[Any], plan: PiecePlan, numbers: Indices) -> LoadedPiece:
        """The piece of the `samples` that `plan` names by their places; `numbers` are theirs in the epoch."""
        chosen = [samples[row] for row in plan.indices.tolist()]
        with randomness.kept() if self.collate is not default_collate else nullcontext():
            batch = collated(self.collate, chosen, self.seed, epoch, int(numbers[0]))
        return LoadedPiece(replace(plan, indices=numbers), batch)

    def no_sample(self, epoch: int) -> DataError:
        """The error of an epoch that is over before it has begun."""
        return DataError(
            f"the {self.name} stream gave no sample in epoch {epoch}",
            where=type(self.dataset).__name__,
            fix="let __iter__ begin again each time it is called",
        )


class _Produced(IterableDataset[Any]):
    """What is made in a loader process."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return self.make()
