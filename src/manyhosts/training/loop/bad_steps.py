"""Steps whose numbers went wrong: a loss or a gradient that is NaN or infinite. Found, named, and by choice left out.

To stop, or to go back to a snapshot, costs nothing: the numbers of a step are read when they are there. To leave a step
out at once its numbers must be known before the update; on a CPU they are, and for a GPU this is one wait per step.

A run that stops looks at no gradient that is not clipped, because that would cost every step something. A gradient that
is NaN under a finite loss so gets into the weights. It shows in the next loss, or where weights are looked at before
they are kept: see `finite`.
"""

from __future__ import annotations

import math

from torch import Tensor

from manyhosts.data.order import Indices
from manyhosts.training.loop.deferred_metrics import StepMetricValues
from manyhosts.training.setup.build import Parts
from manyhosts.training.state.buffers import BufferCopies

SHOW_NORM_EVERY = 20
"""Steps from one norm that is only shown to the next: to find it takes a tenth of a small model's step."""


class BadStep(Exception):
    """A step went wrong, and all workers, who see the same numbers, are to go back behind it."""

    def __init__(self, step: int, trouble: str, where: str) -> None:
        super().__init__(step, trouble, where)
        self.step, self.trouble, self.where = step, trouble, where


class BadSteps:
    """Watches one loop. Every worker sees the same numbers, so all find the same steps bad."""

    def __init__(self, parts: Parts, choice: str, *, clips: bool) -> None:
        """`choice`: the setting `on_bad_step`. `clips`: whether gradients are clipped, by their norm."""
        self.parts = parts
        self.leave_out, self.rewinds = choice == "skip", choice == "rewind"
        self.judges_norm = clips or self.rewinds
        """Whether every step has a norm; otherwise one in `SHOW_NORM_EVERY` has, which is looked at by people only."""
        self.on_cpu = parts.world.device.type == "cpu"
        self.drifts = not parts.strategy.traits.synchronous
        """Whether each worker has a gradient of its own, of which the others know nothing."""
        self.scaled = parts.precision.scaler is not None
        """Whether fp16's scaler looks for overflows, which are nothing unusual there, and leaves those steps out."""
        self.buffers = BufferCopies(parts.trained) if self.leave_out else None
        self.bad_norms: dict[int, float] = {}
        """Of steps that were left out, until they are told."""

    def watched(self, norm: Tensor | None) -> Tensor | None:
        """The norm of the gradient that this step is judged by; where nobody else wants it, found here."""
        return self._norm() if self.rewinds and norm is None and not self.scaled else norm

    def must_go(self, step: int, loss: Tensor, norm: Tensor | None) -> bool:
        """Whether `step`, just computed, must not change the model. Buffers are then as they were before it."""
        if not self.leave_out:
            # On a CPU the numbers are there already, so a run that is to stop keeps the weights of before.
            return self.on_cpu and not self.rewinds and not self._are_finite(loss, norm)
        good = bool(loss.isfinite())
        if good and not self.scaled:
            found = self._norm() if norm is None else norm
            good = bool(found.isfinite())
            if not good:
                self.bad_norms[step] = found.item()
        if not good and self.buffers:
            self.buffers.put_back()
        return not good and not self.scaled

    def shown(self, step: int, norm: Tensor | None) -> Tensor | None:
        """The norm that is told of `step`, whose gradient is whole: now and then also where nobody clips by it."""
        if norm is not None or step % SHOW_NORM_EVERY != 1:
            return norm
        gradients = (parameter.grad for parameter in self.parts.trained.parameters())
        if not self.parts.strategy.traits.takes_sparse_gradients and any(
            each is not None and each.is_sparse for each in gradients
        ):
            return None
        self.parts.precision.unscale(self.parts.optimizer)
        return self._norm()

    def _are_finite(self, loss: Tensor, norm: Tensor | None) -> bool:
        if norm is None or self.scaled or self.drifts:
            return math.isfinite(loss.item())
        return math.isfinite(loss.item()) and math.isfinite(norm.item())

    def _norm(self) -> Tensor:
        return self.parts.strategy.norm(self.parts.trained)

    def trouble(self, numbers: StepMetricValues) -> str:
        """What is wrong with a step, in words; empty where nothing is."""
        loss = numbers.values["loss"]
        norm = self.bad_norms.pop(numbers.facts.step, numbers.gradient_norm if self.judges_norm else None)
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if norm is not None and not math.isfinite(norm) and not self.scaled and not self.drifts:
            return f"the norm of the gradient is {norm}"
        return ""


def named(indices: Indices, shards: int, most: int = 64) -> str:
    """The samples of a step, the first ones of many; of a stream in shards each by its place in its shard."""
    chosen = indices[:most].tolist()
    more = ", …" if len(indices) > most else ""
    if shards < 2:
        return f"samples [{', '.join(map(str, chosen))}{more}]"
    places: dict[int, list[int]] = {}
    for number in chosen:
        places.setdefault(number % shards, []).append(number // shards)
    found = ", ".join(f"{each} of shard {shard}" for shard, each in places.items())
    return f"samples {found}{more}, of {shards} shards"
