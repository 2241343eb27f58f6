"""Names that lead to code, which is imported when it is asked for."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Generic, TypeVar, cast

from manyhosts.errors import ConfigError

T = TypeVar("T")


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'? ` for a word that looks like one of `known`, else nothing: the start of a `fix`."""
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"did you mean {by_lower[near[0]]!r}? " if near else ""


def nearest_few(name: str, known: Iterable[str], most: int = 5) -> list[str]:
    """Those of `known` that look like `name`, the nearest first; then those that share a word of it."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=most, cutoff=0.5)
    words = set(re.split(r"[._]", name))
    near += [each for each in names if each not in near and words & set(re.split(r"[._]", each))]
    return near[:most]


@dataclass(frozen=True, slots=True)
class Table(Generic[T]):
    """Names of one kind of part. Other packages add theirs by an entry point in `group`."""

    kind: str
    group: str
    own: Mapping[str, str]
    """Name → `module:attribute`."""

    def names(self) -> list[str]:
        """Every known name, sorted."""
        return sorted({*self.own, *(point.name for point in entry_points(group=self.group))})

    def load(self, name: str) -> T:
        """Import and return the object named `name`.

        Raises:
            ConfigError: no part of this kind has that name.
        """
        if name in self.own:
            module, _, attribute = self.own[name].partition(":")
            return cast(T, getattr(importlib.import_module(module), attribute))
        for point in entry_points(group=self.group, name=name):
            return cast(T, point.load())
        raise ConfigError(
            f"there is no {self.kind} named {name!r}",
            fix=f"{nearest(name, self.names())}known: {', '.join(self.names())}",
        )
