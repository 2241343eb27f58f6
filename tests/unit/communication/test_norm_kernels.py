"""What a BatchNorm layer computes on one worker: both ways give what PyTorch's own layer gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from stand_in import kernels
from torch import Tensor, nn

from manyhosts.communication.norm_kernels import CpuKernels, GpuKernels, PlainKernels

EPS = 1e-5
LAID_OUT = {
    "rows": (torch.randn(40, 6), torch.contiguous_format),
    "lines": (torch.randn(7, 6, 9), torch.contiguous_format),
    "images": (torch.randn(5, 6, 4, 3), torch.contiguous_format),
    "images, channels last": (torch.randn(5, 6, 4, 3), torch.channels_last),
    "volumes, channels last": (torch.randn(3, 6, 4, 3, 2), torch.channels_last_3d),
    "images cut out of larger ones": (torch.randn(5, 6, 8, 6)[:, :, ::2, ::2], None),
}


@pytest.fixture(autouse=True)
def of_stand_in() -> Iterator[None]:
    """PyTorch has its kernels for CUDA alone."""
    with (
        patch.object(torch, "batch_norm_stats", kernels.stats),
        patch.object(torch, "batch_norm_elemt", kernels.elemt),
        patch.object(torch, "batch_norm_backward_reduce", kernels.backward_reduce),
        patch.object(torch, "batch_norm_backward_elemt", kernels.backward_elemt),
    ):
        yield


def through(
    way: PlainKernels, x: Tensor, gradient: Tensor, weight: Tensor | None, bias: Tensor | None
) -> dict[str, Tensor]:
    """What a layer alone gives: nothing is exchanged."""
    mean, variance = way.statistics(x, EPS)
    output = way.output(x, weight, bias, mean, variance, EPS)
    backward = way.backward(gradient, x, weight, mean, variance, EPS)
    to_input = backward.to_input(backward.sums.clone(), torch.tensor([x.numel() / x.shape[1]]))
    found = {"mean": mean, "variance": variance, "output": output, "input": to_input}
    return found | {"bias": backward.sums[0], "weight": backward.sums[1]}


def by_pytorch(x: Tensor, gradient: Tensor, weight: Tensor | None, bias: Tensor | None) -> dict[str, Tensor]:
    """What PyTorch's own layer gives, in float64."""
    leaves = [None if each is None else each.double().requires_grad_() for each in (x, weight, bias)]
    dims = [dim for dim in range(x.dim()) if dim != 1]
    output = nn.functional.batch_norm(leaves[0], None, None, leaves[1], leaves[2], training=True, eps=EPS)
    output.backward(gradient.double())
    variance, mean = torch.var_mean(x.double(), dim=dims, correction=0)
    found: dict[str, Any] = {"mean": mean, "variance": variance, "output": output.detach()}
    grads = [None if each is None else each.grad for each in leaves]
    found |= {name: each for name, each in zip(("input", "weight", "bias"), grads, strict=True) if each is not None}
    return found


@pytest.mark.parametrize("way", [GpuKernels(), PlainKernels(), CpuKernels()], ids=["of a GPU", "plain", "of a CPU"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", LAID_OUT)
def test_each_way_gives_what_pytorch_gives(way: PlainKernels, affine: bool, shape: str) -> None:
    x, memory_format = LAID_OUT[shape]
    x = (x * 3 + 5).contiguous(memory_format=memory_format) if memory_format is not None else x
    gradient = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))  # contiguous, whatever the samples are
    weight, bias = (torch.randn(6), torch.randn(6)) if affine else (None, None)
    found = through(way, x, gradient, weight, bias)
    for name, expected in by_pytorch(x, gradient, weight, bias).items():
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(found[name].double() / scale, expected / scale, rtol=0, atol=1e-6, msg=name)
    if memory_format is not None:
        assert found["output"].is_contiguous(memory_format=memory_format)
        assert way is not GpuKernels or found["input"].is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("way", [GpuKernels(), PlainKernels()], ids=["of a GPU", "plain"])
@pytest.mark.parametrize("of_weights", [torch.float32, torch.bfloat16])
def test_samples_of_fewer_digits_are_summed_with_more(way: PlainKernels, of_weights: torch.dtype) -> None:
    x = torch.randn(64, 4, 8, 8).add(100).bfloat16()  # in which a sum of 4096 such numbers would have one digit
    weight, bias = torch.ones(4, dtype=of_weights), torch.zeros(4, dtype=of_weights)
    gradient = torch.randn(64, 4, 8, 8).bfloat16()
    found = through(way, x, gradient, weight, bias)
    assert (found["output"].dtype, found["input"].dtype) == (torch.bfloat16, torch.bfloat16)
    expected = by_pytorch(x, gradient, weight, bias)
    torch.testing.assert_close(found["mean"].double(), expected["mean"], rtol=1e-6, atol=0)
    torch.testing.assert_close(found["variance"].double(), expected["variance"], rtol=1e-4, atol=0)
    torch.testing.assert_close(found["input"].double(), expected["input"], rtol=0, atol=0.03)


def test_variance_far_below_eps_is_not_lost() -> None:
    x = torch.randn(4096, 2).mul(1e-4)
    mean, variance = GpuKernels().statistics(x, EPS)
    assert (variance >= 0).all()
    torch.testing.assert_close(variance + EPS, x.var(0, correction=0) + EPS, rtol=1e-6, atol=0)
    assert float(mean.abs().max()) < 1e-5
