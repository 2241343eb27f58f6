"""What identifies a dataset: its length, and what a few of its samples hold.

A snapshot keeps this, so that a run is not resumed on other data unseen. Each sample is read under its own random
address, so augmentation does not matter. Floating-point numbers and pictures are compared by a few sums and not by
their bits: another processor, or another version of a decoder, may round otherwise.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from manyhosts.data import loader_process, randomness

SAMPLES = 8
"""Samples that are looked at."""
AT_LEAST = 2
BUDGET_S = 0.1
"""After the first `AT_LEAST` samples no further one is read when this has passed."""
_MOST_NUMBERS = 1 << 16
_EXACT_NUMBERS = 16
_TOLERANCE = 0.02
_SCALAR_TOLERANCE = 1e-4

_VARIES = ", unless classes are numbered by a set, whose order differs between processes: sort it, or use manyhosts run"
_INTEGERS = "whole numbers "
"""Before the digest of many; in older snapshots there is none."""

Print = list[str | list[float]]
"""Of a sample: words that must be equal, and sums of numbers that must be near each other."""


class Unknown(Exception):
    """A value of a kind that cannot be compared."""


class DataIdentity:
    """That of one training set, found when somebody first asks."""

    def __init__(self, dataset: Dataset[Any] | None, *, seed: int, elsewhere: bool, weights: str = "") -> None:
        """`weights`: what identifies those that samples are drawn by, or their order; empty without.

        `elsewhere`: read the samples in another process: this one has never opened the dataset, whose loader processes
        might not bear to share what it has open.
        """
        self.dataset, self._seed, self._elsewhere = dataset, seed, elsewhere
        self._weights = {"weights": weights} if weights else {}
        self._found: dict[str, Any] | None = None

    def __call__(self) -> dict[str, Any]:
        """In plain values. `unknown` says why no sample is in it, where none is."""
        if self._found is None:
            self._found = {**self._look(), **self._weights}
        return self._found

    def described(self) -> str:
        """The training set's class, and what it does to a sample where it says so: `transform`, as torchvision's do."""
        inner, said = self.dataset, [type(self.dataset).__qualname__]
        while inner is not None:
            for name in ("transform", "target_transform", "transforms"):
                if (rule := getattr(inner, name, None)) is not None:
                    said.append(f"{name}: {re.sub(' at 0x[0-9a-f]+', '', repr(rule))}")
            inner = getattr(inner, "dataset", None)
            said += [] if inner is None else [f"of {type(inner).__qualname__}"]
        return ", ".join(said)

    def _look(self) -> dict[str, Any]:
        dataset = self.dataset
        if dataset is None:
            return {}
        if isinstance(dataset, IterableDataset):
            return {"stream": type(dataset).__qualname__}
        length = len(cast(Any, dataset))
        if not self._elsewhere:
            return {"length": length, **_look_at_samples(dataset, length, self._seed)}
        looking = _Looking(dataset, length, self._seed)
        [found] = DataLoader(
            looking,
            batch_size=None,
            num_workers=1,
            multiprocessing_context=loader_process.context(),
            generator=torch.Generator(),
        )
        return {"length": length, **found}


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Why the data of `now` is not that of `before`, in a sentence; nothing where it may well be."""
    if "stream" in before or "stream" in now:
        kinds = [f"a stream of class {each['stream']}" if "stream" in each else "no stream" for each in (before, now)]
        return "" if kinds[0] == kinds[1] else f"the training set is {kinds[1]}, and the run began with {kinds[0]}"
    if before.get("length") != now.get("length"):
        return f"the training set has {now.get('length')} samples, and the run began with {before.get('length')}"
    if before.get("weights") != now.get("weights"):
        return "samples are drawn by other weights than when the run began, or in another order"
    kept, found = before.get("samples", {}), now.get("samples", {})
    for index in kept.keys() & found.keys():
        if not are_alike(kept[index], found[index]):
            varies = _VARIES if os.environ.get("PYTHONHASHSEED", "random") == "random" else ""
            return f"sample {index} of the training set is not what it was when the run began{varies}"
    return ""


