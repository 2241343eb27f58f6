"""A script without mh.Trainer: its optimizer steps are counted, its gradients and weights noted at each of them."""

from __future__ import annotations

import gc
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from manyhosts.prove.conduct import TrialConfig
from manyhosts.prove.in_worker.sketch import facts_of_all
from manyhosts.prove.in_worker.writer import Writer

_handles: list[Any] = []


def count_no_more() -> None:
    """A trainer of ours reports its steps itself."""
    while _handles:
        _handles.pop().remove()


class PlainScript:
    """Writes one line per optimizer step."""

    def __init__(self, conduct: TrialConfig, writer: Writer) -> None:
        self.conduct, self.writer = conduct, writer
        self.step = 0
        self.names: dict[int, dict[str, Tensor]] = {}
        self.buffers: dict[int, nn.Module] = {}
        self.line: dict[str, Any] = {}

    def put_in_place(self) -> None:
        """Have every optimizer of this process seen."""
        _handles.append(register_optimizer_step_pre_hook(self._before))
        _handles.append(register_optimizer_step_post_hook(self._after))

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        weights = self._weights(optimizer)
        if not self.step:
            self.writer.add("begin", step=0, plain=True, weights=facts_of_all(weights), buffers={})
        gradients = {name: tensor.grad for name, tensor in weights.items() if tensor.grad is not None}
        self.line = {
            "lr": [float(group["lr"]) for group in optimizer.param_groups],
            "gradients": facts_of_all(gradients),
        }

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        self.step += 1
        self.line["weights"] = facts_of_all(self._weights(optimizer))
        model = self.buffers.get(id(optimizer))
        self.line["buffers"] = {} if model is None else facts_of_all(dict(model.named_buffers()))
        self.writer.add("step", step=self.step, **self.line)
        self.writer.after_step(self.step)

    def _weights(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """The parameters of `optimizer` by the names of the model that holds most of them."""
        if id(optimizer) not in self.names:
            optimized = {id(tensor): tensor for group in optimizer.param_groups for tensor in group["params"]}
            model = _model_of(optimized)
            named = {} if model is None else dict(model.named_parameters())
            own = {name: tensor for name, tensor in named.items() if id(tensor) in optimized}
            known = {id(tensor) for tensor in own.values()}
            rest = [tensor for key, tensor in optimized.items() if key not in known]
            self.names[id(optimizer)] = {**own, **{f"(parameter {place})": tensor for place, tensor in enumerate(rest)}}
            if model is not None:
                self.buffers[id(optimizer)] = model
        return self.names[id(optimizer)]


def _model_of(optimized: dict[int, Tensor]) -> nn.Module | None:
    """The module with most of the parameters `optimized`; of equal ones the innermost, which no wrapper has renamed."""
    best: tuple[int, int, nn.Module] | None = None
    for thing in gc.get_objects():
        if not issubclass(type(thing), nn.Module):
            continue
        count = sum(id(parameter) in optimized for parameter in thing.parameters())
        depth = sum(1 for _ in thing.modules())
        if count and (best is None or (count, -depth) > (best[0], -best[1])):
            best = count, depth, thing
    return None if best is None else best[2]
