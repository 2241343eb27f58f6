"""The blocks of a model that stages of a pipeline could share, and the layers that could be cut over workers."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from manyhosts.measure.in_worker.passes import Passes
from manyhosts.model.trained_module import model_of
from manyhosts.planner.measured import Block, CutLayers
from manyhosts.strategies.cut_model import copy_of
from manyhosts.strategies.pipeline.chain import find_chain
from manyhosts.strategies.pipeline.look import look
from manyhosts.strategies.strategy import Piece
from manyhosts.strategies.tensor.look import look as look_at_layers
from manyhosts.strategies.uses import tensors_in

_WORKERS = 2
"""Over which layers are taken to be cut: what is exchanged hardly depends on it."""


def measure(timed: Passes, samples: int) -> dict[str, Any]:
    """`blocks` and `cut_layers` of `Measured`, by a batch of so many samples; empty and None where there are none."""
    components, batch = timed.components, timed.batches.of(samples)
    if (
        components.compute.step is not None
        or components.world.device.type != "cpu"
        or components.settings.virtual_workers is not None
    ):
        return {}
    model = model_of(components.trained)
    piece = Piece(bring=lambda: batch, samples=samples, weight=1.0, address=(0, 0, 0))
    found: dict[str, Any] = {}
    for name, measured in (("blocks", _blocks), ("cut_layers", _layers)):
        # The model's own code, called as nowhere before: a run with that strategy says what is wrong.
        with suppress(Exception):
            found[name] = measured(model, components.compute.inputs_of(piece)[0], components.compute.context, samples)
    return found


def _blocks(model: nn.Module, inputs: Any, context: Any, samples: int) -> tuple[Block, ...]:
    chain = find_chain(model)
    seen = look(model, chain, inputs, context, timed=True)
    copied = copy_of(model)
    sent: list[int] = []
    for _, block in find_chain(copied).blocks:
        block.register_forward_hook(lambda *each: sent.append(sum(tensor.nbytes for tensor in tensors_in(each[2]))))
    with context(), torch.no_grad():
        copied(inputs)
    sizes, in_all = [0] * len(chain.blocks), max(1e-12, sum(seen.seconds))
    named: dict[str, Tensor] = dict(model.named_parameters())
    for name, users in seen.uses.items():
        if name in named:
            sizes[users[0] if users else 0] += named[name].nbytes
    return tuple(
        Block(share=seconds / in_all, parameter_bytes=size, sent_bytes=each / samples)
        for seconds, size, each in zip(seen.seconds, sizes, sent, strict=True)
    )


def _layers(model: nn.Module, inputs: Any, context: Any, samples: int) -> CutLayers | None:
    copied = copy_of(model)
    with context():
        plan, groups = look_at_layers(copied, inputs, _WORKERS)
    plan = plan.with_groups(groups)
    exchanged: list[int] = []

    def note(way: str, module: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> None:
        """Outputs are summed or put together unless parts follow, gradients of inputs unless parts came."""
        exchanged.extend([made.nbytes] * (way != "column") + [given[0].nbytes] * (way in ("column", "gathered")))

    for name, way in plan.ways.items():
        copied.get_submodule(name).register_forward_hook(lambda *each, way=way: note(way, *each))
    with context():
        copied(inputs)
    cut = {id(each): each for name in plan.ways for each in copied.get_submodule(name).parameters()}
    size = sum(each.nbytes for each in cut.values())
    return (
        CutLayers(parameter_bytes=size, exchanges=len(exchanged), exchanged_bytes=sum(exchanged) / samples)
        if cut
        else None
    )
