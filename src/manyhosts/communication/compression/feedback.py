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
from manyhosts.communication.compression.exchange import Chunk, Compression, takes_whole_tensors, worth_it
from manyhosts.communication.layout import gradient_view, memory_shape
from manyhosts.communication.link import Link

PARCEL_BYTES = 8 << 20
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
        self.freights: list[_Sending] = []
        self.scale: Tensor | None = None
        """What the loss was multiplied by in the step that filled `residual`; None for 1."""
        self.revocable = False
        """Whether a step may have to be undone: then what the compression remembers is copied before each."""
        self._settled = False
        """Whether `next_residual` is what was kept before the step under way."""
        self._remembered: Any = None
        """What the compression remembered before the step under way."""

    def takes(self, parameter: nn.Parameter) -> bool:
        """Whether the gradient of `parameter` goes through the compression."""
        return worth_it(self.compression, parameter, above=self.above)

    def lay_out(self, parts: Sequence[tuple[Tensor, Sequence[nn.Parameter]]]) -> None:
        """Take the compressible part of each bucket: its memory and the parameters in it. What was kept stays kept."""
        residual, other = self.residual(), self._by_key("next_residual")
        self.freights = []
        for values, parameters in parts:
            wide = torch.promote_types(values.dtype, torch.float32)
            memory = torch.zeros(2, values.numel() if self.feedback else 0, dtype=wide, device=values.device)
            keys = [self.key_of[parameter] for parameter in parameters]
            self.freights.append(_Sending(values, parameters, keys, memory[0], memory[1]))
        self.keep(residual)
        for key, tensor in self._by_key("next_residual").items():
            tensor.copy_(other.get(key, tensor))

    def begin(self, scale: Tensor | None) -> None:
        """A step begins whose loss is multiplied by `scale`, shape (); None for 1. Called by all workers."""
        self.confirm()
        self.comm_queue.ready()
        if self.revocable and (remembers := getattr(self.compression, "state_dict", None)) is not None:
            self._remembered = copy.deepcopy(remembers())
        if self.feedback and (scale is not None or self.scale is not None):
            now = torch.ones(()) if scale is None else scale
            factor = now if self.scale is None else now / self.scale
            if factor.device.type != "cpu" or float(factor) != 1:
                for sending in self.freights:
                    sending.residual.mul_(factor.to(sending.residual))
        self.scale = None if scale is None else scale.clone()

    def start(self, number: int) -> None:
        """Begin to exchange the compressible part of bucket `number`."""
        sending = self.freights[number]
        sending.queue, sending.sound = [], []
        for chunk, place in self._chunks(sending):
            sending.queue.append(self.comm_queue.submit(partial(self._exchange, sending, chunk, place)))

    def _chunks(self, sending: _Sending) -> list[tuple[Chunk, slice]]:
        values = sending.values
        if takes_whole_tensors(self.compression):
            shapes = [memory_shape(parameter) for parameter in sending.parameters]
            return [(Chunk(values, shapes, sending.keys), slice(0, values.numel()))] if values.numel() else []
        length = max(1, PARCEL_BYTES // values.element_size())
        places = [slice(begin, min(begin + length, values.numel())) for begin in range(0, values.numel(), length)]
        return [(Chunk(values[at], [values[at].shape], sending.keys[:1]), at) for at in places]

    def _exchange(self, sending: _Sending, chunk: Chunk, at: slice, link: Link) -> None:
        """The life of a chunk, in a communication queue."""
        whole = chunk.values.to(sending.residual.dtype)
        if self.feedback:
            whole = torch.add(whole, sending.residual[at], out=sending.next_residual[at])
        # The compression may write into the values; what it was given is needed after it, to see what was dropped.
        values = chunk.values if chunk.values.dtype == whole.dtype else torch.empty_like(whole)
        if values is not whole:
            values.copy_(whole)
        sent = self.compression(replace(chunk, values=values), link)
        if values is not chunk.values:
            chunk.values.copy_(values)
        if self.feedback:
            whole.zero_() if sent is None else whole.sub_(sent)
            sending.sound.append(values.sum().isfinite())

    def finish(self, number: int) -> None:
        """Wait until the sums of bucket `number` are there."""
        for queued in self.freights[number].queue:
            self.comm_queue.wait(queued)

    def settle(self) -> None:
        """Remember what this step dropped, unless a sum is no number: such a step is left out by whoever scales."""
        if not self.feedback:
            return
        sound = [flag for sending in self.freights for flag in sending.sound]
        if not sound:
            return
        counts = torch.stack(sound).all()
        for sending in self.freights:
            if counts.device.type == "cpu":
                if bool(counts):
                    sending.residual, sending.next_residual = sending.next_residual, sending.residual
                    self._settled = True
            else:  # decided on the device: the host does not wait for it
                torch.where(counts, sending.next_residual, sending.residual, out=sending.residual)

    def confirm(self) -> None:
        """The step under way counts: it will not be undone."""
        self._settled, self._remembered = False, None

    def step_back(self) -> None:
        """The step under way broke off and will be done again: keep what was kept before it. On a CPU only."""
        if self._settled:
            for sending in self.freights:
                sending.residual, sending.next_residual = sending.next_residual, sending.residual
        if self._remembered is not None:
            self.compression.load_state_dict(self._remembered)  # type: ignore[attr-defined]  # it has a state_dict
        self.confirm()

    def residual(self) -> dict[int, Tensor]:
        """What this worker keeps, by the number of the parameter, in its shape."""
        return self._by_key("residual")

    def _by_key(self, memory: Literal["residual", "next_residual"]) -> dict[int, Tensor]:
        return {
            key: gradient_view(part, parameter)
            for sending in self.freights
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
        own = self.residual()
        for key, tensor in residual.items():
            if key in own:
                own[key].add_(tensor.to(own[key]))

    def errors(self) -> dict[int, Tensor]:
        """Of each parameter: the norm of what this worker keeps over the norm of the summed gradient."""
        found: dict[int, Tensor] = {}
        for sending in self.freights:
            sizes = [parameter.numel() for parameter in sending.parameters]
            for key, residual, summed in zip(
                sending.keys, sending.residual.split(sizes), sending.values.split(sizes), strict=True
            ):
                found[key] = residual.norm() / summed.to(residual.dtype).norm().clamp(
                    min=torch.finfo(residual.dtype).tiny
                )
        return found

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
        scale = 1.0 if self.scale is None else float(self.scale)
        return {
            "kept": {str(key): tensor / scale for key, tensor in self.residual().items()},
            "compression": self.shared_state(),
        }

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take up what the `state_dict` of every former worker gave, by rank.

        Where there are fewer workers now, each takes up what several kept; where there are more, some begin with
        nothing: what all keep together stays the same.
        """
        self.scale = None
        for sending in self.freights:
            sending.residual.zero_()
        for former in states[self.comm_queue.world.rank :: self.comm_queue.world.size]:
            self.keep({int(key): tensor for key, tensor in former.get("kept", {}).items()})
        self.take_shared(states[0].get("compression", {}) if states else {})
