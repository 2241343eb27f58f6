"""Models of many shapes: how they hold their modules, what is shared, what is made late. Six numbers in, two out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

WIDTH = 6


class Block(nn.Module):
    """What a deep model repeats."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = inputs + self.dropout(self.down(torch.tanh(self.up(self.norm(inputs)))))
        return out


class Gate(nn.Module):
    """Another block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = inputs * self.layers(inputs)
        return out


class Body(nn.Module):
    """Some `body`, called by `call`, and a head."""

    def __init__(self, body: nn.Module, call: Callable[[Any, Tensor], Tensor] = lambda body, x: body(x)) -> None:
        super().__init__()
        self.body, self.head, self.call = body, nn.Linear(WIDTH, 2), call

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.head(self.call(self.body, inputs))
        return out


def in_turn(rows: Any, inputs: Tensor) -> Tensor:
    """Through lists and dicts, at any depth."""
    for each in rows.values() if isinstance(rows, nn.ModuleDict) else rows:
        inputs = in_turn(each, inputs) if isinstance(each, nn.ModuleList | nn.ModuleDict) else each(inputs)
    return inputs


def nested_lists() -> nn.Module:
    return Body(nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(3)), in_turn)


def lists_of_one() -> nn.Module:
    return Body(nn.ModuleList(nn.ModuleList([Block()]) for _ in range(3)), in_turn)


def lists_of_two_kinds() -> nn.Module:
    return Body(nn.ModuleList(nn.ModuleList([Block(), Gate()]) for _ in range(3)), in_turn)


def dicts_of_lists() -> nn.Module:
    return Body(nn.ModuleDict({name: nn.ModuleList([Block(), Gate(), Block()]) for name in "ab"}), in_turn)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, 2)


class Matrices(nn.Module):
    """Nothing but parameters in a list and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 3 for _ in range(3))
        self.named = nn.ParameterDict({"last": torch.randn(WIDTH, 2) / 3, "bias": torch.zeros(2)})

    def forward(self, inputs: Tensor) -> Tensor:
        for matrix in self.matrices:
            inputs = torch.tanh(inputs @ matrix)
        return inputs @ self.named["last"] + self.named["bias"]


class Own(nn.Module):
    """A container of the script's own: no forward pass, called through its own method."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        for number in range(count):
            self.add_module(f"block{number}", Block())

    def through(self, inputs: Tensor) -> Tensor:
        for block in self.children():
            inputs = block(inputs)
        return inputs


def own_container() -> nn.Module:
    return Body(Own(), lambda body, x: body.through(x))


class Stack(nn.ModuleList):
    """A list with a forward pass."""

    def forward(self, inputs: Tensor) -> Tensor:
        return in_turn(list(self), inputs)


def called_lists() -> nn.Module:
    return Body(nn.Sequential(Stack([Block(), Block()]), Stack([Block()])))


def shared_block() -> nn.Module:
    block = Block()
    return Body(nn.ModuleList([block, Gate(), block, Gate(), block]), in_turn)


def looped_block() -> nn.Module:
    def three_times(body: nn.Module, inputs: Tensor) -> Tensor:
        for _ in range(3):
            inputs = body(inputs)
        return inputs

    return Body(nn.Sequential(Block(), Block()), three_times)


class Experts(nn.Module):
    """Each sample to its best expert: some experts see nothing on a worker."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(Block() for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        shares = self.router(inputs).softmax(1)
        best = shares.argmax(1)
        out = torch.zeros_like(inputs)
        for number, expert in enumerate(self.experts):
            own = (best == number).nonzero().flatten()
            out = out.index_add(0, own, expert(inputs[own]) * shares[own, number : number + 1])
        return out


def experts() -> nn.Module:
    return Body(nn.Sequential(Experts(), Experts()))


class UNet(nn.Module):
    """Down and up again, with a list of what is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Block(), Block(), Block()])
        self.up = nn.ModuleList([Block(), Block(), Block()])
        self.merge = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        skipped = []
        for block in self.down:
            inputs = block(inputs)
            skipped.append(inputs)
        for block, merge in zip(self.up, self.merge, strict=True):
            inputs = block(merge(torch.cat([inputs, skipped.pop()], 1)))
        return inputs


def weight_norm() -> nn.Module:
    return Body(nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), Block()))


def spectral_norm() -> nn.Module:
    return Body(nn.Sequential(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), Block()))


class Symmetric(nn.Module):
    """A matrix and its transpose."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def parametrized() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return Body(nn.Sequential(layer, nn.Tanh(), Block(), Block()))


class Quantised(nn.Module):
    """Frozen eight-bit weights beside what is trained, as adapters have it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 127, (WIDTH, WIDTH), dtype=torch.int8))
        self.register_buffer("scale", torch.full((WIDTH, 1), 0.01))
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        base = nn.functional.linear(inputs, self.weight.to(inputs.dtype) * self.scale)
        out: Tensor = torch.tanh(base + self.up(self.down(inputs)))
        return out


def quantised() -> nn.Module:
    return Body(nn.Sequential(*(Quantised() for _ in range(3))))


class Complex(nn.Module):
    """Complex weights of a state-space layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64) / 3)
        self.mix = nn.Linear(WIDTH, WIDTH, dtype=torch.complex64)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.mix(torch.exp(-self.rates.abs()) * self.rates * inputs).real + inputs


def complex_weights() -> nn.Module:
    return Body(nn.Sequential(Complex(), Complex(), Complex()))


