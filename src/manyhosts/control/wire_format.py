"""How messages of head and agents are written on the wire: one JSON object on one line for each.

`message` names the class (`ask_store` is an `AskStore`), next to its fields. Every message is checked against
the class before it is used: a field that is missing, or of another type, is refused in a sentence. Text that
may be shown is rid of control sequences of terminals, and nothing is nested deeper than JSON can be written again.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from manyhosts.records import plain_text

MOST_LEVELS = 64
"""So deep may be what a message brings of its sender's own."""
Text = Annotated[str, "lines"]
"""Several lines, and perhaps colours; a plain `str` is one line without."""
AsPrinted = Annotated[list[str], "raw"]
"""What a worker prints: whatever its terminal is to obey is the script's own affair."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WireMessage:
    """What one side says to the other."""

    NAME: ClassVar[str]
    """What it is called on the wire."""
    IS_SHOWN: ClassVar[bool] = True
    """Whether people may see what it holds."""

    def __init_subclass__(cls) -> None:
        """It is called as its class is, unless that says another name."""
        if "NAME" not in vars(cls):
            cls.NAME = re.sub(r"\B(?=[A-Z])", "_", cls.__name__).lower()


Clean = Callable[[str], str]
Kind = TypeVar("Kind", bound=WireMessage)


def by_name(*kinds: type[Kind]) -> dict[str, type[Kind]]:
    """Classes of messages by their names on the wire."""
    return {kind.NAME: kind for kind in kinds}


def content_of(message: WireMessage) -> dict[str, Any]:
    """The fields of a message, as JSON can have them."""
    return {entry.name: _plain(getattr(message, entry.name)) for entry in fields(message)}


def _plain(value: Any) -> Any:
    if isinstance(value, list) and value and is_dataclass(value[0]):
        return [{entry.name: getattr(each, entry.name) for entry in fields(each)} for each in value]
    return value


@functools.cache
def _hints(kind: Any) -> dict[str, tuple[Any, bool]]:
    """By field of a class: its type, and whether it may be absent."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        entry.name: (hints[entry.name], entry.default is not MISSING or entry.default_factory is not MISSING)
        for entry in fields(kind)
    }


def read(found: Mapping[str, Any], kinds: Mapping[str, type[Kind]]) -> Kind:
    """What was said, if it is one of `kinds`, by their names on the wire.

    Raises:
        ValueError: it is no message that is known. The text ends a sentence.
    """
    name = found.get("message")
    if not isinstance(name, str) or name not in kinds:
        raise ValueError(f"it is of the kind {_short(name)}, which this version does not know")
    message: Kind = built(found, kinds[name])
    return message


def built(found: Mapping[str, Any], kind: Any) -> Any:
    """An object of the dataclass `kind`. Unknown fields are ignored.

    Raises:
        ValueError: it lacks a field, or has one of another type. The text ends a sentence.
    """
    hints, shown = _hints(kind).items(), getattr(kind, "IS_SHOWN", True)
    return kind(
        **{name: _field(found, name, hint, shown) for name, (hint, optional) in hints if name in found or not optional}
    )


def _field(found: Mapping[str, Any], name: str, hint: Any, is_shown: bool) -> Any:
    if name not in found:
        raise ValueError(f"it has no {name!r}")
    try:
        value = _fitted(found[name], hint)
        if hint == AsPrinted:
            return value
        clean = plain_text.lines if hint == Text else plain_text.line
        return _cleaned(value, clean if is_shown else None)
    except RecursionError:
        raise ValueError(f"its {name!r} is nested too deeply") from None
    except ValueError:
        raise ValueError(f"its {name!r} is {_short(found[name])}") from None


def _fitted(value: Any, hint: Any) -> Any:
    """`value` as a field of type `hint` has it.

    Raises:
        ValueError: it is of another type.
    """
    if hint is Any:
        return value
    origin = get_origin(hint)
    if origin is Annotated:
        hint = get_args(hint)[0]
        origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        fits = any(value is None if option is type(None) else _is(value, option) for option in get_args(hint))
    elif origin is list and isinstance(value, list):
        [kind] = get_args(hint)
        if kind is not str:
            return [_fitted(each, kind) for each in value]
        fits = all(isinstance(each, str) for each in value)  # lines of workers: there may be many
    elif is_dataclass(hint) and isinstance(value, dict):
        return built(value, hint)
    else:
        fits = _is(value, hint)
    if not fits:
        raise ValueError
    return value


def see_depth(value: Any) -> None:
    """See that `value` can be sent on.

    Raises:
        ValueError: it is nested too deeply.
    """
    try:
        _cleaned(value, None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def see_range(name: str, value: int, least: int, most: int) -> None:
    """See that the field `name` of a message is a number from `least` to `most`.

    Raises:
        ValueError: it is not. The text ends a sentence.
    """
    if not least <= value <= most:
        raise ValueError(f"its {name!r} is {_short(value)}")


def _cleaned(value: Any, clean: Clean | None, levels: int = MOST_LEVELS) -> Any:
    """`value` with its texts as they may be shown. Those below a name keep their lines.

    Raises:
        RecursionError: it is nested too deeply.
    """
    if isinstance(value, str):
        return value if clean is None else clean(value)
    if not isinstance(value, dict | list):
        return value
    if levels == 0:
        raise RecursionError
    if isinstance(value, list):
        return [_cleaned(each, clean, levels - 1) for each in value]
    below = None if clean is None else plain_text.lines
    return {name: _cleaned(each, below, levels - 1) for name, each in value.items()}


def _is(value: Any, hint: Any) -> bool:
    kind = get_origin(hint) or hint
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
