"""`--set key=value`: settings changed without touching the script.

Keys are the fields of `Settings`; `snapshots.every` and `mesh.tensor` reach into a section, and the fields
of the chosen strategy are known by their own names. They travel to the workers in one environment variable.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from manyhosts.config.settings import Settings, check_size
from manyhosts.config.strategies import BY_NAME, named
from manyhosts.errors import ConfigError
from manyhosts.table import nearest, nearest_few
from manyhosts.units import Duration

VARIABLE = "MANYHOSTS_SET"
_SECTIONS = ("snapshots", "early_stopping", "best", "mesh")

S = TypeVar("S")


def parse(words: Iterable[str]) -> dict[str, str]:
    """`["lr=0.01", "seed=3"]` as a mapping, keys and values checked; a word such as `small.yaml` is a file of settings.

    Of two words that name the same key the later one counts.

    Raises:
        ConfigError: a word has no `=` and is no such file, its key is none of `known_keys()`, or its value can be none
            of that key.
    """
    overrides: dict[str, str] = {}
    for word in words:
        key, sign, text = word.partition("=")
        if not sign and word.endswith((".yaml", ".yml")):
            overrides |= of_file(Path(word))
            continue
        if not sign:
            raise ConfigError(
                f"cannot read {word!r}",
                where="--set",
                fix="write it as --set key=value, or name a .yaml file of settings",
            )
        overrides[key.strip()] = text.strip()
    check_keys(overrides, overrides)
    for key, text in overrides.items():
        check_value(key, text, where="--set", others=overrides)
    return overrides


def of_file(path: Path) -> dict[str, str]:
    """The settings of a YAML file, as `parse` gives them: `lr: 0.01`, or a section with its fields indented.

    Raises:
        ConfigError: it cannot be read, holds something else, or PyYAML is not installed.
    """
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as cause:
        fix = "pip install pyyaml, or give --set key=value"
        raise ConfigError("a YAML file takes PyYAML, which is not installed", where=f"--set {path}", fix=fix) from cause
    try:
        found = yaml.safe_load(path.read_text())
    except FileNotFoundError as cause:
        fix = "name a .yaml file of settings, as seen from this folder"
        raise ConfigError(f"there is no file {str(path)!r}", where=f"--set, in {Path.cwd()}", fix=fix) from cause
    except (OSError, ValueError, yaml.YAMLError) as cause:
        what = f"cannot read the settings: {_reason(cause)}"
        raise ConfigError(what, where=f"--set {path}", fix="write a line key: value for each, as in lr: 0.1") from cause
    if not found:
        fix = "write a line key: value for each, as in lr: 0.1"
        raise ConfigError("the file has no settings", where=f"--set {path}", fix=fix)
    overrides: dict[str, str] = {}
    for key, value in (found if isinstance(found, dict) else {"": found}).items():
        inside = value.items() if isinstance(value, dict) and key in _SECTIONS else [(None, value)]
        for field, each in inside:
            if not key or not isinstance(key, str) or isinstance(each, list | dict):
                kind = "a list" if isinstance(each, list) else "a section" if isinstance(each, dict) else "a word"
                kind = kind if isinstance(key, str) else f"a {type(key).__name__} in YAML"
                raise ConfigError(
                    f"{key or 'the file'} is {kind}, and a setting is one value under its name",
                    where=f"--set {path}",
                    fix="write a line key: value for each; snapshots, early_stopping, best and mesh have indented ones",
                )
            text = "none" if each is None else str(each).lower() if isinstance(each, bool) else str(each)
            overrides[key if field is None else f"{key}.{field}"] = text
    check_keys(overrides, overrides, where=f"--set {path}")
    for key, text in overrides.items():
        check_value(key, text, where=f"--set {path}", others=overrides)
    return overrides


def _reason(cause: Exception) -> str:
    """What is wrong with a file, with the line; PyYAML would call it "<unicode string>"."""
    place, problem = getattr(cause, "problem_mark", None), getattr(cause, "problem", None)
    return f"line {place.line + 1}: {problem}" if place is not None else " ".join(str(cause).split())


def known_keys() -> list[str]:
    """Everything that `--set` can change."""
    keys = [field.name for field in dataclasses.fields(Settings) if field.name not in _SECTIONS]
    for section in _SECTIONS:
        keys += [f"{section}.{field.name}" for field in dataclasses.fields(_section_type(section))]
    for strategy in BY_NAME.values():
        keys += [field.name for field in dataclasses.fields(strategy) if field.name not in keys]
    return sorted(keys)


def check_keys(
    overrides: Iterable[str], values: Mapping[str, str] = MappingProxyType({}), *, where: str = "--set"
) -> None:
    """Raise ConfigError for the first key that is no setting, with the nearest one that is.

    `values`: what was typed for them, where one value was; it is in what is to be written instead.
    """
    known = known_keys()
    for key in overrides:
        if key in known:
            continue
        if own := [each for each in known if each.startswith(f"{key}.")]:
            what = f"{key!r} is the name of several settings, and none itself"
            raise ConfigError(what, where=where, fix=f"set one of {', '.join(own)}; more: manyhosts run --set help")
        if key in _IN_SCRIPT:
            face = "mh.Run" if key in ("models", "optimizers", "schedulers", "evaluate") else "mh.Trainer"
            what = f"{key!r} is given in the script alone, as {face}({key}=…)"
            raise ConfigError(what, where=where, fix="change it there; a run directory is named by --run-dir")
        raise ConfigError(
            f"there is no setting named {key!r}",
            where=where,
            fix=(_called(key, values.get(key, "")) or f"{nearest(key, known)}{_like(key, known)}")
            + "all of them: manyhosts run --set help",
        )


_IN_SCRIPT = {
    "model", "models", "loss", "step", "optimizer", "optimizers", "schedulers", "metrics", "listeners",
    "callbacks", "init_from", "run_dir", "data", "evaluate",
}  # fmt: skip
"""What is no plain value."""
_CALLED = {
    **dict.fromkeys(("epochs", "max_epochs", "num_epochs", "epoch"), ('duration="{} epochs"', "20")),
    **dict.fromkeys(("steps", "max_steps", "iterations"), ('duration="{} steps"', "500")),
    **dict.fromkeys(("learning_rate", "learning-rate"), ("lr={}", "0.001")),
    **dict.fromkeys(("batch", "bs"), ("batch_size={}", "64")),
    **dict.fromkeys(
        ("accumulate_grad_batches", "gradient_accumulation_steps", "accumulation_steps"),
        ("micro_batch_size=32 (the most samples in one forward pass; batch_size stays the total)", ""),
    ),
    **dict.fromkeys(("max_grad_norm", "gradient_clip_val", "clip", "grad_clip"), ("clip_gradients={}", "1.0")),
    **dict.fromkeys(("fp16", "bf16", "mixed_precision", "amp"), ("precision=bf16 (or fp16)", "")),
    **dict.fromkeys(
        ("num_workers", "workers"),
        ("loader_workers={0} (processes that read); --workers {0} for those that train", "2"),
    ),
}
"""What other programs call a setting of ours, and how it is written here, with an amount where none was given."""


def _called(key: str, value: str) -> str:
    if key not in _CALLED:
        return ""
    written, example = _CALLED[key]
    return f"write --set {written.format(value if _AMOUNT.fullmatch(value) else example)}; "


_VALUES = {
    "precision": {
        **dict.fromkeys(("bf16-mixed", "bf16-true", "bfloat16"), "bf16"),
        **dict.fromkeys(("16", "16-mixed", "16-true", "float16", "half"), "fp16"),
        **dict.fromkeys(("no", "32", "32-true", "float32"), "fp32"),
    }
}
"""What other programs call a value of a setting, and how it is written here."""


def in_our_words(key: str, text: str) -> str:
    """`text` as it is written here, where other programs write a value of `key` so."""
    return _VALUES.get(key, {}).get(text, text)


_AMOUNT = re.compile(r"\d+(\.\d+)?(e-?\d+)?")


_DEPEND = {
    "fragments": ("sync_every", "overlap_steps"),
    "overlap_steps": ("sync_every", "fragments"),
    "sync_at_most": ("sync_every", "sync_rule"),
    "dedicated": ("servers",),
}
"""Settings of strategies, and the others that decide their range; without the first of these the run alone knows it."""


_NEUTRAL = {"fragments": "1", "overlap_steps": "0"}
"""What stands in for those of them that the script may have given: whatever it has, these ask no more."""


def check_value(key: str, text: str, *, where: str, others: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raise ConfigError where `text` can be no value of `key`, whatever the settings are that `others` does not have.

    What else a value must fit (the strategy, the size of a batch) is known to the run alone.
    """
    try:
        if key == "strategy":
            named(text)
        elif "." in key:
            section, _, field = key.partition(".")
            _replace(_section_type(section)(), {field: text}, section + ".")
        elif key in (types_of := typing.get_type_hints(Settings)):
            _check_word(text, types_of[key], key)
            check_size(key, _read(text, types_of[key], key))
            if key in ("duration", "validate_every"):
                Duration.parse(text, where=where)
        else:
            kind = BY_NAME[_strategies_with(key)[0]]
            type_of = typing.get_type_hints(kind)[key]
            _read(text, type_of, key)
            _check_word(text, type_of, key)
            deciding = _DEPEND.get(key, ())
            if not deciding or deciding[0] in others:
                known = {**_NEUTRAL, **others}
                _replace(kind(), {**{each: known[each] for each in deciding if each in known}, key: text}, "")
    except ConfigError as error:
        raise ConfigError(error.what, where=f"{where} {key}={text}", fix=error.fix) from error


