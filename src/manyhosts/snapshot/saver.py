"""`mh.Saver`: snapshots of what a loop of your own trains, complete or absent, checked by hash when they are read."""

from __future__ import annotations

import os
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist

from manyhosts.config.snapshots import Snapshots
from manyhosts.data.sampler import Order
from manyhosts.errors import ConfigError
from manyhosts.records import run_lock
from manyhosts.records.manifest import Facts, found_in
from manyhosts.snapshot.fingerprint import fingerprint
from manyhosts.snapshot.load import Loaded, load, same_model
from manyhosts.snapshot.store import Store
from manyhosts.units import Duration

_TORCH, _PYTHON, _NUMPY = 5056, 625, 625
"""Bytes of torch's generator, and numbers of 32 bits of the two others."""


class Stateful(Protocol):
    """A model, an optimizer, a scheduler, an `mh.Order`, or an object of the script's own."""

    def state_dict(self) -> Mapping[str, Any]:
        """Nested values: tensors, numbers, words."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Be as when `state_dict` gave `state`."""


class Saver:
    """Saves and restores named objects of a loop that is equal on all workers (one process, DistributedDataParallel).

    ```python
    saver = mh.Saver("snapshots", mh.Snapshots(every="100 steps"), model=model, optimizer=optimizer, order=order)
    saver.resume()
    for epoch in range(order.epoch, 20):
        for batch in loader:
            ...
            saver.after_step()
    saver.close()
    ```

    Rank 0 writes during training; every worker reads. Besides the objects a snapshot has the number of the step and
    the random generators (torch on the CPU, NumPy, Python) of each worker, which a resume on as many workers restores.

    Args:
        folder: where the snapshots lie; all workers see it.
        snapshots: when one is made, and how many are kept.
        objects: by name, what has `state_dict` and `load_state_dict`. One named `order` moves on with each step.

    Raises:
        ConfigError: there is nothing to save, or something that has no state.
    """

    def __init__(self, folder: str | Path, snapshots: Snapshots | None = None, **objects: Stateful) -> None:
        given: Sequence[tuple[Any, Any]] = ((folder, str | os.PathLike), (snapshots, Snapshots | None))
        if wrong := [type(each).__name__ for each, kinds in given if not isinstance(each, kinds)]:
            raise ConfigError(
                f"a {wrong[0]} comes where the folder and mh.Snapshots(…) belong",
                where="mh.Saver",
                fix='write mh.Saver("snapshots", mh.Snapshots(every="100 steps"), model=model, optimizer=optimizer)',
            )
        self.folder, self.settings = Path(folder), snapshots or Snapshots()
        if self.settings.to is not None:
            raise ConfigError(
                "a saver writes to one folder", where="mh.Saver(snapshots=…)", fix="leave to= out, or use mh.Run"
            )
        for name, each in objects.items():
            if not hasattr(each, "state_dict") or not hasattr(each, "load_state_dict"):
                raise ConfigError(
                    f"{name} is a {type(each).__name__}, which has no state_dict() and load_state_dict()",
                    where=f"mh.Saver({name}=…)",
                    fix="give models, optimizers, schedulers, an mh.Order, or objects that have both",
                )
        if not objects:
            raise ConfigError(
                "there is nothing to save", where="mh.Saver", fix="give model=model, optimizer=optimizer, order=order"
            )
        self.objects = {
            name: getattr(each, "module", each) if _is_wrapper(each) else each for name, each in objects.items()
        }
        """Without DistributedDataParallel around a model, so that its names are the model's own."""
        self.every = Duration.parse(self.settings.every, where="snapshots.every")
        order = objects.get("order")
        if self.every.epochs is not None and not hasattr(order, "epoch"):
            fix = "give it as order=mh.Order(…), or say how often in steps or minutes"
            raise ConfigError("snapshots are asked for by epochs, and no order counts them", where="mh.Saver", fix=fix)
        if order is None and (other := [name for name, each in objects.items() if isinstance(each, Order)]):
            fix = f"give it as order=, and not as {other[0]}="
            raise ConfigError(
                f"{other[0]} is an mh.Order, which moves on under its own name alone", where="mh.Saver", fix=fix
            )
        self.store = Store(self.folder, keep=self.settings.keep) if _rank() == 0 else None
        self.step = 0
        """Steps done."""
        self._lock: run_lock.RunLock | None = None
        self._is_begun = False
        self._saved_at, self._saved_epoch, self._saved_time = 0, 0, time.monotonic()
        self._size, self._is_first = _size(), True

    def resume(self) -> int:
        """Restore the newest snapshot that is complete, where there is one. All workers call this. Returns the step.

        Raises:
            SnapshotError: there are snapshots, and none can be used; or this one is of another model.
        """
        found: Loaded | None = None
        if self.store is not None:
            found = self.store.latest(same_model(self._model()))
        step = _agreed(-1 if found is None else found.facts.step)
        self._is_first = False
        if step < 0:
            return 0
        if found is None:
            found = load(self.folder / f"step-{step:08d}", same_model(self._model()))
        for skipped in found.skipped:
            sys.stderr.write(f"manyhosts: {skipped.path} is passed over: {skipped.reason}\n")
        kept = found.state["objects"]
        if surplus := sorted(set(kept) - set(self.objects)):
            raise ConfigError(
                f"the snapshot of step {step} has {surplus[0]}, which the saver was not given: it would begin anew",
                where=str(found.path),
                fix=f"give mh.Saver(…, {surplus[0]}={surplus[0]}), or begin in another folder",
            )
        for name, each in self.objects.items():
            if name not in kept:
                raise ConfigError(
                    f"the snapshot of step {step} has no {name}, but {', '.join(sorted(kept))}",
                    where=str(found.path),
                    fix="give the saver the objects that it had, or begin in another folder",
                )
            each.load_state_dict(_plain(kept[name]))
        generators = found.state["random"]
        if len(generators) == _size():
            own, order = generators[_rank()], self.objects.get("order")
            if isinstance(order, Order) and order.position.sample:
                order.before_first = partial(_set_generators, own)  # in an epoch: its loader has drawn a seed before
            else:
                _set_generators(own)
        self.step = self._saved_at = step
        self._saved_epoch, self._saved_time = found.facts.epoch, time.monotonic()
        return step

    def after_step(self) -> None:
        """An optimizer step is done: count it, and make a snapshot where one is due. All workers call this.

        One that is due at the end of an epoch is made after the next step, or by `close`: what the script does after an
        epoch (a scheduler's step, say) is in it.
        """
        if not self._is_begun:
            self._see_that_alone()
        order = self.objects.get("order")
        if isinstance(order, Order):
            order.advance()
        self.step += 1
        if self._is_due() and not (isinstance(order, Order) and not order.position.sample):
            self.save()

    def _see_that_alone(self) -> None:
        """See that no other process saves in the folder: each would delete what is old of the other's. A script that
        only resumes, to evaluate say, may come at any time.
        """
        is_anothers = False
        if self.store is not None:
            try:
                self._lock = self._lock or run_lock.take(self.folder, run_lock.token_of_this_run())
                if self._lock is not None:
                    self._lock.check()
            except ConfigError:
                is_anothers = True
            except OSError:  # a disk that takes no lock
                self._lock = None
        self._is_begun = True
        if _agreed(is_anothers):
            owner = run_lock.owner_of(self.folder)
            raise ConfigError(
                "another process saves in this folder" if owner is None else owner.refusal(self.folder).what,
                where=f"mh.Saver, {self.folder}",
                fix="wait for its end or end it, or give another folder",
            )

    def _is_due(self) -> bool:
        every = self.every
        is_due = every.steps is not None and self.step - self._saved_at >= every.steps
        is_due = is_due or (every.epochs is not None and self._epoch() - self._saved_epoch >= every.epochs)
        if every.seconds is not None and not is_due:
            is_due = bool(_agreed(int(time.monotonic() - self._saved_time >= every.seconds)))
        return is_due

    def save(self) -> None:
        """Make a snapshot now. All workers call this, at the same step. What the disk refuses is said.

        Raises:
            ConfigError: the folder has snapshots of later steps, of a run that was not resumed; another process saves
                there; or the workers have come together after the saver was made.
        """
        if _size() > self._size:
            raise ConfigError(
                "the saver was made before torch.distributed was initialised, and every process would write",
                where="mh.Saver",
                fix="make it after init_process_group(), Accelerator() or fabric.launch()",
            )
        if self._is_first:
            newest = (
                0
                if self.store is None
                else max((each.step for each in found_in(self.folder) if each.how != "half"), default=0)
            )
            if (newest := _agreed(newest)) > self.step:
                raise ConfigError(
                    f"the folder has a snapshot of step {newest}, and this is step {self.step} of a run that was not "
                    "resumed",
                    where=str(self.folder),
                    fix="call saver.resume() before the loop, or give another folder",
                )
            self._is_first = False
        self._see_that_alone()
        self._saved_at, self._saved_epoch, self._saved_time = self.step, self._epoch(), time.monotonic()
        generators = _gathered(_generators())
        if self.store is None:
            return
        order = self.objects.get("order")
        place = {} if order is None else order.state_dict()
        position = {key: int(value) for key, value in place.items() if isinstance(value, Integral)}
        facts = Facts(
            step=self.step,
            epoch=self._epoch(),
            position={key: position[key] for key in ("epoch", "sample") if key in position},
            strategy="ddp" if _size() > 1 else "single",
            model=self._model(),
        )
        objects = {name: dict(each.state_dict()) for name, each in self.objects.items()}
        self.store.save({"objects": objects, "random": generators}, facts)
        self._report()

    def close(self) -> None:
        """Make a snapshot of the last step, where there is none, and wait until it is on the disk."""
        if self._saved_at != self.step:
            self.save()
        if self.store is not None:
            self.store.wait()
            self._report()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _report(self) -> None:
        assert self.store is not None, "rank 0 writes"
        for news in self.store.finished():
            if reason := getattr(news, "reason", ""):
                sys.stderr.write(f"manyhosts: no snapshot of step {news.step}: {reason}\n")

    def _epoch(self) -> int:
        order = self.objects.get("order")
        return int(getattr(order, "epoch", 0))

    def _model(self) -> dict[str, Any]:
        models = {name: each for name, each in self.objects.items() if isinstance(each, nn.Module)}
        return {f"{name}.{key}": row for name, each in models.items() for key, row in fingerprint(each).items()}


