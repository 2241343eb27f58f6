"""Samples that are drawn by weights, with repeats, inside the one order: an epoch has as many as the dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhosts.errors import ConfigError

Weights = NDArray[np.float64]


def balanced(labels: Any) -> Weights:
    """A weight for each sample, so that every class is drawn equally often: for `mh.Data(weights=…)`.

    `labels`: the class of each sample, a list, an array or a tensor of shape `(samples,)`.

    Raises:
        ConfigError: they are something else, or one is NaN.
    """
    try:
        classes = np.asarray(labels)
        _, place, counts = np.unique(classes, return_inverse=True, return_counts=True)
        is_one_each = 0 < classes.size == len(classes)
    except (TypeError, ValueError):  # of other lengths or kinds, or one value alone
        is_one_each = False
    if not is_one_each or np.any(classes != classes):  # NaN equals nothing
        what = "have a NaN, which is no class" if is_one_each else "are not one class for each sample"
        raise ConfigError(
            f"labels, of the type {type(labels).__name__}, {what}",
            where="mh.balanced(labels)",
            fix="give a list, an array or a tensor (on the CPU) with the class of each sample of the training set",
        )
    found: Weights = 1.0 / counts[place.reshape(-1)]
    return found


def checked(weights: Sequence[float] | Any, length: int) -> Weights:
    """`weights` as an array of shape `(length,)`.

    Raises:
        ConfigError: they are other in number, or no weights.
    """
    try:
        found: Weights = np.asarray(weights, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError) as cause:
        raise ConfigError(
            f"weights is a {type(weights).__name__}, and not a number for each sample", where="mh.Data(weights=…)",
            fix="give a list, an array or a tensor: mh.balanced(labels) makes one",
        ) from cause  # fmt: skip
    if len(found) != length:
        raise ConfigError(
            f"there are {len(found)} weights for {length} samples",
            where="mh.Data(weights=…)",
            fix="give one for each sample of the training set, in its order",
        )
    if not np.isfinite(found).all() or (found < 0).any() or not found.any():
        raise ConfigError(
            "a weight is negative or not finite, or all are 0",
            where="mh.Data(weights=…)",
            fix="give numbers from 0 on: a sample with 2.0 is drawn twice as often as one with 1.0",
        )
    return found


def drawn(weights: Weights, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """The samples of `epoch`, in order; shape `(samples,)`. By NumPy's legacy generator, as a permutation is."""
    generator = np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, epoch, 1])
    ends = np.cumsum(weights)
    found = np.searchsorted(ends, generator.random_sample(len(weights)) * ends[-1], side="right")
    last: np.int64 = np.flatnonzero(weights)[-1]
    drawn_now: NDArray[np.int64] = np.minimum(found, last).astype(np.int64)
    return drawn_now


def fingerprint(weights: Weights) -> str:
    """What identifies these weights."""
    return hashlib.sha256(weights.tobytes()).hexdigest()[:16]
