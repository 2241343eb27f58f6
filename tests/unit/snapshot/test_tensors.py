"""Tensor files: what is written is what the safetensors library reads."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from manyhosts.errors import SnapshotError
from manyhosts.snapshot import tensors
from manyhosts.snapshot.disk import Disk
from manyhosts.snapshot.fingerprint import difference, fingerprint, tensors_sha256, weights_sha256


def read(path: Path) -> dict[str, torch.Tensor]:
    file = tensors.TensorFile(path)
    return {name: file.read(name) for name in file._opened().keys()}  # noqa: SIM118 - it is no dict


@pytest.mark.parametrize("dtype", tensors._CODES, ids=tensors.dtype_name)
def test_every_dtype_of_the_format_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    content = (torch.arange(48) % (2 if dtype is torch.bool else 256)).to(torch.uint8)
    matrix = content.view(dtype).reshape(2, -1)
    given = {"matrix": matrix, "scalar": matrix[0, 0].clone(), "empty": matrix[:0]}
    tensors.write(tmp_path / "x", given, Disk())
    back = read(tmp_path / "x")
    assert {name: (value.dtype, value.shape) for name, value in back.items()} == {
        name: (value.dtype, value.shape) for name, value in given.items()
    }
    assert all(tensors.bytes_of(back[name]) == tensors.bytes_of(value) for name, value in given.items())


def test_the_library_reads_what_was_written_and_the_record_is_right(tmp_path: Path) -> None:
    given = {"b": torch.arange(5), "ä ☃": torch.randn(3, 4), "a": torch.ones(3, dtype=torch.bfloat16)}
    record = tensors.write(tmp_path / "x", given, Disk())
    back = safetensors.torch.load_file(tmp_path / "x")
    assert all(torch.equal(back[name], value) for name, value in given.items())
    written = (tmp_path / "x").read_bytes()
    assert (record.bytes, record.sha256) == (len(written), hashlib.sha256(written).hexdigest())


def test_tensors_that_were_read_need_their_file_no_more(tmp_path: Path) -> None:
    tensors.write(tmp_path / "x", {"a": torch.arange(1000)}, Disk())
    back = read(tmp_path / "x")
    (tmp_path / "x").write_bytes(bytes(9000))
    assert torch.equal(back["a"], torch.arange(1000))


def test_file_that_is_no_tensor_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"nothing of the kind")
    with pytest.raises(SnapshotError, match="x cannot be read"):
        tensors.TensorFile(tmp_path / "x").read("a")


def test_weights_hash_is_that_of_the_bits_whatever_the_layout_and_the_order() -> None:
    one, other = torch.randn(4, 6), torch.zeros(2, dtype=torch.bfloat16)
    assert tensors_sha256({"a": one, "b": other}) == tensors_sha256({"b": other, "a": one.t().contiguous().t()})


def test_weights_hash_changes_with_one_bit_a_name_a_dtype_or_a_shape() -> None:
    tensor = torch.zeros(4, dtype=torch.float32)
    flipped = tensor.clone()
    flipped.view(torch.uint8)[0] ^= 1
    others = [{"a": flipped}, {"b": tensor}, {"a": tensor.view(torch.int32)}, {"a": tensor.reshape(2, 2)}, {}]
    hashes = {tensors_sha256(each) for each in [{"a": tensor}, *others]}
    assert len(hashes) == 6


def test_weights_hash_sees_buffers_that_are_saved_and_no_others() -> None:
    model = nn.BatchNorm1d(3)
    model.register_buffer("cache", torch.zeros(1), persistent=False)
    before = weights_sha256(model)
    model.cache += 1
    assert weights_sha256(model) == before
    model.running_mean += 1
    assert weights_sha256(model) != before


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        (nn.Linear(3, 2), ""),
        (nn.Linear(4, 2), "its weight is float32 of shape (2, 4), this model's is float32 of shape (2, 3)"),
        (nn.Linear(3, 2).bfloat16(), "its weight is bfloat16 of shape (2, 3), this model's is float32"),
        (nn.Linear(3, 2, bias=False), "it has no bias, which this model has as float32 of shape (2)"),
        (nn.BatchNorm1d(2), "its weight is float32 of shape (2)"),
    ],
)
def test_models_that_differ_are_told_apart_by_the_first_difference(saved: nn.Module, words: str) -> None:
    found = difference(fingerprint(saved), fingerprint(nn.Linear(3, 2)))
    assert bool(found) == bool(words)
    assert words in found


def test_model_with_more_in_it_is_another_model() -> None:
    assert "it has bias as float32 of shape (2)" in difference(
        fingerprint(nn.Linear(3, 2)), fingerprint(nn.Linear(3, 2, bias=False))
    )
