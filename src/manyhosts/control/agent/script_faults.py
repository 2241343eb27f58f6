"""Common faults of scripts for distributed training, as a worker sees them: worker and head find them together.

Seen are the passes over each `DataLoader` (which of them train, in which order, in which mode of the model), the files
that `torch.save` writes and `torch.load` reads, and the GPU of the weights. Whatever is certain only when several
workers are compared is decided by `head.output`. Tensors are compared by fingerprints, equal for equal values: of what
is large, every n-th element counts, and a GPU is waited for once. Nothing here imports torch; what fails here fails no
script.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from manyhosts.cluster import reports
from manyhosts.cluster.reports import Reporter

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


_MOST_FILES = 50
_OTHER_SNAPSHOTS = ("safetensors", "torch.distributed.checkpoint")
"""Who imports one of these may save and load in other ways than by torch.save."""


@dataclass(slots=True)
class _Pass:
    """One time through a loader."""

    dataset: int
    """Its identity."""
    samples: int
    sampler: Any
    epoch: int | None
    """The argument of a DistributedSampler's set_epoch; None where there is none, or it does not shuffle."""
    steps: int = 0
    batches: int = 0
    fingerprint: str = ""
    forwards: int = 0
    """Of a model in DistributedDataParallel."""
    in_train_mode: int = 0
    """How many of these found layers in train mode that behave otherwise in evaluation."""
    is_counted: bool = False


class ScriptFaults:
    """Follows the script through its passes and files, for as long as it runs."""

    def __init__(self, reporter: Reporter, account: dict[str, Any]) -> None:
        """`account` is what the script probe knows of the process group."""
        self._reporter, self._account = reporter, account
        self._steps = 0
        self._at_switch = 0
        self._reading: Any = None
        """The iterator that gave the newest batch."""
        self._passes: WeakKeyDictionary[Any, _Pass] = WeakKeyDictionary()
        self._present: _Pass | None = None
        self._trained_on: set[int] = set()
        self._validated: set[int] = set()
        self._epochs: dict[int, set[int]] = {}
        """By DistributedSampler: the epochs of which a pass has trained."""
        self._last_training: _Pass | None = None
        self._last_is_complete = False
        self._files: set[str] = set()
        self._loaded: list[str] = []
        self._has_begun = False
        self._modes: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
        self.is_off = False

    # What the script probe calls.

    def note_step(self, done: int) -> None:
        """So many optimizer steps are done."""
        self._steps = done

    def note_forward(self, model: Any) -> None:
        """A model in DistributedDataParallel computes."""
        now = self._present
        if now is None or now.steps or self._steps > self._at_switch:
            return  # a training pass: of no interest
        now.forwards += 1
        layers = self._modes.get(model)
        if layers is None:
            layers = self._modes[model] = [each for each in model.modules() if _differs_in_evaluation(each)]
        now.in_train_mode += any(layer.training for layer in layers)

    def watch_passes(self, loaders: Any) -> None:
        """Follow `torch.utils.data.dataloader`. Costs a comparison for each batch."""
        kind = loaders._BaseDataLoaderIter
        fetch = kind.__next__

        @functools.wraps(fetch)
        def fetch_and_follow(iterator: Any) -> Any:
            if iterator is not self._reading and not self.is_off:
                self._switch(iterator)
            try:
                batch = fetch(iterator)
            except StopIteration:
                self._end_pass(iterator)
                raise
            if (now := self._present) is not None:
                now.batches += 1
                if now.batches == 1:
                    self._look_at_first(now, batch)
            return batch

        kind.__next__ = fetch_and_follow

    def watch_files(self, serialization: Any) -> None:
        """Note which files `torch.save` writes and `torch.load` reads."""
        torch: Any = sys.modules["torch"]
        for name, note in (("save", self._note_saved), ("load", self._loaded.append)):
            wrapped = _noting(getattr(serialization, name), note, place=1 if name == "save" else 0)
            setattr(serialization, name, wrapped)
            if hasattr(torch, name):  # else it is being loaded, and takes it from there
                setattr(torch, name, wrapped)

    # Passes.

    def _switch(self, iterator: Any) -> None:
        """Another iterator than the last gives a batch: steps since then belong to the last one."""
        with contextlib.suppress(Exception):
            self._credit()
            self._reading, self._present = iterator, self._passes.get(iterator)
            if self._present is None:
                self._present = self._passes[iterator] = _new_pass(iterator)

    def _credit(self) -> None:
        now, self._at_switch, before = self._present, self._steps, self._at_switch
        if now is None or self._steps == before:
            return
        now.steps += self._steps - before
        self._trained_on.add(now.dataset)
        self._last_training, self._last_is_complete = now, False
        if not now.is_counted:
            now.is_counted = True
            self._count_epoch(now)

    def _count_epoch(self, now: _Pass) -> None:
        if not self._has_begun:
            self._has_begun = True
            others = any(name in sys.modules for name in _OTHER_SNAPSHOTS)
            self._report("began", epoch=now.epoch, loaded=self._loaded, other_ways=others)
        if now.epoch is None:
            return
        epochs = self._epochs.setdefault(id(now.sampler), set())
        if now.epoch in epochs:
            self._report("order", epoch=now.epoch)
        epochs.add(now.epoch)

    def _end_pass(self, iterator: Any) -> None:
        with contextlib.suppress(Exception):
            self._credit()
            now = self._passes.pop(iterator, None)
            self._reading = self._present = None
            if now is None:
                return
            if now.steps:
                self._last_is_complete = True
            elif now.fingerprint and now.dataset not in self._trained_on:
                self._validated.add(now.dataset)
                counts = {"samples": now.samples, "batches": now.batches, "fingerprint": now.fingerprint}
                wrong_mode = now.forwards > 0 and now.in_train_mode == now.forwards
                self._report("validation", **counts, train_mode=wrong_mode)

    def _look_at_first(self, now: _Pass, batch: object) -> None:
        """Take a fingerprint, once for each data set that is read without training on it, when training has begun."""
        if not self._steps or now.dataset in self._trained_on or now.dataset in self._validated or self.is_off:
            return
        with contextlib.suppress(Exception):
            tensors, words = tensors_in(batch)
            fingerprints = Fingerprints()
            fingerprints.add("batch", tensors, words)
            now.fingerprint = fingerprints.read()["batch"]

    # Files.

    def _note_saved(self, path: str) -> None:
        last = self._last_training
        if self._steps > self._at_switch:
            self._credit()
            last = self._last_training
        if last is not None and last.epoch is not None:
            self._report("saved", path=path, epoch=last.epoch, whole=self._last_is_complete)
        if path not in self._files and len(self._files) < _MOST_FILES:
            self._files.add(path)
            self._report("file", path=path)

    def _report(self, fault: str, **fields: object) -> None:
        if not self.is_off:
            known = {name: self._account.get(name) for name in ("workers", "world", reports.IN_PARTS)}
            self._reporter.send("fault", fault=fault, host=os.uname().nodename, **known, **fields)


