"""Local SGD: each worker steps alone, and every `sync_every` steps all take the mean of their models.

The mean is weighted by the samples that each has seen since the last one, so with `sync_every=1` and plain SGD it is
data parallelism, however the batch is cut. Optimizers keep their own state: it is not averaged.

Source: Stich 2018, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767; the exact start
("post-local"): Lin et al. 2018, arXiv:1808.07217.
"""

from __future__ import annotations

from torch import nn

from manyhosts.config.local_steps import LocalSGD
from manyhosts.strategies.local_stepping import LocalStepping
from manyhosts.strategies.traits import TRAITS


class LocalSteps(LocalStepping):
    """The strategy of `LocalSGD`."""

    traits = TRAITS["local-sgd"]
    config: LocalSGD

    def exchange(self, model: nn.Module) -> None:
        """Take the mean when it is time. Behind a step that all took together there is none to take."""
        if self.steps <= self.config.sync_warmup:
            self.end_exact_step()
        elif self.alone.steps >= self.rounds.length:
            self.average(model)
            self.alone.met()
            self.rounds.next()

    def meet(self, source: int, *, new: bool, gone: int) -> str:
        """Let all continue from the mean of those that trained, as if that had been due; a round begins with it."""
        lost = super().meet(source, new=new, gone=gone)
        self.rounds.next()
        return lost