def _look_at_samples(dataset: Dataset[Any], length: int, seed: int) -> dict[str, Any]:
    chosen = dict.fromkeys([*(randomness.seed_at(length, k) % length for k in range(SAMPLES - 2)), 0, length - 1])
    samples: dict[str, Print] = {}
    begin = time.perf_counter()
    try:
        with randomness.kept():
            if _keeps_draws(dataset, next(iter(chosen)), seed):
                return {"samples": {}, "unknown": KEEPS_DRAWS}
            for index in chosen:
                first, again = (_read(dataset, index, seed) for _ in range(2))
                if first != again:
                    # A generator of the dataset's own: no two looks at it are the same.
                    return {"samples": {}, "unknown": "a sample that is read twice differs"}
                samples[str(index)] = first
                if len(samples) >= AT_LEAST and time.perf_counter() - begin > BUDGET_S:
                    break
    except Unknown as kind:
        return {"samples": {}, "unknown": f"samples hold a {kind}"}
    except Exception as trouble:  # who trains on it will say more
        return {"samples": {}, "unknown": f"a sample cannot be read ({type(trouble).__name__})"}
    return {"samples": samples}


KEEPS_DRAWS = "a sample keeps the random numbers that it draws when it is read first"
"""Why no sample is known of a dataset that caches them augmented."""


def _keeps_draws(dataset: Dataset[Any], index: int, seed: int) -> bool:
    """Whether a sample that drew random numbers draws others, or none, when it is read again."""
    randomness.seed_all(seed, randomness.SAMPLE, 0, index)
    before = randomness.states()
    dataset[index]
    if not randomness.drawn_since(before):
        return False
    ended = randomness.states()
    randomness.seed_all(seed, randomness.SAMPLE, 0, index)
    dataset[index]
    return randomness.drawn_since(ended)


def _read(dataset: Dataset[Any], index: int, seed: int) -> Print:
    randomness.seed_all(seed, randomness.SAMPLE, 0, index)
    return list(print_of(dataset[index]))


class _Looking(IterableDataset[dict[str, Any]]):
    """Looks at the samples where it is iterated over: in a loader process."""

    def __init__(self, dataset: Dataset[Any], length: int, seed: int) -> None:
        self.dataset, self.length, self.seed = dataset, length, seed

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield _look_at_samples(self.dataset, self.length, self.seed)


# What a sample holds.


def print_of(value: Any) -> Iterator[str | list[float]]:
    """Of what a sample holds, or a batch of them.

    Raises:
        Unknown: it holds a kind of thing that cannot be compared.
    """
    if isinstance(value, torch.Tensor):
        yield from _tensor_print(value)
    elif isinstance(value, np.ndarray | np.generic):
        yield from _array_print(np.asarray(value))
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        yield _scalar_print(value)
    elif isinstance(value, Mapping):
        for key in value:
            yield str(key)
            yield from print_of(value[key])
    elif isinstance(value, list | tuple):
        yield from _list_print(value)
    elif dataclasses.is_dataclass(value):
        for entry in dataclasses.fields(value):
            yield from print_of(getattr(value, entry.name))
    elif hasattr(value, "__array_interface__"):  # a picture of PIL
        yield from _array_print(np.asarray(value))
    else:
        raise Unknown(type(value).__qualname__)


def _scalar_print(value: bool | float | str | bytes | None) -> str | list[float]:
    if isinstance(value, float):
        return [value if np.isfinite(value) else 0.0]
    if isinstance(value, str | bytes):
        return hashlib.sha256(value.encode() if isinstance(value, str) else value).hexdigest()[:16]
    return repr(value)


def _list_print(value: Sequence[Any]) -> Iterator[str | list[float]]:
    yield f"{len(value)} items"
    if len(value) > _EXACT_NUMBERS and all(type(item) is int for item in value):
        yield _INTEGERS + hashlib.sha256(repr(list(value)).encode()).hexdigest()[:16]
        return
    for item in value:
        yield from print_of(item)


def _tensor_print(tensor: torch.Tensor) -> Iterator[str | list[float]]:
    plain = tensor.detach().cpu()
    if plain.layout is not torch.strided or plain.is_quantized:
        raise Unknown(f"tensor of layout {plain.layout}")
    plain = plain.resolve_conj().resolve_neg()
    yield from _array_print((plain.float() if plain.dtype is torch.bfloat16 else plain).numpy())


