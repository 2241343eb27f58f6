"""What stages send each other: nested values of tensors of any shape, without pickle, and laid out as they were.

A message is two tensors of bytes: its length, and what is in it. A tensor arrives with the strides that it had, since
the kernel that multiplies it may follow from them, and so its last bits. What is in several places of a value
arrives as one tensor.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manyhosts.communication.collectives import Waitable
from manyhosts.communication.world import World
from manyhosts.errors import ConfigError

FORWARD, BACKWARD, VALUES, GRADIENTS, OUTPUTS = 11, 12, 13, 14, 15
"""Tags: messages of one kind between two stages arrive in order, and are taken for no other kind."""
_HEADER = 2
_DTYPES = {
    str(each): each
    for each in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


@dataclass(slots=True)
class Flat:
    """A nested value taken apart."""

    shape: Any
    """The value as JSON can hold it, with the number of a tensor in its place."""
    tensors: list[Tensor] = field(default_factory=list)
    """Each once."""


def flat(value: Any) -> Flat:
    """Take `value` apart: tensors, None, numbers and words, in lists, tuples and dicts.

    Raises:
        ConfigError: something else is in it.
    """
    found = Flat(None)
    found.shape = _node(value, found.tensors, {})
    return found


def _node(value: Any, tensors: list[Tensor], known: dict[int, int]) -> Any:
    if isinstance(value, Tensor):
        if str(value.dtype) not in _DTYPES or value.layout is not torch.strided:
            raise _refusal(f"a tensor of {value.dtype}, {value.layout}")
        if id(value) not in known:
            known[id(value)] = len(tensors)
            tensors.append(value)
        return {"tensor": known[id(value)]}
    if value is None or type(value) in (bool, int, float, str):
        return {"plain": value}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_node(each, tensors, known) for each in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _node(each, tensors, known) for key, each in value.items()}}
    raise _refusal(f"a {type(value).__name__}")


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        f"{what} goes from one block of the model to the next, and stages send each other tensors, numbers and words, "
        "in lists, tuples and dicts",
        where="strategy='pipeline'",
        fix="let blocks give such values, or name cuts where they do: mh.Pipeline(cuts=[…])",
    )


def put_together(shape: Any, tensors: list[Tensor]) -> Any:
    """The value that `flat` took apart, with these tensors."""
    [(kind, content)] = shape.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "plain":
        return content
    if kind == "dict":
        return {key: put_together(each, tensors) for key, each in content.items()}
    items = [put_together(each, tensors) for each in content]
    return items if kind == "list" else tuple(items)


@dataclass(slots=True)
class _Layout:
    """How a tensor lies in memory: its dimensions from the slowest to the fastest, and those that repeat."""

    dtype: str
    shape: list[int]
    order: list[int]
    repeats: list[int]

    @property
    def sides(self) -> list[int]:
        """Of what is sent, slowest first."""
        return [1 if dim in self.repeats else self.shape[dim] for dim in self.order]

    @property
    def size(self) -> int:
        return math.prod(self.sides) * _DTYPES[self.dtype].itemsize


def _taken_apart(tensor: Tensor) -> tuple[_Layout, Tensor]:
    """How `tensor` lies, and its bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    strides = plain.stride()
    repeats = [dim for dim in range(plain.dim()) if strides[dim] == 0 and plain.shape[dim] > 1]
    order = sorted(range(plain.dim()), key=lambda dim: -strides[dim])
    for dim in repeats:
        plain = plain.narrow(dim, 0, 1)
    dense = plain.permute(order).contiguous()
    row = dense.as_strided((dense.numel(),), (1,))  # one element alone may have kept the step of a repeated one
    return _Layout(str(tensor.dtype), list(tensor.shape), order, repeats), row.view(torch.uint8)


def _as_it_lay(layout: _Layout, data: Tensor) -> Tensor:
    """A tensor of its own, and no view: what autograd notes of one that is written into leads past a view."""
    strides, step = [0] * len(layout.order), 1
    for dim, side in zip(reversed(layout.order), reversed(layout.sides), strict=True):
        strides[dim] = 0 if dim in layout.repeats else step
        step *= max(side, 1)
    made = torch.empty_strided(layout.shape, strides, dtype=_DTYPES[layout.dtype])
    if data.numel():
        torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage()).copy_(data)
    return made


Inbox = defaultdict[int, deque[list[Tensor]]]
"""What stages of one worker send each other, by the tag."""


class Channel:
    """Messages between stages. Sends do not wait: they are ended with the step, or when it is known that they came."""

    def __init__(self, world: World, ranks: Sequence[int], own: int, inbox: Inbox) -> None:
        """`ranks`: in `world`, those of the stages; `own`: the one that sends and receives here; `inbox`: what stages
        of this worker share."""
        self.world, self.ranks, self.own, self.inbox = world, ranks, own, inbox
        self.waited_s = 0.0
        """Seconds waited for messages of others."""
        self._under_way: list[tuple[Waitable, Tensor]] = []

    def meet(self, ranks: Sequence[int]) -> None:
        """Send to workers of these ranks from now on. What was under way to others is forgotten."""
        self.ranks = ranks
        self._under_way.clear()
        self.inbox.clear()

    def send(self, value: Any, stage: int, tag: int) -> None:
        """Begin to send `value` to a stage."""
        taken = flat(value)
        parts = [_taken_apart(each) for each in taken.tensors]
        layouts = [[each.dtype, each.shape, each.order, each.repeats] for each, _ in parts]
        words = json.dumps([taken.shape, layouts]).encode()
        head = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        body = torch.cat([head, *(data for _, data in parts)])
        messages, tag = (
            [torch.tensor([len(words), body.numel()], dtype=torch.int64), body],
            self._tag(tag, self.own, stage),
        )
        if self.ranks[stage] == self.world.rank:
            self.inbox[tag].append(messages)
            return
        for message in messages:
            self.world.count_sent(message.nbytes)
            work = dist.isend(message, dst=self.ranks[stage], tag=tag)
            assert work is not None, "every worker is in the default group"
            self._under_way.append((work, message))

    def receive(self, stage: int, tag: int) -> Any:
        """The next value of a stage."""
        rank, tag = self.ranks[stage], self._tag(tag, stage, self.own)
        if rank == self.world.rank:
            length, body = self.inbox[tag].popleft()
            words = int(length[0])
        else:
            begin = time.perf_counter()
            length = torch.empty(_HEADER, dtype=torch.int64)
            self.world.wait(dist.irecv(length, src=rank, tag=tag))
            words, size = length.tolist()
            body = torch.empty(size, dtype=torch.uint8)
            self.world.wait(dist.irecv(body, src=rank, tag=tag))
            self.waited_s += time.perf_counter() - begin
        shape, layouts = json.loads(body[:words].numpy().tobytes())
        tensors, place = [], words
        for layout in (_Layout(*each) for each in layouts):
            tensors.append(_as_it_lay(layout, body[place : place + layout.size]))
            place += layout.size
        return put_together(shape, tensors)

    def _tag(self, kind: int, source: int, target: int) -> int:
        """One worker may have several stages, which do not take each other's messages."""
        return kind + 16 * (source * len(self.ranks) + target)

    def finish(self, *, but: int = 0) -> None:
        """Wait until all that was sent has come, but for the last messages of so many."""
        done, begin = max(0, len(self._under_way) - 2 * but), time.perf_counter()
        for work, _ in self._under_way[:done]:
            self.world.wait(work)
        del self._under_way[:done]
        self.waited_s += time.perf_counter() - begin
