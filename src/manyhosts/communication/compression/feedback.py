"""Sends buckets through a compression, and keeps what it dropped for the next step.

Each worker keeps its own rest: `kept = (gradient + kept before) - what arrived`, so the sum of all that was sent plus
all that is kept is the sum of all gradients. Small tensors of a bucket travel uncompressed, summed exactly.

Source: Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
arXiv:1901.09847.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from manyhosts.communication.comm_queue import CommQueue, QueuedExchange
from manyhosts.communication.compression.exchange import Chunk, Compression, takes_full_tensors, worth_it
from manyhosts.communication.layout import gradient_view, memory_shape
from manyhosts.communication.link import Link

CHUNK_BYTES = 8 << 20
"""Chunks of a bucket: small enough that one is computed while another travels, large enough for the network."""


@dataclass(slots=True)
class _Sending:
    """The compressed part of one bucket."""

    values: Tensor
    """The part of the bucket's buffer that is compressed; shape (elements,)."""
    parameters: Sequence[nn.Parameter]
    keys: Sequence[int]
    residual: Tensor
    """What earlier steps dropped; float32 or wider."""
    next_residual: Tensor
    """What `residual` becomes if this step counts."""
    queue: list[QueuedExchange] = field(default_factory=list)
    sound: list[Tensor] = field(default_factory=list)
    """For each chunk whether its sum is a number; shape ()."""


def exchange(
    compression: Compression,
    chunk: Chunk,
    link: Link,
    kept: Tensor | None,
    *,
    together: Tensor,
    factor: Any = None,
) -> Tensor | None:
    """Sum a chunk over the workers. Returns whether the sum is a number, shape (); None where nothing is kept.

    What earlier steps `kept`, times `factor`, goes with it, and what is dropped is written to `together`; shape
    (elements,) both.
    """
    full = chunk.values.to(torch.promote_types(chunk.values.dtype, torch.float32))
    if kept is not None:
        if factor is None:
            full = torch.add(full, kept, out=together)
        else:
            full = torch.addcmul(full, kept, factor.to(kept), out=together)
    # The compression may write into the values; what it was given is needed after it, to see what was dropped.
    values = chunk.values if chunk.values.dtype == full.dtype else torch.empty_like(full)
    if values is not full:
        values.copy_(full)
    sent = compression(replace(chunk, values=values), link)
    if values is not chunk.values:
        chunk.values.copy_(values)
    if kept is None:
        return None
    full.zero_() if sent is None else full.sub_(sent)
    return values.sum().isfinite()


