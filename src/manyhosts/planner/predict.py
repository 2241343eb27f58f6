"""Every prediction of a plan: each size, strategy and compression, with its time, memory and price."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from manyhosts.config.local_steps import DiLoCo, LocalSGD
from manyhosts.config.strategies import DDP, Single, Strategy, cutting, of_same_samples
from manyhosts.config.strategy_settings import own_or
from manyhosts.planner.catalog import Machines
from manyhosts.planner.compute import batch_of, slowdown
from manyhosts.planner.group import Group, on_tried_networks
from manyhosts.planner.interval import interval, uncertain
from manyhosts.planner.measured import Measured
from manyhosts.planner.memory import Memory
from manyhosts.planner.step import Step
from manyhosts.planner.strategies.strategy import STRATEGIES, StrategyModel
from manyhosts.units import bytes_in_words

VIRTUAL = "virtual-workers"
_HARDLY = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A strategy with its settings, as a plan names it."""

    strategy: str
    compression: str = "none"
    setting: str = ""
    """What distinguishes it from others of the same strategy, such as `zero=2`."""
    shard: int = 1
    """By which the number of workers must be divisible."""
    most: int | None = None
    """Workers that there may be; None: as many as one likes."""
    one_host: bool = False
    """Whether they must all be on one host."""
    model: StrategyModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What one way to train would take on some machines."""

    machines: str
    """Their name in the catalog; empty where there is none."""
    workers: int
    nodes: int
    strategy: str
    compression: str
    setting: str = ""
    """Of the strategy, such as `zero=2`."""
    step: Step
    compute_lost: float
    """Seconds of the step's computing beyond an even share of what one worker alone computes."""
    epoch_seconds: float
    efficiency: float
    """The speed over what as many workers would give at best: that of one such worker alone, times their number."""
    memory: Memory
    price: float | None
    """Of an epoch; None where no price is known."""
    why_not: str = ""
    """Why it cannot be done; empty where it can."""
    deviation: float = 0.0
    """That the logarithm of the step is uncertain by, from what was uncertain in what was measured."""

    @property
    def step_range(self) -> tuple[float, float]:
        """Seconds that nine of ten steps like this one are expected between."""
        return interval(self.step.seconds, self.deviation)

    def lost(self) -> dict[str, float]:
        """The seconds of a step that more workers do not shrink, by cause."""
        return {**self.step.parts(), "compute": self.compute_lost}

    def limit(self) -> str:
        """What there is most to gain from; computing where no other cause takes a fiftieth of the step."""
        lost = self.lost()
        worst = max(lost, key=lambda name: lost[name])
        return worst if lost[worst] > _HARDLY * self.step.seconds else "compute"

    @property
    def fits(self) -> bool:
        """Whether it can be done."""
        return not self.why_not

    def to_json(self) -> dict[str, Any]:
        """For `plan --json`."""
        return {
            "machines": self.machines,
            "workers": self.workers,
            "nodes": self.nodes,
            "strategy": self.strategy,
            "compression": self.compression,
            "setting": self.setting,
            "step_seconds": self.step.seconds,
            "step_seconds_range": list(self.step_range),
            "epoch_seconds": self.epoch_seconds,
            "efficiency": self.efficiency,
            "communication_exposed": self.step.communication_exposed,
            "parts": self.step.parts(),
            "limit": self.limit(),
            "memory_bytes": self.memory.total,
            "memory": asdict(self.memory),
            "price": self.price,
            "fits": self.fits,
            "why_not": self.why_not,
        }


def ways(measured: Measured, own: Strategy | None = None) -> list[Way]:
    """Every strategy and compression that a plan looks at, from the one that changes least about the training.

    `own`: the script's strategy; its settings take the place of the defaults of its kind.
    """
    if measured.virtual_workers is not None:
        return [Way(strategy=VIRTUAL, model=STRATEGIES.load(VIRTUAL)(None))]
    ddp, local, diloco = own_or(DDP(), own), own_or(LocalSGD(), own), own_or(DiLoCo(), own)
    if diloco.outer_compression not in measured.compression:
        diloco = replace(diloco, outer_compression="none")
    found = [_way(replace(ddp, compression="none"))]
    found += [_way(replace(ddp, compression=name), compression=name) for name in measured.compression]
    if measured.unit_bytes:
        found += [
            Way(
                strategy=each.name,
                setting=each.variant,
                shard=each.shard if isinstance(each.shard, int) else 1,
                model=STRATEGIES.load(each.name)(each),
            )
            for each in cutting(own)
        ]
    if own is not None and getattr(own, "planned_if_asked", False):
        way = _way(own, getattr(own, "compression", "none"))
        found.append(replace(way, most=own.most_workers(len(measured.blocks))))
    most = {
        "tensor": None if measured.cut_layers else 1,
        "pipeline": len(measured.blocks) // (1 if own is None else own.per_worker),
    }
    found += [
        replace(_way(each), most=most[each.name], setting=each.variant)
        for each in of_same_samples(own)
        if measured.device == "cpu" and most[each.name] not in (0, 1)
    ]
    return [*found, _way(local), _way(diloco)]


