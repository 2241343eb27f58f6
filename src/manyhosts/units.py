"""Words for amounts: durations and sizes read and written, bytes and seconds as people say them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from manyhosts.errors import ConfigError

_SECONDS = {"s": 1.0, "sec": 1.0, "second": 1.0, "m": 60.0, "min": 60.0, "minute": 60.0, "h": 3600.0, "hour": 3600.0}
_SECONDS |= {"d": 86400.0, "day": 86400.0}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)")
_EXAMPLES = 'write it as "20 epochs", "500 steps", "2h30m", "10 min" or "20 epochs or 2h"'


@dataclass(frozen=True, slots=True)
class Duration:
    """How long something continues: whichever of the given limits comes first.

    Also the distance between two repetitions, as in `Snapshots(every="10 min")`.
    """

    epochs: float | None = None
    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str, *, where: str = "duration", fix: str = _EXAMPLES) -> Duration:
        """Read `20 epochs`, `500 steps`, `2h30m`, or several joined by `or`.

        Raises:
            ConfigError: the text is no duration, or one of zero length; `fix` says how one is written.
        """
        limits: dict[str, float] = {}
        for part in str(text).lower().split(" or "):
            unit, amount = _read_part(part, text, where, fix)
            if unit in limits:
                raise ConfigError(f"{text!r} names {unit} twice", where=where, fix=fix)
            limits[unit] = amount
        steps = limits.get("steps")
        return cls(
            epochs=limits.get("epochs"), steps=None if steps is None else int(steps), seconds=limits.get("seconds")
        )

    def __str__(self) -> str:
        parts = []
        if self.epochs is not None:
            parts.append(f"{self.epochs:g} epoch{'' if self.epochs == 1 else 's'}")
        if self.steps is not None:
            parts.append(f"{self.steps} step{'' if self.steps == 1 else 's'}")
        if self.seconds is not None:
            parts.append(seconds_in_words(self.seconds))
        return " or ".join(parts)


def _read_part(part: str, text: str, where: str, fix: str) -> tuple[str, float]:
    """One limit: its unit (epochs, steps, seconds) and its amount."""
    found = _AMOUNT.findall(part)
    if not found or _AMOUNT.sub("", part).strip():
        raise ConfigError(f"cannot read the duration {text!r}", where=where, fix=fix)
    names = [name if name in _SECONDS else name.removesuffix("s") for _, name in found]
    amounts = [float(amount) for amount, _ in found]
    if names in (["epoch"], ["step"]):
        unit, amount = names[0] + "s", amounts[0]
        if unit == "steps" and amount != int(amount):
            raise ConfigError(f"{text!r} asks for a part of a step", where=where, fix=fix)
    elif all(name in _SECONDS for name in names):
        unit, amount = "seconds", sum(a * _SECONDS[n] for a, n in zip(amounts, names, strict=True))
    else:
        unknown = next((name for name in names if name not in {*_SECONDS, "epoch", "step"}), names[-1])
        raise ConfigError(f"cannot read the duration {text!r}: {unknown!r} fits no unit here", where=where, fix=fix)
    if amount <= 0:
        raise ConfigError(f"the duration {text!r} is not longer than nothing", where=where, fix=fix)
    return unit, amount


def seconds_in_words(seconds: float) -> str:
    """`0.13 s`, `42 s`, `3 min 05 s`, `2 h 07 min`."""
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"


def bytes_in_words(count: float) -> str:
    """`512 B`, `1.5 MB`: decimal units, as network and disk makers count."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def bytes_of(text: str, *, where: str) -> int:
    """`500 MB`, `1 GiB`, `20M` or `4096` in bytes. One letter counts as the decimal unit.

    Raises:
        ConfigError: the text is no size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if not found or (found[3] and not found[2]):
        raise ConfigError(f"cannot read the size {text!r}", where=where, fix='write it as "500 MB", "1 GiB" or "0"')
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2] or " "))
