"""Layers cut over workers, as a plain value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from manyhosts.config.kinds import check_kinds
from manyhosts.config.mesh import OF_MESH
from manyhosts.config.strategy_settings import StrategySettings
from manyhosts.errors import ConfigError

FOUND = "found"
WAYS = ("column", "row", "gathered", "vocabulary", "whole")
"""How a layer may be cut: `nn.Linear` by outputs, by inputs, by outputs that are put together again; `nn.Embedding` by
rows; not at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor(StrategySettings):
    """Each worker computes a part of every large layer, of the same samples as the others of its copy."""

    name: ClassVar[str] = "tensor"
    axes: ClassVar[Mapping[str, str]] = {"tensor": "size"}
    unplanned: ClassVar[str] = "size"
    variant: ClassVar[str] = ""

    size: int = 0
    """Over how many workers each layer is cut; 0: over all. The others hold further copies of the model, which read
    different samples and sum their gradients."""
    plan: str | Mapping[str, str] = FOUND
    """How layers are cut. `found`: from a forward pass; or names of layers, which may hold `*`, with `column`, `row`,
    `gathered`, `vocabulary` or `whole`: `{"*.up": "column", "*.down": "row"}` (`*.up=column,*.down=row` in `--set`).
    The first name that fits counts; what none fits is not cut."""

    def __post_init__(self) -> None:
        check_kinds(self, prefix="Tensor.")
        given: Any = self.plan
        if isinstance(given, Mapping):
            object.__setattr__(self, "plan", ",".join(f"{name}={way}" for name, way in given.items()))
        if self.size < OF_MESH:
            raise ConfigError(
                f"size is {self.size}",
                where="Tensor(size=…)",
                fix="set it to how many workers cut a layer, or leave it out",
            )
        for name, way in self.ways.items():
            if not name or way not in WAYS:
                raise ConfigError(
                    f"the plan has {name!r} cut as {way!r}",
                    where="Tensor(plan=…)",
                    fix=f"give each name one of {', '.join(WAYS)}, as in *.up=column,*.down=row; or plan='found'",
                )

    @property
    def ways(self) -> dict[str, str]:
        """The way of each pattern of the user's; empty where it is found."""
        assert isinstance(self.plan, str), "a mapping was written as words"
        if self.plan == FOUND:
            return {}
        pairs = [each.partition("=") for each in self.plan.split(",")]
        return {name.strip(): way.strip() for name, _, way in pairs}
