"""The values of a step, by name: summed over the pieces of a worker and over the workers.

They travel as one vector whose places are names that all workers know, `Agreed`: at the beginning `loss` alone. A
worker whose own pieces have given other names raises a flag in that same vector, so that all learn it in the same step
and without an exchange of its own. Then they send each other names, sums and weights, and know them the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from manyhosts import device
from manyhosts.communication.collectives import Work
from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.tree import Node, Subtrees
from manyhosts.communication.world import World
from manyhosts.strategies.strategy import StepOutcome, Unsettled


class Agreed:
    """The names that have a place in what the workers sum: the same ones on all workers at every step."""

    names: tuple[str, ...] = ("loss",)

    def forget(self) -> None:
        """Know what everybody knows at the beginning: other workers are there now."""
        self.names = ("loss",)


@dataclass(slots=True)
class LocalSums:
    """What one part of a batch has given on one worker, by name. Ghosts count for nothing, whatever they give."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    """Value times weight, over the pieces that had the name."""
    weights: dict[str, float] = field(default_factory=dict)
    pieces: dict[str, int] = field(default_factory=dict)
    of: int = 0
    """Pieces with samples."""

    def add(self, values: Mapping[str, Tensor], weight: float) -> None:
        """Add the means over the samples of one piece, whose share of the global batch is `weight`."""
        if not weight:
            return
        self.of += 1
        for name, value in values.items():
            part = value.detach() if weight == 1 else value.detach().double() * weight
            self.sums[name] = self.sums[name] + part if name in self.sums else part
            self.weights[name] = self.weights.get(name, 0.0) + weight
            self.pieces[name] = self.pieces.get(name, 0) + 1

    def fits(self, names: Sequence[str]) -> bool:
        """Whether every piece has given these names and no other."""
        return not self.of or self.pieces == dict.fromkeys(names, self.of)

    def in_places(self, names: Sequence[str], device: torch.device) -> list[Tensor]:
        """The sums of `names`, float64 of shape (1,) each; zero where there is none."""
        return [
            self.sums[name].double().reshape(1)
            if name in self.sums
            else torch.zeros(1, dtype=torch.float64, device=device)
            for name in names
        ]

    def reported(self) -> list[Any]:
        """The same in plain values, for the others."""
        sums = sorted(self.sums.items())
        return [self.of, {name: [value.item(), self.weights[name], self.pieces[name]] for name, value in sums}]


def resolve_names(
    world: World, agreed: Agreed, parts: Sequence[LocalSums], known: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The mean of every value over the samples that had it, from what all workers' `parts` of the batch have given.

    Sums run in the tree of the parts, so that no bit depends on who has computed which. `known` are the sums of the
    names that had a place: they count where every piece had the name. Every worker calls this.
    """
    rows = [row for worker in gather_plain(world, [part.reported() for part in parts]) for row in worker]
    names = sorted({name for _, values in rows for name in values}, key=lambda name: (name != "loss", name))
    pieces = sum(of for of, _ in rows)
    result, everywhere = {}, []
    for name in names:
        if sum(values[name][2] for _, values in rows if name in values) == pieces:
            everywhere.append(name)
            if name in known:
                result[name] = known[name]
                continue
        weight = sum(values[name][1] for _, values in rows if name in values)
        total = _in_tree([values[name][0] if name in values else 0.0 for _, values in rows])
        mean = total if name in everywhere else total / weight
        result[name] = torch.tensor(mean, dtype=torch.float64, device=world.device)
    if len(everywhere) == len(names) and names:
        agreed.names = tuple(names)
    return result


def _in_tree(numbers: Sequence[float]) -> float:
    sums: Subtrees[float] = Subtrees(len(numbers), lambda left, right: left + right)
    for part, number in enumerate(numbers):
        sums.put(Node(0, part), number)
    [(_, total)] = sums.stack
    return total


class StepMetrics:
    """Sums the weighted values of a step, over pieces and then over workers.

    Control flags are small numbers that travel with the loss and are summed over the workers: a clock, a request to
    stop. They are for decisions that all workers must take alike, and cost no exchange of their own.
    """

    def __init__(self, control_flags: Sequence[float], agreed: Agreed, world: World) -> None:
        self.control_flags: Sequence[float] | Tensor = control_flags
        self.agreed, self.world = agreed, world
        self.own = LocalSums()
        self._summed: Tensor | None = None

    def add(self, values: Mapping[str, Tensor], weight: float) -> Tensor:
        """Add one piece's means. Returns its weighted loss, from which to go backward."""
        self.own.add(values, weight)
        return values["loss"] if weight == 1 else values["loss"] * weight

    def packed(self, device: torch.device) -> Tensor:
        """What this worker has so far, to be summed over them: float64, shape (values, control flags and a flag,)."""
        names = self.agreed.names
        numbers = [*self.control_flags, float(not self.own.fits(names))]
        return torch.cat(
            [
                *self.own.in_places(names, device),
                torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True),
            ]
        )

    def take(self, summed: Tensor) -> None:
        """Have the sums over the workers of what `packed` gave, in place of this worker's own."""
        self._summed = summed
        self.control_flags = summed[len(self.agreed.names) : -1]

    def start_sum(self) -> Work:
        """Begin to sum over the workers; nothing may be read before the wait for it is over."""
        if self.world.size == 1:
            return None
        vector = self.packed(self.world.device)
        work = self.world.start_all_reduce(vector)
        self.take(vector)
        return work

    def outcome(self) -> StepOutcome:
        """What was found. All workers call this, once the sums are here."""
        names, summed = self.agreed.names, self._summed
        if summed is not None:
            known = dict(zip(names, summed, strict=False))
            settle = partial(resolve_names, self.world, self.agreed, [self.own], known)
            return outcome(self.world, known, self.control_flags, summed[-1], settle)
        fits = self.own.fits(names)
        values = self.own.sums if fits else resolve_names(self.world, self.agreed, [self.own], {})
        return StepOutcome(values, self.control_flags)


def outcome(
    world: World,
    known: Mapping[str, Tensor],
    control_flags: Sequence[float] | Tensor,
    flag: Tensor,
    settle: Callable[[], Mapping[str, Tensor]],
) -> StepOutcome:
    """What was found, with the values settled where that is due.

    On a GPU the flag cannot be read without a wait. It is read later, unless workers may be lost meanwhile: all are
    needed to settle values.
    """
    if device.is_asynchronous(world.device) and not world.confirms:
        return StepOutcome(known, control_flags, Unsettled(flag, settle))
    return StepOutcome(settle() if flag.item() else known, control_flags)
