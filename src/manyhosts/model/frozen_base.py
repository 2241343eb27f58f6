"""Models with adapters of PEFT: the frozen weights below them, which the script makes again, are not in snapshots.

A snapshot names the checksum of the frozen weights that its adapters belong to, and goes with no others. Where
something has changed frozen weights after all, snapshots hold the entire model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from torch import Tensor, nn

from manyhosts.communication.holding import Holding
from manyhosts.communication.world import World
from manyhosts.records.manifest import Manifest
from manyhosts.snapshot.fingerprint import Fingerprint, combined, tensor_checksums
from manyhosts.snapshot.load import Fits, same_model

KEY = "frozen_base"
"""Under which a manifest names the checksum, in `Facts.run`."""


class FrozenBase:
    """The frozen parameters of those parts of a model that have adapters; of other models, and of stages, nothing."""

    def __init__(self, model: nn.Module, holding: Holding, world: World) -> None:
        """`model`: as it was placed. What it has now is what the script makes."""
        self._model, self._holding, self._world = model, holding, world
        self.names = frozenset() if holding.by_stage else frozenset(_frozen_below_adapters(model))
        """In the model's `state_dict`."""

    def tensors(self) -> dict[str, Tensor]:
        """Those in use, by name."""
        return {name: each for name, each in self._model.state_dict().items() if name in self.names}

    @cached_property
    def _as_made(self) -> tuple[str, int]:
        """Checksums of the entire tensors, empty where there is nothing, and of what this worker holds of them.

        All workers ask for it together, first before any step.
        """
        found: dict[str, str] = {}
        for name, each in self.tensors().items():
            found |= tensor_checksums({name: self._holding.full(each)})  # one entire tensor at a time
        return f"{combined(found):016x}" if found else "", self._held()

    def _held(self) -> int:
        return combined(tensor_checksums({name: self._holding.local(each) for name, each in self.tensors().items()}))

    def for_snapshot(self) -> str:
        """The checksum where a snapshot can do without the frozen weights, else empty. All workers call this."""
        made, own = self._as_made
        return "" if not made or self._world.any(self._held() != own) else made

    def fits(self, wanted: Fingerprint) -> Fits:
        """Only snapshots of this model will do and, of those with adapters alone, the ones that belong to this base.

        All workers call this before anything was put into the model.
        """
        same, (own, _) = same_model(wanted), self._as_made

        def reason(manifest: Manifest) -> str:
            if (other := same(manifest)) or manifest.facts.run.get(KEY, own) == own:
                return other
            return "it holds adapters alone, and the frozen weights below them are not those that the script makes now"

        return reason


def _frozen_below_adapters(model: nn.Module) -> set[str]:
    adapted = [
        f"{name}." if name else ""
        for name, module in model.named_modules()
        if isinstance(getattr(module, "peft_config", None), Mapping)
    ]
    frozen = {name for name, each in model.named_parameters(remove_duplicate=False) if not each.requires_grad}
    return {name for name in frozen if any(name.startswith(prefix) for prefix in adapted)}
