"""Boxes of a tensor: what is left of two, and whether some of them hold each element once."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhosts.records.tensor_parts import Box, TensorRecord, first_flaw, flaw, joined

SIDES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def tensors_with_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and some boxes in or about it: cut exactly, and then perhaps one lost, repeated, moved or grown."""
    shape = draw(SIDES)
    cuts = [[0, *sorted(draw(st.sets(st.integers(1, 4), max_size=2))), side] for side in shape]
    edges = [[edge for edge in cut if edge <= cut[-1]] for cut in cuts]
    spans = [list(pairwise(edge)) for edge in edges]
    boxes = [Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in product(*spans)]
    for _ in range(draw(st.integers(0, 2))):
        if not boxes:
            break
        index = draw(st.integers(0, len(boxes) - 1))
        box = boxes[index]
        match draw(st.sampled_from(["lose", "repeat", "move", "grow"])):
            case "lose":
                del boxes[index]
            case "repeat":
                boxes.append(box)
            case "move":
                boxes[index] = Box(tuple(place + draw(st.integers(-1, 1)) for place in box.offset), box.shape)
            case "grow":
                boxes[index] = Box(box.offset, tuple(side + draw(st.integers(0, 1)) for side in box.shape))
    return shape, boxes


def elements(box: Box) -> Counter[tuple[int, ...]]:
    return Counter(product(*(range(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))))


@given(tensors_with_boxes())
def test_boxes_are_exact_just_where_each_element_is_counted_once(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    held: Counter[tuple[int, ...]] = sum(map(elements, boxes), Counter())
    exact = held == elements(Box.full(shape)) or not elements(Box.full(shape))
    assert (flaw(shape, boxes) == "") == exact


def test_flaw_is_told_in_words() -> None:
    top, bottom = Box((0, 0), (2, 3)), Box((2, 0), (2, 3))
    assert flaw((4, 3), [top, bottom]) == ""
    assert flaw((4, 3), [top]) == "6 of its 12 elements are missing"
    assert flaw((4, 3), [top, top, bottom]) == "parts of it overlap"
    assert flaw((4, 3), [top, top]) == "parts of it overlap, and others are missing"
    assert flaw((4, 3), [Box((0,), (12,))]) == "a part of it has another number of dimensions"
    assert flaw((), [Box((), ())]) == ""
    assert flaw((), []) == "1 of its 1 elements are missing"


def test_tensor_of_many_dimensions_is_looked_at_in_no_time() -> None:
    shape = (2,) * 40
    assert flaw(shape, [Box((half, *[0] * 39), (1, *[2] * 39)) for half in range(2)]) == ""


@given(one=tensors_with_boxes(), other=st.data())
def test_overlap_holds_what_is_in_both(one: tuple[tuple[int, ...], list[Box]], other: st.DataObject) -> None:
    _, boxes = one
    if not boxes:
        return
    first, second = (other.draw(st.sampled_from(boxes)) for _ in range(2))
    common = first.overlap(second)
    assert (elements(common) if common else Counter()) == elements(first) & elements(second)


@given(SIDES, SIDES)
def test_box_is_read_as_it_is_written(offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
    box = Box(offset[: len(shape)] + (7,) * (len(shape) - len(offset)), shape)
    assert Box.from_text(str(box)) == box
    record = TensorRecord("float32", shape, {"a-file": box, "another": box})
    assert TensorRecord.from_text(str(record)) == record


@pytest.mark.parametrize("text", ["3", "1:2:3", "a:b", "0:1,"])
def test_text_that_is_no_box_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # of int, or ours
        Box.from_text(text)


def test_what_several_have_written_is_put_together_and_they_must_agree() -> None:
    def half(file: str, begin: int, dtype: str = "float32") -> dict[str, TensorRecord]:
        return {"weight": TensorRecord(dtype, (4,), {file: Box((begin,), (2,))})}

    both = joined([half("a", 0), half("b", 2)])
    assert (list(both["weight"].parts), first_flaw(both)) == (["a", "b"], "")
    assert first_flaw(joined([half("a", 0)])) == "weight is incomplete: 2 of its 4 elements are missing"
    with pytest.raises(ValueError, match=r"weight is float32\[4\] in one file and int8\[4\] in another"):
        joined([half("a", 0), half("b", 2, "int8")])