def _way(config: Strategy, compression: str = "none") -> Way:
    one_host, model = config.one_host, STRATEGIES.load(config.name)(config)
    return Way(strategy=config.name, compression=compression, shard=config.block, one_host=one_host, model=model)


def predictions(
    measured: Measured,
    machines: Machines,
    sizes: Iterable[tuple[int, int]],
    asked: Sequence[Way],
) -> list[Prediction]:
    """Of every size (machines, workers on each) by every way; one worker has no one to exchange with, and one way."""
    found = []
    for nodes, each in sizes:
        group = machines.group(nodes, each)
        if machines.as_measured:
            group = on_tried_networks(measured.tried, group)
        alone = [way for way in asked if way.strategy == VIRTUAL] or [_way(Single())]
        for way in alone if group.workers == 1 else asked:
            if way.most is not None and group.workers > way.most:
                continue
            found.append(predict(measured, machines, group, way))
    return found


def predict(measured: Measured, machines: Machines, group: Group, way: Way) -> Prediction:
    """One prediction."""
    epoch = epoch_seconds(measured, group, way.model)
    single = way.model if way.strategy == VIRTUAL else _way(Single()).model
    alone = epoch_seconds(measured, machines.group(1, 1), single)
    memory = replace(way.model.memory(measured, group), process=measured.process_bytes)
    step = way.model.step(measured, group)
    share = 1 if measured.batch_grows else group.workers
    return Prediction(
        machines=machines.name,
        workers=group.workers,
        nodes=group.nodes,
        strategy=way.strategy,
        compression=way.compression,
        setting=way.setting,
        step=step,
        compute_lost=step.compute - single.step(measured, machines.group(1, 1)).compute / share,
        epoch_seconds=epoch,
        efficiency=alone / (group.workers * epoch),
        memory=memory,
        price=None if machines.price is None else group.nodes * machines.price * epoch / 3600,
        why_not=_why_not(measured, machines, group, memory, way),
        deviation=uncertain(measured, group, way.compression, lambda *worse: way.model.step(*worse).seconds),
    )


def epoch_seconds(measured: Measured, group: Group, model: StrategyModel) -> float:
    """All steps of an epoch, the smaller one at its end too, its validations, and what every worker does once."""
    batch = batch_of(measured, group.workers)
    full, rest = divmod(measured.samples, batch)
    seconds = full * model.step(measured, group).seconds
    if rest:
        share = -(-rest // group.workers) if measured.batch_grows else rest
        seconds += model.step(replace(measured, global_batch=share), group).seconds
    every = measured.validate_every_steps
    validations = 1.0 if every is None else (full + bool(rest)) / every
    return seconds + validations * validation_seconds(measured, group) + measured.epoch_other_s


def validation_seconds(measured: Measured, group: Group) -> float:
    """One validation: a set in parts, of which the worker with most of them has an integral number."""
    samples = measured.validation_samples
    if not samples:
        return 0.0
    parts = measured.validation_parts
    share = -(-parts // group.workers) / parts
    return slowdown(measured, group) * share * samples * measured.validation_s_per_sample


def _why_not(measured: Measured, machines: Machines, group: Group, memory: Memory, way: Way) -> str:
    """Why workers cannot train so; empty where they can."""
    parts = measured.virtual_workers
    if parts is not None and group.workers > parts:
        return f"{group.workers} workers share {parts} virtual ones, and each needs one"
    if way.one_host and group.nodes > 1:
        return f"strategy {way.strategy!r} shares the memory of one host"
    if group.workers % way.shard:
        return f"{group.workers} workers cannot share copies of the model among {way.shard} each"
    if group.nodes > 1 and group.workers_per_node % way.shard and way.shard % group.workers_per_node:
        return f"copies among {way.shard} workers end within hosts of {group.workers_per_node}: that is not planned"
    if not measured.batch_grows and group.workers > measured.global_batch:
        return f"{group.workers} workers share a batch of {measured.global_batch} samples"
    limit = machines.memory_bytes or measured.device_memory_bytes
    together = group.per_machine if measured.device == "cpu" else 1
    needed = together * memory.total
    if limit and needed > limit:
        whose = f"{together} workers of a machine need" if together > 1 else "a worker needs"
        return f"{whose} {bytes_in_words(needed)}, and there are {bytes_in_words(limit)}"
    return ""


def by_size(found: Iterable[Prediction]) -> Mapping[tuple[str, int, int], list[Prediction]]:
    """Those that fit, by machines, number of workers, and number of machines."""
    groups: dict[tuple[str, int, int], list[Prediction]] = {}
    for each in found:
        if each.fits:
            groups.setdefault((each.machines, each.workers, each.nodes), []).append(each)
    return groups
