"""A look at every step from outside the loop, for `prove` and `plan`: the session of a process may have a watcher.

A listener learns what happened when it is over, on rank 0; a watcher sees the tensors while they are there, on
every worker, and may change what goes into a step to find out what depends on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from manyhosts.config.settings import Settings
    from manyhosts.data.steps import Step
    from manyhosts.evaluation.evaluate import OfAllSets
    from manyhosts.events import Listener
    from manyhosts.strategies.strategy import StepOutcome
    from manyhosts.training.state.run_state import RunState


class Watcher:
    """Called by `build` and by the loop, in this order; what it does not say itself changes nothing."""

    def made(self, model: nn.Module) -> None:
        """The model is there, with a loss that has a state, and neither placed nor in an optimizer."""

    def fits(self, validation: OfAllSets | None, listeners: Sequence[Listener]) -> Sequence[Listener]:
        """A run is about to be begun that would evaluate `validation`. Returns the listeners that are to hear of it."""
        return listeners

    def begins(self, components: Any, settings: Settings, state: RunState) -> None:
        """Training begins with `setup.build.Components` from where `state` is; again where workers went or came."""

    def reads(self, step: Step) -> Step:
        """The samples of a step are there, and nothing is computed of them yet. Returns the step to take."""
        return step

    def differentiates(self, outcome: StepOutcome) -> None:
        """The gradients of the step are in `grad`, neither clipped nor used."""

    def steps(self, step: int) -> None:
        """Optimizer step number `step` is done."""
