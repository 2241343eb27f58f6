"""Colours and signs for a terminal, and what becomes of them where there is none."""

from __future__ import annotations

import re
from typing import Literal

Colour = Literal["bold", "dim", "red", "green", "yellow", "blue", "magenta", "cyan"]

_CODES: dict[Colour, int] = {
    "bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36,
}  # fmt: skip
_PAINT = re.compile(r"\x1b\[[0-9;]*m")
_PLAIN = str.maketrans({**dict(zip("━╸─★·", "=>-*-", strict=True)), **dict.fromkeys("█▉▊▋▌▍▎▏", "#"), "→": "->"})


def paint(text: str, *colours: Colour) -> str:
    """`text` in colours, as terminals have understood them since the VT100."""
    return f"\x1b[{';'.join(str(_CODES[colour]) for colour in colours)}m{text}\x1b[0m" if colours and text else text


def bare(text: str) -> str:
    """`text` without its paint."""
    return _PAINT.sub("", text)


def writable(text: str, encoding: str | None) -> str:
    """`text` with signs that `encoding` knows: a terminal in the C locale gets `=` for `━`, and `?` for the unknown."""
    encoding = encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding, errors="replace").decode(encoding)
    return text


def bar(share: float, width: int) -> str:
    """A bar that fills `share` of `width` columns to an eighth of a column, padded to that width."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return ("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8]).strip().ljust(width)[:width]
