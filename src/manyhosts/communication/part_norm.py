"""BatchNorm whose batch is one part of the global batch, with running values that no cut over workers can change.

A part is normalised by its own mean and variance, so a forward pass needs no one else. Meanwhile the running mean and
variance stay as they are: every part of a step sees the same. What the parts saw is summed in the order of the tree and
put into the running values once per step, as the mean and the unbiased variance of all samples of the step;
`num_batches_tracked` counts steps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from manyhosts.communication.shared_norm import prepare, running_of


class PartStatistics:
    """What the layers of one model saw in a step, by part."""

    def __init__(self, model: nn.Module) -> None:
        """Every BatchNorm layer of `model` sees the part that is being computed from now on, and nothing else."""
        self.layers = [layer for layer in prepare(model) if layer.track_running_stats]
        self.seen: dict[_BatchNorm, Tensor] = {}

    def normalise(self, layer: _BatchNorm, input: Tensor, *, track: bool) -> Tensor:
        """See `shared_norm.Batch`. One value per channel is normalised to 0."""
        # PyTorch's kernel leaves the statistics of this batch in what it takes for running values.
        dtype = torch.promote_types(input.dtype, torch.float32)
        mean = torch.zeros(input.shape[1], dtype=dtype, device=input.device)
        variance = torch.zeros_like(mean)
        output = torch.batch_norm(
            input, layer.weight, layer.bias, mean, variance, True, 1.0, layer.eps, torch.backends.cudnn.enabled
        )
        if track:
            self._note(layer, input.numel() // input.shape[1], mean.double(), variance)
        return output

    @torch.no_grad()
    def _note(self, layer: _BatchNorm, count: int, mean: Tensor, variance: Tensor) -> None:
        """One layer has seen `count` values per channel, of this mean and unbiased variance."""
        own = variance.double() * ((count - 1) / count) if count > 1 else torch.zeros_like(mean)
        sums = torch.cat([mean.new_full((1,), count), mean * count, (own + mean.square()) * count])
        self.seen[layer] = self.seen[layer] + sums if layer in self.seen else sums

    def take(self) -> list[Tensor]:
        """Count, sum and sum of squares per channel of what every layer saw in this part; float64, and then forgotten.

        In float64 a sum of squares loses nothing that float32 had, unless the mean is a million standard deviations.
        """
        rows = [
            self.seen[layer]
            if layer in self.seen
            else torch.zeros(1 + 2 * layer.num_features, dtype=torch.float64, device=running_of(layer)[0].device)
            for layer in self.layers
        ]
        self.seen = {}
        return rows

    @torch.no_grad()
    def track(self, total: Tensor) -> None:
        """Move the running values by the sums over all parts."""
        rows = total.split([1 + 2 * layer.num_features for layer in self.layers])
        for layer, row in zip(self.layers, rows, strict=True):
            _track(layer, *row.split([1, layer.num_features, layer.num_features]))


def _track(layer: _BatchNorm, count: Tensor, sums: Tensor, squares: Tensor) -> None:
    running_mean, running_var, steps = running_of(layer)
    seen = count > 0  # a layer that no part used stays as it is
    steps.add_(seen[0].to(steps.dtype))
    mean = sums / count.clamp(min=1)
    variance = (squares - sums * mean).clamp(min=0) / (count - 1).clamp(min=1)
    momentum = layer.momentum if layer.momentum is not None else 1.0 / steps.clamp(min=1).double()
    for running, value in ((running_mean, mean), (running_var, variance)):
        running.copy_(torch.where(seen, torch.lerp(running.double(), value, momentum), running.double()))
