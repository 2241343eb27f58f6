"""The ways to train in which workers step alone and synchronise now and then, as plain values.

With `shard` it is copies of the model that step alone, and several workers keep each of them in parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from manyhosts.config.arguments import answering
from manyhosts.config.fully_sharded import FSDP
from manyhosts.config.kinds import check_kinds
from manyhosts.config.mesh import OF_MESH, Mesh
from manyhosts.config.strategy_settings import StrategySettings
from manyhosts.errors import ConfigError


class _Name:
    """The name of a strategy; where copies of the model are kept in parts, that of the combination."""

    def __init__(self, alone: str, in_parts: str) -> None:
        self.alone, self.in_parts = alone, in_parts

    def __get__(self, config: Any, kind: Any = None) -> str:
        return self.alone if config is None or config.shard == 1 else self.in_parts


@dataclass(frozen=True, kw_only=True, slots=True)
class StepAlone(StrategySettings):
    """What `LocalSGD` and `DiLoCo` have in common."""

    drifts: ClassVar[bool] = True
    axes: ClassVar[Mapping[str, str]] = {"shard": "shard"}
    gives_up: ClassVar[tuple[str, ...]] = ("workers", "ranks")
    why_not_virtual: ClassVar[str] = "lets the workers' models differ"
    keeps_some: ClassVar[bool] = True
    by_design: ClassVar[str] = "lets each worker step alone between two exchanges"

    sync_every: int = 8
    """Optimizer steps between two means, or two outer steps of the same parameter. With means 1 is data parallelism,
    for SGD."""
    sync_rule: Literal["fixed", "quadratic"] = "fixed"
    """`fixed`: a round has always `sync_every` steps. `quadratic`: where the learning rate has fallen to a share s of
    its highest value, it has `1 / s²` times as many (Gu et al. 2023, arXiv:2310.14423)."""
    sync_at_most: int | None = None
    """Most steps of a round under the quadratic rule; 16 times `sync_every` where it is not given."""
    sync_warmup: int = 0
    """Steps at the start of a run that all take together, as in data parallelism: post-local SGD. The published runs of
    DiLoCo begin with a model that is trained already."""
    inside_node: Literal["exact", "alike"] = "exact"
    """What the workers of one node do among themselves, where there are several nodes of several workers each:
    `exact`: sum their gradients in every step, so that only nodes diverge; `alike`: step alone, each of them."""
    local_lr_scaling: Literal["auto", "sqrt"] | None = "auto"
    """What multiplies the learning rate of those that step alone. `sqrt`: the root of their number, which gives an
    adaptive optimizer back what a small part of the batch takes from its steps (Malladi et al. 2022, arXiv:2205.10287);
    `auto`: that for Adam and its relatives, nothing for others; None: nothing."""
    shard: int = 1
    """How many workers, in the order of their ranks, keep one copy of the model in parts, as `FSDP` does. Then copies
    step alone, and not workers; what an outer optimizer keeps is in parts, too."""
    units: str | Sequence[str] = ()
    """As in `FSDP`, of a copy in parts."""
    zero: int = 3
    """As in `FSDP`, of a copy in parts."""

    def __post_init__(self) -> None:
        kind = type(self).__name__
        object.__setattr__(self, "units", self.copy.units)  # as `FSDP` checks them and writes them in words
        check_kinds(self, prefix=f"{kind}.")
        check_inside_node(kind, self.inside_node)
        if self.shard != 1 and self.inside_node != "exact":
            raise ConfigError(
                f"inside_node is {self.inside_node!r}, and workers that keep a copy of the model together cannot each "
                "step alone",
                where=f"{kind}(inside_node=…)",
                fix="leave it out, or leave out shard",
            )
        if self.local_lr_scaling not in ("auto", "sqrt", None):
            raise ConfigError(
                f"local_lr_scaling is {self.local_lr_scaling!r}",
                where=f"{kind}(local_lr_scaling=…)",
                fix='give "auto", "sqrt" or None',
            )
        _check_rule(kind, self.sync_rule, self.sync_every, self.sync_at_most)
        _at_least(kind, {"sync_every": (self.sync_every, 1), "sync_warmup": (self.sync_warmup, 0)})

    @property
    def copy(self) -> FSDP:
        """How the workers of one copy keep it in parts."""
        return FSDP(shard=None if self.shard == OF_MESH else self.shard, units=self.units, zero=self.zero)

    @property
    def block(self) -> int:
        """By which a plan has the number of workers divisible."""
        return self.shard

    def check_shared(self, settings: Any, workers: int) -> None:
        """Refuse what takes workers that hold one model in every step.

        Raises:
            ConfigError: it is asked for.
        """
        if settings.balance == "speed":
            raise ConfigError(
                f"with strategy {self.name!r} workers step alone and their models count alike, so each must have "
                "equally many samples",
                where="balance",
                fix='leave balance out, or choose strategy="ddp"',
            )
        StrategySettings.check_shared(self, settings, workers)  # `super` does not know a class with slots
        if settings.on_bad_step == "rewind":
            raise ConfigError(
                "with local steps each worker has a gradient of its own, and one alone would find it bad and go back",
                where="on_bad_step",
                fix='leave local steps out, or use on_bad_step="stop"',
            )

    def check_kept(self, name: str) -> None:
        """Refuse it.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"a callback keeps tensors ({name}), and with strategy {self.name!r} each worker has weights of its own "
            "between two exchanges, so these would differ",
            where="mh.Trainer(callbacks=…)",
            fix='leave the callback out, or choose strategy="ddp"',
        )

    def check_thawed(self, name: str) -> None:
        """Refuse it.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"a callback freezes {name!r} for a part of the run, and with strategy {self.name!r} workers exchange what "
            "is trained when it begins, and in each round",
            where="mh.Trainer(callbacks=…)",
            fix='freeze it for the entire run (no start=, no until=), or choose strategy="ddp"',
        )

    def check_planned(self, mesh: Mesh | None) -> None:
        """Refuse what a plan cannot lay out.

        Raises:
            ConfigError: copies are kept in parts, and no one says by how many workers.
        """
        if self.shard == OF_MESH:
            raise ConfigError(
                "no one says how many workers keep one copy of the model in parts",
                where=f"{type(self).__name__}(shard=…)",
                fix="write --set shard=2",
            )
        StrategySettings.check_planned(self, mesh)


@answering()
@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSGD(StepAlone):
    """Every worker steps alone with its part of each batch; every `sync_every` steps all take the mean of their models.

    Source: Stich 2018, arXiv:1805.09767; the exact start: Lin et al. 2018, arXiv:1808.07217.
    """

    name = _Name("local-sgd", "fsdp+local-sgd")


@answering()
@dataclass(frozen=True, kw_only=True, slots=True)
class DiLoCo(StepAlone):
    """Every worker steps alone; every `sync_every` steps what they moved by becomes one step of an outer optimizer.

    Source: Douillard et al. 2023, arXiv:2311.08105; fragments and overlap: Douillard et al. 2025, arXiv:2501.18512.
    """

    name = _Name("diloco", "fsdp+diloco")

    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    """Nesterov's."""
    fragments: int = 4
    """Into how many parts the model is cut, which take turns: one is exchanged every `sync_every / fragments` steps."""
    overlap_steps: int = 1
    """Inner steps that continue while a fragment travels."""
    mixing: float = 0.5
    """What a worker keeps of its own fragment where inner steps continued; 0 where none did."""
    outer_compression: str = "int8"
    """How outer gradients travel: any compression that `DDP` knows."""

    @property
    def about_weights(self) -> str:
        """That it does not go by samples among workers."""
        return (
            "what samples count is kept inside each worker; diloco counts all workers alike, also where the samples of "
            "one count more than those of another"
        )

    def __post_init__(self) -> None:
        StepAlone.__post_init__(self)  # `super` does not know a class with slots
        _at_least("DiLoCo", {"fragments": (self.fragments, 1), "overlap_steps": (self.overlap_steps, 0)})
        if self.fragments > self.sync_every or self.overlap_steps * self.fragments > self.sync_every:
            raise ConfigError(
                f"{self.fragments} fragments of {self.overlap_steps} steps each do not fit into {self.sync_every}",
                where="DiLoCo(sync_every=…, fragments=…, overlap_steps=…)",
                fix="raise sync_every, or lower one of the other two",
            )
        for key in ("outer_lr", "outer_momentum", "mixing"):
            if not 0 <= getattr(self, key) <= (1 if key != "outer_lr" else float("inf")):
                raise ConfigError(
                    f"{key} is {getattr(self, key)}", where=f"DiLoCo({key}=…)", fix="give a number from 0 to 1"
                )


def check_inside_node(kind: str, value: str) -> None:
    """Raise ConfigError where `value` is no way to treat the workers of one node."""
    if value not in ("exact", "alike"):
        raise ConfigError(f"inside_node is {value!r}", where=f"{kind}(inside_node=…)", fix='give "exact" or "alike"')


def _check_rule(kind: str, rule: str, every: int, most: int | None) -> None:
    if rule not in ("fixed", "quadratic"):
        raise ConfigError(f"sync_rule is {rule!r}", where=f"{kind}(sync_rule=…)", fix='give "fixed" or "quadratic"')
    if most is not None and most < every:
        raise ConfigError(
            f"a round has at most {most} steps, but {every} at least",
            where=f"{kind}(sync_every=…, sync_at_most=…)",
            fix="raise sync_at_most, or leave it out",
        )


def _at_least(kind: str, values: dict[str, tuple[int, int]]) -> None:
    for key, (value, least) in values.items():
        if value < least:
            raise ConfigError(f"{key} is {value}", where=f"{kind}({key}=…)", fix=f"set it to {least} or more")
