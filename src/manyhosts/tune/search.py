"""What is searched: settings and flags of the script, the values that each may have, and when it has any.

lr=log:1e-4:1e-1             a number, on a logarithmic scale
--width=int:32:512           a flag of the script, an integer; int:32:512:32 in steps of 32, intlog:… logarithmic
momentum=float:0:0.99        a number
optimizer=sgd,adamw          one of several words
lr=auto                      what a learning-rate range test finds, on a logarithmic scale
--nesterov=true,false if --optimizer=sgd    only where another one that is searched has this value
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from manyhosts.config import overrides
from manyhosts.errors import ConfigError

Value = float | int | str
_KINDS = ("log", "float", "int", "intlog")
_FORMS = (
    "write it as KEY=log:LOW:HIGH, float:LOW:HIGH, int:LOW:HIGH, intlog:LOW:HIGH or KEY=A,B,C; "
    "KEY is a setting of --set, or a flag of the script with its dashes"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One thing that is searched."""

    name: str
    """A key of `--set`, or a flag of the script with its dashes."""
    kind: str
    """`log`, `float`, `int`, `intlog`, `choice`, or `auto`: a range that is yet to be found."""
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    """Of `int`: the distance of values. Else: how many values a grid takes from the range."""
    choices: tuple[str, ...] = ()
    condition: tuple[str, str] | None = None
    """Another parameter and the value that it must have; else this one is left out."""

    @classmethod
    def parse(cls, text: str) -> Parameter:
        """Read one `--search`.

        Raises:
            ConfigError: it cannot be read, there is no such setting, or it cannot have that value.
        """
        text, _, when = (word.strip() for word in text.partition(" if "))
        name, sign, spec = text.partition("=")
        above, _, value = when.rpartition("=")
        condition = (above.strip(), value.strip()) if when else None
        if not sign or not name or not spec or (condition and not all(condition)):
            raise ConfigError(f"cannot read {text!r}", where="--search", fix=_FORMS)
        if not name.startswith("--"):
            try:
                overrides.check_keys([name])
            except ConfigError as error:
                fix = error.fix.replace("write --set ", "write --search ", 1)
                fix = f"{fix}; a flag of the script is written with its dashes: --search --{name}=…"
                raise ConfigError(error.what, where=f"--search {name}", fix=fix) from error
        kind, colon, numbers = spec.partition(":")
        if spec == "auto" and name == "lr":
            return cls(name=name, kind="auto", condition=condition)
        if colon and kind in _KINDS:
            made = cls._of_range(name, kind, numbers, text)
        else:
            choices = tuple(dict.fromkeys(word.strip() for word in spec.split(",")))
            if len(choices) < 2 or not all(choices):
                raise ConfigError(f"{name} has nothing to choose from in {spec!r}", where="--search", fix=_FORMS)
            made = cls(name=name, kind="choice", choices=choices)
        for value in () if name.startswith("--") else made.choices or (made.shown(made.low), made.shown(made.high)):
            overrides.check_value(name, value, where="--search")
        return replace(made, condition=condition)

    @classmethod
    def _of_range(cls, name: str, kind: str, numbers: str, text: str) -> Parameter:
        try:
            low, high, *more = map(float, numbers.split(":"))
        except ValueError as cause:
            raise ConfigError(f"cannot read {text!r}", where="--search", fix=_FORMS) from cause
        is_uncut = not kind.startswith("int") or all(map(float.is_integer, (low, high, *more)))
        for is_wrong, why in (
            (not (math.isfinite(low) and math.isfinite(high)) or len(more) > 1, "its range is not two numbers"),
            (low >= high, f"{low:g} is not below {high:g}"),
            ("log" in kind and low <= 0, f"{low:g} has no logarithm"),
            (not is_uncut or (more and more[0] < 1), "it needs integers"),
        ):
            if is_wrong:
                raise ConfigError(f"cannot search {text}: {why}", where="--search", fix=_FORMS)
        return cls(name=name, kind=kind, low=low, high=high, step=more[0] if more else None)

    def shown(self, value: Value) -> str:
        """A value as it is typed, so that it is read back exactly."""
        return str(int(value)) if self.kind.startswith("int") else str(value)

    def suggest(self, trial: Any) -> Value:
        """The value that Optuna chooses for `trial`."""
        if self.kind == "choice":
            return str(trial.suggest_categorical(self.name, self.choices))
        if self.kind.startswith("int"):
            step = int(self.step or 1) if self.kind == "int" else 1
            return int(
                trial.suggest_int(self.name, int(self.low), int(self.high), step=step, log=self.kind == "intlog")
            )
        return float(trial.suggest_float(self.name, self.low, self.high, log=self.kind == "log"))

    def grid(self) -> list[Value]:
        """Every value of it, for a search that tries all.

        Raises:
            ConfigError: it is a range, and no one said how many values of it.
        """
        if self.kind == "choice":
            return list(self.choices)
        if self.kind == "int":
            return list(range(int(self.low), int(self.high) + 1, int(self.step or 1)))
        if self.step is None:
            values = "log:1e-4:1e-1" if self.kind == "auto" else f"{self.kind}:{self.low:g}:{self.high:g}"
            fix = f"say how many values: --search {self.name}={values}:5"
            raise ConfigError(f"a grid needs single values of {self.name}", where="--search", fix=fix)
        count = int(self.step)
        shares = [place / max(1, count - 1) for place in range(count)]
        if "log" in self.kind:
            found = [self.low * (self.high / self.low) ** share for share in shares]
        else:
            found = [self.low + (self.high - self.low) * share for share in shares]
        return list(dict.fromkeys(round(each) if self.kind == "intlog" else each for each in found))


