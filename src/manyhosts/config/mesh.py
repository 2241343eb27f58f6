"""How many workers stand along each axis of a mesh, as a plain value, and what a strategy makes of it.

A combination has the name of both, such as `ddp+tensor`: copies of a model whose layers are cut.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol, TypeVar, cast

from manyhosts.config.kinds import check_kinds
from manyhosts.errors import ConfigError


class _Named(Protocol):
    """A way to spread a step over workers, as a plain value."""

    name: ClassVar[str]


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


def axis_of(strategy: object) -> tuple[str, str]:
    """The axis that a strategy has besides `replicate`, and which of its settings says its size.

    `replicate` and empty where it has none; both empty where it knows nothing of a mesh.
    """
    return getattr(strategy, "axis", ("", ""))


def laid_out(strategy: S, mesh: Mesh | None, workers: int) -> S:
    """`strategy` with the sizes that `mesh` says, where they are those of `workers`; one worker needs none.

    Raises:
        ConfigError: the sizes do not multiply to the workers, or a combination has none.
    """
    mesh = mesh or Mesh()
    axis, key = axis_of(strategy)
    if workers == 1 or (not key and not mesh.replicate):
        return strategy
    own, size = (getattr(strategy, key) or 0, mesh.sizes[axis]) if key else (1, 1)
    if own in (0, OF_MESH):
        if own == OF_MESH and not (size or mesh.replicate):
            raise ConfigError(
                f"strategy 'ddp+{strategy.name}' makes copies, and no one says how many workers make one",
                where="strategy",
                fix=f"write --set mesh.{axis}=2, or mh.Trainer(strategy=mh.Mesh({axis}=2))",
            )
        size = size or (0 if workers % (mesh.replicate or 1) else workers // (mesh.replicate or 1))
    elif key and (size not in (0, own) or (own == "host" and mesh.replicate)):
        raise ConfigError(
            f"the strategy has {key}={own!r}, and the mesh has {mesh}",
            where="mesh",
            fix=f"leave one of them out: {key} of the strategy, or the mesh",
        )
    elif own == "host":
        return strategy
    else:
        size = own
    if not size or workers % size or (mesh.replicate and size * mesh.replicate != workers):
        given = replace(mesh, **{axis: size}) if key else mesh
        raise ConfigError(
            f"there are {workers} workers, which a mesh with {given} does not multiply to",
            where="mesh" if mesh != Mesh() else f"strategy={strategy.name!r}, {key}=…",
            fix="start as many workers as its axes multiply to, or leave one out: it is then what the others leave",
        )
    return cast(S, replace(cast(Any, strategy), **{key: size})) if key else strategy
