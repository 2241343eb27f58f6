"""What is kept of the first batch, and what is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from manyhosts.records import first_batch


def images(*shape: int) -> np.ndarray:
    return np.linspace(-2, 3, int(np.prod(shape)), dtype=np.float32).reshape(shape)


def test_pictures_come_back_as_they_were_but_for_brightness(tmp_path: Path) -> None:
    inputs = images(5, 3, 6, 7)
    found = first_batch.pictures_of(inputs, np.arange(5), most=4)
    assert found is not None
    first_batch.write(tmp_path / "b.npz", found)
    read = first_batch.read(tmp_path / "b.npz")
    assert read is not None
    assert read.labels == ("0", "1", "2", "3")
    assert read.pixels.shape == (4, 6, 7, 3)
    low, high = inputs[:4].min(), inputs[:4].max()
    expected = 255 * (inputs[:4].transpose(0, 2, 3, 1) - low) / (high - low)
    assert np.abs(read.pixels - expected).max() <= 0.5 + 1e-3


@pytest.mark.parametrize(
    "inputs",
    [images(4, 10), images(4, 2, 8, 8), images(4, 1, 2, 9), images(4, 8, 8, 3), images(0, 1, 8, 8), None],
    ids=["rows", "two channels", "too small", "channels last", "empty", "nothing"],
)
def test_what_is_no_picture_is_not_kept(inputs: np.ndarray | None) -> None:
    assert first_batch.pictures_of(inputs, None, most=16) is None


def test_large_pictures_are_thinned_and_numbers_that_are_none_are_black() -> None:
    inputs = images(1, 1, 1000, 400)
    inputs[0, 0, 0, 0] = np.nan
    found = first_batch.pictures_of(inputs, np.array([0.5]), most=1)
    assert found is not None
    assert max(found.pixels.shape[1:3]) <= 192
    assert found.pixels[0, 0, 0, 0] == 0
    assert found.labels == ()


def test_file_that_holds_something_else_is_nothing(tmp_path: Path) -> None:
    path = tmp_path / "b.npz"
    assert first_batch.read(path) is None
    path.write_bytes(b"no archive")
    assert first_batch.read(path) is None
    with path.open("wb") as file:
        np.savez(file, pixels=np.array([{}], dtype=object), labels=np.array([]))
    assert first_batch.read(path) is None  # and nothing was unpickled