class Late(nn.Module):
    """Makes its modules when it sees its first input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: nn.ModuleList | None = None
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.blocks is None:
            self.blocks = nn.ModuleList(nn.Linear(inputs.shape[1], WIDTH) for _ in range(2))
        return in_turn(self.blocks, self.first(inputs))


def late_modules() -> nn.Module:
    return Body(Late())


def lazy_layers() -> nn.Module:
    return Body(nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh(), Block(), Block()))


class Reversible(nn.Module):
    """Two streams, each changed by the other."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(nn.ModuleDict({"f": Block(), "g": Block()}) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        one = other = inputs
        for pair in self.pairs:
            one = one + pair["f"](other)
            other = other + pair["g"](one)
        return (one + other) / 4


class Skips(nn.Module):
    """Leaves out a block now and then, by a number that it draws: stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = inputs + (block(inputs) - inputs) * (torch.rand(()) < 0.7)
        return inputs


class Ensemble(nn.Module):
    """Members as one: stacked parameters and `torch.func`."""

    def __init__(self) -> None:
        super().__init__()
        members = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
        parameters, _ = torch.func.stack_module_state(members)  # type: ignore[arg-type]
        self.stacked = nn.ParameterDict({name.replace(".", "_"): each.detach() for name, each in parameters.items()})
        self.names = list(parameters)
        self.__dict__["base"] = copy.deepcopy(members[0]).to("meta")

    def forward(self, inputs: Tensor) -> Tensor:
        stacked = {name: self.stacked[name.replace(".", "_")] for name in self.names}

        def one(parameters: dict[str, Tensor]) -> Any:
            return torch.func.functional_call(self.__dict__["base"], parameters, (inputs,))

        out: Tensor = torch.func.vmap(one)(stacked).mean(0)
        return out


def tied_ends() -> nn.Module:
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    last.weight = first.weight
    return Body(nn.Sequential(first, Block(), Block(), last))


def blocks_in_blocks() -> nn.Module:
    return Body(nn.Sequential(*(nn.Sequential(*(Block() for _ in range(2)), Gate()) for _ in range(2))))


class Many(nn.Module):
    """Gives and takes dicts, keywords and tuples between its blocks."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, state: dict[str, Tensor], *, scale: float) -> dict[str, Any]:
            return {"x": state["x"] + scale * torch.tanh(self.one(state["y"])), "y": self.two(state["x"]), "n": None}

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(self.Step() for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        state: dict[str, Any] = {"x": inputs, "y": inputs}
        for step in self.steps:
            state = step(state, scale=0.5)
        out: Tensor = state["x"] + state["y"]
        return out


def mixed_dtypes() -> nn.Module:
    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()

        def forward(self, inputs: Tensor) -> Tensor:
            out: Tensor = self.inner(inputs.double()).float()
            return out

    return Body(nn.Sequential(Double(), Double(), Block()))


def grouped_norm() -> nn.Module:
    return Body(nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), Block(), nn.BatchNorm1d(WIDTH, affine=False)))


def frozen_half() -> nn.Module:
    model = Body(nn.Sequential(*(Block() for _ in range(4))))
    for block in list(model.body)[:2]:  # type: ignore[call-overload]
        block.requires_grad_(False)
    return model


def half_frozen_blocks() -> nn.Module:
    model = Body(nn.Sequential(*(Block() for _ in range(3))))
    for block in model.body:  # type: ignore[union-attr]
        block.up.requires_grad_(False)
    return model


def recurrent() -> nn.Module:
    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.ModuleList(nn.GRUCell(2, WIDTH) for _ in range(2))

        def forward(self, inputs: Tensor) -> Tensor:
            states = [inputs.new_zeros(len(inputs), WIDTH)] * 2
            for step in inputs.split(2, 1):
                states = [cell(step, state) for cell, state in zip(self.cells, states, strict=True)]
            return states[0] + states[1]

    return Body(Cells())


def attention_pairs() -> nn.Module:
    """As many write it: a list of lists of two, of which one is PyTorch's own."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            make = nn.MultiheadAttention
            self.layers = nn.ModuleList(nn.ModuleList([make(2, 1, batch_first=True), Block()]) for _ in range(2))

        def forward(self, inputs: Tensor) -> Tensor:
            for attention, block in self.layers:  # type: ignore[misc]
                words = inputs.view(-1, 3, 2)
                inputs = block(inputs + attention(words, words, words, need_weights=False)[0].flatten(1))
            return inputs

    return Body(Pairs())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lists in lists": nested_lists,
    "lists of one": lists_of_one,
    "lists of two kinds": lists_of_two_kinds,
    "dicts of lists": dicts_of_lists,
    "one layer": linear,
    "lists of parameters": Matrices,
    "container of its own": own_container,
    "lists that are called": called_lists,
    "block at three places": shared_block,
    "blocks called three times": looped_block,
    "experts": experts,
    "U-Net": lambda: Body(UNet()),
    "weight norm": weight_norm,
    "spectral norm": spectral_norm,
    "parametrized": parametrized,
    "eight-bit buffers": quantised,
    "complex weights": complex_weights,
    "modules made late": late_modules,
    "lazy layers": lazy_layers,
    "reversible": lambda: Body(Reversible()),
    "stacked members": lambda: Body(Ensemble()),
    "tied ends": tied_ends,
    "blocks in blocks": blocks_in_blocks,
    "dicts between blocks": lambda: Body(Many()),
    "two dtypes": mixed_dtypes,
    "BatchNorm between blocks": grouped_norm,
    "frozen blocks": frozen_half,
    "blocks half frozen": half_frozen_blocks,
    "cells": recurrent,
    "attention in pairs": attention_pairs,
    "stochastic depth": lambda: Body(Skips()),
}
