"""One stage of a pipeline: its forward and backward pass of one micro-batch, and what it sends to its neighbours.

Bits are those of one process, because each thing is computed from the same numbers in the same order: random numbers go
on from where the stage before has left them; what a stage is given has the gradient that autograd would have handed on,
with its strides; and the gradient of a weight that several stages use is added up within each micro-batch from the last
use to the first, and only then to what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manyhosts.config import stage_order
from manyhosts.data import randomness
from manyhosts.strategies.pipeline.chain import Chain, run
from manyhosts.strategies.pipeline.halves import Halves, Pass
from manyhosts.strategies.pipeline.messages import (
    BACKWARD,
    FORWARD,
    GRADIENTS,
    OUTPUTS,
    VALUES,
    Channel,
    flat,
    put_together,
)
from manyhosts.strategies.pipeline.owners import Tied, put_in

_BEFORE = {stage_order.FORWARD: (-1, FORWARD), stage_order.BACKWARD: (1, BACKWARD)}
"""From which neighbour a pass has what it begins with, and by which tag."""


class _Received(torch.autograd.Function):
    """A tensor of the stage before: keeps the gradient that it is given, as it is given."""

    @staticmethod
    def forward(ctx: Any, starts: Tensor, tensor: Tensor, gradients: list[Tensor | None], number: int) -> Tensor:
        ctx.gradients, ctx.number = gradients, number
        ctx.mark_dirty(tensor)  # so that it is no view, and the stage may write into it
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        [ctx.gradients[ctx.number]] = gradients
        return None, None, None, None


@dataclass(slots=True)
class _Held:
    """What a stage keeps of a micro-batch between its forward and its backward pass."""

    outputs: list[Tensor]
    """Those that have a gradient; of the last stage the loss alone."""
    starts: list[Tensor] = field(default_factory=list)
    """The leaves in whose place what was received is, where it has a gradient."""
    gradients: list[Tensor | None] = field(default_factory=list)
    """Of what was received and has one, once the backward pass has found it."""


class Stage:
    """That of this worker."""

    def __init__(
        self,
        model: nn.Module,
        chain: Chain,
        cuts: Sequence[int],
        tied: Sequence[Tied],
        channel: Channel,
        halves: Halves | None = None,
    ) -> None:
        """`halves`: where gradients of weights are found after those of inputs, in `weights`."""
        self.model, self.chain = model, chain
        self.number, self.count = channel.own, len(cuts) - 1
        self.begin, self.end = cuts[self.number], cuts[self.number + 1]
        self.is_first, self.is_last = self.number == 0, self.number == self.count - 1
        """Whether it takes the samples, and whether it gives what the model gives."""
        self.tied, self.channel, self.halves = tied, channel, halves
        self.lent: dict[str, nn.Parameter] = {}
        """What other stages own and this one uses, by name."""
        self.under_way: dict[int, _Held] = {}

    # Weights that several stages use.

    def lend(self) -> None:
        """Give the stages that use a weight of this one its value, and take those of others. All stages call this."""
        self.lent, self.under_way = {}, {}
        if self.halves is not None:
            self.halves.left.clear()  # a step may have been interrupted
        for each in self.tied:
            owner, *users = each.stages
            if owner == self.number:
                module, key = each.places[0]
                for user in users:
                    self.channel.send(module._parameters[key], user, VALUES)
                continue
            value = self.channel.receive(owner, VALUES)
            self.lent[each.name] = nn.Parameter(value, requires_grad=each.kept.requires_grad)

    def values(self) -> AbstractContextManager[None]:
        """Within, these are in the model."""
        return put_in(self.tied, self.lent)

    # One micro-batch.

    def forward(self, number: int, inputs: Any, then: Callable[[], None] = lambda: None) -> Any:
        """What the blocks of this stage give, of micro-batch `number`; the last one alone sends it to no one.

        `inputs`: what the model is called with; `then`: called when all has come that this pass begins with.

        The generators have been set to the address of the micro-batch.
        """
        seeded = randomness.states()
        value: Any = None
        begun = _Held([])
        if not self.is_first:
            value, needs, drawn = self.channel.receive(self.number - 1, FORWARD)
            _go_on(drawn)
            value = self._with_gradients(value, needs, begun)
        then()
        outputs = run(self.model, self.chain, self.begin, self.end, inputs, value, self.values)
        if not self.is_last:
            tensors = flat(outputs).tensors
            begun.outputs = [each for each in tensors if each.requires_grad]
            needs = [each.requires_grad for each in tensors]
            self.channel.send([outputs, needs, _drawn_since(seeded)], self.number + 1, FORWARD)
        if torch.is_grad_enabled():
            self.under_way[number] = begun
        return outputs

    def _with_gradients(self, value: Any, needs: Sequence[bool], begun: _Held) -> Any:
        """`value` with tensors that give `begun` their gradients, where they have one."""
        if not torch.is_grad_enabled():
            return value
        found, begun.gradients = flat(value), [None] * sum(needs)
        for place, tensor in enumerate(found.tensors):
            if needs[place]:
                number, starts = len(begun.starts), torch.empty(0, requires_grad=True)
                begun.starts.append(starts)
                found.tensors[place] = _Received.apply(starts, tensor, begun.gradients, number)  # type: ignore[no-untyped-call]
        return put_together(found.shape, found.tensors)

    def expect(self, kind: str) -> None:
        """Begin to receive what the next pass of this kind begins with."""
        step, tag = _BEFORE.get(kind, (0, 0))
        if step and 0 <= self.number + step < self.count:
            self.channel.expect(self.number + step, tag)

    def backward(self, number: int, loss: Tensor | None, then: Callable[[], None]) -> None:
        """The backward pass of that micro-batch, from `loss` on the last stage; `then` as in `forward`."""
        begun = self.under_way.pop(number)
        received = (
            zip(begun.outputs, self.channel.receive(self.number + 1, BACKWARD), strict=True) if loss is None else ()
        )
        ends: list[tuple[Tensor, Tensor | None]] = [] if loss is None else [(loss, None)]
        ends += [each for each in (*received, *self._of_later_uses()) if each[1] is not None]
        then()
        if ends:
            with self.values():
                self._go_back(number, [each for each, _ in ends], [gradient for _, gradient in ends], begun)
        if not self.is_first:
            self.channel.send(begun.gradients, self.number - 1, BACKWARD)
        self._pass_on_gradients()
        self.channel.finish(but=4 * self.count * (1 + len(self.tied)))

    def _go_back(self, number: int, roots: list[Tensor], given: list[Tensor | None], begun: _Held) -> None:
        if self.halves is None or not begun.starts:
            torch.autograd.backward(roots, given)
        else:
            early = [self.lent.get(each.name, each.kept) for each in self.tied]  # they are passed on with this pass
            self.halves.first(number, Pass(roots, given, begun.starts, begun.gradients, early))

    def weights(self, number: int) -> None:
        """Find what the backward pass of that micro-batch has left: gradients of weights."""
        assert self.halves is not None, "another schedule has no such pass"
        with self.values():
            self.halves.second(number)

    def _of_later_uses(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The gradients that later stages have found, in this micro-batch, for weights that this one uses, too."""
        for each in self.tied:
            place = each.stages.index(self.number)
            module, key = each.places[0]
            weight = self.lent.get(each.name, module._parameters[key])
            assert weight is not None, f"{each.name} is in the model"
            if weight.requires_grad and place + 1 < len(each.stages):
                yield weight, self.channel.receive(each.stages[place + 1], GRADIENTS)

    def _pass_on_gradients(self) -> None:
        for each in self.tied:
            place, weight = each.stages.index(self.number), self.lent.get(each.name)
            if place and weight is not None and weight.requires_grad:
                self.channel.send(weight.grad, each.stages[place - 1], GRADIENTS)
                weight.grad = None


