"""Strips below each other, each with its name: bars of what time was spent on, a time line, a map of workers and steps.

The strips are SVG that is stretched as wide as there is room; all words are next to them, and keep their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_LENGTH = 1000


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a strip; places go from 0 to 1."""

    begin: float
    end: float
    colour: str
    words: str = ""
    """Shown where a pointer rests on it."""


@dataclass(frozen=True, slots=True)
class Strip:
    """One of them."""

    name: str
    pieces: Sequence[Piece]
    note: str = ""
    """The text that explains it."""


def strips(rows: Sequence[Strip], *, label: str, ends: tuple[str, ...] = (), thin: bool = False) -> str:
    """All of them; empty where none has a piece. `ends`: words below, spread from left to right."""
    if not any(row.pieces for row in rows):
        return ""
    parts = "".join(
        f'<span class="name">{escape(row.name)}</span>{_drawn(row)}<span class="note">{escape(row.note)}</span>'
        for row in rows
    )
    below = "".join(f"<span>{escape(word)}</span>" for word in ends)
    axis = f'<span></span><div class="ends">{below}</div><span></span>' if ends else ""
    kind = "strips thin" if thin else "strips"
    return f'<div class="{kind}" role="img" aria-label="{escape(label)}">{parts}{axis}</div>'


def legend(names: Sequence[tuple[str, str]]) -> str:
    """What the colours mean: name and colour of each."""
    keys = "".join(
        f'<span><svg class="key" viewBox="0 0 12 12" aria-hidden="true"><rect width="12" height="12" fill="{colour}"/>'
        f"</svg>{escape(name)}</span>"
        for name, colour in names
    )
    return f'<p class="legend">{keys}</p>'


def shade(share: float) -> str:
    """A colour for 0 (light) to 1 (dark), which is as clear on grey paper."""
    share = min(1.0, max(0.0, share))
    light, dark = (0xEE, 0xF3, 0xF8), (0x8A, 0x1C, 0x2B)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(light, dark, strict=True))


def _drawn(row: Strip) -> str:
    parts = []
    for piece in row.pieces:
        begin, end = (round(_LENGTH * min(1.0, max(0.0, place)), 2) for place in (piece.begin, piece.end))
        width = max(end - begin, 2.0)  # a moment is seen, too
        title = f"<title>{escape(piece.words)}</title>" if piece.words else ""
        begin = min(begin, _LENGTH - width)
        parts.append(f'<rect x="{begin:g}" width="{width:g}" y="0" height="10" fill="{piece.colour}">{title}</rect>')
    return f'<svg class="strip" viewBox="0 0 {_LENGTH} 10" preserveAspectRatio="none">{"".join(parts)}</svg>'
