"""Who is wrong, by what each worker says of a part, and what stands for the bits of tensors."""

from __future__ import annotations

import pytest
import torch

from manyhosts.device import processor
from manyhosts.snapshot.fingerprint import tensor_checksums
from manyhosts.strategies.audit import Digest, find_wrong

RIGHT, WRONG, OTHER = 1, 2, 3
R, W = [RIGHT] * 3, [WRONG] * 3  # owner and auditor tell one digest and two more, the third worker two


@pytest.mark.parametrize(
    ("reported", "guilty"),
    [
        ({0: R, 1: W, 2: R[:2]}, {1}),  # the owner or the auditor, for good
        ({0: W, 1: R, 2: R[:2]}, {0}),
        ({0: [WRONG, RIGHT, RIGHT], 1: R, 2: R[:2]}, {0}),  # once
        ({0: R, 1: [WRONG, OTHER, 4], 2: R[:2]}, {1}),  # in another way each time
        ({0: W, 1: R, 2: [OTHER] * 2}, None),  # each says something else
        ({0: [WRONG, RIGHT, RIGHT], 1: R, 2: W[:2]}, None),
        ({0: [1, 2, 3], 1: [2, 3, 4], 2: [2, 3]}, None),  # a model that counts its calls
        ({0: W, 1: R}, None),  # of two, each stays with it
        ({0: [WRONG, RIGHT, RIGHT], 1: R}, {0}),
        ({0: R, 1: [WRONG, RIGHT, RIGHT]}, {1}),
        ({0: [WRONG, OTHER, OTHER], 1: R}, None),
        ({0: [WRONG, OTHER, RIGHT], 1: R}, None),
    ],
)
def test_whoever_disagrees_with_two_that_repeat_themselves_is_wrong(
    reported: dict[int, list[int]], guilty: set[int] | None
) -> None:
    assert find_wrong(reported) == guilty


def digest(*tensors: torch.Tensor | None) -> int:
    found = Digest(tensor_checksums)
    found.add(tensors)
    return found.value


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.bool, torch.int64]
)
def test_digest_is_of_the_bits_and_not_of_where_they_lie(dtype: torch.dtype) -> None:
    tensor = torch.arange(24).reshape(2, 3, 4).to(dtype)
    strided = tensor.transpose(0, 2).contiguous().transpose(0, 2)
    assert digest(tensor) == digest(strided) == digest(tensor.clone())
    assert digest(tensor) != digest(tensor.flatten())
    changed = tensor.clone()
    changed.view(-1)[7] = ~changed.view(-1)[7] if dtype == torch.bool else changed.view(-1)[7] + 1
    assert digest(changed) != digest(tensor)


def test_digest_tells_zeros_by_sign_and_none_from_nothing() -> None:
    assert digest(torch.zeros(2)) != digest(-torch.zeros(2))
    assert len({digest(None), digest(torch.empty(0)), digest(), digest(None, None), digest(torch.tensor(0.0))}) == 5


INTEL = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 85
model name\t: Intel(R) Xeon(R) Gold 6130
stepping\t: 4
microcode\t: 0x1
flags\t\t: fpu sse2 avx2 avx512f pti

processor\t: 1
model name\t: another
"""


def test_make_of_a_processor_is_its_model_and_what_kernels_are_chosen_by() -> None:
    name, make = processor(INTEL)
    assert name == "Intel(R) Xeon(R) Gold 6130"
    assert processor(INTEL.replace("pti", "retbleed").replace("0x1", "0x2")) == (name, make), (
        "an update is no other make"
    )
    assert processor(INTEL.replace("avx512f ", ""))[1] != make
    assert processor(INTEL.replace("6130", "6140"))[1] != make
    arm = "CPU implementer\t: 0x41\nCPU part\t: 0xd0c\nFeatures\t: fp asimd sve\n"
    assert processor(arm)[1] != processor(arm.replace(" sve", ""))[1]
    assert all(processor(""))
