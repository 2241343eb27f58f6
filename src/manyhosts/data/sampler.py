"""`mh.Order`: the one order of the samples as a batch sampler, for a loop that is not ours."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import BatchSampler, Sampler

from manyhosts.cluster.place import Place
from manyhosts.config.kinds import plain
from manyhosts.data import order
from manyhosts.data.order import Position, bounds
from manyhosts.errors import ConfigError


class Order(Sampler[list[int]]):
    """This worker's share of each global batch, as the `batch_sampler` of a DataLoader.

    Epoch e of a seed is one permutation, on any number of workers; each sample comes once per epoch. Iterating over
    it gives the rest of the epoch under way. It moves on by `advance`, called after each step, and not by what a
    loader has read ahead, so that its state is the place of the training.

    Args:
        length: samples of the dataset.
        batch_size: samples of one optimizer step, over all workers.
        seed: of the order.
        shuffle: whether each epoch has an order of its own.
        drop_last: leave out the last batch of an epoch where it is smaller than the others.
        rank, size: of this worker; from the environment that torchrun sets, where they are not given.

    Raises:
        ConfigError: a batch of an epoch has fewer samples than there are workers, or a value makes no sense.
    """

    def __init__(
        self,
        length: int,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        place = Place.from_environment()
        self.rank, self.size = place.rank if rank is None else plain(rank), place.size if size is None else plain(size)
        length, batch_size, seed = (plain(each) for each in (length, batch_size, seed))
        shuffle, drop_last = plain(shuffle), plain(drop_last)
        counts = {"length": length, "batch_size": batch_size, "seed": seed, "rank": self.rank, "size": self.size}
        for name, value in {**counts, "shuffle": shuffle, "drop_last": drop_last}.items():
            if type(value) is not (int if name in counts else bool):
                raise ConfigError(
                    f"{name} is of the type {type(value).__name__}",
                    where="mh.Order",
                    fix="write mh.Order(len(dataset), batch_size=64); seed, rank and size are integers, shuffle and "
                    "drop_last True or False",
                )
        if not 0 <= self.rank < self.size:
            raise ConfigError(
                f"rank is {self.rank}, and size {self.size}",
                where="mh.Order(rank=…, size=…)",
                fix="give both, with a rank from 0 to size - 1, or neither: they are those that torchrun sets",
            )
        if batch_size < 1 or length < 1:
            raise ConfigError(
                f"there are {length} samples and batches of {batch_size}",
                where="mh.Order",
                fix="give len(dataset) and a batch_size of 1 or more",
            )
        self.length, self.seed = length, seed
        self._order = order.Order(length, batch=batch_size, seed=seed, shuffle=shuffle, drop_last=drop_last)
        self._check_batches(length)
        self.position = Position()
        self._read: Position | None = None
        """From where an epoch was read to its end last."""
        self._handed: Position | None = None
        """How far samples were handed out."""
        self.before_first: Callable[[], None] | None = None
        """Called once, when the first samples are asked for. A loader has drawn a seed of its own by then."""

    def _check_batches(self, samples: int) -> None:
        """See that each batch of so many samples that are left of an epoch has one for each worker.

        Raises:
            ConfigError: one has not.
        """
        rest = samples % self._order.batch
        smallest = min(samples, self._order.batch if self._order.drop_last or not rest else rest)
        if not self._order.steps_per_epoch:
            raise ConfigError(
                f"a batch has {self._order.batch} samples, and an epoch {samples}: drop_last leaves no batch",
                where="mh.Order(batch_size=…)",
                fix=f"give batch_size={max(1, samples)} or less, or leave drop_last out",
            )
        if smallest < self.size:
            raise ConfigError(
                f"a batch of an epoch has {smallest} samples, and there are {self.size} workers, each of which needs "
                "one",
                where="mh.Order(batch_size=…)",
                fix="set drop_last=True, or another batch_size; mh.Trainer and mh.Run train with such batches, too",
            )

    @property
    def epoch(self) -> int:
        """The epoch under way, from 0."""
        return self.position.epoch

    @property
    def weight(self) -> float:
        """What this worker's mean loss of the step under way must be multiplied by, where gradients are averaged over
        the workers (DistributedDataParallel): 1 but in batches that the workers cannot cut evenly.
        """
        count = len(self._order.at(self.position))
        begin, end = bounds(count, self.size, self.rank)
        return (end - begin) * self.size / count

    def advance(self) -> None:
        """A step is done.

        Raises:
            ConfigError: its samples were not read.
        """
        if self.position == self._handed:
            raise ConfigError(
                f"a step is counted after sample {self.position.sample} of epoch {self.epoch}, and no more was read",
                where="mh.Order",
                fix="count each step once: by saver.after_step() of one mh.Saver, or by order.advance()",
            )
        self.position = self._order.after(self.position)

    def __iter__(self) -> Iterator[list[int]]:
        """The samples of this worker for each step that is left of the epoch under way."""
        if isinstance(sys._getframe(1).f_locals.get("self"), BatchSampler):  # which would take a batch for a sample
            raise ConfigError(
                "mh.Order gives batches, and comes as the sampler of a DataLoader",
                where="mh.Order",
                fix="write DataLoader(dataset, batch_sampler=order), without batch_size, shuffle and drop_last",
            )
        if self._read == self.position:
            raise ConfigError(
                f"epoch {self.epoch} was read to its end, and read again it would be the same one: no step was counted",
                where="mh.Order",
                fix="call order.advance() after each step, or saver.after_step() of an mh.Saver that has the order",
            )
        if self.rank == 0 and self._read is not None and self._read.epoch == self.epoch:
            left = f"{self.position.sample} of {self._order.used}"
            sys.stderr.write(
                f"manyhosts: epoch {self.epoch} was handed out to its end, and steps of {left} samples were counted: "
                "what comes now is the rest from there; unless the loop was left before, count a step for each batch, "
                "also for those that only accumulate\n"
            )
        if self.before_first is not None:
            self.before_first()
            self.before_first = None
        begun, position, epoch = self.position, self.position, self.position.epoch
        while position.epoch == epoch:
            samples = self._order.at(position)
            begin, end = bounds(len(samples), self.size, self.rank)
            following = self._order.after(position)
            self._handed = following
            yield samples[begin:end].tolist()
            position = following
        self._read = begun

    def __len__(self) -> int:
        """Steps that are left of the epoch under way."""
        return -(-(self._order.used - self.position.sample) // self._order.batch)

    def state_dict(self) -> dict[str, Any]:
        """Where the training is, and in which order."""
        return {
            "epoch": self.position.epoch,
            "sample": self.position.sample,
            "length": self.length,
            "seed": self.seed,
            "shuffle": self._order.shuffle,
            "drop_last": self._order.drop_last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there, on any number of workers and with any batch size.

        Raises:
            ConfigError: it is the place in another order.
        """
        own = self.state_dict()
        for key in ("length", "seed", "shuffle", "drop_last"):
            if state.get(key, own[key]) != own[key]:
                raise ConfigError(
                    f"the order had {key} {state[key]}, and now it has {own[key]}: an epoch would repeat some samples "
                    "and leave others out",
                    where="mh.Order",
                    fix=f"give {key}={state[key]}, or begin in another folder",
                )
        self._read = self._handed = None
        self.position = self._order.begin(Position(state["epoch"], state["sample"]))
        self._check_batches(self.length - self.position.sample)
