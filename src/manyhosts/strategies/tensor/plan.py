"""How the layers of a model are cut, as plain values, and the user's own plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from manyhosts.errors import ConfigError
from manyhosts.strategies.tensor.exchange import has_parts


@dataclass(frozen=True, slots=True)
class Group:
    """Layers cut by outputs, and the one after them that takes parts: between them nothing is put together."""

    columns: tuple[str, ...]
    row: str
    owner: str
    """The module around them all."""
    inner: tuple[str, ...] = ()
    """Parameters that are used between them, uncut: each worker finds a part of their gradient."""
    dropouts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """What is called between them, with the shape of its input where nothing is cut."""
    dims: dict[str, list[int]] = field(default_factory=dict, compare=False)
    """Which dim of what a dropout takes is cut, by its name, as a trial has learnt it."""
    divided: tuple[str, ...] = ()
    """Attributes of `owner`, numbers of heads or of features, of which each worker has its part."""

    def kind(self, model: nn.Module) -> tuple[object, ...]:
        """What is equal for groups that are used or left out together."""
        inside = [name.removeprefix(self.owner) for name in (*self.columns, self.row)]
        shapes = [tuple(model.get_parameter(f"{name}.weight").shape) for name in (*self.columns, self.row)]
        return (type(model.get_submodule(self.owner)), *inside, *shapes)


@dataclass(frozen=True, slots=True)
class Plan:
    """How each layer that is cut is cut."""

    ways: Mapping[str, str]
    """`column`, `row`, `gathered` or `vocabulary`, by the layer's name."""
    groups: tuple[Group, ...] = ()

    def with_groups(self, groups: tuple[Group, ...]) -> Plan:
        """The same with these added."""
        columns = {name: "column" for group in groups for name in group.columns}
        rows = {group.row: "row" for group in groups}
        return replace(self, ways={**self.ways, **columns, **rows}, groups=(*self.groups, *groups))

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Plan:
        """What `dataclasses.asdict` gave of one, also by way of JSON."""
        return cls(plain["ways"], tuple(Group(**each) for each in plain["groups"]))

    def in_words(self) -> str:
        """How many layers are cut in which way."""
        counts = {way: list(self.ways.values()).count(way) for way in ("vocabulary", "column", "row", "gathered")}
        return ", ".join(f"{count} {way}" for way, count in counts.items() if count)


def is_cuttable(module: nn.Module) -> bool:
    """Whether it is a layer whose own forward pass is known here, with nothing that hangs on its calls."""
    if type(module) is nn.Embedding:
        plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    else:
        plain = type(module) is nn.Linear
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return plain and not hooks and "forward" not in module.__dict__


def users_plan(model: nn.Module, ways: Mapping[str, str], workers: int) -> Plan:
    """The user's plan for the layers that the model has.

    Raises:
        ConfigError: a pattern fits no layer, a layer cannot be cut so, or has too few features for the workers.
    """
    used, found = set[str](), dict[str, str]()
    for name, module in model.named_modules():
        pattern = next((each for each in ways if fnmatchcase(name, each)), None)
        if pattern is None or not (isinstance(module, nn.Linear | nn.Embedding) or name == pattern):
            continue
        used.add(pattern)
        if (way := ways[pattern]) != "whole":
            check_cut(name, module, way, workers)
            found[name] = way
    if unused := [each for each in ways if each not in used]:
        layers = [name for name, each in model.named_modules() if is_cuttable(each)]
        raise ConfigError(
            f"the plan names {unused[0]!r}, and no layer of the model is called so",
            where="Tensor(plan=…)",
            fix=f"name some of {', '.join(layers[:12])}{', …' if layers[12:] else ''}; names may hold *",
        )
    return Plan(found)


_WORDS = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "gathered",
    "colwise_rep": "gathered",
    "embedding_rowwise": "vocabulary",
}
"""What `transformers` calls these ways."""


def models_plan(model: nn.Module, plan: Plan) -> Plan | None:
    """`plan` with what a model of `transformers` says itself of its layers; None where it says nothing."""
    given = getattr(model, "tp_plan", None) or {}
    own = {}
    for name, way in plan.ways.items():
        said = next((given[each] for each in given if fnmatchcase(name, each)), None)
        fits = (_WORDS.get(str(said)) == "vocabulary") is (way == "vocabulary")
        if said in _WORDS and fits:
            own[name] = _WORDS[str(said)]
    return Plan({**plan.ways, **own}) if own else None


def check_cut(name: str, module: nn.Module, way: str, workers: int) -> None:
    """See that a layer can be cut in this way.

    Raises:
        ConfigError: it cannot.
    """
    fits = type(module) is (nn.Embedding if way == "vocabulary" else nn.Linear)
    if not fits or not is_cuttable(module):
        takes = "an nn.Embedding" if way == "vocabulary" else "an nn.Linear"
        raise ConfigError(
            f"{name!r} is to be cut as {way!r}, and is a {type(module).__name__}: that way takes {takes} as PyTorch "
            "has it, without hooks",
            where="Tensor(plan=…)",
            fix=f"leave it out, or put {name}=whole before what names it now",
        )
    total = features(module, way)
    if not has_parts(total, workers):
        raise ConfigError(
            f"{name!r} has {total} features to be cut as {way!r}, of which {workers} workers would not all have a part",
            where="Tensor(plan=…)",
            fix=f"put {name}=whole before what names it now, or start fewer workers",
        )


def features(module: nn.Module, way: str) -> int:
    """How long the dim is that is cut."""
    if isinstance(module, nn.Embedding):
        return module.num_embeddings
    assert isinstance(module, nn.Linear), "nothing else is cut"
    return module.in_features if way == "row" else module.out_features
