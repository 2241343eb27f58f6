"""How many workers there are along each axis of a mesh, as a plain value, and what a strategy makes of it.

A combination has the name of both, such as `ddp+tensor`: copies of a model whose layers are cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar, cast

from manyhosts.config.kinds import check_kinds
from manyhosts.errors import ConfigError


class _Named(Protocol):
    """A way to spread a step over workers, as a plain value."""

    @property
    def name(self) -> str:
        """Of it."""


S = TypeVar("S", bound=_Named)
OF_MESH = -1
"""The size in the settings of a combination: it is the mesh that says it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """How many workers there are along each axis. 0: as many as the others leave."""

    replicate: int = 0
    """Copies of the model, which read different samples and sum their gradients."""
    shard: int = 0
    """Workers that share one copy of the model in parts, and read different samples."""
    tensor: int = 0
    """Workers that compute parts of each layer, of the same samples."""
    pipeline: int = 0
    """Stages, one after the other."""

    def __post_init__(self) -> None:
        check_kinds(self, prefix="mesh.")
        for axis, size in self.sizes.items():
            if size < 0:
                raise ConfigError(
                    f"mesh.{axis} is {size}", where=f"mesh.{axis}", fix="set it to 1 or more, or leave it out"
                )

    @property
    def sizes(self) -> dict[str, int]:
        """By the name of the axis."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __str__(self) -> str:
        return " and ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 0)


def axes_of(strategy: object) -> Mapping[str, str]:
    """The axes that a strategy puts workers along, and which of its settings says the size of each.

    `replicate`, with no setting, where it has no other; none where it knows nothing of a mesh.
    """
    return getattr(strategy, "axes", {})


def laid_out(strategy: S, mesh: Mesh | None, workers: int) -> S:
    """`strategy` with the sizes that `mesh` says, where they are those of `workers`; one worker needs none.

    Raises:
        ConfigError: the sizes do not multiply to the workers, or a combination has none.
    """
    mesh = mesh or Mesh()
    keys = {axis: key for axis, key in axes_of(strategy).items() if key}
    if workers == 1 or not (keys or mesh.replicate):
        return strategy
    own = {axis: getattr(strategy, key) or 0 for axis, key in keys.items()}
    unsaid = {0, OF_MESH, *(each.default for each in fields(cast(Any, strategy)) if each.name in keys.values())}
    # What is 1 by itself stays so; what is left open has what the others leave.
    sizes = {axis: own[axis] if own[axis] not in unsaid else mesh.sizes[axis] or max(own[axis], 0) for axis in keys}
    for axis, key in keys.items():
        if mesh.sizes[axis] not in (0, sizes[axis]) or (own[axis] == "host" and mesh.replicate):
            raise ConfigError(
                f"the strategy has {key}={own[axis]!r}, and the mesh has {mesh}",
                where="mesh",
                fix=f"leave one of them out: {key} of the strategy, or the mesh",
            )
    if "host" in own.values():
        return strategy
    _give_rest(strategy, sizes, mesh, workers, [axis for axis in keys if own[axis] == OF_MESH])
    block = math.prod(sizes.values())
    if not block or workers % block or (mesh.replicate and block * mesh.replicate != workers):
        raise ConfigError(
            f"there are {workers} workers, which a mesh with {replace(mesh, **sizes)} does not multiply to",
            where="mesh" if mesh != Mesh() else f"strategy={strategy.name!r}, {', '.join(keys.values())}=…",
            fix="start as many workers as its axes multiply to, or leave one out: it is then what the others leave",
        )
    return cast(S, replace(cast(Any, strategy), **{key: sizes[axis] for axis, key in keys.items()}))


def _give_rest(strategy: _Named, sizes: dict[str, int], mesh: Mesh, workers: int, asked: Sequence[str]) -> None:
    """Put what the other axes leave of `workers` into the one of `sizes` that no one has said, if it comes out even.

    `asked`: the axes whose sizes a combination must be told, but for one.
    """
    left = [axis for axis, size in sizes.items() if not size]
    said = [size for size in (mesh.replicate, *sizes.values()) if size]
    if len(left) > 1 or (left and left[0] in asked and not said):
        name = strategy.name if "+" in strategy.name else f"ddp+{strategy.name}"
        raise ConfigError(
            f"no one says how many workers of strategy {name!r} make one copy of the model",
            where="strategy",
            fix=f"write --set mesh.{left[-1]}=2, or mh.Trainer(strategy=mh.Mesh({left[-1]}=2))",
        )
    if left and workers % math.prod(said) == 0:
        sizes[left[0]] = workers // math.prod(said)
