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

from manyhosts.communication.compression.exchange import Compression, Parcel, takes_whole_tensors, worth_it
from manyhosts.communication.lanes import Lanes, Ticket
from manyhosts.communication.layout import gradient_view, memory_shape
from manyhosts.communication.link import Link

PARCEL_BYTES = 8 << 20
"""Parcels of a bucket: small enough that one is computed while another travels, large enough for the network."""


@dataclass(slots=True)
class _Freight:
    """The compressed part of one bucket."""

    values: Tensor
    """The part of the bucket's buffer that is compressed; shape (elements,)."""
    parameters: Sequence[nn.Parameter]
    keys: Sequence[int]
    kept: Tensor
    """What earlier steps dropped; float32 or wider."""
    next_kept: Tensor
    """What `kept` becomes if this step counts."""
    tickets: list[Ticket] = field(default_factory=list)
    sound: list[Tensor] = field(default_factory=list)
    """For each parcel whether its sum is a number; shape ()."""


class Compressor:
    """Exchanges what is large through `compression`."""

    def __init__(
        self,
        compression: Compression,
        lanes: Lanes,
        *,
        above: int,
        feedback: bool,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self.compression, self.lanes, self.above, self.feedback = compression, lanes, above, feedback
        self.key_of: dict[Tensor, int] = {parameter: key for key, parameter in enumerate(parameters)}
        self.freights: list[_Freight] = []
        self.scale: Tensor | None = None
        """What the loss was multiplied by in the step that filled `kept`; None for 1."""
        self.revocable = False
        """Whether a step may have to be undone: then what the compression remembers is copied before each."""
        self._settled = False
        """Whether `next_kept` is what was kept before the step under way."""
        self._remembered: Any = None
        """What the compression remembered before the step under way."""

    def takes(self, parameter: nn.Parameter) -> bool:
        """Whether the gradient of `parameter` goes through the compression."""
        return worth_it(self.compression, parameter, above=self.above)

    def lay_out(self, parts: Sequence[tuple[Tensor, Sequence[nn.Parameter]]]) -> None:
        """Take the compressible part of each bucket: its memory and the parameters in it. What was kept stays kept."""
        kept, other = self.kept(), self._by_key("next_kept")
        self.freights = []
        for values, parameters in parts:
            wide = torch.promote_types(values.dtype, torch.float32)
            memory = torch.zeros(2, values.numel() if self.feedback else 0, dtype=wide, device=values.device)
            keys = [self.key_of[parameter] for parameter in parameters]
            self.freights.append(_Freight(values, parameters, keys, memory[0], memory[1]))
        self.keep(kept)
        for key, tensor in self._by_key("next_kept").items():
            tensor.copy_(other.get(key, tensor))

    def begin(self, scale: Tensor | None) -> None:
        """A step begins whose loss is multiplied by `scale`, shape (); None for 1. Called by all workers."""
        self.confirm()
        self.lanes.ready()
        if self.revocable and (remembers := getattr(self.compression, "state_dict", None)) is not None:
            self._remembered = copy.deepcopy(remembers())
        if self.feedback and (scale is not None or self.scale is not None):
            now = torch.ones(()) if scale is None else scale
            factor = now if self.scale is None else now / self.scale
            if factor.device.type != "cpu" or float(factor) != 1:
                for freight in self.freights:
                    freight.kept.mul_(factor.to(freight.kept))
        self.scale = None if scale is None else scale.clone()

    def start(self, number: int) -> None:
        """Begin to exchange the compressible part of bucket `number`."""
        freight = self.freights[number]
        freight.tickets, freight.sound = [], []
        for parcel, place in self._parcels(freight):
            freight.tickets.append(self.lanes.submit(partial(self._exchange, freight, parcel, place)))

    def _parcels(self, freight: _Freight) -> list[tuple[Parcel, slice]]:
        values = freight.values
        if takes_whole_tensors(self.compression):
            shapes = [memory_shape(parameter) for parameter in freight.parameters]
            return [(Parcel(values, shapes, freight.keys), slice(0, values.numel()))] if values.numel() else []
        length = max(1, PARCEL_BYTES // values.element_size())
        places = [slice(begin, min(begin + length, values.numel())) for begin in range(0, values.numel(), length)]
        return [(Parcel(values[at], [values[at].shape], freight.keys[:1]), at) for at in places]

    def _exchange(self, freight: _Freight, parcel: Parcel, at: slice, link: Link) -> None:
        """The life of a parcel, in a lane."""
        whole = parcel.values.to(freight.kept.dtype)
        if self.feedback:
            whole = torch.add(whole, freight.kept[at], out=freight.next_kept[at])
        # The compression may write into the values; what it was given is needed after it, to see what was dropped.
        values = parcel.values if parcel.values.dtype == whole.dtype else torch.empty_like(whole)
        if values is not whole:
            values.copy_(whole)
        sent = self.compression(replace(parcel, values=values), link)
        if values is not parcel.values:
            parcel.values.copy_(values)
        if self.feedback:
            whole.zero_() if sent is None else whole.sub_(sent)
            freight.sound.append(values.sum().isfinite())

    def finish(self, number: int) -> None:
        """Wait until the sums of bucket `number` are there."""
        for ticket in self.freights[number].tickets:
            self.lanes.wait(ticket)

    def settle(self) -> None:
        """Remember what this step dropped, unless a sum is no number: such a step is left out by whoever scales."""
        if not self.feedback:
            return
        sound = [flag for freight in self.freights for flag in freight.sound]
        if not sound:
            return
        counts = torch.stack(sound).all()
        for freight in self.freights:
            if counts.device.type == "cpu":
                if bool(counts):
                    freight.kept, freight.next_kept = freight.next_kept, freight.kept
                    self._settled = True
            else:  # decided on the device: the host does not wait for it
                torch.where(counts, freight.next_kept, freight.kept, out=freight.kept)

    def confirm(self) -> None:
        """The step under way counts: it will not be undone."""
        self._settled, self._remembered = False, None

    def step_back(self) -> None:
        """The step under way broke off and will be done again: keep what was kept before it. On a CPU only."""
        if self._settled:
            for freight in self.freights:
                freight.kept, freight.next_kept = freight.next_kept, freight.kept
        if self._remembered is not None:
            self.compression.load_state_dict(self._remembered)  # type: ignore[attr-defined]  # it has a state_dict
        self.confirm()

    def kept(self) -> dict[int, Tensor]:
        """What this worker keeps, by the number of the parameter, in its shape."""
        return self._by_key("kept")

    def _by_key(self, memory: Literal["kept", "next_kept"]) -> dict[int, Tensor]:
        return {
            key: gradient_view(part, parameter)
            for freight in self.freights
            if freight.kept.numel()
            for key, parameter, part in zip(
                freight.keys,
                freight.parameters,
                getattr(freight, memory).split([parameter.numel() for parameter in freight.parameters]),
                strict=True,
            )
        }

    def keep(self, kept: Mapping[int, Tensor]) -> None:
        """Add what was kept elsewhere or before to what is kept here."""
        own = self.kept()
        for key, tensor in kept.items():
            if key in own:
                own[key].add_(tensor.to(own[key]))

    def errors(self) -> dict[int, Tensor]:
        """Of each parameter: the norm of what this worker keeps over the norm of the summed gradient."""
        found: dict[int, Tensor] = {}
        for freight in self.freights:
            sizes = [parameter.numel() for parameter in freight.parameters]
            for key, kept, summed in zip(
                freight.keys, freight.kept.split(sizes), freight.values.split(sizes), strict=True
            ):
                found[key] = kept.norm() / summed.to(kept.dtype).norm().clamp(min=torch.finfo(kept.dtype).tiny)
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
            "kept": {str(key): tensor / scale for key, tensor in self.kept().items()},
            "compression": self.shared_state(),
        }

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take up what the `state_dict` of every former worker gave, by rank.

        Where there are fewer workers now, each takes up what several kept; where there are more, some begin with
        nothing: what all keep together stays the same.
        """
        self.scale = None
        for freight in self.freights:
            freight.kept.zero_()
        for former in states[self.lanes.world.rank :: self.lanes.world.size]:
            self.keep({int(key): tensor for key, tensor in former.get("kept", {}).items()})
        self.take_shared(states[0].get("compression", {}) if states else {})
