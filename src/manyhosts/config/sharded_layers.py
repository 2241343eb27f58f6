"""Layers cut over workers, whose parts others keep in parts: a plain value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from manyhosts.config.fully_sharded import FSDP
from manyhosts.config.mesh import OF_MESH
from manyhosts.config.tensor_cut import FOUND, Tensor
from manyhosts.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedLayers(FSDP):
    """Workers next to each other compute parts of each layer of the same samples; those that hold the same part read
    different samples, and each keeps a part of it."""

    name: ClassVar[str] = "fsdp+tensor"
    axes: ClassVar[Mapping[str, str]] = {"shard": "shard", "tensor": "size"}
    planned_if_asked: ClassVar[bool] = False

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
    def layers(self) -> Tensor:
        """How each layer is cut."""
        return Tensor(size=self.size, plan=self.plan)
