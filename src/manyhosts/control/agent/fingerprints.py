"""Fingerprints of tensors: equal ones for equal values, without waiting for a GPU before all are asked for.

Of what is large, every n-th element counts: two sets of random weights, or two batches, differ nearly everywhere.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_MOST_ELEMENTS = 1 << 20
"""Of one batch, or of all weights together."""
_MOST_TIMES = 4
"""How often something is added to one name: of many micro-batches the first ones are enough."""
_DEEPEST = 6


class Fingerprints:
    """Collects samples of tensors under names, on the devices where they are, and reads all of them at once."""

    def __init__(self) -> None:
        self._words: dict[str, str] = {}
        self._pieces: list[tuple[str, Any]] = []
        self._times: Counter[str] = Counter()

    def add(self, name: str, tensors: Sequence[Any], words: Iterable[str] = ()) -> None:
        """Take some elements of each of `tensors` now; `words` belong to the fingerprint too."""
        torch: Any = sys.modules["torch"]
        if any(each.is_cuda for each in tensors) and torch.cuda.is_current_stream_capturing():
            return  # what is done now would be repeated with the captured graph
        if self._times[name] == _MOST_TIMES:
            return
        self._times[name] += 1
        every = max(1, -(-sum(each.numel() for each in tensors) // _MOST_ELEMENTS))
        with torch.no_grad():
            taken = [each.detach().reshape(-1)[::every].contiguous().clone().view(torch.uint8) for each in tensors]
        self._words[name] = " ".join([*words, *(f"{each.dtype}{list(each.shape)}" for each in tensors)])
        self._pieces += [(name, each) for each in taken]

    def read(self) -> dict[str, str]:
        """The fingerprint of each name. This is where a GPU is waited for, once."""
        torch: Any = sys.modules["torch"]
        hashes = {name: hashlib.blake2b(words.encode(), digest_size=8) for name, words in self._words.items()}
        for device in dict.fromkeys(piece.device for _, piece in self._pieces):
            mine = [(name, piece) for name, piece in self._pieces if piece.device == device]
            read = torch.cat([piece for _, piece in mine]).cpu().numpy()
            begin = 0
            for name, piece in mine:
                hashes[name].update(read[begin : begin + piece.numel()].tobytes())
                begin += piece.numel()
        return {name: found.hexdigest() for name, found in hashes.items()}


def tensors_in(batch: object) -> tuple[list[Any], list[str]]:
    """The tensors in a batch of any shape, and the words and numbers in it."""
    torch: Any = sys.modules["torch"]
    numpy: Any = sys.modules.get("numpy")
    tensors, words = [], []
    for leaf in _leaves(batch, _DEEPEST):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif numpy is not None and isinstance(leaf, numpy.ndarray) and leaf.dtype != object:
            tensors.append(torch.as_tensor(leaf))
        elif isinstance(leaf, str | int | float | bytes):
            words.append(repr(leaf))
    return tensors, words


def _leaves(thing: object, depth: int) -> Iterator[object]:
    if isinstance(thing, Mapping):
        for key in thing:
            yield from _leaves(thing[key], depth - 1) if depth else ()
    elif isinstance(thing, list | tuple):
        for each in thing:
            yield from _leaves(each, depth - 1) if depth else ()
    else:
        yield thing
