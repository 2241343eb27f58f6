"""What a BatchNorm layer computes on one worker, before and after the workers exchange sums.

On a GPU by the kernels that PyTorch has for its SyncBatchNorm: each reads the samples once, in the memory format that
they have. On a CPU, in float32 and float64, by those of its own BatchNorm in evaluation, which take mean and variance
as they are given. Elsewhere by operations that every device has. How sums of several workers are combined is not their
concern: PyTorch's own kernel for that gives NaN where the first worker has no samples.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from manyhosts.device import is_asynchronous


def kernels_for(x: Tensor) -> PlainKernels:
    """Those for samples `x`."""
    if is_asynchronous(x.device):
        return GpuKernels()
    full = x.dtype in (torch.float32, torch.float64) and x.numel() > 0
    return CpuKernels() if x.is_cpu and full else PlainKernels()


def wide(tensor: Tensor) -> Tensor:
    """`tensor` in float32, or in float64 where it has that many digits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class PlainBackward:
    """A backward pass of a layer, on both sides of the exchange."""

    sums: Tensor
    """Of the output's gradient, and of its product with the samples as they are without weight and bias; (2, C)."""

    def __init__(
        self, gradient: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, variance: Tensor, eps: float
    ) -> None:
        self.gradient, self.weight, self.inverse = wide(gradient), weight, torch.rsqrt(variance + eps)
        self.normal, self.dtype = _normal(x, mean, self.inverse), x.dtype
        dims = _dims(x)
        self.sums = torch.stack([self.gradient.sum(dims), (self.gradient * self.normal).sum(dims)])

    def to_input(self, total: Tensor, counts: Tensor) -> Tensor:
        """The gradient of the samples. `total`: `sums` over all workers; `counts`: of what each worker has, (size,)."""
        mean_gradient, mean_product = (_along(each, self.gradient) for each in total / counts.sum())
        scale = self.inverse if self.weight is None else self.inverse * wide(self.weight)
        found = (self.gradient - mean_gradient - self.normal * mean_product) * _along(scale, self.gradient)
        return found.to(self.dtype)


class PlainKernels:
    """For samples `x`, shape (N, C, …). Means, variances and sums are by channel, in float32 or float64."""

    backward: Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, float], PlainBackward] = PlainBackward
    """Begins the backward pass, with the output's gradient, `x`, weight, mean, variance and `eps`."""

    def statistics(self, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Mean and biased variance, shape (C,) each. `eps`: that of the layer."""
        variance, mean = torch.var_mean(wide(x), dim=_dims(x), correction=0)
        return mean, variance

    def output(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
    ) -> Tensor:
        """Of the layer, for the mean and the biased variance of the entire batch."""
        inverse = torch.rsqrt(variance + eps)
        output = _normal(x, mean, inverse)
        if weight is not None:
            output = output * _along(wide(weight), x)
        if bias is not None:
            output = output + _along(wide(bias), x)
        return output.to(x.dtype)


class _CpuBackward(PlainBackward):
    """In evaluation the gradient of the samples is the output's, scaled; what is missing is linear in the samples."""

    def __init__(
        self, gradient: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, variance: Tensor, eps: float
    ) -> None:
        weight = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        self.x, self.mean, self.inverse = x, mean, torch.rsqrt(variance + eps)
        self.scale = self.inverse * weight
        self.scaled, of_product, of_gradient = torch.ops.aten.native_batch_norm_backward(
            gradient, x, weight, mean, variance, None, None, False, eps, [True, True, True]
        )
        self.sums = torch.stack([of_gradient, of_product])

    def to_input(self, total: Tensor, counts: Tensor) -> Tensor:
        mean_gradient, mean_product = total / counts.sum()
        slope = self.scale * self.inverse * mean_product
        shift = self.scale * mean_gradient
        ones = torch.ones_like(self.mean)
        # slope * (x - mean) + shift, by the kernel that reads the samples once.
        rest = torch.native_batch_norm(self.x, slope, shift, self.mean, ones, False, 0.0, 0.0)[0]
        found: Tensor = self.scaled.sub_(rest)
        return found


class CpuKernels(PlainKernels):
    """The same for what is there in float32 or float64, by PyTorch's kernels for CPUs, which copy no samples."""

    backward = _CpuBackward

    def statistics(self, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Mean and biased variance."""
        return torch.batch_norm_update_stats(x, None, None, 0.0)

    def output(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
    ) -> Tensor:
        """Of the layer."""
        return torch.native_batch_norm(x, _like(weight, mean), _like(bias, mean), mean, variance, False, 0.0, eps)[0]


class _GpuBackward(PlainBackward):
    def __init__(
        self, gradient: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, variance: Tensor, eps: float
    ) -> None:
        self.samples = _dense(gradient, x), _dense(x, x), mean, torch.rsqrt(variance + eps)
        self.weight = _like(weight, mean)
        # The gradients of weight and bias are the same sums, so they are not asked for: the kernel wants a weight then.
        of_gradient, of_product, _, _ = torch.batch_norm_backward_reduce(*self.samples, None, True, False, False)
        self.sums = torch.stack([of_gradient, of_product * self.samples[-1]])

    def to_input(self, total: Tensor, counts: Tensor) -> Tensor:
        of_gradient, of_product = total[0], total[1] / self.samples[-1]
        totals = counts.to(torch.int32)  # one for each worker: their sum may be larger than that type holds
        return torch.batch_norm_backward_elemt(*self.samples, self.weight, of_gradient, of_product, totals)


class GpuKernels(PlainKernels):
    """The same by PyTorch's kernels for GPUs."""

    backward = _GpuBackward

    def statistics(self, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Mean and biased variance."""
        mean, inverse = torch.batch_norm_stats(_dense(x, x), eps)
        return mean, (inverse.pow(-2) - eps).clamp(min=0)

    def output(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
    ) -> Tensor:
        """Of the layer."""
        inverse = torch.rsqrt(variance + eps)
        # The kernel gets the inverse, and makes nothing of its last argument.
        return torch.batch_norm_elemt(_dense(x, x), _like(weight, mean), _like(bias, mean), mean, inverse, 0.0)


def _dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _along(of_channels: Tensor, x: Tensor) -> Tensor:
    return of_channels.view([1, -1, *[1] * (x.dim() - 2)])


def _normal(x: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    return (wide(x) - _along(mean, x)) * _along(inverse, x)


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _dense(tensor: Tensor, x: Tensor) -> Tensor:
    """`tensor` as `x` lies in memory, where that is one of the two ways that the kernels read."""
    last = _CHANNELS_LAST.get(x.dim())
    is_last = last is not None and x.is_contiguous(memory_format=last)
    return tensor.contiguous(memory_format=last if is_last and last is not None else torch.contiguous_format)


def _like(of_channels: Tensor | None, mean: Tensor) -> Tensor | None:
    """In the type that the kernels compute in: besides that of the samples they take no other."""
    return None if of_channels is None else of_channels.to(mean.dtype).contiguous()