def _check_word(text: str, kind: Any, key: str) -> None:
    """Raise ConfigError where `kind` is a few words, and `text` is none of them."""
    members = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    words = [word for member in members for word in typing.get_args(member)]
    may_be_none = types.NoneType in members
    if not words or any(not typing.get_args(member) and member is not types.NoneType for member in members):
        return
    if text not in words and not (may_be_none and text.lower() == "none"):
        fix = f"{nearest(in_our_words(key, text), words)}known: {', '.join(map(str, words))}"
        raise ConfigError(f"{key} is {text!r}", fix=fix)


def _like(key: str, known: Sequence[str]) -> str:
    """Keys that look like `key`, other than the nearest, which is named already; empty where there are none."""
    named_already = nearest(key, known)
    few = [each for each in nearest_few(key, known) if repr(each) not in named_already]
    return f"similar: {', '.join(few)}; " if few else ""


def table() -> list[tuple[str, str]]:
    """Every key, with its default."""
    found = {}
    for kind, prefix in ((Settings, ""), *((_section_type(each), f"{each}.") for each in _SECTIONS)):
        found.update({f"{prefix}{field.name}": _default(field) for field in dataclasses.fields(kind)})
    for strategy in BY_NAME.values():
        for field in dataclasses.fields(strategy):
            found.setdefault(field.name, _default(field))
    return [(key, found[key]) for key in known_keys()]


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default if field.default is not dataclasses.MISSING else None
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def from_environment() -> dict[str, str]:
    """What `manyhosts run --set …` asked of this worker."""
    return typing.cast(dict[str, str], json.loads(os.environ.get(VARIABLE, "{}")))


