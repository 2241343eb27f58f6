"""The weights of a stage that updates them while micro-batches are under way: one version after each update.

A pass that needs an older version than the newest computes with parameters of its own, which have the memory of that
version; an update then goes to new memory. So a version costs what its weights take, and only from when an update would
have overwritten it until the last pass that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from manyhosts.config.pipedream import PipeDream
from manyhosts.strategies.pipeline.owners import places_of, put_parameter


class Versions:
    """Those of this worker's stage, in one step."""

    def __init__(self, config: PipeDream, model: nn.Module, update: Callable[[], None]) -> None:
        """`update`: changes the parameters of `model` by one step, by the gradients that they have."""
        self.config, self.update = config, update
        named = [(name, each) for name, each in model.named_parameters() if each.requires_grad and not each.is_meta]
        self.trained = [each for _, each in named]
        self.places = [places_of(model, name) for name, _ in named]
        self.micro_batches = 0
        """Of this step."""
        self.newest = 0
        """The number of the newest version: how many updates there were in this step."""
        self.most = 1
        """How many versions were kept at a time, the newest among them."""
        self.stalest = 0
        """The most updates that came between the forward pass of a micro-batch and the update that it is a part of."""
        self._under_way: dict[int, int] = {}
        """Micro-batch → the version of its forward pass."""
        self._kept: dict[int, list[nn.Parameter]] = {}
        """Version → what passes compute with in place of the parameters."""

    def begin(self, micro_batches: int) -> None:
        """A step begins. All that was under way has come through."""
        self.micro_batches, self.newest, self.most, self.stalest = micro_batches, 0, 1, 0
        self._under_way, self._kept = {}, {}

    @contextmanager
    def forward(self, number: int) -> Iterator[None]:
        """Within, the model has the weights with which micro-batch `number` is computed."""
        group = number // self.config.accumulate
        version = max(group - 1, 0) if self.config.versions == "two" else self.newest
        self._under_way[number] = version
        if self.config.versions == "one":
            yield
            return
        self._put(self._as_parameters(version))
        try:
            yield
        finally:
            self._put(self.trained)

    def before_backward(self, number: int) -> None:
        """Begin to add up gradients, where `number` is the first of those behind an update."""
        if number % self.config.accumulate == 0:
            for parameter in self.trained:
                parameter.grad = None

    def after_backward(self, number: int) -> None:
        """Add what micro-batch `number` has found to the gradients, and update where it is the last one."""
        version, group = self._under_way.pop(number), number // self.config.accumulate
        self.stalest = max(self.stalest, group - version)
        for parameter, own in zip(self.trained, self._kept.get(version, ()), strict=False):
            if own.grad is not None:
                parameter.grad = own.grad if parameter.grad is None else parameter.grad.add_(own.grad)
                own.grad = None
        if (number + 1) % self.config.accumulate == 0 or number + 1 == self.micro_batches:
            self._update()

    def _update(self) -> None:
        before = self.newest
        needed = set(self._under_way.values())
        if self.config.versions == "two" and (before + 1) * self.config.accumulate < self.micro_batches:
            needed.add(before)  # the next micro-batches compute with it
        self._kept = {version: each for version, each in self._kept.items() if version in needed}
        if self.config.versions != "one" and before in needed:
            self._as_parameters(before)
            for parameter in self.trained:
                parameter.data = parameter.data.clone()
        with self._unseen() if self.config.versions == "one" else nullcontext():
            self.update()
        self.newest += 1
        self.most = max(self.most, len(self._kept) + 1)

    def _as_parameters(self, version: int) -> list[nn.Parameter]:
        """What the passes of a version compute with. It has the memory of the parameters, as long as it is the newest.

        Autograd notes the parameter itself that a pass has used, and so would find its newest values.
        """
        if version not in self._kept:
            assert version == self.newest, f"version {version} was let go of, and {self.newest} is the newest"
            self._kept[version] = [nn.Parameter(each.data) for each in self.trained]
        return self._kept[version]

    def _unseen(self) -> _unsafe_preserve_version_counter:
        """Within, parameters change, and autograd lets the passes under way go on with their new values."""
        return _unsafe_preserve_version_counter(tuple(self.trained))

    def _put(self, parameters: Sequence[nn.Parameter]) -> None:
        for places, parameter in zip(self.places, parameters, strict=True):
            for module, key in places:
                put_parameter(module, key, parameter)
