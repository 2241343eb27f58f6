"""Generators are seeded by an address: exactly as those who made them would seed them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from manyhosts.data import randomness


@pytest.mark.parametrize("address", [(0, 1, 0, 0), (7, 7, 12, 3, 0), (2**62, 0, 1)])
def test_generators_are_as_their_own_seed_makes_them(address: tuple[int, ...]) -> None:
    seed = randomness.seed_at(*address)
    with randomness.kept():
        torch.manual_seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        random.seed(seed)
        wanted = randomness.states()
        for draw in (random.gauss, np.random.normal):  # each keeps the second of two for the next call
            draw(0.0, 1.0)
        torch.randn(3)
        assert randomness.drawn_since(wanted)
        randomness.seed_compute(*address)
        assert not randomness.drawn_since(wanted)
        assert random.getstate() == wanted[2]
        assert np.random.get_state()[3:] == wanted[1][3:]