def _array_print(array: NDArray[Any]) -> Iterator[str | list[float]]:
    if array.dtype.kind not in "biufc":
        raise Unknown(f"numpy array of {array.dtype}")
    yield f"{array.dtype}{list(array.shape)}"
    flat = array.reshape(-1)
    if array.dtype.kind in "biu" and flat.size <= _EXACT_NUMBERS:
        yield repr(flat.tolist())
        return
    flat = flat[:: max(1, -(-flat.size // _MOST_NUMBERS))]
    if array.dtype.kind == "c":
        flat = np.concatenate([flat.real, flat.imag])
    yield _sums(np.nan_to_num(flat.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0))


def _sums(numbers: NDArray[np.float64]) -> list[float]:
    """The root mean square of `numbers`, and their sums under some signs, of about the same size."""
    if not numbers.size:
        return []
    root = float(np.sqrt(numbers.size))
    # No product of matrices: that may start threads, and loader processes are forked from this one.
    sums = [np.sqrt(np.square(numbers).sum()) / root, *(_signs(numbers.size) * numbers).sum(axis=1) / root]
    return [float(f"{each:.6g}") for each in sums]  # the manifest is read by people, too


@lru_cache(maxsize=16)
def _signs(size: int) -> NDArray[np.float64]:
    """Shape (4, size): -1 and 1, the same on every machine."""
    drawn = np.frombuffer(np.random.RandomState(size).bytes(4 * size), dtype=np.uint8) & 1
    return (drawn.astype(np.float64) * 2 - 1).reshape(4, size)


def are_alike(before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Whether two of what `print_of` gives may be of the same things."""
    if len(before) != len(now):
        return False
    for old, new in zip(before, now, strict=True):
        if isinstance(old, str) or isinstance(new, str):
            if _bare(old) != _bare(new):
                return False
        elif len(old) != len(new):
            return False
        elif old:
            tolerance = _SCALAR_TOLERANCE if len(old) == 1 else _TOLERANCE
            allowed = tolerance * max(abs(old[0]), abs(new[0]))
            if any(abs(one - other) > allowed for one, other in zip(old, new, strict=True)):
                return False
    return True


def without_text(sample: Print) -> Print:
    """What is left of a sample without its texts."""
    return [each for each in sample if not (isinstance(each, str) and _DIGEST.fullmatch(each))]


_DIGEST = re.compile("[0-9a-f]{16}")
"""What replaces a text."""


def _bare(word: object) -> object:
    return word.removeprefix(_INTEGERS) if isinstance(word, str) else word


# What distinguishes one worker's dataset from another's without running the script's code: how it was split, and the
# tensors that it holds.
#
# A split or tensors that are drawn from a generator without a seed are others in every process. Reading a sample would
# run the script's code, so a dataset of the script's own is looked at only for datasets of PyTorch's that it holds.

ROWS = 8
"""Samples of a `TensorDataset` that are looked at, the first and the last among them."""
_MOST_INDICES = 1 << 16
_DEEPEST = 8


def print_of_set(dataset: Dataset[Any]) -> Print:
    """Words that must be equal on all workers, and sums that must be near each other; less where less is known."""
    return list(_look_in(dataset, _DEEPEST))


def _look_in(dataset: object, deep: int) -> Iterator[str | list[float]]:
    if deep == 0:
        return
    kind = type(dataset)
    if isinstance(dataset, Subset) and kind is Subset:
        yield _split(dataset.indices)
        yield from _look_in(dataset.dataset, deep - 1)
    elif isinstance(dataset, ConcatDataset) and kind is ConcatDataset:
        for each in dataset.datasets:
            yield from _look_in(each, deep - 1)
    elif isinstance(dataset, TensorDataset) and kind is TensorDataset:
        yield from _rows(dataset)
    elif isinstance(dataset, Dataset):
        for value in vars(dataset).values():
            if isinstance(value, Dataset):
                yield from _look_in(value, deep - 1)


def _split(indices: Any) -> str:
    """Which samples were chosen: of very many every second, third … is looked at."""
    try:
        chosen = np.asarray(indices[:: max(1, -(-len(indices) // _MOST_INDICES))], dtype=np.int64)
    except Exception:  # a sequence of the script's own kind
        return "split"
    return f"split {hashlib.sha256(chosen.tobytes()).hexdigest()[:16]}"


def _rows(dataset: TensorDataset) -> Iterator[str | list[float]]:
    if len(dataset) == 0:
        return
    rows = np.linspace(0, len(dataset) - 1, min(ROWS, len(dataset))).astype(int).tolist()
    for tensor in dataset.tensors:
        try:
            for row in rows:  # each a view: what is copied in threads may not be forked from any more
                yield from print_of(tensor[row])
        except (Unknown, RuntimeError, NotImplementedError):  # rows of sparse tensors are none
            yield "tensor"
