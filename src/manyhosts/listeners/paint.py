"""Colours and signs for a terminal, and what becomes of them where there is none."""

from __future__ import annotations

import re
from typing import Literal

Colour = Literal["bold", "dim", "red", "green", "yellow", "blue", "magenta", "cyan"]

_CODES: dict[Colour, int] = {
    "bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36,
}  # fmt: skip
_PAINT = re.compile(r"\x1b\[[0-9;]*m")
_RULE = re.compile("─{3,}")
_BAR = re.compile(r" *(\x1b\[[0-9;]*m)?[█▏▎▍▌▋▊▉]+ *(\x1b\[0m)?$")
_WORD = re.compile(r" *[^ ]+")
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


def fitted(text: str, width: int) -> str:
    """`text`, painted or not, in lines of at most `width` columns; what happens in the next line is indented.

    Bars are left out where one of them has no room, a rule gives way, and a word that is longer is not cut.
    """
    lines = text.split("\n")
    if any(len(bare(line)) > width and _BAR.search(line) for line in lines):
        lines = [_BAR.sub("", line) for line in lines]
    return "\n".join(_broken(line, width) for line in lines)


def _broken(line: str, width: int) -> str:
    excess = len(bare(line)) - width
    if excess <= 0:
        return line
    if rule := _RULE.search(line):
        line = line[: rule.start()] + "─" * max(1, len(rule[0]) - excess) + line[rule.end() :]
    indent = " " * (len(line) - len(line.lstrip(" ")) + 2)
    done, now = [], ""
    for word in _WORD.findall(line):
        if now.strip() and len(bare(now + word)) > width:
            done.append(now)
            now = indent + word.lstrip(" ")
        else:
            now += word
    return "\n".join([*done, now])


def bar(share: float, width: int) -> str:
    """A bar that fills `share` of `width` columns to an eighth of a column, padded to that width."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return ("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8]).strip().ljust(width)[:width]
