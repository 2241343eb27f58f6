"""The numbers of each step: read when they are there, since the loop never waits for a device; and found bad or good.

On a CPU they are there at once. On a GPU the copy to the host is queued after the step, and the numbers are read two
steps later. The lag is fixed, so what is decided by them is decided after the same step on every worker. How long a
step took is measured by the clock that it ran by: on a GPU by events on its stream, since the host, which only queues
the work, has finished a step long before the GPU has.

To stop at a loss or a gradient that is NaN or infinite, or to go back to a snapshot, costs nothing. To leave a step out
its numbers must be known before the update; on a CPU they are, and for a GPU this is one wait per step. A run that
stops looks at no gradient that is not clipped, because that would cost every step something. A gradient that is NaN
under a finite loss then gets into the weights. It shows in the next loss, or where weights are looked at before they
are kept: see `first_not_finite`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from manyhosts.communication.holding import UNCUT, Holding
from manyhosts.data.order import Indices
from manyhosts.device import Event, by_device, is_asynchronous, module
from manyhosts.events import StepTiming
from manyhosts.model.buffers import BufferCopies
from manyhosts.strategies.strategy import StepOutcome
from manyhosts.training.setup.build import Components

LAG_ON_GPU = 2


@dataclass(slots=True)
class StepFacts:
    """What is known of a step without asking the device."""

    step: int
    epoch: int
    lr: float
    samples: int
    bytes_sent: int
    exchange_s: float
    """From the first gradient's leaving to the last sum's arrival; 0 on a GPU."""
    timing: StepTiming
    """By the host's clock; once the numbers are known, by the clock of the device."""
    time: float
    indices: Indices
    """The samples of the global batch, as `Step.taken` has them."""
    shards: int = 0
    """In how many their epoch is read; 0 where it is not."""
    weight: float | None = None
    """What the batch counts in the mean; None: its samples."""


@dataclass(slots=True)
class StepMetricValues:
    """A step whose numbers are known."""

    facts: StepFacts
    values: Mapping[str, float]
    gradient_norm: float | None
    control_flags: Sequence[float]


@dataclass(slots=True)
class _Pending:
    facts: StepFacts
    outcome: StepOutcome
    packed: Tensor
    """Its numbers, one after another: the flag of what is unsettled, the values, the norm, the control flags."""
    has_norm: bool
    event: Event
    """After the step and the copy of its numbers."""
    began: Event
    """After the step before, where that was still under way."""
    data_waits: Sequence[tuple[Event, Event]]
    """Between the two of each pair the host waited for data, so that the device may have had nothing to do."""
    waits: Sequence[tuple[Event, Event]]


class DeferredMetrics:
    """A queue of steps whose numbers are on their way."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_asynchronous = is_asynchronous(device)
        self.lag = LAG_ON_GPU if self.is_asynchronous else 0
        self.pending: deque[_Pending | StepMetricValues] = deque()
        self._began: Event | None = None
        self._data_waits: list[tuple[Event, Event]] = []

    def begin(self) -> None:
        """A step of an asynchronous device begins: its time runs from here, or from the end of the one under way."""
        last = self.pending[-1] if self.pending else None
        self._began = last.event if isinstance(last, _Pending) else self._event()
        self._data_waits = []

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Within, the host waits for data that the step needs."""
        before = self._event()
        yield
        self._data_waits.append((before, self._event()))

    def _event(self) -> Event:
        event = module(self.device).Event(enable_timing=True)
        event.record()
        return event

    def add(
        self,
        facts: StepFacts,
        outcome: StepOutcome,
        norm: Tensor | None,
        waits: Sequence[tuple[Event, Event]] = (),
    ) -> None:
        """Take the numbers of one more step, without waiting for them."""
        flags = outcome.control_flags
        if not self.is_asynchronous:
            known = flags.tolist() if isinstance(flags, Tensor) else flags
            values = {name: value.item() for name, value in outcome.values.items()}
            self.pending.append(StepMetricValues(facts, values, None if norm is None else norm.item(), known))
            return
        unsettled = [] if outcome.unsettled is None else [outcome.unsettled.flag]
        numbers = [*unsettled, *outcome.values.values(), *([] if norm is None else [norm])]
        on_device = torch.as_tensor(flags, dtype=torch.float64).to(self.device, non_blocking=True)
        packed = torch.cat([*(each.double().reshape(1) for each in numbers), on_device]).to("cpu", non_blocking=True)
        assert self._began is not None, "begin() comes before add()"
        self.pending.append(
            _Pending(facts, outcome, packed, norm is not None, self._event(), self._began, self._data_waits, waits)
        )

    def lengthen(
        self,
        seconds: float,
        *,
        exposed_s: float,
        exchange_s: float,
        bytes_sent: int,
        waits: Sequence[tuple[Event, Event]] = (),
    ) -> None:
        """The step that was added last took so much more, in an exchange after its update."""
        if not self.pending:
            return  # it was reported when workers went, in the midst of the exchange
        last = self.pending.pop()
        timing = last.facts.timing
        facts = replace(
            last.facts,
            bytes_sent=last.facts.bytes_sent + bytes_sent,
            exchange_s=last.facts.exchange_s + exchange_s,
            timing=replace(
                timing,
                total=timing.total + seconds,
                communication_exposed=timing.communication_exposed + exposed_s,
                compute=timing.compute + seconds - exposed_s,
            ),
            time=time.time(),
        )
        if isinstance(last, StepMetricValues):
            self.pending.append(replace(last, facts=facts))
        else:
            waits = [*last.waits, *waits]
            self.pending.append(replace(last, facts=facts, waits=waits, event=self._event()))  # after the new waits

    def read(self, *, all_of_them: bool = False) -> list[StepMetricValues]:
        """The steps that are old enough to be read, or all."""
        ready = len(self.pending) - (0 if all_of_them else self.lag)
        return [_known(self.pending.popleft()) for _ in range(ready)]


