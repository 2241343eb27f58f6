"""`first-batch.npz`: some samples of the first batch that a run has trained on, where they are pictures."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from manyhosts.records.atomic_file import write_atomically

_CHANNELS = (1, 3)
_LEAST_PIXELS, _MOST_PIXELS = 4, 192
"""Of a side: smaller ones are no pictures, and of larger ones every second, third … pixel is kept."""


@dataclass(frozen=True, slots=True)
class FirstBatch:
    """What is kept: pixels (pictures, height, width, 1 or 3) from 0 to 255, and the label of each, where known."""

    pixels: np.ndarray[Any, np.dtype[np.uint8]]
    labels: tuple[str, ...]


def pictures_of(inputs: Any, targets: Any, most: int) -> FirstBatch | None:
    """The first `most` of a batch of arrays, where they look like pictures: (samples, 1 or 3, height, width).

    All are brought to 0 to 255 by the lowest and the highest value of them together: the normalisation had
    reasons that are in no file.
    """
    is_picture = getattr(inputs, "ndim", 0) == 4 and inputs.shape[1] in _CHANNELS and len(inputs) > 0
    if most < 1 or not is_picture or min(inputs.shape[2:]) < _LEAST_PIXELS:
        return None
    every = -(-max(inputs.shape[2:]) // _MOST_PIXELS)
    values = np.asarray(inputs[:most, :, ::every, ::every], dtype=np.float32).transpose(0, 2, 3, 1)
    finite = values[np.isfinite(values)]
    if not finite.size:
        return None
    low, high = float(finite.min()), float(finite.max())
    scaled = 255 * (np.nan_to_num(values, nan=low, posinf=high, neginf=low) - low) / ((high - low) or 1.0)
    return FirstBatch(np.clip(scaled.round(), 0, 255).astype(np.uint8), _labels(targets, len(values)))


def write(path: Path, batch: FirstBatch) -> None:
    """Put `batch` at `path`, completely or not at all.

    Raises:
        OSError: the disk does not take it.
    """
    file = BytesIO()
    np.savez_compressed(file, pixels=batch.pixels, labels=np.array(batch.labels, dtype=np.str_))
    write_atomically(path, file.getvalue())


def read(path: Path) -> FirstBatch | None:
    """What `write` has put at `path`; None where there is nothing, or nothing of that kind."""
    with (
        contextlib.suppress(OSError, ValueError, KeyError, EOFError, BadZipFile),
        np.load(path, allow_pickle=False) as found,
    ):
        pixels, labels = found["pixels"], tuple(str(label) for label in found["labels"])
        if pixels.ndim == 4 and pixels.dtype == np.uint8 and pixels.shape[3] in _CHANNELS:
            return FirstBatch(pixels, labels)
    return None


def _labels(targets: Any, count: int) -> tuple[str, ...]:
    """Integers, one for each picture; of other targets nothing is kept."""
    if getattr(targets, "ndim", 0) != 1 or len(targets) < count:
        return ()
    array = np.asarray(targets[:count])
    return tuple(str(label) for label in array) if array.dtype.kind in "iub" else ()
