"""Numbers as the terminal shows them: short, with their unit."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_SHARES = ("accuracy", "precision", "recall", "f1", "specificity")


def number(value: float) -> str:
    """Six columns where they do: `0.0612`, `1.2346`, `12.346`, `1234.6`, `0.00060`, `1.2e-05`, `nan`."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.{4 - max(0, math.floor(math.log10(abs(value))))}f}"
    return f"{value:#.2g}"


def figure(name: str, value: float) -> str:
    """A value by its name: `loss 0.0612`, `accuracy 98.33 %`."""
    if 0 <= value <= 1 and _is_share(name.lower()):
        return f"{name} {100 * value:.2f} %"
    return f"{name} {number(value)}"


def _is_share(name: str) -> bool:
    """Whether a name says that the value is a share: `val_accuracy`, `MulticlassF1Score`, `acc`, `token_acc`."""
    return any(share in name for share in _SHARES) or "acc" in re.split(r"[^a-z]+", name)


def figures(values: Mapping[str, float], between: str) -> str:
    """All values, the loss last: what people look for comes first."""
    names = sorted(values, key=lambda name: name == "loss")
    return between.join(figure(name, values[name]) for name in names)


def rate(per_second: float) -> str:
    """Samples in a second: `512 samples/s`, `30.5k samples/s`."""
    if per_second >= 1e6:
        return f"{per_second / 1e6:.1f}M samples/s"
    if per_second >= 1e4:
        return f"{per_second / 1e3:.1f}k samples/s"
    return f"{per_second:.0f} samples/s" if per_second >= 10 else f"{per_second:.2g} samples/s"


def clock(seconds: float) -> str:
    """Time to go, as a clock shows it: `0:42`, `12:05`, `3:07:33`."""
    rounded = max(0, round(seconds))
    if rounded >= 3600:
        return f"{rounded // 3600}:{rounded % 3600 // 60:02d}:{rounded % 60:02d}"
    return f"{rounded // 60}:{rounded % 60:02d}"


def amount(count: int, thing: str) -> str:
    """`1 restart`, `23 steps`, `1,797 samples`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"
