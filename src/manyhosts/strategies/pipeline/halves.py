"""A backward pass in two halves: first the gradients of what a stage was given, later those of its weights.

The graph is autograd's, and some of its functions are called twice: in the first half for the gradients of their
inputs, in the second for those of their weights. That is possible where weights belong to one function through which
the gradient of an input goes, and PyTorch has that function itself: a linear layer, a convolution, a norm. All else is
computed in the first half. The first backward pass of a stage is made in one piece and in halves, and compared bit for
bit: where they differ, all are made in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from manyhosts.strategies.pipeline.look import same_bits

_Later = dict[Node, list[Tensor]]
"""Function → the weights whose gradients it gives in the second half."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A backward pass: what `torch.autograd.backward` is given, and what it finds."""

    roots: Sequence[Tensor]
    given: Sequence[Tensor | None]
    """Their gradients."""
    starts: Sequence[Tensor]
    """The leaves made of what the stage was given."""
    gradients: list[Tensor | None]
    """Where the pass leaves the gradients of what the stage was given."""
    early: Sequence[Tensor]
    """Weights whose gradients are needed after the first half."""


@dataclass(slots=True)
class Halves:
    """The backward passes of one stage."""

    is_sound: bool | None = None
    """Whether halves give the bits of one piece; None as long as none was tried."""
    left: dict[int, tuple[dict[Node, Sequence[Tensor | None]], _Later]] = field(default_factory=dict)
    """By micro-batch: the gradients that functions were given in the first half, and their weights."""

    def first(self, number: int, one: Pass) -> None:
        """The first half of the pass of micro-batch `number`."""
        later, now = _divided(one)
        if self.is_sound is None and later and all(each.grad is None for each in (*now, *_all(later))):
            self._try(one, later, now)
            return
        if not self.is_sound:
            now, later = [*now, *_all(later)], {}
        self._finish({id(each) for each in now})
        self.left[number] = _half(one, later, now)

    def second(self, number: int) -> None:
        """The second half, where something is left of it."""
        caught, later = self.left.pop(number, ({}, {}))
        for node, gradients in caught.items():
            edges = [GradientEdge(node, place) for place, each in enumerate(gradients) if each is not None]
            torch.autograd.backward(edges, [each for each in gradients if each is not None], inputs=later[node])

    def _finish(self, weights: set[int]) -> None:
        """Have second halves computed that add to one of `weights`, whose turn is now: a sum has its order."""
        for number in [*self.left]:
            if any(id(each) in weights for each in _all(self.left[number][1])):
                self.second(number)

    def _try(self, one: Pass, later: _Later, now: list[Tensor]) -> None:
        """A pass both in one piece and in halves, before which nothing was added up."""
        leaves = [*now, *_all(later)]
        torch.autograd.backward(one.roots, one.given, retain_graph=True)
        wanted = [*one.gradients, *(each.grad for each in leaves)]
        for each in leaves:
            each.grad = None
        self.left[-1] = _half(one, later, now)
        self.second(-1)
        found = [*one.gradients, *(each.grad for each in leaves)]
        self.is_sound = all(map(_alike, wanted, found))
        if not self.is_sound:
            one.gradients[:] = wanted[: len(one.gradients)]
            for each, gradient in zip(leaves, wanted[len(one.gradients) :], strict=True):
                each.grad = gradient


def _half(one: Pass, later: _Later, now: Sequence[Tensor]) -> tuple[dict[Node, Sequence[Tensor | None]], _Later]:
    """Compute the gradients of `now`; note what functions with weights in `later` are given."""
    caught: dict[Node, Sequence[Tensor | None]] = {}
    hooks = [node.register_prehook(partial(caught.__setitem__, node)) for node in later]
    torch.autograd.backward(one.roots, one.given, inputs=now if later else None, retain_graph=bool(later))
    for hook in hooks:
        hook.remove()
    return caught, later


def _divided(one: Pass) -> tuple[_Later, list[Tensor]]:
    """The weights that may wait, by their function; and the other leaves of the pass, and its starts."""
    starts, early = {id(each) for each in one.starts}, {id(each) for each in one.early}
    edges = [get_gradient_edge(each).node for each in one.roots]
    through = set[Node]()  # those through which a gradient comes to a start
    leaves: dict[Node, dict[int, Tensor]] = {}  # those that a gradient comes to from each other function
    owners: dict[int, list[Node]] = {}
    every: dict[int, Tensor] = {}
    for node in _inputs_first(edges):
        below = [each for each, _ in node.next_functions if each is not None]
        beneath = {key: each for other in below for key, each in leaves.get(other, {}).items()}
        if node.name() == "torch::autograd::AccumulateGrad":
            leaf: Tensor = node.variable  # type: ignore[attr-defined]
            beneath, every[id(leaf)] = {id(leaf): leaf}, leaf
        if starts & beneath.keys() or through.intersection(below):
            through.add(node)
            for key in beneath:
                owners.setdefault(key, []).append(node)
        else:
            leaves[node] = beneath
    direct = {key for edge in edges for key in leaves.get(edge, ())}
    later: _Later = {}
    for key, (node, *others) in owners.items():
        waits = not others and key not in (starts | early | direct) and not isinstance(node, BackwardCFunction)
        if waits and "CheckpointFunctionBackward" not in {type(each).__name__ for each in through}:
            later.setdefault(node, []).append(every[key])
    waiting = {id(each) for each in _all(later)}
    return later, [each for key, each in every.items() if key not in waiting]


def _inputs_first(roots: Sequence[Node]) -> Iterator[Node]:
    """The functions of a graph, each after all that its gradients go to."""
    seen = set[Node]()
    waiting = [(each, False) for each in roots]
    while waiting:
        node, is_due = waiting.pop()
        if is_due:
            yield node
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting += [(each, False) for each, _ in node.next_functions if each is not None]


def _all(later: _Later) -> list[Tensor]:
    return [each for gradients in later.values() for each in gradients]


def _alike(one: Any, other: Any) -> bool:
    return one is other if one is None or other is None else same_bits(one, other)
