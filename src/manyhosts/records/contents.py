"""What the files of a snapshot hold, compared with its manifest and with each other.

No torch here: `manyhosts snapshots verify` is to refuse whatever a run would refuse.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from manyhosts.errors import SnapshotError
from manyhosts.records.manifest import Files, Manifest, fix_of
from manyhosts.records.tensor_parts import Box, TensorRecord, joined

PLACES = "DCP_SHARDING_INFO"
"""The key under which torch.distributed.checkpoint.HuggingFaceStorageReader looks for the places of parts."""
CODES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "complex64": ("C64", 8),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
}
"""By the name of a dtype: the word of safetensors for it, and the bytes of an element."""
_NAMES = {code: (name, size) for name, (code, size) in CODES.items()}
_LENGTH = 8
"""Bytes with which a safetensors file says how long its header is."""


def headers_of(files: Files, manifest: Manifest) -> dict[str, dict[str, TensorRecord]]:
    """What the header of each file of the state's tensors says of those in it, in the order of their bytes.

    Raises:
        SnapshotError: one cannot be read.
    """
    names = [name for name in manifest.files if name.startswith("tensors-")]
    with _readable("the header of a file", files):
        return {name: _in_file(files, name, manifest.files[name].bytes) for name in names}


def records_of(
    files: Files, manifest: Manifest, headers: Mapping[str, Mapping[str, TensorRecord]] | None = None
) -> Mapping[str, TensorRecord]:
    """Where each tensor of the state is: as the files say, the manifest, where it says so, and `state.json`, all alike.

    `headers`: what `headers_of` gave, where it was called before.

    Raises:
        SnapshotError: they do not, or a file cannot be read.
    """
    if "state.json" not in manifest.files:
        raise _damaged("the manifest does not name state.json", files)
    headers = headers_of(files, manifest) if headers is None else headers
    with _readable("the header of a file", files):
        found = joined(headers.values())
    if manifest.has_parts:
        for name in sorted(found.keys() | manifest.tensors.keys()):
            if found.get(name) != manifest.tensors.get(name):
                raise _damaged(f"the files hold other parts of {name} than the manifest says", files)
    _compare("state.json", found, files)
    return manifest.tensors if manifest.has_parts else found


def check_owns(files: Files, manifest: Manifest, *, left_to_others: Collection[str] = ()) -> None:
    """See that of what each worker gave as its own, values and tensors belong together.

    `left_to_others`: files that somebody else looks into.

    Raises:
        SnapshotError: they do not, or a file cannot be read.
    """
    for name in manifest.files:
        tensors = name.removesuffix(".json") + ".safetensors"
        if name.startswith("own-") and name.endswith(".json") and tensors not in left_to_others:
            with _readable(tensors, files):
                in_file = _in_file(files, tensors, manifest.files[tensors].bytes) if tensors in manifest.files else {}
            _compare(name, in_file, files)


def _compare(text: str, in_file: Mapping[str, TensorRecord], files: Files) -> None:
    """See that the values in the file `text` name just those tensors that the others hold."""
    named = _Named()
    with _readable(text, files):
        unflatten(json.loads(b"".join(files.pieces(text))), named)
    if lost := sorted(named.names ^ in_file.keys()):
        where = f"{text} names" if lost[0] not in in_file else "the files hold"
        raise _damaged(f"only {where} {lost[0]}", files)


class _Named:
    """In the place of tensors: notes which are asked for."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> _Named:
        self.names.add(name)
        return self

    def numpy(self) -> None:
        """As if it were one."""


def _in_file(files: Files, name: str, size: int) -> dict[str, TensorRecord]:
    """What the header of a safetensors file of `size` bytes says of each tensor in it.

    Raises:
        ValueError, KeyError, TypeError: it is none, or its tensors do not fill it.
    """
    start = b""
    for piece in files.pieces(name):
        start += piece
        if len(start) >= _LENGTH and len(start) >= (begin := _LENGTH + int.from_bytes(start[:_LENGTH], "little")):
            break
    else:
        raise ValueError(f"{name} ends within its header")
    header = json.loads(start[_LENGTH:begin])
    places = json.loads(header.pop("__metadata__", {}).get(PLACES, "{}"))
    found, end = {}, 0
    for tensor, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, itemsize = _NAMES[entry["dtype"]]
        local, (first, last) = tuple(entry["shape"]), entry["data_offsets"]
        if first != end or last != first + itemsize * math.prod(local):
            raise ValueError(f"{tensor} is not in {name} where its header says")
        end = last
        place = places.get(tensor)
        offset, shape = (tuple(place["saved_offsets"]), tuple(place["shape"])) if place else ((0,) * len(local), local)
        found[tensor] = TensorRecord(dtype, shape, {name: Box(offset, local)})
    if begin + end != size:
        raise ValueError(f"the tensors of {name} take {end} bytes, and it has {size - begin} for them")
    return found


def unflatten(nodes: Any, tensors: Any) -> Any:
    """The state that `snapshot.flatten` flattened, in the same types and order; a dict of any kind comes back as one.

    `tensors`: gives each by its name.

    Raises:
        KeyError, TypeError, ValueError: `nodes` was not made so, or a tensor that it names is not there.
    """
    if isinstance(nodes, list):
        return [unflatten(node, tensors) for node in nodes]
    if not isinstance(nodes, dict):
        return nodes
    if len(nodes) == 1:
        [(tag, content)] = nodes.items()
        if tag.startswith("$"):
            return _untag(tag, content, tensors)
    return {key: unflatten(node, tensors) for key, node in nodes.items()}


_TAGS: dict[str, Callable[[Any, Any], Any]] = {
    "$tensor": lambda content, tensors: tensors[content],
    "$array": lambda content, tensors: tensors[content].numpy(),
    "$tuple": lambda content, tensors: tuple(unflatten(node, tensors) for node in content),
    "$float": lambda content, tensors: float(content),
    "$bytes": lambda content, tensors: base64.b64decode(content),
    "$counter": lambda content, tensors: Counter({unflatten(key, tensors): count for key, count in content}),
    "$dict": lambda content, tensors: {unflatten(key, tensors): unflatten(node, tensors) for key, node in content},
}


def _untag(tag: str, content: Any, tensors: Any) -> Any:
    if tag not in _TAGS:
        raise ValueError(f"unknown tag {tag!r}")
    return _TAGS[tag](content, tensors)


def _damaged(what: str, files: Files) -> SnapshotError:
    return SnapshotError(what, where=files.where, fix=fix_of())


@contextmanager
def _readable(what: str, files: Files) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as cause:
        named = cause if isinstance(cause, ValueError) else f"{type(cause).__name__}: {cause}"
        raise _damaged(f"{what} cannot be read: {named}", files) from cause
