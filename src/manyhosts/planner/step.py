"""Where the time of one optimizer step goes, put together from what a strategy says of its exchanges.

data_wait + compute + straggler + communication_exposed + update + other
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from manyhosts.planner import overlap
from manyhosts.planner.compute import Passes, cores_of, crowding, pass_cores, passes, share_of, slowdown
from manyhosts.planner.group import Group
from manyhosts.planner.measured import Measured
from manyhosts.planner.overlap import Transfer
from manyhosts.planner.slowest import expected_largest

_THROUGH_MEMORY_S = 3e-5
"""That a row of a BatchNorm layer takes to one more worker of the same host: see `communication.shared_rows`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Seconds of one step, as every worker has them: all wait for the last one."""

    compute: float
    """Forward and backward passes, of an ordinary worker."""
    straggler: float
    """That the slowest worker is expected to take longer."""
    communication_exposed: float
    """Exchanging, as far as no backward pass hides it."""
    data_wait: float
    update: float
    other: float

    @property
    def seconds(self) -> float:
        """All of them."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Each by its name."""
        return {each.name: float(getattr(self, each.name)) for each in fields(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """When the passes of a step run, by a clock that starts with the first of them: what exchanges are laid over."""

    passes: Passes
    batch_norm_forward: float
    """Exchanging the statistics of BatchNorm layers before the last backward pass. Nothing hides it."""
    batch_norm_backward: float
    """The same in the last backward pass."""
    barriers: int = 0
    """How often the workers wait for each other within the passes."""
    processor_s: float = 0.0
    """That these exchanges keep a worker's cores busy."""

    @property
    def backward_begins(self) -> float:
        """The last one, of the last micro-batch."""
        return self.passes.forward + self.batch_norm_forward

    @property
    def ends(self) -> float:
        """When the last backward pass is over."""
        return self.backward_begins + self.passes.backward + self.batch_norm_backward

    def when(self, ready: float) -> float:
        """When a share `ready` of the last backward pass has run."""
        return self.backward_begins + ready * (self.ends - self.backward_begins)


def timeline(measured: Measured, group: Group) -> Timeline:
    """The passes of one worker of `group`, and what its BatchNorm layers exchange within them."""
    own = passes(measured, group)
    layers = measured.batch_norm_layers if measured.virtual_workers is None else 0
    if not layers or group.workers == 1:
        return Timeline(passes=own, batch_norm_forward=0.0, batch_norm_backward=0.0)
    of_layer, processor_s = measured.batch_norm_bytes / layers, 0.0
    if group.nodes == 1 and measured.device == "cpu":
        forward = backward = layers * _THROUGH_MEMORY_S * (group.workers - 1)
    else:
        # As long as the messages take, or the cores that the workers of a machine share with each other.
        others = group.workers - 1
        busy = [
            layers * group.processor_seconds(sent * of_layer, messages)
            for sent, messages in ((others, others), (2 * others / group.workers, 2 * others))
        ]
        processor_s = own.micro_batches * sum(busy)
        cores = cores_of(measured, group) if measured.device == "cpu" else math.inf
        forward = max(layers * group.all_gather(of_layer), busy[0] / cores)
        backward = max(layers * group.all_reduce(of_layer), busy[1] / cores)
    times = own.micro_batches
    return Timeline(
        passes=own,
        batch_norm_forward=times * forward + (times - 1) * backward,
        batch_norm_backward=backward,
        barriers=2 * layers * times,
        processor_s=processor_s,
    )


def exposed_after(
    measured: Measured, group: Group, lines: Timeline, transfers: Iterable[Transfer], *, queues: int = 1
) -> float:
    """Seconds that a step takes longer for its `transfers`: those that continue after the passes, and those by which
    they make passes longer whose cores they need.
    """
    passes = overlap.Passes(seconds=lines.ends, cores=cores_of(measured, group), busy=pass_cores(measured))
    if measured.device != "cpu":
        passes = replace(passes, cores=math.inf, busy=0.0)
    return max(0.0, overlap.last_end(transfers, queues=queues, passes=passes) - lines.ends)


def assemble(measured: Measured, group: Group, lines: Timeline, *, exposed: float) -> Step:
    """The step whose exchanges continue `exposed` seconds after its passes, and during them, BatchNorm's left out."""
    # The update and the rest keep a core busy, also where passes wait for something else and hardly slow each other.
    slower = max(slowdown(measured, group), crowding(measured, group) / group.speed)
    own = lines.passes
    without_data = Step(
        compute=own.total,
        # Passes that are cut by barriers wait in each of them for the worker that arrives last. Where what varies is
        # independent from one to the next, a part of a step that is an n-th of it varies by the root of an n-th.
        straggler=math.sqrt(1 + lines.barriers) * own.spread * expected_largest(group.workers),
        communication_exposed=exposed + lines.batch_norm_forward + lines.batch_norm_backward,
        data_wait=0.0,
        update=slower * measured.update_s,
        other=slower * measured.step_other_s,
    )
    busy_s = own.total / slowdown(measured, group) * pass_cores(measured) + measured.update_s + measured.step_other_s
    return replace(
        without_data,
        data_wait=data_wait(measured, group, other_s=without_data.seconds, busy_s=busy_s + lines.processor_s),
    )


def longer(step: Step, compute_s: float, measured: Measured, *, exposed: float = 0.0) -> Step:
    """The same step with so many seconds more of compute, and of exchange, during which loader processes fetch on."""
    meanwhile = compute_s + exposed if measured.loader_processes else 0.0
    return replace(
        step,
        compute=step.compute + compute_s,
        communication_exposed=step.communication_exposed + exposed,
        data_wait=max(0.0, step.data_wait - meanwhile),
    )


def data_wait(measured: Measured, group: Group, *, other_s: float, busy_s: float = 0.0) -> float:
    """Seconds of a step that its samples are waited for; `other_s` are those of all else in it.

    Loader processes fetch while the step runs, so only what takes them longer than it is waited for. Without them the
    worker fetches for itself, and nothing runs next to it. Workers of one machine share its cores, which bound what all
    their loaders give together; where loader processes are more than the cores that are left, with what the rest of
    the step keeps busy for `busy_s`.
    """
    rate, cores = measured.loader_samples_per_second, group.cores or measured.cores
    busy = measured.loader_processor_s
    if busy is None:
        busy = max(1, measured.loader_processes) / rate
    share = share_of(measured, group.workers)
    fetching = share * max(1 / rate, group.per_machine * busy / cores)
    if measured.loader_processes == 0:
        return fetching
    own_s = busy_s if measured.device == "cpu" else 0.0
    return max(0.0, fetching - other_s, group.per_machine * (share * busy + own_s) / cores - other_s)