def chunks_of(
    compression: Compression, values: Tensor, shapes: Sequence[torch.Size], keys: Sequence[int]
) -> list[tuple[Chunk, slice]]:
    """What is exchanged at a time of `values`, which are tensors of these shapes, with its place among them."""
    if takes_full_tensors(compression):
        return [(Chunk(values, shapes, keys), slice(0, values.numel()))] if values.numel() else []
    length = max(1, CHUNK_BYTES // values.element_size())
    places = [slice(begin, min(begin + length, values.numel())) for begin in range(0, values.numel(), length)]
    return [(Chunk(values[at], [values[at].shape], keys[:1]), at) for at in places]


class Compressor:
    """Exchanges what is large through `compression`."""

    def __init__(
        self,
        compression: Compression,
        comm_queue: CommQueue,
        *,
        above: int,
        feedback: bool,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self.compression, self.comm_queue, self.above, self.feedback = compression, comm_queue, above, feedback
        self.key_of: dict[Tensor, int] = {parameter: key for key, parameter in enumerate(parameters)}
        self.sendings: list[_Sending] = []
        self.scale: Tensor | None = None
        """What the loss of the step under way is multiplied by; None for 1."""
        self.unit: Tensor | None = None
        """The same of the step that filled `residual`, which is in units of it; None for 1."""
        self._factor: Any = None
        """By what `residual` is multiplied as it is added to this step's gradients; None for 1."""
        self._unit_before: Tensor | None = None
        self.revocable = False
        """Whether a step may have to be undone: then what the compression remembers is copied before each."""
        self._settled = False
        """Whether `next_residual` is what was kept before the step under way."""
        self._remembered: dict[str, Any] = {}
        """What the compression remembered before the step under way."""

    def takes(self, parameter: nn.Parameter) -> bool:
        """Whether the gradient of `parameter` goes through the compression."""
        return worth_it(self.compression, parameter, above=self.above)

    def lay_out(self, parts: Sequence[tuple[Tensor, Sequence[nn.Parameter]]]) -> None:
        """Take the compressible part of each bucket: its memory and the parameters in it. What was kept stays kept."""
        residual, other = self.by_key("residual"), self.by_key("next_residual")
        self.sendings = []
        for values, parameters in parts:
            wide = torch.promote_types(values.dtype, torch.float32)
            memory = torch.zeros(2, values.numel() if self.feedback else 0, dtype=wide, device=values.device)
            keys = [self.key_of[parameter] for parameter in parameters]
            self.sendings.append(_Sending(values, parameters, keys, memory[0], memory[1]))
        self.keep(residual)
        for key, tensor in self.by_key("next_residual").items():
            tensor.copy_(other.get(key, tensor))

    def begin(self, scale: Tensor | None) -> None:
        """A step begins whose loss is multiplied by `scale`, shape (); None for 1. Called by all workers."""
        self.confirm()
        self.comm_queue.ready()
        self._remembered = copy.deepcopy(self.shared_state()) if self.revocable else {}
        self.scale, self._factor = (None if scale is None else scale.clone()), None
        if self.scale is not None or self.unit is not None:
            # Multiplied in where it is added: to bring all of it to another unit takes a pass over the memory.
            self._factor = _number(self.scale) / _number(self.unit)

    def start(self, number: int) -> None:
        """Begin to exchange the compressible part of bucket `number`."""
        sending = self.sendings[number]
        sending.queue, sending.sound = [], []
        shapes = [memory_shape(parameter) for parameter in sending.parameters]
        for chunk, place in chunks_of(self.compression, sending.values, shapes, sending.keys):
            sending.queue.append(self.comm_queue.submit(partial(self._exchange, sending, chunk, place)))

    def _exchange(self, sending: _Sending, chunk: Chunk, at: slice, link: Link) -> None:
        """The life of a chunk, in a communication queue."""
        kept, together = sending.residual[at], sending.next_residual[at]
        sound = exchange(
            self.compression, chunk, link, kept if self.feedback else None, together=together, factor=self._factor
        )
        if sound is not None:
            sending.sound.append(sound)

    def finish(self, number: int) -> None:
        """Wait until the sums of bucket `number` are there."""
        for queued in self.sendings[number].queue:
            self.comm_queue.wait(queued)

    def settle(self) -> None:
        """Remember what this step dropped, unless a sum is no number: such a step is left out by the scaler."""
        sound = [flag for sending in self.sendings for flag in sending.sound]
        if not sound:
            return
        counts = torch.stack(sound).all()
        self._unit_before = self.unit
        if counts.device.type == "cpu":
            if bool(counts):
                self._swap()
                self.unit, self._settled = self.scale, True
            return
        for sending in self.sendings:  # decided on the device: the host does not wait for it
            torch.where(counts, sending.next_residual, sending.residual, out=sending.next_residual)
        self._swap()
        self._settled = True
        if self._factor is not None:
            self.unit = torch.where(counts, _number(self.scale), _number(self.unit))

    def _swap(self) -> None:
        for sending in self.sendings:
            sending.residual, sending.next_residual = sending.next_residual, sending.residual

    def confirm(self) -> None:
        """The step under way counts: it will not be undone."""
        self._settled, self._remembered = False, {}

    def step_back(self) -> None:
        """The step under way broke off and will be done again: keep what was kept before it."""
        if self._settled:
            self._swap()
            self.unit = self._unit_before
        self.take_shared(self._remembered)
        self.confirm()

    def by_key(self, memory: Literal["residual", "next_residual", "values"]) -> dict[int, Tensor]:
        """What `memory` has, by the number of the parameter, in its shape: what this worker keeps is its `residual`."""
        return {
            key: gradient_view(part, parameter)
            for sending in self.sendings
            if sending.residual.numel()
            for key, parameter, part in zip(
                sending.keys,
                sending.parameters,
                getattr(sending, memory).split([parameter.numel() for parameter in sending.parameters]),
                strict=True,
            )
        }

    def keep(self, residual: Mapping[int, Tensor]) -> None:
        """Add what was kept elsewhere or before to what is kept here."""
        own = self.by_key("residual")
        for key, tensor in residual.items():
            if key in own:
                own[key].add_(tensor.to(own[key]))

    def errors(self) -> dict[int, Tensor]:
        """Of each parameter: the norm of what this worker keeps over the norm of the summed gradient."""
        summed = self.by_key("values")
        return {
            key: kept.norm() / summed[key].to(kept.dtype).norm().clamp(min=torch.finfo(kept.dtype).tiny)
            for key, kept in self.by_key("residual").items()
        }

    def shared_state(self) -> dict[str, Any]:
        """What the compression itself remembers, equal on all workers."""
        remembers = getattr(self.compression, "state_dict", None)
        return remembers() if remembers is not None else {}

    def take_shared(self, state: Mapping[str, Any]) -> None:
        """Take up what `shared_state` gave on another worker."""
        takes_up = getattr(self.compression, "load_state_dict", None)
        if takes_up is not None and state:
            takes_up(state)

    def state_dict(self) -> dict[str, Any]:
        """What is kept, of this worker alone, and what the compression itself remembers, equal on all."""
        return {
            "kept": {str(key): tensor / _number(self.unit) for key, tensor in self.by_key("residual").items()},
            "compression": self.shared_state(),
        }

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take up what the `state_dict` of every former worker gave, by rank.

        Where there are fewer workers now, each takes up what several kept; where there are more, some begin with
        nothing: what all keep together stays the same.
        """
        self.unit = None
        for sending in self.sendings:
            sending.residual.zero_()
        for former in states[self.comm_queue.world.rank :: self.comm_queue.world.size]:
            self.keep({int(key): tensor for key, tensor in former.get("kept", {}).items()})
        self.take_shared(states[0].get("compression", {}) if states else {})


def _number(scale: Tensor | None) -> Any:
    """`scale`, shape (), or None for 1."""
    return 1.0 if scale is None else scale
