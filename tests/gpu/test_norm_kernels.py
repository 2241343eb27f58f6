"""What a BatchNorm layer computes on a GPU: the kernels that PyTorch has for it against plain operations."""

from __future__ import annotations

import pytest
import torch

from manyhosts.communication.norm_kernels import GpuKernels, PlainKernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("affine", [True, False])
def test_kernels_of_pytorch_give_what_plain_operations_give(
    memory_format: torch.memory_format, dtype: torch.dtype, affine: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 24, 9, 7, device="cuda").mul(2).add(3).to(dtype).contiguous(memory_format=memory_format)
    gradient = torch.randn(32, 24, 9, 7, device="cuda").to(dtype)
    weight, bias = (torch.randn(24, device="cuda"), torch.randn(24, device="cuda")) if affine else (None, None)
    counts = torch.tensor([0.0, 20.0, 12.0], device="cuda") * 63
    found = []
    for way in (GpuKernels(), PlainKernels()):
        mean, variance = way.statistics(x, 1e-5)
        backward = way.backward(gradient, x, weight, mean, variance, 1e-5)
        to_input = backward.to_input(backward.sums.clone(), counts)
        found.append((mean, variance, way.output(x, weight, bias, mean, variance, 1e-5), backward.sums, to_input))
    for ours, plain in zip(*found, strict=True):
        few = 0.03 if plain.dtype is torch.bfloat16 else 1e-6
        scale = float(plain.abs().max())
        torch.testing.assert_close(ours.float() / scale, plain.float() / scale, rtol=0, atol=few)
