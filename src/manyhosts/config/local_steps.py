"""The ways to train in which workers step alone and meet now and then, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from manyhosts.config.arguments import answering
from manyhosts.config.kinds import check_kinds
from manyhosts.errors import ConfigError


@answering()
@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSGD:
    """Every worker steps alone with its part of each batch; every `sync_every` steps all take the mean of their models.

    Source: Stich 2018, arXiv:1805.09767; the exact start: Lin et al. 2018, arXiv:1808.07217.
    """

    name: ClassVar[str] = "local-sgd"
    gives_up: ClassVar[tuple[str, ...]] = ("workers", "ranks")
    by_design: ClassVar[str] = "lets each worker step alone between two exchanges"

    sync_every: int = 8
    """Optimizer steps between two means. 1 is data parallelism, for SGD."""
    sync_rule: Literal["fixed", "quadratic"] = "fixed"
    """`fixed`: a round has always `sync_every` steps. `quadratic`: where the learning rate has fallen to a share s of
    its highest value, it has `1 / s²` times as many (Gu et al. 2023, arXiv:2310.14423)."""
    sync_at_most: int | None = None
    """Most steps of a round under the quadratic rule; 16 times `sync_every` where it is not given."""
    sync_warmup: int = 0
    """Steps at the start of a run that all take together, as in data parallelism: post-local SGD."""
    inside_node: Literal["exact", "alike"] = "exact"
    """What the workers of one node do among themselves, where there are several nodes of several workers each:
    `exact`: sum their gradients in every step, so that only nodes drift apart; `alike`: step alone, each of them."""
    local_lr_scaling: Literal["auto", "sqrt"] | None = "auto"
    """What multiplies the learning rate of those that step alone. `sqrt`: the root of their number, which gives an
    adaptive optimizer back what a small part of the batch takes from its steps (Malladi et al. 2022, arXiv:2205.10287);
    `auto`: that for Adam and its relatives, nothing for others; None: nothing."""

    def __post_init__(self) -> None:
        check_kinds(self, prefix="LocalSGD.")
        check_inside_node("LocalSGD", self.inside_node)
        _check_scaling("LocalSGD", self.local_lr_scaling)
        _check_rule("LocalSGD", self.sync_rule, self.sync_every, self.sync_at_most)
        _at_least("LocalSGD", {"sync_every": (self.sync_every, 1), "sync_warmup": (self.sync_warmup, 0)})


@answering()
@dataclass(frozen=True, kw_only=True, slots=True)
class DiLoCo:
    """Every worker steps alone; every `sync_every` steps what they moved by becomes one step of an outer optimizer.

    Source: Douillard et al. 2023, arXiv:2311.08105; fragments and overlap: Douillard et al. 2025, arXiv:2501.18512.
    """

    name: ClassVar[str] = "diloco"
    gives_up: ClassVar[tuple[str, ...]] = LocalSGD.gives_up
    by_design: ClassVar[str] = LocalSGD.by_design

    sync_every: int = 8
    """Optimizer steps between two outer steps of the same parameter."""
    sync_rule: Literal["fixed", "quadratic"] = "fixed"
    """As in `LocalSGD`."""
    sync_at_most: int | None = None
    """As in `LocalSGD`."""
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    """Nesterov's."""
    sync_warmup: int = 0
    """Steps at the start of a run that all take together, as in data parallelism. The published runs begin with a
    model that is trained already."""
    fragments: int = 4
    """Into how many parts the model is cut, which take turns: one is exchanged every `sync_every / fragments` steps."""
    overlap_steps: int = 1
    """Inner steps that continue while a fragment travels."""
    mixing: float = 0.5
    """What a worker keeps of its own fragment where inner steps continued; 0 where none did."""
    outer_compression: str = "int8"
    """How outer gradients travel: any compression that `DDP` knows."""
    inside_node: Literal["exact", "alike"] = "exact"
    """As in `LocalSGD`."""
    local_lr_scaling: Literal["auto", "sqrt"] | None = "auto"
    """As in `LocalSGD`, for the inner optimizer."""

    def __post_init__(self) -> None:
        check_kinds(self, prefix="DiLoCo.")
        check_inside_node("DiLoCo", self.inside_node)
        _check_scaling("DiLoCo", self.local_lr_scaling)
        _check_rule("DiLoCo", self.sync_rule, self.sync_every, self.sync_at_most)
        _at_least(
            "DiLoCo",
            {
                "sync_every": (self.sync_every, 1),
                "sync_warmup": (self.sync_warmup, 0),
                "fragments": (self.fragments, 1),
                "overlap_steps": (self.overlap_steps, 0),
            },
        )
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


def _check_scaling(kind: str, value: str | None) -> None:
    if value not in ("auto", "sqrt", None):
        raise ConfigError(
            f"local_lr_scaling is {value!r}", where=f"{kind}(local_lr_scaling=…)", fix='give "auto", "sqrt" or None'
        )


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
