"""The watcher of a worker that measures: at the first `fit` it times everything, lets a few steps run, and ends."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from manyhosts import host_memory
from manyhosts.config.settings import Settings
from manyhosts.config.strategies import DDP, Strategy
from manyhosts.config.strategy_settings import own_or
from manyhosts.control.agent import host_state
from manyhosts.data.steps import Step
from manyhosts.errors import ConfigError
from manyhosts.evaluation.evaluate import OfAllSets
from manyhosts.events import Listener
from manyhosts.measure import lines
from manyhosts.measure.in_worker import (
    compressions,
    cutting,
    in_parts,
    loading,
    machine,
    passes,
    readiness,
    several_workers,
    updating,
    validating,
)
from manyhosts.measure.in_worker.batches import Batches
from manyhosts.measure.in_worker.guard import Guard, leave
from manyhosts.measure.in_worker.passes import Passes
from manyhosts.measure.request import Request
from manyhosts.planner.measured import InParts, Measured
from manyhosts.strategies.strategy import StepOutcome
from manyhosts.strategies.units import tail_bytes, unit_bytes
from manyhosts.training.setup.build import Components
from manyhosts.training.state.run_state import RunState
from manyhosts.training.telemetry.watching import Watcher
from manyhosts.units import Duration

_SHARES = {
    "passes": 0.25, "readiness": 0.1, "update": 0.05, "loader": 0.15, "validation": 0.1, "compressions": 0.1,
    "parts": 0.05,
}  # fmt: skip
"""Of the time that there is; the rest is for a few steps."""
_STEPS_S = 0.2
_FEWEST_STEPS, _MOST_STEPS = 3, 30
_STREAM_STEPS = 1000
"""Steps that an epoch of a stream is taken to have: it is not known before its end."""


class Measurer(Watcher):
    """Measures once, at the first `fit` of the script."""

    def __init__(self, request: Request, guard: Guard) -> None:
        self.request, self.guard = request, guard
        self.validation: OfAllSets | None = None
        self.found: dict[str, Any] = {}
        self.strategy: Mapping[str, Any] = {}
        self.devices = 0
        self.timed: Passes | None = None
        self.until = 0.0
        self.marks: list[dict[str, float]] = []
        """Of each step that was taken in the end, when it came to each place."""
        self.together: dict[str, Any] = {}
        """What several workers found, and the steps of theirs that follow."""
        self.full_steps: several_workers.FullSteps | None = None

    def made(self, model: nn.Module) -> None:
        """There is a trainer."""
        self.guard.made()

    def fits(self, validation: OfAllSets | None, listeners: Sequence[Listener]) -> Sequence[Listener]:
        """A measurement is no run, so no listener hears of it."""
        self.validation = validation
        return ()

    def begins(self, components: Components, settings: Settings, state: RunState) -> None:
        """Measure. A few steps of the loop follow."""
        self.guard.come()
        if components.own_step is not None:
            raise ConfigError(
                "a step of mh.Run is the script's own code, whose passes and updates no one can time one by one",
                where="run.fit",
                fix="`manyhosts study` measures any script by running it at several sizes",
            )
        settings.strategy.check_planned(settings.mesh)
        if self.request.together:
            self.together = several_workers.measure(components, settings, state, self.request.seconds)
            if (
                not getattr(getattr(components.batches.source, "loader", None), "processes", 0)
                or not self.together["steps"]
            ):
                several_workers.report(components.world, self.together)
                leave()
            self.full_steps = several_workers.FullSteps(components.world)
            return
        self.timed = Passes(components, Batches(components, state))
        self._measure(self.timed, components, settings, state)
        self.timed.batches.forget()
        self.found["process_bytes"] = self._process_bytes(components)
        lines.send("measures", what="a few steps")
        self.until = time.perf_counter() + _STEPS_S * self.request.seconds

    def reads(self, step: Step) -> Step:
        """Note when."""
        self.marks.append({"read": time.perf_counter()})
        return step

    def differentiates(self, outcome: StepOutcome) -> None:
        """Note when."""
        self.marks[-1]["computed"] = time.perf_counter()

    def steps(self, step: int) -> None:
        """Note when; after some steps, report what was found, and end."""
        if self.full_steps is not None:
            if self.full_steps.are_over():
                several_workers.report(self.full_steps.world, {**self.together, "full_step_s": self.full_steps.seconds})
                leave()
            return
        self.marks[-1]["updated"] = time.perf_counter()
        count = len(self.marks)
        if count < _FEWEST_STEPS or (count < _MOST_STEPS and time.perf_counter() < self.until):
            return
        self.found["step_other_s"] = max(0.0, around(self.marks) - self.found["update_s"])
        self.found["full_step_s"] = 0.0 if self.found["loader_processes"] else full_step(self.marks)
        self.found["in_parts"] = self._in_parts()
        measured = Measured(**self.found)
        lines.send("measured", measured=measured.to_json(), strategy=self.strategy, devices=self.devices)
        leave()

    def _process_bytes(self, components: Components) -> int:
        """Of this process and its loaders, without the tensors that a plan counts by themselves.

        0 of a worker of a GPU: what its process has lies elsewhere.
        """
        for parameter in components.trained.parameters():
            parameter.grad = None
        host_memory.give_back()
        own = machine.process_bytes([os.getpid()])
        if self.found["device"] != "cpu" or not own:
            return 0
        kept: int = self.found["parameter_bytes"] + self.found["buffer_bytes"]  # the optimizer has forgotten its state
        return max(0, own - kept) + int(self.found["process_bytes"])

    def _in_parts(self) -> InParts | None:
        """The last thing: the model is in parts then. Where it cannot be, no way with parts is planned."""
        if self.timed is None or not self.found["unit_bytes"] or self.found["device"] != "cpu":
            return None
        lines.send("measures", what="the model in parts")
        try:
            return in_parts.measure(
                self.timed,
                samples=self.found["compute"][0].samples,
                update_s=self.found["update_s"],
                seconds=self._seconds("parts"),
            )
        except Exception:  # the script's own code, called as nowhere before; a run with parts says what is wrong
            self.found["unit_bytes"] = ()
            return None

    def _measure(self, timed: Passes, components: Components, settings: Settings, state: RunState) -> None:
        """Everything but what a step takes besides its parts."""
        asked = [size for size in self._sizes(timed.batches, components, settings) if timed.batches.can_be(size)]
        lines.send("measures", what="forward and backward passes")
        begun, busy = time.perf_counter(), time.process_time()
        compute = passes.measure(timed, asked, self._seconds("passes"))
        pass_cores = (time.process_time() - busy) / (time.perf_counter() - begun)
        largest = compute[-1]
        self.found = {"compute": compute, "pass_cores": pass_cores, **_counted(components, settings)}
        self.found |= cutting.measure(timed, largest.samples)
        self.strategy = plain_strategy(settings.strategy.planned(settings.mesh))
        self.devices = machine.devices(components.world.device)
        self._measure_gradients(timed, components, settings, largest.samples)
        lines.send("measures", what="the loader")
        step_s = largest.forward_s + largest.backward_s + self.found["update_s"]
        self.found |= loading.measure(components, state, step_s=step_s, seconds=self._seconds("loader"))
        self.found["validate_every_steps"] = validate_every(
            settings, components, step_s * components.batches.size / largest.samples
        )
        if self.validation is not None:
            lines.send("measures", what="the validation")
            per_sample = validating.measure(
                self.validation.first, components.model, seconds=self._seconds("validation")
            )
            self.found |= {
                "validation_samples": self.validation.samples,
                "validation_parts": self.validation.first.passes.parts,
                "validation_s_per_sample": per_sample,
            }

    def _measure_gradients(self, timed: Passes, components: Components, settings: Settings, samples: int) -> None:
        """What is done with a gradient: the update, the buckets that it leaves in, and ways to send less of it."""
        lines.send("measures", what="the update and the buckets of gradients")
        update_s, kept, passing = updating.measure(
            components,
            timed,
            clip=settings.clip_gradients,
            samples=self.found["compute"][0].samples,
            seconds=self._seconds("update"),
        )
        trained = [parameter for parameter in components.trained.parameters() if parameter.requires_grad]
        ddp = own_or(DDP(), settings.strategy)
        bucket_bytes = int(ddp.bucket_mb * 1e6)
        seconds = self._seconds("readiness")
        buckets = readiness.measure(timed, trained, bucket_bytes=bucket_bytes, samples=samples, seconds=seconds)
        self.found |= {
            "update_s": update_s,
            "optimizer_bytes": kept,
            "update_bytes": passing,
            "buckets": buckets,
            "gradient_bytes": sum(bucket.bytes for bucket in buckets),
        }
        if settings.virtual_workers is None:  # they add every bit of the gradients
            lines.send("measures", what="ways to send less")
            seconds = self._seconds("compressions") + self._seconds("validation") * (self.validation is None)
            self.found["compression"] = compressions.measure(ddp, trained, bucket_bytes=bucket_bytes, seconds=seconds)

    def _seconds(self, name: str) -> float:
        return _SHARES[name] * self.request.seconds

    def _sizes(self, batches: Batches, components: Components, settings: Settings) -> list[int]:
        grows = settings.batch_size is None
        return passes.sizes(
            min(components.batches.size, batches.most),
            settings.micro_batch_size,
            (1,) if grows else self.request.workers,
            settings.virtual_workers,
        )


def plain_strategy(strategy: Strategy) -> Mapping[str, Any]:
    """Its name and its settings, but for what is a function of the script."""
    plain = {key: value for key, value in asdict(strategy).items() if not callable(value)}
    return {"name": strategy.name, **plain}


def validate_every(settings: Settings, components: Components, step_s: float) -> int | None:
    """Steps from one validation to the next; None for an epoch."""
    every = Duration.parse(settings.validate_every, where="validate_every")
    steps = [] if every.steps is None else [every.steps]
    if every.seconds is not None:
        steps.append(max(1, round(every.seconds / max(step_s, 1e-9))))
    if every.epochs not in (None, 1.0) and components.batches.source.steps_per_epoch is not None:
        steps.append(max(1, round(every.epochs * components.batches.source.steps_per_epoch)))
    return min(steps) if steps else None


def around(marks: Sequence[dict[str, float]]) -> float:
    """Seconds of a step that are neither compute nor waiting for it: from the gradient to the next forward pass.

    Of an even number the lower middle one: where steps are long there are two gaps, and a neighbour's in one of them.
    """
    known = [mark for mark in marks if "computed" in mark and "updated" in mark]
    inside = [mark["updated"] - mark["computed"] for mark in known]
    between = [after["read"] - before["updated"] for before, after in pairwise(marks)]
    return sum(statistics.median_low(times) for times in (inside, between) if times)


def full_step(marks: Sequence[dict[str, float]]) -> float:
    """Seconds from one step to the next, as they have become; 0 where that is not to be seen yet."""
    steps = [after["read"] - before["read"] for before, after in pairwise(marks)][several_workers.SETTLE :]
    return statistics.median(steps) if len(steps) >= _FEWEST_STEPS else 0.0


def _counted(components: Components, settings: Settings) -> dict[str, Any]:
    """What is known at once: all but one number of it is counted, not timed."""
    norms = [module for module in components.trained.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    shared = settings.batch_norm == "global" and settings.virtual_workers is None
    steps = components.batches.source.steps_per_epoch
    dataset = getattr(getattr(components.batches.source, "order", None), "used", None)
    total, strategy = _bytes(components.trained.parameters()), settings.strategy
    units = unit_bytes(components.model, strategy.patterns, total=total)
    return {
        "parameter_bytes": total,
        "unit_bytes": units,
        "copy_s_per_byte": machine.copy_s_per_byte(components.world.device, max(units), total) if units else 0.0,
        "buffer_bytes": _bytes(components.trained.buffers()),
        "samples": dataset if dataset is not None else (steps or _STREAM_STEPS) * components.batches.size,
        "global_batch": components.batches.size,
        "batch_grows": settings.batch_size is None,
        "micro_batch": settings.micro_batch_size,
        "virtual_workers": settings.virtual_workers,
        "batch_norm_layers": len(norms) if shared else 0,
        "batch_norm_bytes": sum(_exchanged(norm) for norm in norms) if shared else 0,
        "device": components.world.device.type,
        "cores": host_state.cores(),
        "threads": machine.threads(),
        "load": machine.load(),
        "device_memory_bytes": machine.memory_bytes(components.world.device),
        "tail_bytes": tail_bytes(components.model, strategy.patterns),
    }


def _exchanged(norm: nn.modules.batchnorm._BatchNorm) -> int:
    """Bytes that a layer exchanges in a forward pass: a mean and a variance of each channel, and a count."""
    return 4 * (2 * norm.num_features + 1)


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of tensors that may share memory."""
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())
