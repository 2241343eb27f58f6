"""BatchNorm over the global batch, on every backend and device.

The mean and variance of each channel are those of the samples of all workers, so that the number of workers does not
change the model. PyTorch's SyncBatchNorm does the same but refuses CPU tensors. Workers may hold different numbers of
samples; one that holds a ghost (`ghost` set) takes part in the exchange and counts for nothing.

One exchange of 2 C + 1 numbers per layer in the forward pass, and one of 2 C in the backward pass, for C channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from manyhosts.communication.world import World

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Membership:
    """What the layers of one model share: the world, and whether the present batch is a ghost."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ghost = False

    @contextmanager
    def as_ghost(self, ghost: bool) -> Iterator[None]:
        """Within, batches count for nothing if `ghost`."""
        before, self.ghost = self.ghost, ghost
        try:
            yield
        finally:
            self.ghost = before


class GlobalBatchNorm(nn.modules.batchnorm._BatchNorm):
    """A BatchNorm layer whose batch is that of all workers."""

    membership: Membership

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dims, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input` of shape `(N, C, …)`."""
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        self._check_input_dim(input)
        output, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, self.membership
        )
        if self.training and self.track_running_stats:
            self._track(mean, variance, count)
        return cast(Tensor, output)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None, "track_running_stats without running_mean"
        assert self.running_var is not None, "track_running_stats without running_var"
        assert self.num_batches_tracked is not None, "track_running_stats without num_batches_tracked"
        self.num_batches_tracked.add_(1)
        momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, membership: Membership
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        channels = x.shape[1]
        values = x.float()
        own = x.numel() // channels
        variance, mean = torch.var_mean(values, dim=dims, correction=0)
        row = torch.cat([mean, variance, mean.new_tensor([float(own)])])
        if membership.ghost:
            row.zero_()
        rows = membership.world.stack(row)
        counts = rows[:, -1:]
        count = counts.sum()
        shares = counts / count
        # Chan, Golub and LeVeque 1983: sums of squares around each worker's own mean lose no digits to cancellation.
        means = rows[:, :channels]
        mean = (means * shares).sum(0)
        variance = ((rows[:, channels:-1] + (means - mean).square()) * shares).sum(0)
        inverse = torch.rsqrt(variance + eps)
        shape = [1, channels, *[1] * (x.dim() - 2)]
        normal = (values - mean.view(shape)) * inverse.view(shape)
        ctx.save_for_backward(normal, weight, inverse, count)
        ctx.membership, ctx.ghost, ctx.dims, ctx.shape = membership, membership.ghost, dims, shape
        ctx.mark_non_differentiable(mean, variance, count)
        output = normal if weight is None else normal * weight.float().view(shape)
        if bias is not None:
            output = output + bias.float().view(shape)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        normal, weight, inverse, count = ctx.saved_tensors
        gradient = gradients[0].float()
        own = torch.stack([gradient.sum(ctx.dims), (gradient * normal).sum(ctx.dims)])
        to_bias, to_weight = own[0].clone(), own[1].clone()
        total = ctx.membership.world.all_reduce(own.zero_() if ctx.ghost else own)
        if ctx.ghost:
            to_input = torch.zeros_like(gradient)
        else:
            mean_gradient, mean_product = (total / count).view(2, *ctx.shape)
            scale = inverse if weight is None else inverse * weight.float()
            to_input = (gradient - mean_gradient - normal * mean_product) * scale.view(ctx.shape)
        return (
            to_input.to(gradients[0].dtype),
            None if weight is None else to_weight.to(weight.dtype),
            None if weight is None else to_bias.to(weight.dtype),
            None,
            None,
        )


def make_global(model: nn.Module, world: World) -> Membership | None:
    """Let every BatchNorm layer of `model` see the batch of all workers. None where there is no such layer.

    The layers stay the objects that they are, with their parameters, hooks and names: only their class changes.
    """
    layers = [module for module in model.modules() if type(module) in _KINDS]
    if not layers:
        return None
    membership = Membership(world)
    for layer in layers:
        layer.__class__ = GlobalBatchNorm
        layer.membership = membership  # type: ignore[assignment]  # a plain attribute, no submodule
    return membership