def _is_wrapper(each: Any) -> bool:
    return isinstance(each, nn.parallel.DistributedDataParallel)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _device() -> torch.device:
    return torch.device(dist.distributed_c10d._get_object_coll_device(dist.group.WORLD))


def _agreed(number: int) -> int:
    """Rank 0's `number`."""
    if _size() == 1:
        return number
    reported = torch.tensor([number], device=_device())
    dist.broadcast(reported, 0)
    return int(reported)


def _gathered(own: Tensor) -> Tensor:
    """Of all workers, by rank in the first dim."""
    if _size() == 1:
        return own[None]
    rows = [torch.empty_like(own, device=_device()) for _ in range(_size())]
    dist.all_gather(rows, own.to(_device()))
    return torch.stack(rows).cpu()


def _generators() -> Tensor:
    """The states of torch's, Python's and NumPy's generators, shape (bytes,), uint8."""
    _, numbers, place, has, half = np.random.get_state(legacy=True)  # a tuple, as asked for
    _, python, other = random.getstate()
    halves = [_of_half(float(half) if has else None), _of_half(other)]
    own = np.concatenate([np.array([*python, *numbers, place], dtype=np.uint32), *halves])
    return torch.cat([torch.get_rng_state(), torch.from_numpy(own.view(np.uint8).copy())])


def _set_generators(kept: Tensor) -> None:
    torch.set_rng_state(kept[:_TORCH].clone())
    numbers: Any = kept[_TORCH:].numpy().copy().view(np.uint32)
    end = _PYTHON + _NUMPY
    half, other = (_half(numbers[end + begin : end + begin + 3]) for begin in (0, 3))
    random.setstate((3, tuple(int(each) for each in numbers[:_PYTHON]), other))
    place = int(numbers[end - 1])
    np.random.set_state(("MT19937", numbers[_PYTHON : end - 1], place, int(half is not None), half or 0.0))


def _of_half(half: float | None) -> Any:
    """The second of a pair of normal numbers, where it was drawn and not given yet: as three numbers of 32 bits."""
    return np.array([half is not None, *np.array([half or 0.0]).view(np.uint32)], dtype=np.uint32)


def _half(kept: Any) -> float | None:
    """What `_of_half` has kept; None where a snapshot is older than that."""
    return float(kept[1:].copy().view(np.float64)[0]) if len(kept) and kept[0] else None


def _plain(value: Any) -> Any:
    """`value` with everything read that a snapshot has of it."""
    if isinstance(value, Mapping) and not isinstance(value, Counter):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value
