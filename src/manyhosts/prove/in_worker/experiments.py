"""Is a sample the same when it is read again, and a piece when it is computed again, or in halves?

Two trials do not show it, so it is tried inside one. All workers do the same with the same samples, in a model whose
state is put back each time; so what differs between them depends on the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from manyhosts.data import fetch, randomness
from manyhosts.prove.in_worker.calm import RemoveNondeterminism
from manyhosts.prove.in_worker.sketch import digest_of_sample, leaves_of
from manyhosts.prove.in_worker.sources import changed, global_states, states_within, stopped_clock
from manyhosts.strategies.strategy import Piece

_MOST = 32
"""Samples that are looked at."""
_NORMS = nn.modules.batchnorm._BatchNorm


def fetcher_of(source: Any) -> Any:
    """What reads the samples of a dataset with an index; None for a stream."""
    return getattr(getattr(source, "loader", None), "fetcher", None)


class Experiments:
    """Made before any sample is read."""

    def __init__(self, components: Any, settings: Any, state: Any, calm: RemoveNondeterminism) -> None:
        self.components, self.settings, self.calm = components, settings, calm
        self.fetcher = fetcher_of(components.batches.source)
        """Only of a dataset with an index."""
        self.samples: list[Any] = []
        self.data: dict[str, Any] = {}
        self.collate_draws = False
        """Whether `collate` draws random numbers, so that two halves of a batch are not what all of it is."""
        self.epoch = state.position.epoch
        if self.fetcher is not None:
            indices = components.batches.source.order.at(state.position).tolist()
            self.indices = indices[: min(_MOST, len(indices) // 2 * 2 or 1)]
            self._read_twice()

    def run(self) -> dict[str, Any]:
        """What was found, in plain values."""
        if not self.samples:
            return {"data": self.data, "compute": {}}
        try:
            return {"data": self.data, "compute": self._compute()}
        except Exception as error:  # the user's own code, with a batch of another size than it has had
            return {"data": self.data, "compute": {}, "error": f"{type(error).__name__}: {error}"}

    # The data.

    def _read(self) -> list[Any]:
        samples = []
        with randomness.kept():
            for index in self.indices:
                randomness.seed_all(self.settings.seed, randomness.SAMPLE, self.epoch, index)
                samples.append(self.fetcher.dataset[index])
        return samples

    def _read_twice(self) -> None:
        before = states_within(self.fetcher.dataset)
        self.samples = self._read()
        first, after = _digests(self.samples), states_within(self.fetcher.dataset)
        again = _digests(self._read())
        self.data = {"digests": first, "again": first == again}
        if first != again:
            with stopped_clock():
                self.data["with_stopped_clock"] = _digests(self._read()) == _digests(self._read())
            self.data["changed"] = changed(before, after)
        if self.fetcher.collate is not default_collate:
            self._collate_twice()

    def _collate_twice(self) -> None:
        given = _as_given(self.fetcher.collate)
        before, drawn = states_within(given), global_states()
        with randomness.kept():
            digests = [digest_of_sample(leaves_of(self._collated())) for _ in range(2)]
            moved = changed(drawn, global_states())
        own = changed(before, states_within(given))
        self.data["collate"] = {"again": digests[0] == digests[1], "changed": own, "moved": moved}
        self.collate_draws = bool(moved) or digests[0] != digests[1]

    def _collated(self) -> Any:
        """The batch, as a step would have it."""
        samples, seed = list(self.samples), self.settings.seed
        return fetch.collated(self.fetcher.collate, samples, seed, self.epoch, self.indices[0])

    def _batch(self, samples: Sequence[Any]) -> Any:
        with randomness.kept():
            randomness.seed_all(0)
            return self.calm.change_batch(self.fetcher.collate(list(samples)))

    # Model and loss.

    def _compute(self) -> dict[str, Any]:
        model, compute = self.components.trained, self.components.compute
        full = self._piece(self.samples)
        user = [model, *(_as_given(part) for part in (compute.loss, compute.step) if part is not None)]
        kept = _Kept(model)
        pass_over = self._pass_over(kept)
        before = states_within(*user)
        first, outputs = pass_over(full)
        after, drawn = states_within(*user), global_states()
        found: dict[str, Any] = {"loss": first, "changed_buffers": kept.changed(), "changed": changed(before, after)}
        again, _ = pass_over(full)
        found["again"] = _same(first, again)
        found["moved"] = changed(drawn, global_states())
        if not found["again"]:
            with stopped_clock():
                found["with_stopped_clock"] = _same(pass_over(full)[0], pass_over(full)[0])
        half = len(self.samples) // 2
        if half and not self.collate_draws:
            pieces = [self._piece(self.samples[:half]), self._piece(self.samples[half:])]
            (one, left), (two, right) = (pass_over(piece) for piece in pieces)
            found |= {"halves": [one, two], "mixes": _mix(outputs, left, right)}
        kept.put_back()
        return found

    def _piece(self, samples: Sequence[Any]) -> Piece:
        batch = self._batch(samples)
        return Piece(bring=lambda: batch, samples=len(samples), weight=1.0, address=(0, 0, 0))

    def _pass_over(self, kept: _Kept) -> Callable[[Piece], tuple[float, Tensor | None]]:
        """Computes a piece from the same state each time: its loss, and what the model gave, where that is a tensor."""
        model, compute = self.components.trained, self.components.compute
        outputs: list[Any] = []
        self.components.model.register_forward_hook(lambda _, __, output: outputs.append(output))

        def once(piece: Piece) -> tuple[float, Tensor | None]:
            kept.put_back()
            outputs.clear()
            for module in model.modules():
                if isinstance(module, _NORMS):
                    module.eval()
            loss = float(compute(model, piece)["loss"].detach())
            tensors = [leaf for leaf in leaves_of(outputs) if isinstance(leaf, Tensor)]
            fit = [tensor.detach() for tensor in tensors if tensor.dim() and len(tensor) == piece.samples]
            return loss, fit[0].clone() if fit else None

        return once


class _Kept:
    """Parameters and buffers as they were."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.slots = [
            (module, kind, name, tensor, tensor.detach().clone())
            for module in model.modules()
            for kind in ("_parameters", "_buffers")
            for name, tensor in getattr(module, kind).items()
            if tensor is not None
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Have every one where it was, with the values that it had."""
        for module, kind, name, tensor, value in self.slots:
            tensor.copy_(value) if not _overlaps(tensor) else None
            getattr(module, kind)[name] = tensor

    def changed(self) -> list[str]:
        """The names of those that have other values now, BatchNorm's own left out."""
        names = {id(module): prefix for prefix, module in self.model.named_modules()}
        found = []
        for module, kind, name, _, value in self.slots:
            now = getattr(module, kind)[name]
            if not isinstance(module, _NORMS) and (now is None or not torch.equal(now.detach(), value)):
                found.append(f"{names.get(id(module), '')}.{name}".lstrip("."))
        return found


def _overlaps(tensor: Tensor) -> bool:
    """Whether several of its values share one place, as in an expanded tensor."""
    return any(not stride and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _as_given(call: Any) -> Any:
    """What the script gave, without what sees it called: that keeps numbers of its own."""
    return getattr(call, "__wrapped__", call)


def _digests(samples: Sequence[Any]) -> list[str]:
    return [digest_of_sample(leaves_of(sample)) for sample in samples]


def _same(one: float, other: float) -> bool:
    return one == other or (one != one and other != other)


def _mix(full: Tensor | None, left: Tensor | None, right: Tensor | None) -> bool | None:
    """Whether what the model gives for a sample depends on the others of its batch; None where that cannot be seen."""
    if full is None or left is None or right is None or left.shape[1:] != full.shape[1:] != right.shape[1:]:
        return None
    halves = torch.cat([left, right])
    if halves.shape != full.shape or not full.is_floating_point():
        return None
    return float((halves - full).norm()) > 1e-4 * float(full.norm())
