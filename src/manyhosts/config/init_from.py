"""Weights to begin with, and what may differ between them and the model: `mh.InitFrom`, for fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import Any

from manyhosts.errors import ConfigError


@dataclass(frozen=True, slots=True)
class InitFrom:
    """Weights to begin with, for `mh.Trainer(init_from=…)`; a path alone means `mh.InitFrom(path)`.

    Names are patterns as of a shell, such as `"head.*"`, of parameters and buffers by their names in the model.

    Args:
        source: a run directory, a snapshot, a `.safetensors` file, a folder of Hugging Face's with one or several of
            them, a `.pt` file with a `state_dict`, or a `state_dict`.
        rename: beginnings of names there, and what replaces them in this model: `{"bert.": "encoder."}`.
        missing: what this model has and may keep as it was made, such as a new head, also where a tensor of that name
            is there with another shape.
        extra: what is there and may be left out.
        freeze: parameters that are not trained. Statistics of frozen BatchNorm layers still follow the data.
    """

    source: str | Path | Mapping[str, Any]
    rename: Mapping[str, str] = field(default_factory=dict)
    missing: Sequence[str] = ()
    extra: Sequence[str] = ()
    freeze: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.source, str | PathLike | Mapping):
            raise ConfigError(
                f"init_from is given a {type(self.source).__name__}, and takes a path or a state_dict",
                where="init_from",
                fix='write init_from="runs/first", or init_from=other.state_dict()',
            )
        for key in ("missing", "extra", "freeze"):
            if isinstance(getattr(self, key), str):
                raise ConfigError(
                    f"{key} is a word", where=f"mh.InitFrom({key}=…)", fix=f'write {key}=["{getattr(self, key)}"]'
                )

    @property
    def where(self) -> str:
        """For errors."""
        return f"init_from={'a state_dict' if isinstance(self.source, Mapping) else repr(str(self.source))}"

    def renamed(self, name: str) -> str:
        """The name in the model of what is called `name` there; of several beginnings the longest counts."""
        for begin in sorted(self.rename, key=len, reverse=True):
            if name.startswith(begin):
                return self.rename[begin] + name[len(begin) :]
        return name


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of `patterns` matches `name`."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
