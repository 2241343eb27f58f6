"""Which box of which tensor each file of a snapshot holds, and whether together they are the full tensor.

A tensor may be written by several workers, each the part that it holds:

    float32[64, 3] = tensors-00000-of-00002.safetensors[0:40, 0:3] + tensors-00001-of-00002.safetensors[40:64, 0:3]
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor: in each dimension the indices from `offset` up to, and without, `offset` + `shape`."""

    offset: Shape
    shape: Shape

    @classmethod
    def full(cls, shape: Shape) -> Box:
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), shape)

    @classmethod
    def from_text(cls, text: str) -> Box:
        """What `str` gave.

        Raises:
            ValueError: it did not.
        """
        ends = [tuple(map(int, words.split(":"))) for words in text.split(", ") if text]
        if any(len(each) != 2 for each in ends):
            raise ValueError(f"{text!r} is no box")
        return cls(tuple(begin for begin, _ in ends), tuple(end - begin for begin, end in ends))

    def __str__(self) -> str:
        """`0:40, 0:3`; nothing for all of a tensor without dimensions."""
        return ", ".join(f"{begin}:{begin + side}" for begin, side in zip(self.offset, self.shape, strict=True))

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        """The elements that are in both; None where there are none."""
        begins = tuple(map(max, self.offset, other.offset))
        ends = tuple(
            min(a + b, c + d) for a, b, c, d in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        sides = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return Box(begins, sides) if all(side > 0 for side in sides) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Where it is in a tensor that holds just `outer`."""
        return tuple(
            slice(begin - first, begin - first + side)
            for begin, first, side in zip(self.offset, outer.offset, self.shape, strict=True)
        )


def flaw(shape: Shape, boxes: Iterable[Box]) -> str:
    """What keeps `boxes` from holding each element of a tensor of this shape exactly once; empty where nothing does.

    A box is described by its corners, each with a sign that changes from one to the next: summed along every dimension
    they give 1 in the box and 0 outside. So boxes hold each element once just where their corners, added up, are those
    of the full tensor. That takes time in proportion to the number of boxes, and not to that of their pairs.
    """
    if not math.prod(shape):
        return ""
    filled = [box for box in boxes if box.size]
    full = Box.full(shape)
    if filled == [full]:
        return ""
    if any(len(box.shape) != len(shape) or len(box.offset) != len(shape) for box in filled):
        return "a part of it has another number of dimensions"
    cut = [
        d for d in range(len(shape)) if any((box.offset[d], box.shape[d]) != (0, shape[d]) for box in filled)
    ]  # the others add nothing but work
    corners: Counter[Shape] = Counter()
    for box in filled:
        _add_corners(corners, box, cut, 1)
    _add_corners(corners, full, cut, -1)
    if not any(corners.values()):
        return ""
    found = sum(box.size for box in filled)
    if found < full.size:
        return f"{full.size - found} of its {full.size} elements are missing"
    return "parts of it overlap" if found > full.size else "parts of it overlap, and others are missing"


def _add_corners(corners: Counter[Shape], box: Box, dimensions: Iterable[int], times: int) -> None:
    sides = [((box.offset[d], 1), (box.offset[d] + box.shape[d], -1)) for d in dimensions]
    for corner in itertools.product(*sides):
        corners[tuple(place for place, _ in corner)] += times * math.prod(sign for _, sign in corner)


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """What a tensor of a snapshot is, and where."""

    dtype: str
    """`float32`."""
    shape: Shape
    """Of the full tensor."""
    parts: Mapping[str, Box]
    """Name of a file → what of the tensor is in it."""

    def __str__(self) -> str:
        """One line, as above."""
        return f"{self.dtype}{list(self.shape)} = " + " + ".join(f"{file}[{box}]" for file, box in self.parts.items())

    @classmethod
    def from_text(cls, text: str) -> TensorRecord:
        """What `str` gave.

        Raises:
            ValueError: it did not.
        """
        what, _, where = text.partition(" = ")
        parts = {}
        for each in where.split(" + ") if where else []:
            file, opening, box = each.removesuffix("]").rpartition("[")
            if not opening:
                raise ValueError(f"{each!r} is no part of a file")
            parts[file] = Box.from_text(box)
        return cls(*from_dtype_and_shape(what), parts)


def joined(reported: Iterable[Mapping[str, TensorRecord]]) -> dict[str, TensorRecord]:
    """What several have written of each tensor, together, by name in the order of the names.

    Raises:
        ValueError: two of them disagree about what a tensor is.
    """
    found: dict[str, TensorRecord] = {}
    for records in reported:
        for name, record in records.items():
            known = found.get(name)
            if known is None:
                found[name] = record
                continue
            if (known.dtype, known.shape) != (record.dtype, record.shape):
                one, other = (dtype_and_shape(each.dtype, each.shape) for each in (known, record))
                raise ValueError(f"{name} is {one} in one file and {other} in another")
            found[name] = TensorRecord(known.dtype, known.shape, {**known.parts, **record.parts})
    return dict(sorted(found.items()))


def first_flaw(tensors: Mapping[str, TensorRecord]) -> str:
    """Which tensor is not in the files exactly once, and how; empty where all are."""
    for name, record in tensors.items():
        if reason := flaw(record.shape, record.parts.values()):
            return f"{name} is incomplete: {reason}"
    return ""


def dtype_and_shape(dtype: str, shape: Shape) -> str:
    """`float32[64, 3]`."""
    return f"{dtype}{list(shape)}"


def from_dtype_and_shape(words: str) -> tuple[str, Shape]:
    """`float32[64, 3]`, parsed."""
    dtype, _, sides = words.removesuffix("]").partition("[")
    return dtype, tuple(int(side) for side in sides.split(",") if side)