def _known(pending: _Pending | StepMetricValues) -> StepMetricValues:
    if isinstance(pending, StepMetricValues):
        return pending
    pending.event.synchronize()
    numbers, unsettled = iter(pending.packed.tolist()), pending.outcome.unsettled
    is_unsettled = unsettled is not None and next(numbers) != 0
    values = {name: next(numbers) for name in pending.outcome.values}
    norm = next(numbers) if pending.has_norm else None
    if unsettled is not None and is_unsettled:
        # Every worker reads this step at the same place, so all of them are here.
        values |= {name: value.item() for name, value in unsettled.settle().items()}
    return StepMetricValues(replace(pending.facts, timing=_by_device(pending)), values, norm, list(numbers))


def _by_device(pending: _Pending) -> StepTiming:
    """The time of a step that is over, by the clock of its device. What the host waited for counts as far as that had
    nothing to do meanwhile."""
    host = pending.facts.timing
    left = total = pending.began.elapsed_time(pending.event) / 1000
    left -= (data_wait := min(left, host.data_wait, _between(pending.data_waits)))
    left -= (stall := min(left, host.snapshot_stall))
    exposed = min(left, _between(pending.waits))
    return StepTiming(
        total=total,
        compute=left - exposed,
        communication_exposed=exposed,
        data_wait=data_wait,
        snapshot_stall=stall,
    )


def _between(pairs: Sequence[tuple[Event, Event]]) -> float:
    """The seconds from the first to the second of each pair of events."""
    return sum(before.elapsed_time(after) for before, after in pairs) / 1000


SHOW_NORM_EVERY = 20
"""Steps from one norm that is only shown to the next: to find it takes a tenth of a small model's step."""


class BadStep(Exception):
    """A step went wrong, and all workers, who see the same numbers, are to go back to before it."""

    def __init__(self, step: int, trouble: str, where: str) -> None:
        super().__init__(step, trouble, where)
        self.step, self.trouble, self.where = step, trouble, where