def parse(words: Sequence[str]) -> tuple[Parameter, ...]:
    """All of `--search`, each after what it depends on; `lr=auto` where there is none.

    Raises:
        ConfigError: one cannot be read, is given twice, or depends on what is not searched.
    """
    found = {each.name: each for each in map(Parameter.parse, words or ["lr=auto"])}
    if len(found) < len(words):
        raise ConfigError("a name is searched twice", where="--search", fix="give each once")
    ordered: list[Parameter] = []
    while left := [each for each in found.values() if each not in ordered]:
        known = {each.name: each for each in ordered}
        ready = [each for each in left if each.condition is None or each.condition[0] in known]
        if not ready:
            name, value = left[0].condition or ("", "")
            what = f"{left[0].name} depends on {name}={value}, which is not searched"
            raise ConfigError(what, where="--search", fix=f"add --search {name}={value},…, or leave the condition out")
        for each in ready:
            if each.condition is not None and each.condition[1] not in (above := known[each.condition[0]]).choices:
                what = f"{each.name} depends on {'='.join(each.condition)}, a value that {above.name} is never given"
                raise ConfigError(what, where="--search", fix=f"it is one of: {', '.join(above.choices) or 'a range'}")
        ordered += ready
    return tuple(ordered)


def suggest(trial: Any, parameters: Sequence[Parameter]) -> dict[str, Value]:
    """What `trial` is to be run with."""
    return _chosen(parameters, lambda each: each.suggest(trial))


def _chosen(parameters: Sequence[Parameter], value: Callable[[Parameter], Value]) -> dict[str, Value]:
    """The value of each that has one, where those that it depends on have theirs."""
    chosen: dict[str, Value] = {}
    for each in parameters:
        if each.condition is None or chosen.get(each.condition[0]) == each.condition[1]:
            chosen[each.name] = value(each)
    return chosen


def grid(parameters: Sequence[Parameter]) -> list[dict[str, Value]]:
    """Every combination, each once.

    Raises:
        ConfigError: a range has no single values.
    """
    found: list[dict[str, Value]] = []
    for values in itertools.product(*(each.grid() for each in parameters)):
        of = dict(zip([each.name for each in parameters], values, strict=True))
        chosen = _chosen(parameters, lambda each, of=of: of[each.name])  # type: ignore[misc]
        if chosen not in found:
            found.append(chosen)
    return found


def words(chosen: Mapping[str, Value]) -> tuple[list[str], list[str]]:
    """What is typed after `manyhosts run` for these values, and after the script."""
    settings = [f"{name}={value}" for name, value in chosen.items() if not name.startswith("--")]
    flags = [f"{name}={value}" for name, value in chosen.items() if name.startswith("--")]
    return list(itertools.chain.from_iterable(("--set", each) for each in settings)), flags


def metric(text: str) -> tuple[str, bool]:
    """`accuracy:max` as a name, and whether more of it is better.

    Raises:
        ConfigError: no one says which is better.
    """
    name, _, better = text.partition(":")
    if name and (better in ("max", "min") or (name == "loss" and not better)):
        return name, better == "max"
    fix = f"write --metric {name or 'loss'}:max or {name or 'loss'}:min"
    raise ConfigError(f"is more or less of {name!r} better?", where="--metric", fix=fix)
