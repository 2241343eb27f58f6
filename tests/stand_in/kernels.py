"""The kernels of PyTorch's SyncBatchNorm, which exist for CUDA alone, as plain operations: what each should compute.

They take samples of any floating type, compute in float32 at least, and want weights in the one or the other. A kernel
that is given samples in one memory format and their gradient in another reads the wrong ones: here it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _rows(samples: Tensor) -> Tensor:
    """Shape (N, …, C), in the type that is computed in."""
    return samples.movedim(1, -1).to(torch.promote_types(samples.dtype, torch.float32))


def _is_last(samples: Tensor) -> bool:
    return samples.dim() in _LAST and samples.is_contiguous(memory_format=_LAST[samples.dim()])


def _check(samples: Tensor, *of_channels: Tensor | None) -> None:
    assert samples.is_contiguous() or _is_last(samples), "the kernel would make a copy"
    for each in of_channels:
        if each is not None:
            assert each.shape == samples.shape[1:2], f"expected one number for each channel, got {tuple(each.shape)}"
            assert each.is_contiguous(), "the kernel takes numbers of channels that are contiguous"
            computes_in = torch.promote_types(samples.dtype, torch.float32)
            assert each.dtype in (samples.dtype, computes_in), f"expected {computes_in}, got {each.dtype}"


def _check_both(gradient: Tensor, samples: Tensor) -> None:
    assert gradient.dtype == samples.dtype, f"samples are {samples.dtype}, their gradient {gradient.dtype}"
    assert gradient.stride() == samples.stride(), "samples and their gradient lie in different formats"


def _as(samples: Tensor, rows: Tensor) -> Tensor:
    return torch.empty_like(samples).copy_(rows.movedim(-1, 1))


def stats(samples: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean, and one through the standard deviation with `eps` in it."""
    _check(samples)
    rows = _rows(samples).reshape(-1, samples.shape[1])
    mean = rows.mean(0)
    return mean, (rows - mean).square().mean(0).add(eps).rsqrt()


def elemt(
    samples: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, eps: float
) -> Tensor:
    """The layer's output."""
    _check(samples, weight, bias, mean, inverse)
    rows = (_rows(samples) - mean) * inverse
    return _as(samples, rows * (1 if weight is None else weight) + (0 if bias is None else bias))


def backward_reduce(
    gradient: Tensor,
    samples: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sums of the gradient, and of the gradient times how far each sample is from the mean."""
    _check(samples, mean, inverse)
    _check_both(gradient, samples)
    assert input_g, "nothing else is asked for here"
    assert not weight_g, "nothing else is asked for here"
    assert not bias_g, "nothing else is asked for here"
    of_output, channels = _rows(gradient).reshape(-1, samples.shape[1]), samples.shape[1]
    product = (of_output * (_rows(samples).reshape(-1, channels) - mean)).sum(0)
    return of_output.sum(0), product, mean.new_empty(0), mean.new_empty(0)


def backward_elemt(
    gradient: Tensor,
    samples: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """The gradient of the samples. `count`: of each worker, by rank."""
    _check(samples, mean, inverse, weight, sum_dy, sum_dy_xmu)
    _check_both(gradient, samples)
    assert count.dtype == torch.int32, f"the kernel reads int32, got {count.dtype}"
    assert count.is_contiguous(), "the kernel reads one number behind the other"
    whole = count.sum()
    projected = (_rows(samples) - mean) * (sum_dy_xmu / whole * inverse.square())
    return _as(samples, (_rows(gradient) - sum_dy / whole - projected) * inverse * (1 if weight is None else weight))


KERNELS: dict[Any, Callable[..., Any]] = {
    _aten.batch_norm_stats.default: stats,
    _aten.batch_norm_elemt.default: elemt,
    _aten.batch_norm_backward_reduce.default: backward_reduce,
    _aten.batch_norm_backward_elemt.default: backward_elemt,
}