class BadSteps:
    """Watches one loop. Every worker sees the same numbers, so all find the same steps bad."""

    def __init__(self, components: Components, choice: str, *, clips: bool) -> None:
        """`choice`: the setting `on_bad_step`. `clips`: whether gradients are clipped, by their norm."""
        self.components = components
        self.leave_out, self.rewinds = choice == "skip", choice == "rewind"
        self.judges_norm = clips or self.rewinds
        """Whether every step has a norm; otherwise one in `SHOW_NORM_EVERY` has, which is looked at by people only."""
        self.on_cpu = components.world.device.type == "cpu"
        self.keeps_weights = self.on_cpu
        """Whether weights are still those of before a step that is found bad. On a GPU later steps have changed them by
        then, and where the strategy updates within a step this one has."""
        self.drifts = not components.strategy.traits.synchronous
        """Whether each worker has a gradient of its own, of which the others know nothing."""
        self.scaled = components.precision.scaler is not None
        """Whether fp16's scaler looks for overflows, which are nothing unusual there, and leaves those steps out."""
        self.buffers = BufferCopies(components.trained) if self.leave_out else None
        self.bad_norms: dict[int, float] = {}
        """Of steps that were left out, until they are reported."""

    def watched(self, norm: Tensor | None) -> Tensor | None:
        """The norm of the gradient that this step is judged by; where no one else wants it, found here."""
        return self._norm() if self.rewinds and norm is None and not self.scaled else norm

    def must_go(self, step: int, loss: Tensor, norm: Tensor | None) -> bool:
        """Whether `step`, just computed, must not change the model. Buffers are then as they were before it."""
        if not self.leave_out:
            # On a CPU the numbers are there already, so a run that is to stop keeps the weights of before.
            return self.on_cpu and not self.rewinds and not self._are_finite(loss, norm)
        good = bool(loss.isfinite())
        if good and not self.scaled:
            found = self._norm() if norm is None else norm
            good = bool(found.isfinite())
            if not good:
                self.bad_norms[step] = found.item()
        if not good:
            self.put_back()
        return not good and not self.scaled

    def put_back(self) -> None:
        """Have the buffers as they were before the step, where it may be left out."""
        if self.buffers:
            self.buffers.put_back()

    def shown(self, step: int, norm: Tensor | None) -> Tensor | None:
        """The norm that is reported of `step`, whose gradient is complete: now and then also where none clips by it."""
        if norm is not None or step % SHOW_NORM_EVERY != 1:
            return norm
        self.components.precision.unscale(self.components.optimizer)
        return self._norm()

    def _are_finite(self, loss: Tensor, norm: Tensor | None) -> bool:
        if norm is None or self.scaled or self.drifts:
            return math.isfinite(loss.item())
        return math.isfinite(loss.item()) and math.isfinite(norm.item())

    def _norm(self) -> Tensor:
        return self.components.strategy.norm(self.components.trained)

    def trouble(self, numbers: StepMetricValues) -> str:
        """What is wrong with a step, in words; empty where nothing is."""
        loss = numbers.values["loss"]
        norm = self.bad_norms.pop(numbers.facts.step, numbers.gradient_norm if self.judges_norm else None)
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if norm is not None and not math.isfinite(norm) and not self.scaled and not self.drifts:
            return f"the norm of the gradient is {norm}"
        return ""


def named(indices: Indices, shards: int, most: int = 64) -> str:
    """The samples of a step, the first ones of many; of a stream in shards each by its place in its shard."""
    chosen = indices[:most].tolist()
    more = ", …" if len(indices) > most else ""
    if shards < 2:
        return f"samples [{', '.join(map(str, chosen))}{more}]"
    places: dict[int, list[int]] = {}
    for number in chosen:
        places.setdefault(number % shards, []).append(number // shards)
    found = ", ".join(f"{each} of shard {shard}" for shard, each in places.items())
    return f"samples {found}{more}, of {shards} shards"


# Whether all weights are finite: looked at before they are kept, because no run continues from others.


@torch.no_grad()
def first_not_finite(model: nn.Module, holding: Holding = UNCUT) -> str:
    """What is wrong with the first trained parameter that holds NaN or infinity, or the first buffer that holds NaN.

    Nothing where all are well. A buffer may well hold infinities, as a mask of attention does. One pass over the
    memory, and one wait for a GPU. Of what is cut each worker looks at what it holds.
    """
    parameters = {name: holding.local(value) for name, value in model.named_parameters() if value.requires_grad}
    buffers = {name: holding.local(value) for name, value in model.named_buffers()}
    largest = _largest([*parameters.values(), *buffers.values()])
    if bool(largest.isfinite()):
        return ""
    for name, parameter in parameters.items():
        if not bool(parameter.isfinite().all()):
            return f"{'nan' if bool(parameter.isnan().any()) else 'infinity'} in the parameter {name!r}"
    return next((f"nan in the buffer {name!r}" for name, buffer in buffers.items() if bool(buffer.isnan().any())), "")


def _largest(tensors: Sequence[Tensor]) -> Tensor:
    """The largest absolute number in `tensors`; NaN where one is. Shape ()."""
    looked_at = [each for each in tensors if each.numel() and (each.is_floating_point() or each.is_complex())]
    if not looked_at:
        return torch.zeros(())
    found = []
    for own in by_device(looked_at).values():
        # Numbers of one byte have no norm of their own.
        norms = torch._foreach_norm([each.float() if each.element_size() == 1 else each for each in own], math.inf)
        found.append(torch.stack([norm.float() for norm in norms]).max().cpu())
    return torch.stack(found).max()
