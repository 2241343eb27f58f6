"""What may change in a model besides its gradients: tensors in a forward pass, and which parameters are trained.

A buffer changes in place, or another tensor or other memory is put where it was: that shows in the module that holds
it, without a look at the values. What is written through `.data` does not show, so the values are looked at in the
first steps, and now and then. In the same steps it is seen whether the forward pass wrote into parameters. BatchNorm's
running values are no affair of this: the code that computes sees to them.

Two numbers per worker show whether all workers have the same: a checksum h and its square, of which the sums over n
workers are S and T. All checksums are equal where n T = S² (Cauchy-Schwarz), and the numbers are small enough for
float64 to hold each exactly. They travel with others that are summed anyway, so as long as all is well nothing is sent
for it. Where it is not, the workers send each other the checksum of every buffer.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.layout import bytes_of, without_repeats
from manyhosts.communication.world import World
from manyhosts.device import LateNumbers
from manyhosts.errors import ConfigError

UNFROZEN = "unfrozen"
"""Under which strategies keep the names of parameters that were unfrozen; they are the same on all workers."""
_BITS = 20
"""Of the checksum that is summed: its square over some thousand workers is exact in float64."""
_FIRST_STEPS, _EVERY_STEPS = 4, 64
"""In which the values are looked at."""
_NORM = ("running_mean", "running_var", "num_batches_tracked")
_PARAMETER, _IS_TRAINED = itemgetter(1), attrgetter("requires_grad")


def _getter(module: nn.Module, table: Any, key: str) -> Callable[[], Any]:
    """What gives the tensor `key` of `module` that is in `table`, or None: that of a scripted one is no dictionary."""
    return (
        partial(getattr, module, key, None) if isinstance(module, torch.jit.ScriptModule) else partial(table.get, key)
    )


@dataclass(slots=True, eq=False)
class _Place:
    """Where a buffer or a parameter is, and what was there the last time."""

    name: str
    get: Callable[[], Any]
    """Gives what is there now."""
    persistent: bool = True
    tensor: Tensor | None = None
    version: int = -1
    memory: int = 0
    checksum: int = 0
    """Of the values; 0 for those of when the model was placed, equal on all workers."""

    def __post_init__(self) -> None:
        self.settle()

    @property
    def has_changed(self) -> bool:
        """Whether something else is here than before, as far as it shows without a look at the values."""
        tensor = self.get()
        return tensor is not self.tensor or (
            tensor is not None and (tensor._version != self.version or tensor.data_ptr() != self.memory)
        )

    def settle(self) -> None:
        """What is here now is what was here before."""
        tensor = self.tensor = self.get()
        self.version, self.memory = (-1, 0) if tensor is None else (tensor._version, tensor.data_ptr())

    def take_checksum(self) -> None:
        """Look at the values."""
        self.settle()
        tensor = self.tensor
        if tensor is None or tensor.layout is not torch.strided or tensor.is_quantized:
            self.checksum = 0
            return
        own = bytes_of(without_repeats(tensor.detach())).cpu().numpy().data
        self.checksum = zlib.crc32(own, zlib.crc32(f"{tensor.dtype}{_shape(tensor)}".encode())) or 1


class BufferWatch:
    """The buffers of one model, as they were when it was looked at last."""

    def __init__(self, model: nn.Module) -> None:
        self.places = [
            _Place(
                name=f"{path}.{key}" if path else key,
                get=_getter(module, module._buffers, key),
                persistent=key not in getattr(module, "_non_persistent_buffers_set", ()),
            )
            for path, module in model.named_modules()
            for key in module._buffers.keys()  # noqa: SIM118 - that of a scripted module is no dict
            if not (isinstance(module, _BatchNorm) and key in _NORM)
        ]
        self.parameters = [
            _Place(f"{path}.{key}" if path else key, _getter(module, module._parameters, key))
            for path, module in model.named_modules()
            for key, each in module._parameters.items()
            if each is not None
        ]
        """Which a forward pass should not write into, looked at in the same steps."""
        self.written: list[_Place] = []
        """Those of them into which one of this step has written."""
        self.steps = 0

    @property
    def looks_at_values(self) -> bool:
        """Whether it does so in this step."""
        return self.steps <= _FIRST_STEPS or self.steps % _EVERY_STEPS == 0

    def look(self) -> list[_Place]:
        """Those that have changed since the last look, or may have."""
        return [place for place in self.places if self.looks_at_values or place.has_changed]

    def count_step(self) -> None:
        """A step begins. Its forward pass is yet to write into parameters."""
        self.steps += 1
        self.written = []
        if self.looks_at_values:
            for place in self.parameters:
                place.settle()

    def begin_step(self) -> None:
        """A step begins. What is now is what it is to be."""
        self.count_step()
        for place in self.look():
            place.take_checksum()

    def see_written(self) -> list[str]:
        """See which parameters a forward pass has written into. The names of those that an earlier one had changed."""
        again = []
        for place in [each for each in self.parameters if each.has_changed] if self.looks_at_values else ():
            before = place.checksum
            place.take_checksum()
            if place not in self.written:
                self.written.append(place)
            elif place.checksum != before:
                again.append(place.name)
        return again

    def changed_state(self) -> list[str]:
        """The names of those that have other values than at the last look, caches left out."""
        names = self.see_written()
        for place in self.look():
            before, checksum = place.tensor, place.checksum
            place.take_checksum()
            grown = place.tensor is not None and (before is None or before.shape != place.tensor.shape)
            is_cache = grown and not place.persistent  # made of nothing but what can be made again
            if checksum != place.checksum and not is_cache:
                names.append(place.name)
        return names

    def kind_of(self, name: str) -> str:
        """Whether this is a parameter or a buffer, in words."""
        return "parameter" if any(place.name == name for place in self.parameters) else "buffer"


class ModelWatch:
    """Whether all workers have the same buffers and train the same parameters, in every step."""

    def __init__(self, model: nn.Module, world: World) -> None:
        """`model`: as all workers have it, just placed."""
        self.model, self.world = model, world
        self.watch = BufferWatch(model)
        self.frozen = [(name, each) for name, each in model.named_parameters() if not each.requires_grad]
        for _, parameter in self.frozen:
            parameter.grad = None  # one that is unfrozen later has none of before
        self.thawed: list[str] = []
        """The names of the parameters that are trained now and were not when the model was placed."""
        self.late = LateNumbers(world.device)

    def all_is_new(self) -> None:
        """The workers have changed, and those that are new were given the others' buffers: compare all from now on."""
        self.watch = BufferWatch(self.model)
        self.late = LateNumbers(self.world.device)
        for place in self.watch.places:
            place.take_checksum()

    def unfreeze(self, names: Collection[str]) -> list[nn.Parameter]:
        """Train the parameters of these names, too, as other workers or an earlier run did. Those that were frozen."""
        found = [(name, each) for name, each in self.frozen if name in names]
        for _, parameter in found:
            parameter.requires_grad_()
        self.known(found)
        return [each for _, each in found]

    def known(self, found: Sequence[tuple[str, nn.Parameter]]) -> None:
        """All workers train these parameters, given with their names, from now on."""
        names = [name for name, _ in found]
        self.thawed += names
        self.frozen = [each for each in self.frozen if each[0] not in names]

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters, with their names, that all workers are known to train."""
        frozen = {name for name, _ in self.frozen}
        found = self.model.named_parameters()
        return [(name, each) for name, each in found if each.requires_grad and name not in frozen]

    def unfrozen(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters, with their names, that were not trained and are to be trained now."""
        some = any(map(_IS_TRAINED, map(_PARAMETER, self.frozen)))  # half the time of a loop, in every step
        return [(name, each) for name, each in self.frozen if each.requires_grad] if some else []

    @property
    def may_differ(self) -> bool:
        """Whether there is anything in which workers could differ; the same on all of them, and in every step.

        What travels with the gradients must not change its length: in which order they are added up depends on it.
        """
        return bool(self.watch.places or self.watch.parameters)

    def numbers(self) -> list[float]:
        """What this worker sends the others in a step, to be summed over them; empty where nothing can differ."""
        if not self.may_differ:
            return []
        for place in self.watch.look():
            place.take_checksum()
        own = zlib.crc32("\0".join(name for name, _ in self.unfrozen()).encode()) if self.frozen else 0
        self.watch.see_written()
        for place in [*self.watch.places, *self.watch.written]:
            if place.checksum:
                own = zlib.crc32(f"{place.name}\0{place.checksum}".encode(), own)
        own >>= 32 - _BITS
        return [float(own), float(own * own)]

    def read(self, sums: Sequence[float] | Tensor) -> list[float] | None:
        """The sums that are to be checked now, those of an earlier step where a device does things later.

        Whether a parameter is trained from this step on must be known in this step; so where some are frozen, the host
        waits.
        """
        return torch.as_tensor(sums).tolist() if self.frozen else self.late.read(sums)

    def check(self, sums: Sequence[float]) -> None:
        """See that all are alike, by the sums of their `numbers`. Called by all workers.

        Raises:
            ConfigError: they are not; on every worker.
        """
        total, squares = (int(each) for each in sums)
        if self.world.size * squares == total * total:
            return
        places = [*self.watch.places, *self.watch.parameters]
        for place in places:
            place.take_checksum()
        found = {place.name: [place.checksum, place.persistent, _shape(place.tensor)] for place in places}
        reported = gather_plain(self.world, [found, [name for name, _ in self.unfrozen()]])
        self._compare_trained([set(names) for _, names in reported])
        self._compare_buffers([buffers for buffers, _ in reported])

    def _compare_trained(self, reported: Sequence[set[str]]) -> None:
        for name, _ in self.frozen:
            those = [rank for rank, names in enumerate(reported) if name in names]
            if 0 < len(those) < len(reported):
                raise ConfigError(
                    f"the parameter {name!r} is to be trained on {len(those)} of {len(reported)} workers",
                    where=f"rank {', '.join(map(str, those))}",
                    fix="set requires_grad on every worker in the same step: not in a listener, nor for the first only",
                )

    def _compare_buffers(self, reported: Sequence[dict[str, list[object]]]) -> None:
        caches = set()
        for name, first in reported[0].items():
            others = [buffers[name] for buffers in reported]
            if all(other == first for other in others):
                continue
            _, persistent, _ = first
            if not persistent and any(other[2] != first[2] for other in others):
                caches.add(name)  # grown by what each has seen, and made of nothing else
                continue
            kind = self.watch.kind_of(name)
            raise ConfigError(
                f"the forward pass changes the {kind} {name!r}, and other workers' samples change it otherwise",
                where=f"rank {next(rank for rank, other in enumerate(others) if other != first)}",
                fix="sum what it is made of over the workers (torch.distributed.all_reduce, with weight='samples') "
                f"before it is put into the {kind}, change it between steps by what all share, or train in one process",
            )
        self.watch.places = [place for place in self.watch.places if place.name not in caches]


def _shape(tensor: Tensor | None) -> list[int] | None:
    return None if tensor is None else list(tensor.shape)
