"""Layers cut over workers, whose parts others keep in parts: a plain value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from manyhosts.config.fully_sharded import FSDP
from manyhosts.config.mesh import OF_MESH, Mesh
from manyhosts.config.tensor_cut import FOUND, Tensor
from manyhosts.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedLayers(FSDP):
    """Workers next to each other compute parts of each layer of the same samples; those that hold the same part read
    different samples, and each keeps a part of it."""

    name: ClassVar[str] = "fsdp+tensor"
    axes: ClassVar[Mapping[str, str]] = {"shard": "shard", "tensor": "size"}
    planned_if_asked: ClassVar[bool] = True

    size: int = OF_MESH
    """Over how many workers each layer is cut: see `Tensor`; by itself what the mesh says."""
    plan: str | Mapping[str, str] = FOUND
    """How layers are cut: see `Tensor`."""

    def __post_init__(self) -> None:
        FSDP.__post_init__(self)  # `super` does not know a class with slots
        object.__setattr__(self, "plan", self.layers.plan)  # as `Tensor` checks it and writes it in words
        for key, value, other in (("shard", "host", None), ("gather", "bf16", "exact"), ("cpu_offload", True, False)):
            if getattr(self, key) == value:
                raise ConfigError(
                    f"{key} is {value!r}, which strategy {self.name!r} does not know",
                    where=f"strategy={self.name!r}",
                    fix=f"leave it out ({other!r}), or choose strategy='fsdp'",
                )

    @property
    def by_layers(self) -> int:
        """Over how many workers each layer is cut."""
        return self.size

    @property
    def block(self) -> int:
        """By which a plan has the number of workers divisible."""
        return self.size * (self.shard if isinstance(self.shard, int) else 1)

    def check_planned(self, mesh: Mesh | None) -> None:
        """See `planned`."""
        self.planned(mesh)

    def planned(self, mesh: Mesh | None) -> ShardedLayers:
        """The same with the sizes of `mesh`, as a plan takes it: the number of copies follows from that of workers.

        Raises:
            ConfigError: no one says over how many workers a layer is cut, or the mesh says how many copies there are.
        """
        mesh = mesh or Mesh()
        size = mesh.tensor or self.size
        if size < 1 or mesh.replicate:
            has = f"the mesh has {mesh}, and a" if mesh.replicate else "no one says how many workers cut a layer, and a"
            raise ConfigError(
                f"{has} plan of {self.name!r} is for several numbers of workers, of which so many cut each layer",
                where="mesh",
                fix="write --set mesh.tensor=2, say, and mesh.shard=2 where copies are to be of so many; no replicate",
            )
        return replace(self, size=size, shard=mesh.shard or self.shard)

    @property
    def layers(self) -> Tensor:
        """How each layer is cut."""
        return Tensor(size=self.size, plan=self.plan)
