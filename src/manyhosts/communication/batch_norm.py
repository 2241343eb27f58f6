"""BatchNorm over the global batch, on every backend and device.

The mean and variance of each channel are those of the samples of all workers, so that the number of workers does not
change the model. PyTorch's SyncBatchNorm does the same but refuses CPU tensors. Workers may hold different numbers of
samples; one that holds a ghost (`ghost` set) takes part in the exchange and counts for nothing.

One exchange of 2 C + 1 numbers per layer in the forward pass, and one of 2 C in the backward pass, for C channels. A
backward pass that will be differentiated itself (a gradient penalty) computes by operations that autograd knows; it has
two more exchanges per layer.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from manyhosts.communication.shared_norm import prepare
from manyhosts.communication.world import World


class GlobalBatch:
    """The samples of all workers: what the layers of one model share."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ghost = False
        """Whether the piece that is computed is a ghost, in its forward and in its backward pass."""

    def normalise(self, layer: nn.modules.batchnorm._BatchNorm, input: Tensor, *, track: bool) -> Tensor:
        """See `shared_norm.Batch`."""
        output, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, layer.weight, layer.bias, layer.eps, self
        )
        if track:
            _track(layer, mean, variance, count)
        return cast(Tensor, output)


@torch.no_grad()
def _track(layer: nn.modules.batchnorm._BatchNorm, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    assert layer.running_mean is not None, "tracking without running_mean"
    assert layer.running_var is not None, "tracking without running_var"
    assert layer.num_batches_tracked is not None, "tracking without num_batches_tracked"
    layer.num_batches_tracked.add_(1)
    momentum = layer.momentum if layer.momentum is not None else 1.0 / float(layer.num_batches_tracked)
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), momentum)
    unbiased = variance * (count / (count - 1).clamp(min=1))
    layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), momentum)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, batch: GlobalBatch
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        channels = x.shape[1]
        values = _wide(x)
        own = x.numel() // channels
        variance, mean = torch.var_mean(values, dim=dims, correction=0)
        row = torch.cat([mean, variance, mean.new_full((1,), own)])
        if batch.ghost:
            row.zero_()
        rows = batch.world.stack(row)
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
        ctx.save_for_backward(x, weight, bias, mean, inverse, count)
        ctx.batch, ctx.ghost, ctx.dims, ctx.shape, ctx.eps = batch, batch.ghost, dims, shape, eps
        ctx.mark_non_differentiable(mean, variance, count)
        output = normal if weight is None else normal * _wide(weight).view(shape)
        if bias is not None:
            output = output + _wide(bias).view(shape)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, inverse, count = ctx.saved_tensors
        if torch.is_grad_enabled():  # with create_graph: what comes out here is differentiated in its turn
            return *_differentiable(ctx, gradients[0]), None, None
        normal = (_wide(x) - mean.view(ctx.shape)) * inverse.view(ctx.shape)
        gradient = _wide(gradients[0])
        own = torch.stack([gradient.sum(ctx.dims), (gradient * normal).sum(ctx.dims)])
        to_bias, to_weight = own[0].clone(), own[1].clone()
        total = ctx.batch.world.all_reduce(own.zero_() if ctx.ghost else own)
        if ctx.ghost:
            to_input = torch.zeros_like(gradient)
        else:
            mean_gradient, mean_product = (total / count).view(2, *ctx.shape)
            scale = inverse if weight is None else inverse * _wide(weight)
            to_input = (gradient - mean_gradient - normal * mean_product) * scale.view(ctx.shape)
        return (
            to_input.to(gradients[0].dtype),
            None if weight is None else to_weight.to(weight.dtype),
            None if bias is None else to_bias.to(bias.dtype),
            None,
            None,
        )


def _wide(tensor: Tensor) -> Tensor:
    """`tensor` in float32, or in float64 where it has that many digits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _differentiable(ctx: Any, gradient: Tensor) -> list[Tensor | None]:
    """What `backward` gives to x, weight and bias, by operations that can be differentiated again on all workers."""
    inputs = ctx.saved_tensors[:3]
    count = ctx.saved_tensors[-1]
    x, weight, bias = inputs
    ghost = torch.tensor(ctx.ghost, device=x.device)
    values = _wide(x)

    def mean_of(each: Tensor) -> Tensor:
        own = each.sum(ctx.dims)
        own = torch.where(ghost, torch.zeros_like(own), own)  # a ghost, too, exchanges in the backward pass of this
        total = cast(Tensor, _SumOverWorkers.apply(own, ctx.batch))  # type: ignore[no-untyped-call]
        mean: Tensor = total / count
        return mean.view(ctx.shape)

    centred = values - mean_of(values)
    output = centred * torch.rsqrt(mean_of(centred.square()) + ctx.eps)
    if weight is not None:
        output = output * _wide(weight).view(ctx.shape)
    if bias is not None:
        output = output + _wide(bias).view(ctx.shape)
    wanted = [each for each, needed in zip(inputs, ctx.needs_input_grad, strict=False) if needed]
    found = iter(torch.autograd.grad(output.to(x.dtype), wanted, gradient, create_graph=True))
    return [next(found) if needed else None for needed in ctx.needs_input_grad[:3]]


class _SumOverWorkers(torch.autograd.Function):
    """The sum over the workers. A change of one worker's values changes the results of all, so gradients are summed."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, batch: GlobalBatch) -> Tensor:
        ctx.batch = batch
        return batch.world.all_reduce(values.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _SumOverWorkers.apply(gradients[0], ctx.batch), None  # type: ignore[no-untyped-call]


def make_global(model: nn.Module, world: World) -> GlobalBatch | None:
    """Let every BatchNorm layer of `model` see the batch of all workers. None where there is no such layer."""
    return GlobalBatch(world) if prepare(model) else None
