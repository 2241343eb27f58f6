"""Whether the script's own values, such as those of `run.state`, are equal on all workers; the first other is named."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.world import World
from manyhosts.errors import SnapshotError, TrainingError
from manyhosts.snapshot.fingerprint import tensor_checksums
from manyhosts.snapshot.flatten import flatten

_MOST = 40
"""Letters of a value in a message."""


def value_checksums(values: Mapping[str, Any]) -> dict[str, str]:
    """Name → a checksum of a nested value. One that no snapshot could keep is known by its kind alone."""
    return {name: _checksum(value) for name, value in values.items()}


def _checksum(value: Any) -> str:
    try:
        apart = flatten(value)
    except SnapshotError:
        return type(value).__name__
    sums = tensor_checksums(apart.tensors)
    return f"{zlib.crc32(json.dumps(apart.nodes).encode()):08x} {' '.join(sums[name] for name in sorted(sums))}"


def difference_of_values(
    world: World, values: Mapping[str, Any], own: Mapping[str, str], moment: str
) -> TrainingError | None:
    """What is to be raised where a value differs between workers; None where all are equal. All workers call this.

    `own`: its `value_checksums`.
    """
    reported: list[dict[str, list[str]]] = gather_plain(
        world, {name: [own[name], _in_words(value)] for name, value in values.items()}
    )
    for name in dict.fromkeys(name for row in reported for name in row):
        found = [row.get(name, ["", "nothing"]) for row in reported]
        if len({checksum for checksum, _ in found}) > 1:
            return TrainingError(
                f"{name} differs: {_who([words for _, words in found])}",
                where=moment,
                fix="change it by what is equal on all workers: what run.backward and run.update return, "
                "run.steps_done; what belongs to a part of the batch is kept by run.part.keep",
            )
    return None


def _who(words: Sequence[str]) -> str:
    """`it is 3 on rank 0, 4 on rank 1`; without values where these look alike."""
    if len(set(words)) == 1:
        return f"it is {words[0]} on each rank, and not the same one"
    return "it is " + ", ".join(f"{each} on rank {rank}" for rank, each in enumerate(words[:4]))


def _in_words(value: Any) -> str:
    if hasattr(value, "shape"):
        shape = tuple(value.shape)
        return f"{value.item()!r}" if shape == () else f"a {type(value).__name__} of shape {shape}"
    text = repr(value)
    return text if len(text) <= _MOST else f"a {type(value).__name__}"
