"""How a global batch is cut into pieces."""

from __future__ import annotations

import numpy as np
import pytest

from manyhosts.data.cut import Cut
from manyhosts.data.steps import plan_pieces


def pieces(count: int, parts: int, micro_batch: int | None, *, level: bool = False) -> list[list[tuple[int, float]]]:
    """For each part: the size and weight of its pieces."""
    indices = np.arange(count, dtype=np.int64)
    return [
        [
            (len(piece.indices), piece.weight)
            for piece in plan_pieces(indices, Cut(parts, part, part + 1, micro_batch, level))
        ]
        for part in range(parts)
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro_batch", [None, 1, 5])
def test_weights_sum_to_one_and_every_sample_is_in_one_piece(count: int, parts: int, micro_batch: int | None) -> None:
    every = [piece for part in pieces(count, parts, micro_batch) for piece in part]
    assert sum(weight for _, weight in every) == pytest.approx(1)
    assert sum(size for size, _ in every) == count


def test_parts_differ_by_one_sample_at_most() -> None:
    assert [sum(size for size, _ in part) for part in pieces(10, 4, None)] == [3, 3, 2, 2]


def test_worker_without_samples_has_no_piece() -> None:
    assert pieces(3, 4, None)[3] == []


@pytest.mark.parametrize("micro_batch", [None, 1, 2])
def test_level_cut_gives_every_part_the_same_number_of_pieces(micro_batch: int | None) -> None:
    cut = pieces(7, 3, micro_batch, level=True)
    assert len({len(part) for part in cut}) == 1
    ghosts = [piece for part in cut for piece in part if piece[1] == 0]
    assert all(size == 1 for size, _ in ghosts)


def test_level_cut_has_ghosts_only_where_a_part_has_less_to_do() -> None:
    assert [[weight == 0 for _, weight in part] for part in pieces(3, 4, None, level=True)] == [
        [False],
        [False],
        [False],
        [True],
    ]
