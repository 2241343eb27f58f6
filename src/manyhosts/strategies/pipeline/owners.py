"""Which stage has which tensors of a model: one of them each, and a weight that several use is lent to the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.holding import Holding
from manyhosts.communication.parts import TensorPart
from manyhosts.communication.world import World
from manyhosts.errors import ConfigError

Uses = Mapping[str, Sequence[int]]
"""Name of a tensor → the blocks whose computation it takes part in, by their numbers."""


@dataclass(slots=True)
class Tied:
    """A parameter that several stages use."""

    name: str
    stages: list[int]
    """Those that use it, in their order; the first of them owns it."""
    places: list[tuple[nn.Module, str]]
    """Where it is in the model."""
    kept: nn.Parameter
    """What is there between passes: without values, where no stage of this worker owns it."""


def uses_by_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, list[int]]:
    """Which blocks each tensor of `model` is in."""
    inside: dict[int, list[int]] = {}
    for number, block in enumerate(blocks):
        for each in {id(tensor) for tensor in (*block.parameters(), *block.buffers())}:
            inside.setdefault(each, []).append(number)
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: inside.get(id(tensor), []) for name, tensor in named}


def stages_of(uses: Uses, cuts: Sequence[int]) -> dict[str, list[int]]:
    """The stages that use each tensor, in order; the first, where none is known to."""
    stage_of = [stage for stage in range(len(cuts) - 1) for _ in range(cuts[stage], cuts[stage + 1])]
    return {name: sorted({stage_of[block] for block in blocks}) or [0] for name, blocks in uses.items()}


def check_tied(model: nn.Module, stages: Mapping[str, Sequence[int]], precision: str) -> None:
    """See that what several stages use can be lent.

    Raises:
        ConfigError: it is a buffer, which each would change; or a weight whose gradients would be rounded otherwise.
    """
    parameters = dict(model.named_parameters())
    for name, users in stages.items():
        if len(users) < 2:
            continue
        if name not in parameters:
            raise ConfigError(
                f"the buffer {name!r} is used by {len(users)} stages, and each would have one of its own",
                where="strategy='pipeline'",
                fix="give each block a buffer of its own, or name cuts that leave those blocks in one stage: "
                "mh.Pipeline(cuts=[…])",
            )
        homes = [each for each in model.modules() if any(own is parameters[name] for own in each._parameters.values())]
        if precision == "bf16" and sum(not isinstance(each, nn.Embedding) for each in homes) > 1:
            raise ConfigError(
                f"the weight {name!r} is used by several layers of {len(users)} stages, and in bf16 one process adds "
                "their gradients before it rounds them, which stages cannot",
                where="strategy='pipeline'",
                fix="set precision='fp32', or name cuts that leave those layers in one stage: mh.Pipeline(cuts=[…])",
            )


def places_of(model: nn.Module, name: str) -> list[tuple[nn.Module, str]]:
    """Where the parameter `name` is in `model`, under all of its names."""
    found = dict(model.named_parameters(remove_duplicate=False))[name]
    return [(module, key) for module in model.modules() for key, each in module._parameters.items() if each is found]


def leave(model: nn.Module, stages: Mapping[str, Sequence[int]], own: Sequence[int]) -> None:
    """Keep the values of what the stages `own` own; of all else shape and dtype are left, on the meta device."""
    empty: dict[int, Tensor] = {}
    by_id = {id(each): name for name, each in (*model.named_parameters(), *model.named_buffers())}
    for module in model.modules():
        for key, each in [*module._parameters.items(), *module._buffers.items()]:
            if each is None or stages[by_id[id(each)]][0] in own:
                continue
            if id(each) not in empty:
                empty[id(each)] = _without_values(each)
            put_parameter(module, key, empty[id(each)])


def tied_of(model: nn.Module, stages: Mapping[str, Sequence[int]], own: int) -> list[Tied]:
    """The parameters that stage `own` shares with other stages, as their owner or not. After `leave`."""
    found = dict(model.named_parameters())
    return [
        Tied(name, list(users), places_of(model, name), found[name])
        for name, users in stages.items()
        if len(users) > 1 and own in users
    ]


def _without_values(tensor: Tensor) -> Tensor:
    made = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        made.__dict__.update(tensor.__dict__)
    return made


def put_parameter(module: nn.Module, key: str, tensor: Any) -> None:
    """Make `tensor` the parameter or buffer `key` of `module`."""
    table = module._parameters if key in module._parameters else module._buffers
    if isinstance(module, nn.RNNBase) and key in module._parameters:
        setattr(module, key, tensor)  # it has a list of them as well
    else:
        table[key] = tensor


@contextmanager
def put_in(tied: Sequence[Tied], values: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Within, `values` are in the model in place of what another stage owns."""
    here = [(module, key, each) for each in tied if each.name in values for module, key in each.places]
    for module, key, each in here:
        put_parameter(module, key, values[each.name])
    try:
        yield
    finally:
        for module, key, each in here:
            put_parameter(module, key, each.kept)


class Stages(Holding):
    """A tensor is kept in full by one worker, or, as what is no part of the model, by all."""

    by_stage = True

    def __init__(self, world: World) -> None:
        self.world = world

    def holds(self, tensor: Tensor) -> bool:
        """Whether this worker has its values."""
        return not tensor.is_meta

    def part(self, tensor: Tensor) -> Tensor | TensorPart:
        """`tensor`, or a part of it without elements. A snapshot finds out who has it (`flatten.merged`)."""
        if not tensor.is_meta:
            return tensor
        shape = tuple(tensor.shape)
        return TensorPart(torch.empty(0, dtype=tensor.dtype), (0,) * len(shape), shape)

    def local(self, tensor: Tensor) -> Tensor:
        """`tensor`, or one without elements; zero in place of a single number."""
        tensor = tensor.detach()
        return torch.zeros((0,) * tensor.dim(), dtype=tensor.dtype) if tensor.is_meta else tensor

    def block(self, tensor: Tensor) -> TensorPart:
        """The same with its place."""
        shape = tuple(tensor.shape)
        return TensorPart(self.local(tensor), (0,) * len(shape), shape)

    def like(self, tensor: Tensor, local: Tensor) -> Tensor:
        """`local`, where this worker holds `tensor`."""
        return tensor if tensor.is_meta else local

    def full(self, tensor: Tensor) -> Tensor:
        """All of `tensor`, from the first worker that has it. Every worker calls this."""
        tensor, world = tensor.detach(), self.world
        found = world.stack(torch.tensor([not tensor.is_meta], dtype=torch.int64)).flatten().tolist()
        if all(found):
            return tensor
        dense = torch.empty(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.contiguous().clone()
        flat = torch.view_as_real(dense) if dense.is_complex() else dense
        if flat.numel():
            world.broadcast(flat.reshape(-1).view(torch.uint8), source=found.index(1))
        return dense

    def everywhere(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those that every worker has. Every worker calls this."""
        own = [name for name, each in tensors.items() if not each.is_meta]
        common = set(own).intersection(*gather_plain(self.world, own))
        return {name: each for name, each in tensors.items() if name in common}
