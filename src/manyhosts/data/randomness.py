"""Random numbers that have an address: drawn from where they are used, not from how many were drawn before.

Augmentation draws from (seed, epoch, sample), `collate` from (seed, epoch, first sample of the batch), the forward
pass, the loss and the user's step from (seed, step, part, micro-batch), the update from (seed, step). So they are the
same on any number of workers and loader processes, and after a resume. torch, NumPy's global generator and Python's
`random` are treated alike; a generator that a script has made itself is not ours to set.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch

from manyhosts import device

SAMPLE, COMPUTE, MODEL, EVALUATION, COLLATE, UPDATE, AUDIT, OWN_STEP, CALLBACK, ORDER, PASS = range(11)
"""What a random number is for: the first part of its address, so that no two purposes share a stream."""


def seed_at(*address: int) -> int:
    """A seed of 63 bits for `address`, well mixed: neighbours have nothing in common."""
    packed = _packer(len(address))(*address)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


@cache
def _packer(numbers: int) -> Callable[..., bytes]:
    """What packs so many: addresses are few in length, and to read the format takes a fifth of a seed's time."""
    return struct.Struct(f"<{numbers}q").pack


def seed_all(*address: int) -> None:
    """Set the generators of torch (CPU), NumPy and Python to `address`."""
    _seed_host(seed_at(*address))


def seed_compute(*address: int) -> None:
    """Set the generators of torch (CPU and the current GPU), NumPy and Python to `address`."""
    seed = seed_at(*address)
    _seed_host(seed)
    if (module := device.in_use()) is not None:
        module.manual_seed(seed)


_PYTHON: Any = random._inst  # whose methods `random.random` and the rest are
_seed_python = super(random.Random, _PYTHON).seed


def _seed_host(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    _seed_python(seed)  # what `random.seed` does with an integer, but for its look at what it is given
    _PYTHON.gauss_next = None


States = tuple[torch.Tensor, tuple[str, np.ndarray, int, int, float], tuple[object, ...]]
"""Of the generators of torch (CPU), NumPy and Python."""


@contextmanager
def kept() -> Iterator[None]:
    """Give the generators of torch (CPU), NumPy and Python back as they were."""
    before = states()
    try:
        yield
    finally:
        put(before)


@contextmanager
def replayed(before: States) -> Iterator[None]:
    """Within, the generators of torch (CPU), NumPy and Python draw what they drew after `before = states()`."""
    with kept():
        put(before)
        yield


def put(to: States) -> None:
    """Draw on from these."""
    torch.set_rng_state(to[0])
    np.random.set_state(to[1])
    random.setstate(to[2])


@contextmanager
def undisturbed() -> Iterator[None]:
    """Give every generator that we set back as it was, that of the current GPU included."""
    module = device.in_use()
    on_device = None if module is None else module.get_rng_state()
    try:
        with kept():
            yield
    finally:
        if module is not None and on_device is not None:
            module.set_rng_state(on_device)


def states() -> States:
    """The states of the generators of torch (CPU), NumPy and Python."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()  # type: ignore[return-value]  # legacy=True


def drawn_since(before: States) -> bool:
    """Whether anybody drew a random number since `before = states()`."""
    torch_state, numpy_state, python_state = states()
    return not (
        python_state == before[2]
        and numpy_state[2:] == before[1][2:]  # a normal number may be one that was kept from the last draw
        and np.array_equal(numpy_state[1], before[1][1])
        and torch.equal(torch_state, before[0])
    )
