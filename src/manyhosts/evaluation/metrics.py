"""Metrics of torchmetrics over a set that is evaluated in parts, by several workers: as on one process.

Where the states of the parts can be put together (sums, largest, smallest, lists) that is done, in the order of the
parts. Other metrics keep what no rule can put together: a running mean of unequal parts, what a wrapper notes besides
its states. They are fed again, on every worker, with the outputs of all parts in order (`fed_again`). So are those
whose first update changes an attribute that is no state: no one else could know of it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manyhosts.communication.collectives import Collectives
from manyhosts.communication.world import is_connection_error
from manyhosts.data import randomness
from manyhosts.elastic.state_transfer import gather
from manyhosts.errors import ConfigError, SnapshotError, first_line
from manyhosts.model.held_values import same
from manyhosts.snapshot.tensors import dtype_name

if TYPE_CHECKING:  # it takes a second to load, so a script that has no metrics does without it
    from torchmetrics import Metric, MetricCollection

KEEPING = (
    "(metrics) keep something from one validation to the next, which no snapshot has: a resumed run begins it again"
)
"""What is said of metrics that do."""
_PLAIN = (bool, int, float, complex, str, Tensor, list, tuple, dict, set)


class Metrics:
    """The metrics of one evaluation. For each: `begin`; for each part `begin_part`, `update`…, `end_part`; `values`."""

    def __init__(self, metrics: Mapping[str, Metric], world: Collectives, *, seed: int) -> None:
        """`seed` is for the random numbers that a metric draws in its update (a bootstrap, say)."""
        self.world, self.seed = world, seed
        self.all = {name: alone(metric).to(world.device) for name, metric in metrics.items()}
        self.again = {name: metric for name, metric in self.all.items() if fed_again(metric)}
        """Those that see the outputs of all parts in one go."""
        self.merged = {name: metric for name, metric in self.all.items() if name not in self.again}
        self.keeping: list[str] = []
        """Those that `names` has found to keep something from one value to the next."""
        self.begin()

    def begin(self) -> None:
        """Forget the last evaluation."""
        self.states: dict[str, list[dict[str, list[Any]]]] = {
            name: [{state: [] for state in holder._defaults} for holder in _holders(metric)]
            for name, metric in self.merged.items()
        }
        self.is_fed = False
        """Whether this worker has had a forward pass."""
        self.outputs: list[tuple[int, Any, Any]] = []
        for metric in self.again.values():
            metric.reset()

    def begin_part(self) -> None:
        """A part begins."""
        for metric in self.merged.values():
            metric.reset()

    def update(self, first: int, outputs: Any, targets: Any) -> None:
        """Take what the model made of one forward pass, whose first sample has the number `first`."""
        for name, metric in list(self.merged.items()):
            before = None if self.is_fed else attributes(metric)
            _feed(name, metric, outputs, targets)
            if before is not None and put_back(metric, before):
                metric.reset()
                self.again[name] = self.merged.pop(name)
        self.is_fed = True
        if self.again and self.world.size == 1:
            self._update_again(first, outputs, targets)
        elif self.again:
            self.outputs.append((first, outputs, targets))

    def _update_again(self, first: int, outputs: Any, targets: Any) -> None:
        with randomness.kept():
            randomness.seed_all(self.seed, randomness.EVALUATION, first)
            for name, metric in self.all.items():  # in one order on all workers, for all draw from one seed
                if name in self.again:
                    _feed(name, metric, outputs, targets)

    def end_part(self) -> None:
        """Keep what one part found."""
        for key, metric in self.merged.items():
            for holder, states in zip(_holders(metric), self.states[key], strict=True):
                for name, kept in states.items():
                    state = getattr(holder, name)
                    if isinstance(state, list):
                        kept += _joined(holder, name, state)
                    elif kept and _order_free(holder, name, state):
                        kept[0] = kept[0] + state  # integers add up alike in any order: one state to send, not many
                    else:
                        kept.append(state.clone())

    def names(self) -> set[str] | None:
        """What the metrics will be called, by what they have seen on this worker; None where that is too little.

        Nothing that they keep from one value to the next is changed by it: the largest so far, say.
        """
        before = {name: attributes(metric) for name, metric in self.all.items()}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return {key for name, metric in self.all.items() for key in scalars(name, metric.compute())}
        except Exception:  # of any kind: two batches may lack a class, and the entire set may not
            return None
        finally:
            self.keeping = [name for name, metric in self.all.items() if put_back(metric, before[name])]

    def values(self) -> dict[str, float]:
        """Every metric over all parts, equal on all workers. All of them call this."""
        if not self.all:
            return {}
        own = {"states": self.states, "outputs": self.outputs, "again": sorted(self.again), "is_fed": self.is_fed}
        try:
            found = gather(self.world, own)
        except SnapshotError as error:
            raise ConfigError(
                f"the metrics keep what cannot travel from worker to worker: {error.what}",
                where=f"metrics {', '.join(self.all)}, {error.where}",
                fix="keep tensors, numbers, texts, lists and dicts in them, or evaluate on one worker",
            ) from None
        self._agree([each["again"] for each in found if each["is_fed"]])
        for key, metric in self.merged.items():
            for number, holder in enumerate(_holders(metric)):
                for name, default in holder._defaults.items():
                    parts = [state for each in found for state in each["states"][key][number][name]]
                    reduce: Any = holder._reductions[name]  # of states that are no lists: `fed_again` has seen to it
                    is_list = isinstance(default, list)
                    setattr(holder, name, _joined(holder, name, parts) if is_list else reduce(torch.stack(parts)))
                holder._update_count = 1
                holder._computed = None
        for each in found:
            for first, outputs, targets in each["outputs"]:
                self._update_again(first, outputs, targets)
        values = {
            key: number for name, metric in self.all.items() for key, number in scalars(name, metric.compute()).items()
        }
        self.begin()
        return values

    def _agree(self, again: Sequence[Sequence[str]]) -> None:
        """Feed those again that any worker has found to keep something in an attribute of theirs.

        Raises:
            ConfigError: on all workers alike: not every worker that had samples has found that.
        """
        found = {name for names in again for name in names}
        if differing := [name for name in sorted(found) if any(name not in names for names in again)]:
            raise ConfigError(
                f"the metric {differing[0]!r} keeps something in an attribute that is no state, on some workers",
                where="mh.Trainer(metrics=…)",
                fix="keep all that its update changes in states: self.add_state(name, default, dist_reduce_fx=…)",
            )
        for name in found - self.again.keys():  # this worker had no samples
            self.again[name] = self.merged.pop(name)


def attributes(metric: Metric) -> list[dict[str, Any]]:
    """What `metric`, and each inside it, keeps in plain attributes that are no states; copies."""
    found = []
    for holder in _holders(metric):
        kept = {}
        for name, value in vars(holder).items():
            is_own = name not in _bare() and name not in holder._defaults
            if is_own and (value is None or isinstance(value, _PLAIN)):
                with suppress(Exception):  # what cannot be copied is not looked at
                    kept[name] = deepcopy(value)
        found.append(kept)
    return found


def put_back(metric: Metric, before: Sequence[Mapping[str, Any]]) -> bool:
    """Have `metric` keep what `attributes` found before an update. Whether the update has changed any of it."""
    changed = [
        (holder, name, value)
        for holder, kept in zip(_holders(metric), before, strict=True)
        for name, value in kept.items()
        if not same(getattr(holder, name, None), value)
    ]
    for holder, name, value in changed:
        setattr(holder, name, value)
    return bool(changed)


@cache
def _bare() -> frozenset[str]:
    """What every metric has for itself."""
    from torchmetrics import SumMetric

    return frozenset(vars(SumMetric()))


def fed_again(metric: Metric) -> bool:
    """Whether the states of `metric` over several parts cannot be put together to what one pass would have left."""
    from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum
    from torchmetrics.wrappers.abstract import WrapperMetric

    holders = _holders(metric)
    for holder in holders:
        for name, default in holder._defaults.items():
            rule = holder._reductions[name]
            if isinstance(default, list):
                mergeable = rule in (None, dim_zero_cat)
            else:  # each part begins with the default, which would be added as often
                mergeable = rule in (dim_zero_max, dim_zero_min) or (rule is dim_zero_sum and not default.any())
            if not mergeable:
                return True
    return any(isinstance(each, WrapperMetric) for each in holders)


def _holders(metric: Metric) -> list[Metric]:
    """`metric` and those inside it."""
    from torchmetrics import Metric

    return [module for module in metric.modules() if isinstance(module, Metric)]


def _joined(holder: Metric, name: str, states: list[Any]) -> list[Any]:
    """`states` one after the other in one tensor, where that is what the list means; else each is something of its own:
    one image.
    """
    from torchmetrics.utilities import dim_zero_cat

    is_row = holder._reductions[name] is dim_zero_cat and all(isinstance(each, Tensor) for each in states)
    return [dim_zero_cat(states)] if states and is_row else states


def _order_free(holder: Metric, name: str, state: Tensor) -> bool:
    from torchmetrics.utilities import dim_zero_sum

    return holder._reductions[name] is dim_zero_sum and not state.is_floating_point()


def alone(metric: Metric) -> Metric:
    """A copy of `metric` that never talks to other processes by itself: the evaluation does it."""
    copy = metric.clone()
    for holder in _holders(copy):
        holder.sync_on_compute = False
        holder._to_sync = False
    return copy


def flattened(metrics: Mapping[str, Metric | MetricCollection]) -> dict[str, Metric]:
    """Collections in their parts: their members share states in ways that cannot be merged part by part.

    A member has the name that its collection gives it; where something else has that name, too, the key of its
    collection is before it: `train/BinaryAccuracy`.

    Raises:
        ConfigError: something in it is no torchmetrics metric, or two of them have one name.
    """
    if not metrics:
        return {}
    from torchmetrics import Metric, MetricCollection

    found: list[tuple[str, str, Metric]] = []
    for key, metric in metrics.items():
        if isinstance(metric, MetricCollection):
            members = metric.items(keep_base=False, copy_state=False)
            found += [(f"{key}/{name}", str(name), member) for name, member in members]
        elif isinstance(metric, Metric):
            found.append((key, key, metric))
        else:
            what = f"the class {metric.__name__}" if isinstance(metric, type) else f"a {type(metric).__name__}"
            raise ConfigError(
                f"the metric {key!r} is {what}",
                where="mh.Trainer(metrics=…)",
                fix="give metrics of torchmetrics, such as MulticlassAccuracy(num_classes=10)",
            )
    times = Counter(name for _, name, _ in found)
    names = [long if times[short] > 1 else short for long, short, _ in found]
    if twice := [name for place, name in enumerate(names) if name in ("loss", *names[:place])]:
        raise ConfigError(
            f"two values of an evaluation are called {twice[0]!r}",
            where="mh.Trainer(metrics=…)",
            fix="give the metric another key" + (": 'loss' is that of the model" if twice[0] == "loss" else ""),
        )
    return {name: metric for name, (*_, metric) in zip(names, found, strict=True)}


def scalars(name: str, value: Any) -> dict[str, float]:
    """A computed metric as numbers: `name`, or `name/part` for each part of one that has several."""
    if isinstance(value, Mapping):
        return {
            key: number for inner, part in value.items() for key, number in scalars(f"{name}/{inner}", part).items()
        }
    if isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.dim()):
        return {key: n for i, part in enumerate(value) for key, n in scalars(f"{name}/{i}", part).items()}
    return {name: float(value)}


def _feed(name: str, metric: Metric, outputs: Any, targets: Any) -> None:
    """Let a metric see what the model made of one forward pass.

    Raises:
        ConfigError: it cannot take it.
    """
    try:
        metric.update(outputs, targets)
    except (ValueError, RuntimeError, TypeError, IndexError) as cause:
        if isinstance(cause, torch.OutOfMemoryError) or is_connection_error(cause):
            raise
        said = [
            f"{tuple(each.shape)} of {dtype_name(each.dtype)}" if isinstance(each, Tensor) else type(each).__name__
            for each in (outputs, targets)
        ]
        raise ConfigError(
            f"the metric {name!r}, a {type(metric).__name__}, cannot take outputs {said[0]} with targets {said[1]}: "
            f"{first_line(cause)}",
            where="mh.Trainer(metrics=…)",
            fix="see what it is made with, such as num_classes, and what it takes; a step may give it other tensors "
            "as 'outputs' and 'targets'",
        ) from cause
