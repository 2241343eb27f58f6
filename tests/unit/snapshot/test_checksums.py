"""Checksums of tensors: equal for equal bits, and another one for every change."""

from __future__ import annotations

import pytest
import torch

from manyhosts.snapshot.fingerprint import combined, tensor_checksums

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64)


def checksum(tensor: torch.Tensor) -> str:
    return tensor_checksums({"it": tensor})["it"]


@pytest.mark.parametrize("size", [1, 7, 8, 9, 65_537, 300_001])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_flipped_bit_changes_it(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    tensor = (torch.randn(size) * 50).to(dtype)
    before = checksum(tensor)
    for place in {0, size // 2, size - 1}:
        raw = tensor[place : place + 1].view(torch.uint8)
        for bit in (0, 7) if dtype is not torch.bool else (0,):
            raw[-1] ^= 1 << bit
            assert checksum(tensor) != before, (place, bit)
            raw[-1] ^= 1 << bit
    assert checksum(tensor) == before


def test_what_sums_or_an_exclusive_or_would_not_see_is_seen() -> None:
    tensor = torch.randn(4096, 40, generator=torch.Generator().manual_seed(1))
    changes = {
        "rows in another order": tensor.flip(0),
        "two numbers exchanged": tensor.reshape(-1)[[1, 0, *range(2, tensor.numel())]].reshape(tensor.shape),
        "all signs": -tensor,
        "one pair of signs": torch.cat([-tensor[:2], tensor[2:]]),
        "another shape": tensor.reshape(40, 4096),
        "another dtype": tensor.view(torch.int32),
    }
    found = {name: checksum(changed) for name, changed in changes.items()}
    assert checksum(tensor) not in found.values()
    assert len(set(found.values())) == len(changes)


def test_bits_count_and_not_where_or_how_they_lie_in_memory() -> None:
    tensor = torch.randn(64, 33, generator=torch.Generator().manual_seed(2))
    wide = torch.zeros(64, 40)
    wide[:, 3:36] = tensor
    spread = tensor[:, None].expand(64, 5, 33)
    assert checksum(wide[:, 3:36]) == checksum(tensor)
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor)
    assert checksum(spread) == checksum(spread.contiguous())
    assert checksum(torch.tensor(0.0)) != checksum(torch.tensor(-0.0))  # equal numbers, other bits
    assert len(checksum(torch.empty(0, 3))) == len(checksum(torch.tensor(1.5))) == 16
    # The same on every machine and with every version: it is compared between hosts.
    assert checksum(torch.arange(100_000)) == "25ac6e509077be28"


def test_combined_number_knows_names_and_no_order() -> None:
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    there = combined(tensor_checksums({"a": one, "b": two}))
    assert there == combined(tensor_checksums({"b": two, "a": one}))
    assert there != combined(tensor_checksums({"a": two, "b": one}))
    assert 0 <= there < 1 << 63