def to_environment(overrides: Mapping[str, str]) -> dict[str, str]:
    """The variable that carries `overrides` to a worker; none where there is nothing to carry."""
    return {VARIABLE: json.dumps(dict(overrides))} if overrides else {}


def apply(given: Mapping[str, Any], overrides: Mapping[str, str]) -> Settings:
    """The settings that a script has `given`, with `overrides` laid over them: what comes out is checked, as one.

    Raises:
        ConfigError: a key is unknown, a value has the wrong type, or the result contradicts itself.
    """
    check_keys(overrides)
    left, changed = dict(overrides), dict(given)
    if "strategy" in left:
        changed |= {"strategy": named(left.pop("strategy")), "mesh": None}  # the script's mesh is that of its strategy
    strategy = changed["strategy"]
    own = {field.name for field in dataclasses.fields(strategy)} & left.keys()
    if own:
        changed["strategy"] = _replace(strategy, {key: left.pop(key) for key in own}, "")
    for section in _SECTIONS:
        inside = {key.partition(".")[2]: left.pop(key) for key in list(left) if key.startswith(section + ".")}
        if inside:
            changed[section] = _replace(changed.get(section) or _section_type(section)(), inside, section + ".")
    other_batch = {"batch_size": "batch_size_per_worker", "batch_size_per_worker": "batch_size"}
    for key in other_batch.keys() & left.keys():
        changed[other_batch[key]] = None  # the two exclude each other, and what is typed overrides the script
    types_of = typing.get_type_hints(Settings)
    for key, text in left.items():
        if key not in types_of:
            raise ConfigError(
                f"{key!r} is no setting of the strategy {strategy.name!r}",
                where="--set",
                fix=f"choose a strategy that has it with --set strategy=…: {', '.join(_strategies_with(key))}",
            )
        changed[key] = _read(text, types_of[key], key)
    return Settings(**changed)


def lacks(strategy: str, key: str) -> bool:
    """Whether `key` is a setting of other strategies, and not of the one with that name."""
    having = _strategies_with(key)
    return bool(having) and strategy in BY_NAME and strategy not in having


def _strategies_with(key: str) -> list[str]:
    return [name for name, kind in BY_NAME.items() if key in {field.name for field in dataclasses.fields(kind)}]


def _section_type(section: str) -> type:
    kind = typing.get_type_hints(Settings)[section]
    members = [member for member in typing.get_args(kind) if member is not type(None)]
    return typing.cast(type, members[0] if members else kind)


def _replace(section: S, texts: Mapping[str, str], prefix: str) -> S:
    types_of = typing.get_type_hints(type(section))
    values = {key: _read(text, types_of[key], prefix + key) for key, text in texts.items()}
    return dataclasses.replace(section, **values)  # type: ignore[type-var]  # every section is a dataclass


def _read(text: str, kind: Any, key: str, words: Sequence[str] = ()) -> Any:
    """`text` as a value of type `kind`; a union takes the first member that fits. `words`: what else it may be."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        members = typing.get_args(kind)
        if text.lower() == "none" and type(None) in members:
            return None
        words = [word for member in members for word in typing.get_args(member)]
        if text in words:
            return text
        return _read(text, next(member for member in members if member is not type(None)), key, words)
    if typing.get_origin(kind) is typing.Literal:
        return text  # the section itself checks which words it knows
    if kind is bool:
        if text.lower() in ("true", "yes", "on", "1", "false", "no", "off", "0"):
            return text.lower() in ("true", "yes", "on", "1")
        raise ConfigError(f"{key} is {text!r}", where="--set", fix="write true or false")
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError as cause:
            needed, example = ("an integer", "8") if kind is int else ("a number", "0.1")
            also = f", or one of {', '.join(map(repr, words))}" if words else ""
            fix = f"write {needed}, as in --set {key}={example}{also}"
            raise ConfigError(f"{key} is {text!r}, which is not {needed}", where="--set", fix=fix) from cause
    return text
