"""Tensors as clients send them, in JSON or safetensors: read, checked against what the model takes, written back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from manyhosts.export.description import Description, TensorSpec

BINARY = "application/vnd.safetensors"
# numpy has no bfloat16: such tensors travel as float32
_BF16 = {"bfloat16": "float32"}
# By the names of the model's inputs or outputs, each of shape (samples, …)
Arrays = dict[str, np.ndarray]
# What was sent, by the kind of dtype that numpy gave it
_WRONG = {"U": "words", "O": "mixed or too large values", "b": "booleans", "f": "fractions"}


class Refused(Exception):
    """A request that cannot be answered, with its status and a sentence for the client."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


def numpy_dtype(spec: TensorSpec) -> np.dtype[Any]:
    """The dtype in which a tensor travels."""
    return np.dtype(_BF16.get(spec.dtype, spec.dtype))


def limits(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """The least and the largest number of a dtype of numbers."""
    found: Any = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    return dtype.type(found.min).item(), dtype.type(found.max).item()


def parsed(body: bytes) -> Any:
    """`inputs` of a JSON request.

    Raises:
        Refused: it is no JSON, or has no `inputs`.
    """
    try:
        content = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as cause:
        raise Refused(400, f"the body is not JSON: {str(cause)[:200]}" if body else "the body is empty") from cause
    if not isinstance(content, dict) or not isinstance(content.get("inputs"), list):
        raise Refused(422, 'the body must be {"inputs": [...]}, a list with one entry for each sample')
    if other := sorted(content.keys() - {"inputs"}):
        raise Refused(422, f"{other[0]!r:.100} is not known: the body has inputs alone")
    if not content["inputs"]:
        raise Refused(422, "inputs is empty: send at least one sample")
    return content["inputs"]


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number")


def from_json(samples: Sequence[Any], described: Description) -> Arrays:
    """The inputs of the model, from a list of samples; of several inputs each sample is an object with their names.

    Raises:
        Refused: they are not what the model takes.
    """
    specs = described.inputs
    if len(specs) == 1 and not any(isinstance(sample, dict) for sample in samples):
        columns = {specs[0].name: list(samples)}
    else:
        names = {spec.name for spec in specs}
        for number, sample in enumerate(samples):
            if not isinstance(sample, dict) or sample.keys() != names:
                raise Refused(422, f"sample {number} must be an object with {', '.join(sorted(names))}")
        columns = {spec.name: [sample[spec.name] for sample in samples] for spec in specs}
    return {spec.name: _array(columns[spec.name], spec) for spec in specs}


def _array(column: list[Any], spec: TensorSpec) -> np.ndarray:
    dtype = numpy_dtype(spec)
    try:
        array = np.array(column)
        if dtype.kind == "f" and array.dtype.kind == "O" and all(type(each) in (int, float) for each in array.flat):
            array = array.astype(np.float64)  # integers of more than 64 bits
    except OverflowError as cause:
        raise Refused(422, f"{spec.name}: a value does not fit into {spec.dtype}") from cause
    except (ValueError, RecursionError) as cause:
        raise Refused(422, f"{spec.name}: the samples differ in shape, and each must be {_sides(spec)}") from cause
    fits = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}.get(dtype.kind, "")
    if array.dtype.kind not in fits:
        sent = _WRONG.get(array.dtype.kind, array.dtype.name)
        raise Refused(422, f"{spec.name}: {sent} were sent, and the model takes {spec.dtype}")
    return _checked(array, spec)


def _checked(array: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """`array` in the dtype of `spec`.

    Raises:
        Refused: its shape is another, or a value does not fit into that dtype.
    """
    sides = array.shape[1:]
    if len(sides) != len(spec.shape) or any(b not in (None, a) for a, b in zip(sides, spec.shape, strict=True)):
        raise Refused(422, f"{spec.name}: each sample must be {_sides(spec)}, and {list(sides)} was sent")
    if not array.size:
        raise Refused(422, f"{spec.name}: there are no numbers in it")
    dtype = numpy_dtype(spec)
    if array.dtype != dtype:
        least, most = limits(dtype)
        if not least <= array.min().item() <= array.max().item() <= most:
            raise Refused(422, f"{spec.name}: a value does not fit into {spec.dtype}")
    array = np.ascontiguousarray(array, dtype)
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise Refused(422, f"{spec.name}: a value is infinite or not a number")
    return array


def _sides(spec: TensorSpec) -> str:
    return (
        str(["any" if side is None else side for side in spec.shape]).replace("'", "") if spec.shape else "one number"
    )


def from_binary(body: bytes, described: Description) -> Arrays:
    """The inputs of the model, from the bytes of a safetensors file with a tensor (samples, …) of each name.

    Raises:
        Refused: they are not what the model takes.
    """
    try:
        found = load(body)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as cause:
        raise Refused(400, f"the body is not a safetensors file: {str(cause)[:200]}") from cause
    if found.keys() != {spec.name for spec in described.inputs}:
        raise Refused(422, f"the file must hold the tensors {', '.join(spec.name for spec in described.inputs)} alone")
    counts = {len(each) if each.ndim else 0 for each in found.values()}
    if len(counts) != 1 or 0 in counts:
        raise Refused(422, "each tensor needs a first dimension with one entry for each sample, the same for all")
    arrays = {}
    for spec in described.inputs:
        if found[spec.name].dtype != numpy_dtype(spec):
            raise Refused(422, f"{spec.name}: {found[spec.name].dtype} was sent, and the model takes {spec.dtype}")
        arrays[spec.name] = _checked(found[spec.name], spec)
    return arrays


def to_binary(outputs: Arrays) -> bytes:
    """The outputs as the bytes of a safetensors file."""
    return bytes(save({name: np.ascontiguousarray(each) for name, each in outputs.items()}))


def to_json(outputs: Arrays) -> bytes:
    """`{"outputs": [...]}`: one entry for each sample; an object where the model has several outputs.

    JSON has no word for NaN and infinity: null represents them.
    """
    rows: dict[str, list[Any]] = {}
    for name, each in outputs.items():
        rows[name] = each.tolist() if each.dtype.kind != "f" or np.isfinite(each).all() else _nulls(each.tolist())
    if len(rows) == 1:
        [samples] = rows.values()
    else:
        samples = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
    return json.dumps({"outputs": samples}).encode()


def _nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_nulls(each) for each in value]
    return value if math.isfinite(value) else None


def samples_of(arrays: Mapping[str, np.ndarray]) -> int:
    """How many samples there are."""
    return len(next(iter(arrays.values())))