def evaluate(stages: Sequence[Stage], inputs: Any) -> Any:
    """What the model gives, on every worker, whose `stages` these are: all call this, with the same inputs.

    It has no gradient.
    """
    with torch.no_grad():
        for each in stages:
            each.lend()
        seeded = randomness.states()
        for each in stages:
            randomness.put(seeded)
            outputs = each.forward(-1, inputs)
        first, last = stages[0], stages[-1]
        if last.is_last:
            for worker in range(first.number):
                last.channel.send([outputs, _drawn_since(seeded)], worker, OUTPUTS)
        else:
            outputs, drawn = first.channel.receive(first.count - 1, OUTPUTS)
            _go_on(drawn)
        for each in stages:
            each.channel.finish()
    return outputs


def _drawn_since(seeded: randomness.States) -> list[Any] | None:
    """The generators of now, as a message has them; None where no one has drawn a number."""
    if not randomness.drawn_since(seeded):
        return None
    torch_state, numpy_state, python_state = randomness.states()
    version, numbers, gauss = python_state
    kind, keys, *rest = numpy_state
    of_numpy = [
        kind,
        torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        [each.item() if isinstance(each, np.generic) else each for each in rest],
    ]
    return [torch_state, of_numpy, [version, torch.tensor(numbers, dtype=torch.int64), gauss]]


def _go_on(drawn: list[Any] | None) -> None:
    """Draw on from where another stage has left the generators."""
    if drawn is None:
        return
    torch_state, (kind, keys, rest), (version, numbers, gauss) = drawn
    python_state = (version, tuple(numbers.tolist()), gauss)
    randomness.put((torch_state, (kind, keys.numpy().astype(np.uint32), *rest), python_state))
