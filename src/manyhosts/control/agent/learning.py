"""Whether a training that is not ours learns: what its gradients are in the first steps, and whether its weights move.

Nothing here imports torch. What cannot be looked at without changing something (a captured graph, tensors that are cut
up, gradients that a scaler has yet to judge) is left alone, and then nothing is claimed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

_CUT_UP = ("DTensor", "ShardedTensor", "FlatParameter")
_ELEMENTS = 1 << 20
"""Of all weights of an optimizer together that are compared before and after."""
_SKETCH = 64
"""Of which so many are told, for comparing workers."""


class Learning:
    """Looks at every optimizer before its first steps."""

    def __init__(self) -> None:
        self.can_tell = True
        """Whether nothing has come in between of which nobody knows what it does."""
        self.has_gradient = self.is_nonzero = self.is_finite = False
        """Whether a gradient was there in any step; one above zero; one that is finite."""
        self.takes_closure = False
        self.rate = 0.0
        """The highest learning rate so far."""
        self._weights: dict[int, list[tuple[Any, Any]]] = {}
        """By optimizer: what is looked at of each of its weights, and what that was."""

    def look(self, optimizer: Any, arguments: Iterable[object]) -> None:
        """Before a step of `optimizer`, which is called with `arguments`."""
        torch: Any = sys.modules["torch"]
        weights = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
        scaled = getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if scaled or capturing or any(is_cut_up(each) for each in weights):
            self.can_tell = False
        if not self.can_tell:
            return
        self.takes_closure |= any(each is not None for each in arguments)
        self.rate = max([self.rate, *(float(group.get("lr", 0.0)) for group in optimizer.param_groups)])
        with torch.no_grad():
            if id(optimizer) not in self._weights:
                self._weights[id(optimizer)] = _kept(weights)
            gradients = [_values_of(each.grad) for each in weights if each.grad is not None]
            peaks = [each.abs().amax().float().cpu() for each in gradients if each.numel()]
            if peaks:
                self.has_gradient = True
                found = torch.stack(peaks)
                self.is_nonzero |= bool((found != 0).any())  # NaN is not zero
                self.is_finite |= bool(found.isfinite().all())

    def trouble(self) -> str:
        """After the first steps: `nan`, `zero`, `none` or `still`; empty where all is well, or nobody can tell."""
        if not self.can_tell or not self._weights:
            return ""
        still = self.rate > 0 and not self._have_moved()
        if self.has_gradient and not self.takes_closure:
            if not self.is_finite:
                return "nan"
            if not self.is_nonzero:
                return "zero"
        elif still and not self.takes_closure:
            return "none"
        return "still" if still else ""

    def _have_moved(self) -> bool:
        torch: Any = sys.modules["torch"]
        pairs = [pair for kept in self._weights.values() for pair in kept]
        return not all(torch.equal(_some_of(weight, before.numel()), before) for weight, before in pairs)

    def sketch(self) -> tuple[list[float], float]:
        """How far some of the weights of the first optimizer have moved, and the largest of them."""
        torch: Any = sys.modules["torch"]
        pairs = next(iter(self._weights.values()), [])
        if not self.can_tell or not pairs:
            return [], 0.0
        each_gives = max(1, _SKETCH // len(pairs))
        moved, largest = [], 0.0
        for weight, before in pairs[:_SKETCH]:
            if not before.is_floating_point() or not before.numel():
                continue
            chosen = torch.linspace(0, before.numel() - 1, min(each_gives, before.numel())).long()
            was, now = before.cpu()[chosen].double(), _some_of(weight, before.numel()).cpu()[chosen].double()
            moved += (now - was).tolist()
            largest = max(largest, float(was.abs().amax()))
        return moved, largest


def _kept(weights: list[Any]) -> list[tuple[Any, Any]]:
    total = max(1, sum(each.numel() for each in weights))
    part = min(1.0, _ELEMENTS / total)
    return [(each, _some_of(each, max(1, int(each.numel() * part))).clone()) for each in weights if each.numel()]


def _some_of(weight: Any, count: int) -> Any:
    """So many elements of a weight, evenly spread."""
    flat = weight.detach().reshape(-1)
    return flat if count == flat.numel() else flat[:: flat.numel() // count][:count]


def _values_of(gradient: Any) -> Any:
    return gradient.coalesce().values() if gradient.is_sparse else gradient.detach()


def is_cut_up(weight: Any) -> bool:
    """Whether this worker holds a part of a tensor that others hold the rest of."""
    names = {kind.__name__ for kind in type(weight).__mro__}
    return not names.isdisjoint(_CUT_UP) or any(
        hasattr(weight, mark) for mark in ("_fsdp_flattened", "_is_flat_param", "ds_id")
    )
