"""What BatchNorm over the batch of all workers costs: measured in the first steps, and said once."""

from __future__ import annotations

from manyhosts.communication.batch_norm import GlobalBatch
from manyhosts.communication.shared_norm import Batch
from manyhosts.units import seconds_in_words

_FIRST = 3
"""Steps before it that do not count: memory is made, kernels are chosen."""
_STEPS = 10


class NormPrice:
    """Of the exchanges of one model's layers."""

    def __init__(self, batch: Batch | None, notes: list[str]) -> None:
        """The sentence goes to `notes`."""
        self.notes = notes
        self.batch = batch if isinstance(batch, GlobalBatch) else None
        self._steps, self._total, self._begin = 0, 0.0, (0.0, 0)

    def after_step(self, seconds: float) -> None:
        """A step took so many `seconds`. After the last one that counts it is said what exchanges took of them."""
        batch = self.batch
        if batch is None or batch.members.size == 1 or batch.members.device.type != "cpu":
            return
        self._steps += 1
        if self._steps > _FIRST:
            self._total += seconds
        elif self._steps == _FIRST:
            self._begin = batch.exchange_s, batch.exchanges
        if self._steps < _FIRST + _STEPS:
            return
        took, count = batch.exchange_s - self._begin[0], batch.exchanges - self._begin[1]
        self.batch = None
        if not count:
            return
        way = "through shared memory" if batch.is_shared_memory else "over the network"
        self.notes.append(
            f"BatchNorm over the batch of {batch.members.size} workers: {count / _STEPS:.0f} exchanges {way} take "
            f"{seconds_in_words(took / _STEPS)} of a step of {seconds_in_words(self._total / _STEPS)} "
            f"({100 * took / self._total:.0f} %, waiting for the slowest worker included); "
            'batch_norm="local" has none, and its result depends on the number of workers'
        )
