"""What stages send each other: nested values of tensors of any shape, without pickle, and laid out as they were.

A message is bytes: its lengths, and what is in it. A tensor arrives with the strides that it had, since
the kernel that multiplies it may follow from them, and so its last bits. What is in several places of a value
arrives as one tensor.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manyhosts.communication.collectives import Work
from manyhosts.communication.layout import memory_order
from manyhosts.communication.world import World
from manyhosts.errors import ConfigError

FORWARD, BACKWARD, VALUES, GRADIENTS, OUTPUTS = 11, 12, 13, 14, 15
"""Tags: messages of one kind between two stages arrive in order, and are taken for no other kind."""
_LENGTHS = 16
"""Bytes of two lengths, with which a message begins."""
_DTYPES = {
    str(each): each
    for each in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


@dataclass(slots=True)
class Flat:
    """A nested value, flattened."""

    shape: Any
    """The value as JSON can hold it, with the number of a tensor in its place."""
    tensors: list[Tensor]
    """Each once."""


def flat(value: Any) -> Flat:
    """Flatten `value`: tensors, None, numbers and words, in lists, tuples and dicts.

    Raises:
        ConfigError: something else is in it.
    """
    tensors: list[Tensor] = []
    return Flat(_node(value, tensors, {}), tensors)


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
    """The value that `flat` was made of, with these tensors."""
    [(kind, content)] = shape.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "plain":
        return content
    if kind == "dict":
        return {key: put_together(each, tensors) for key, each in content.items()}
    items = [put_together(each, tensors) for each in content]
    return items if kind == "list" else tuple(items)


def _layout_and_bytes(tensor: Tensor) -> tuple[list[Any], Tensor]:
    """How `tensor` lies, without gaps: its dtype, shape, strides, and how many bytes it has in memory; and these."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    repeats = [dim for dim, size in enumerate(plain.shape) if plain.stride(dim) == 0 and size > 1]
    for dim in repeats:
        plain = plain.narrow(dim, 0, 1)
    dense = plain if memory_order(plain) is not None else plain.clone()
    strides = [0 if dim in repeats else step for dim, step in enumerate(dense.stride())]
    data = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    return [str(tensor.dtype), [*tensor.shape], strides, data.numel()], data


def _as_it_lay(dtype: str, shape: list[int], strides: list[int], data: Tensor) -> Tensor:
    """A tensor of its own, and no view: what autograd notes of one that is written into leads past a view."""
    made = torch.empty_strided(shape, strides, dtype=_DTYPES[dtype])
    torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage()).copy_(data)
    return made


Inbox = defaultdict[int, deque[Tensor]]
"""What stages of one worker send each other, by the tag."""


class Channel:
    """Messages between stages. Sends do not wait: they are ended with the step, or when it is known that they came."""

    def __init__(self, world: World, ranks: Sequence[int], own: int, inbox: Inbox) -> None:
        """`ranks`: in `world`, those of the stages; `own`: the one that sends and receives here; `inbox`: what stages
        of this worker share."""
        self.world, self.ranks, self.own, self.inbox = world, ranks, own, inbox
        self.waited_s = 0.0
        """Seconds waited for messages of others."""
        self._under_way: list[tuple[Work, Tensor]] = []
        self._room: dict[int, int] = {}
        """By the tag, how many bytes there is room for in the next message: as many as the one before had."""
        self._expected: dict[int, tuple[Work, Tensor]] = {}

    def reset(self, ranks: Sequence[int]) -> None:
        """Send to workers of these ranks from now on. What was under way to others is forgotten."""
        self.ranks = ranks
        for known in (self._under_way, self._room, self._expected, self.inbox):
            known.clear()

    def send(self, value: Any, stage: int, tag: int) -> None:
        """Begin to send `value` to a stage."""
        taken = flat(value)
        parts = [_layout_and_bytes(each) for each in taken.tensors]
        words = json.dumps([taken.shape, [layout for layout, _ in parts]]).encode()
        size, tag = len(words) + sum(data.numel() for _, data in parts), self._tag(tag, self.own, stage)
        lengths, space = torch.tensor([len(words), size]).view(torch.uint8), self._room.get(tag, 0) - size
        content = [torch.frombuffer(bytearray(words), dtype=torch.uint8), *(data for _, data in parts)]
        message = torch.cat([lengths, *content, lengths.new_zeros(max(0, space))])
        if self.ranks[stage] == self.world.rank:
            self.inbox[tag].append(message)
            return
        for part in self._in_two(message, size, tag):
            self._under_way.append((self.world.start_send(part, self.ranks[stage], tag), part))

    def expect(self, stage: int, tag: int) -> None:
        """Begin to receive the next value of a stage, so that it comes as soon as it is there."""
        rank, tag = self.ranks[stage], self._tag(tag, stage, self.own)
        if rank != self.world.rank and tag not in self._expected:
            message = torch.empty(_LENGTHS + self._room.get(tag, 0), dtype=torch.uint8)
            self._expected[tag] = self.world.start_receive(message, rank, tag), message

    def receive(self, stage: int, tag: int) -> Any:
        """The next value of a stage."""
        self.expect(stage, tag)
        rank, tag, begin = self.ranks[stage], self._tag(tag, stage, self.own), time.perf_counter()
        work, message = (None, self.inbox[tag].popleft()) if rank == self.world.rank else self._expected.pop(tag)
        self.world.wait(work)
        words, size = message[:_LENGTHS].view(torch.int64).tolist()
        if len(message) < _LENGTHS + size:
            message = torch.cat([message, message.new_empty(_LENGTHS + size - len(message))])
        for rest in self._in_two(message, size, tag)[1:] if work is not None else ():
            self.world.wait(self.world.start_receive(rest, rank, tag))
        self.waited_s += time.perf_counter() - begin
        shape, layouts = json.loads(message[_LENGTHS : _LENGTHS + words].numpy().tobytes())
        data = message[_LENGTHS + words : _LENGTHS + size].split([size for *_, size in layouts])
        return put_together(
            shape,
            [
                _as_it_lay(dtype, dims, strides, part)
                for (dtype, dims, strides, _), part in zip(layouts, data, strict=True)
            ],
        )

    def _in_two(self, message: Tensor, size: int, tag: int) -> list[Tensor]:
        """What there is room for, and the rest of one that is longer than the one before it."""
        room, self._room[tag] = _LENGTHS + self._room.get(tag, 0), size
        return [each for each in (message[:room], message[room:]) if each.numel()]

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
