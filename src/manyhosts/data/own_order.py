"""An order of the script's own inside the one order: a function says which samples an epoch has."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from manyhosts.data import randomness
from manyhosts.data.order import Indices
from manyhosts.errors import ConfigError

OrderOf = Callable[[int], Any]
"""`order(epoch)`: the samples of an epoch by their numbers, in order."""
_COMPARED = 3
"""Epochs whose order is compared between workers, and with that of the run that is resumed."""


def asked(order: OrderOf, length: int, seed: int, epoch: int) -> Indices:
    """What `order` says of `epoch`; shape `(length,)`. Random numbers that it draws are those of (seed, epoch).

    Raises:
        ConfigError: it says something else than the numbers of `length` samples.
    """
    with randomness.kept():
        randomness.seed_all(seed, randomness.ORDER, epoch)
        said = order(epoch)
    found = np.asarray(said)
    if found.shape != (length,) or found.dtype.kind not in "iu":
        what = f"{found.dtype} of shape {found.shape}" if found.dtype != object else f"a {type(said).__name__}"
        raise ConfigError(
            f"order({epoch}) gives {what}, and an epoch has the numbers of {length} samples",
            where="mh.Data(order=…)",
            fix=f"give {length} integers; of fewer samples each may come twice: np.resize(some, {length})",
        )
    if found.min() < 0 or found.max() >= length:
        raise ConfigError(
            f"order({epoch}) has sample {found.min() if found.min() < 0 else found.max()}, and they are numbered from "
            f"0 to {length - 1}",
            where="mh.Data(order=…)",
            fix="give numbers of samples of the training set",
        )
    return found.astype(np.int64)


def fingerprint(order: OrderOf, length: int, *, seed: int) -> str:
    """What identifies this order."""
    first = [asked(order, length, seed, epoch) for epoch in range(_COMPARED)]
    return hashlib.sha256(np.stack(first).tobytes()).hexdigest()[:16]