def gpu_of(weight: Any) -> tuple[str, int] | None:
    """Which GPU of its host a weight is on, by the name that all workers call it by, and how many there are."""
    torch: Any = sys.modules["torch"]
    rehearsed = getattr(weight, "rehearsed_gpu", None)
    if rehearsed is None and weight.device.type != "cuda":
        return None
    index = weight.device.index or 0 if rehearsed is None else rehearsed
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return (visible[index] if index < len(visible) else str(index)), int(torch.cuda.device_count())


def _new_pass(iterator: Any) -> _Pass:
    sampler: Any = getattr(iterator._index_sampler, "sampler", None)
    divides = type(sampler).__name__ == "DistributedSampler" and sampler.shuffle
    dataset = iterator._dataset
    return _Pass(
        dataset=id(dataset),
        samples=len(dataset) if hasattr(dataset, "__len__") else 0,
        sampler=sampler,
        epoch=sampler.epoch if divides else None,
    )


def _differs_in_evaluation(layer: Any) -> bool:
    names = {kind.__name__ for kind in type(layer).__mro__}
    return "_BatchNorm" in names or ("_DropoutNd" in names and layer.p > 0)


def _noting(function: Callable[..., Any], note: Callable[[str], None], *, place: int) -> Callable[..., Any]:
    """`function`, which calls `note` with the file given as argument number `place`, when it is done."""

    @functools.wraps(function)
    def act(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        file = arguments[place] if len(arguments) > place else named.get("f")
        with contextlib.suppress(Exception):
            if isinstance(file, str | os.PathLike) and not str(path := os.path.abspath(os.fspath(file))).startswith(
                "/dev/"
            ):
                note(str(path))
        return result

    return act
