"""A value of the wrong kind in a setting, named with what the setting takes, before anything is done with it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from manyhosts.errors import ConfigError

_WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a text",
    type(None): "None",
    Sequence: "a list of texts",
    Callable: "a function",
}
_DURATIONS = ("duration", "every", "validate_every", "warmup")
_FIXES = {"strategy": 'write strategy="ddp" (or another name), or one with its settings: mh.DDP(bucket_mb=10)'}


def check_kinds(settings: Any, *, prefix: str = "") -> None:
    """See that each field of a dataclass has a value of its kind. True counts as no number; NumPy's become plain ones.

    A setting that takes one of some words is left to the code that knows the words. `prefix` precedes names in errors.

    Raises:
        ConfigError: a value is of another kind.
    """
    for entry in fields(settings):
        if (number := plain(given := getattr(settings, entry.name))) is not given:
            object.__setattr__(settings, entry.name, number)  # settings are frozen
    section: Any = type(settings)  # mypy does not take a class of anything for hashable
    for name, kinds in _kinds(section).items():
        value = getattr(settings, name)
        if name == "strategy" and hasattr(value, "name") and not isinstance(value, type):
            continue  # one that another package adds
        if not any(_is(value, kind) for kind in kinds):
            fix = _FIXES.get(name) or f"give it {' or '.join(_word(kind, name) for kind in kinds)}"
            raise ConfigError(f"{prefix}{name} is {_reported(value)}", where=f"{prefix}{name}", fix=fix)


def plain(value: Any) -> Any:
    """`value`; in place of a scalar of NumPy, which JSON does not know, the number that it is."""
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () else value


@functools.cache
def _kinds(settings: Any) -> dict[str, tuple[Any, ...]]:
    """By field that takes no words: the kinds of values that it takes."""
    hints = get_type_hints(settings)
    found = {}
    for entry in fields(settings):
        hint = hints[entry.name]
        kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        if not any(get_origin(kind) is Literal for kind in kinds):
            found[entry.name] = kinds
    return found


def _is(value: Any, kind: Any) -> bool:
    kind = get_origin(kind) or kind
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, {int: Integral, float: Real}.get(kind, kind))


def _reported(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return repr(value) if isinstance(value, (str, int, float)) else f"of the type {type(value).__name__}"


def _word(kind: Any, name: str) -> str:
    if kind is str and name in _DURATIONS:
        return 'a duration such as "500 steps" or "2 epochs"'
    kind = get_origin(kind) or kind
    return _WORDS.get(kind) or f"mh.{kind.__name__}(…)"
