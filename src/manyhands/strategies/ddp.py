"""Data parallelism: every worker holds the whole model and computes its part of each global batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.communication.buckets import GradientBuckets
from manyhands.communication.compression.feedback import Compressor
from manyhands.communication.compression.table import make_compression
from manyhands.communication.lanes import Lanes
from manyhands.communication.world import World
from manyhands.config.strategies import DDP
from manyhands.strategies.strategy import Compute, Piece, Scale, Shard, StepOutcome, Steppable, Tally


class DataParallel:
    """Sums the weighted gradients of all workers while the last backward pass runs."""

    def __init__(self, config: DDP, world: World) -> None:
        self.config = config
        self.world = world
        self.bucket_bytes = int(config.bucket_mb * 1e6)
        self.buckets: GradientBuckets | None = None
        self.steps = 0
        """Steps that gradients were exchanged in."""

    def shard(self) -> Shard:
        """One part for each worker."""
        return Shard(self.world.rank, self.world.size)

    def place(self, model: nn.Module) -> nn.Module:
        """Move `model` to this worker's device and make it equal to the leader's."""
        model = model.to(self.world.device)
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                self.world.broadcast(tensor)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.buckets = GradientBuckets(
            parameters, self.world, bucket_bytes=self.bucket_bytes, compressor=self._compressor(parameters)
        )
        return model

    def _compressor(self, parameters: Sequence[nn.Parameter]) -> Compressor | None:
        compression = make_compression(self.config)
        if compression is None:
            return None
        return Compressor(
            compression,
            Lanes(self.world),
            above=self.config.compress_above,
            feedback=self.config.error_feedback,
            parameters=parameters,
        )

    def forward_backward(
        self, model: nn.Module, pieces: Sequence[Piece], compute: Compute, scale: Scale, riders: Sequence[float]
    ) -> StepOutcome:
        """Accumulate the gradients of this worker's pieces and sum them over the workers."""
        buckets = self.buckets
        assert buckets is not None, "place() comes before forward_backward()"
        if buckets.compressor is None:
            buckets.begin()
        else:
            factor = _factor(scale, self.world.device)
            buckets.begin(compressing=self.steps >= self.config.compression_warmup, scale=factor)
            self.steps += 1
        tally = Tally(riders)
        for piece in pieces[:-1]:
            scale(tally.add(compute(model, piece), piece.weight)).backward()
        last = scale(tally.add(compute(model, pieces[-1]), pieces[-1].weight)) if pieces else None
        buckets.arm()
        summed = tally.start_sum(self.world)  # before the backward pass, which hides it
        if last is not None:
            last.backward()
        buckets.finish()
        self.world.wait(summed)
        return tally.outcome()

    def clip_gradients(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clip by the norm over all parameters; every worker has the same gradients, so the same norm."""
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def update(self, model: nn.Module, optimizer: Steppable) -> None:
        """Step the optimizer; equal gradients keep the workers equal."""
        optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """What compression has kept back; nothing where there is none."""
        if self.buckets is None or self.buckets.compressor is None:
            return {}
        return {"steps": self.steps, **self.buckets.compressor.state_dict()}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take up what every former worker kept back, shared out over those of now."""
        if self.buckets is None or self.buckets.compressor is None:
            return
        self.steps = max((state.get("steps", 0) for state in states), default=0)
        self.buckets.compressor.load_state_dict(states)


def _factor(scale: Scale, device: torch.device) -> Tensor | None:
    """What `scale` multiplies a loss by; None for 1."""
    one = torch.ones((), device=device)
    scaled = scale(one)
    return None if scaled is one else scaled.detach()
