"""Text of somebody else, as it may be shown on a terminal: it moves no cursor, rings no bell and begins no line."""

from __future__ import annotations

import re

_COLOUR = r"\x1b\[[0-9;]*m"
_CONTROL = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # also what turns the direction of writing
_OF_A_LINE = re.compile(f"[{_CONTROL}]")
_OF_LINES = re.compile(f"({_COLOUR})|[{_CONTROL}]")
_KEPT = "\n\t"
_IN_PLACE = "\N{REPLACEMENT CHARACTER}"


def line(text: str) -> str:
    """`text` as one line without colours: what else it holds is replaced, character by character."""
    return _OF_A_LINE.sub(_IN_PLACE, text)


def lines(text: str) -> str:
    """`text` with its line breaks, tabs and colours, and nothing else that a terminal would obey."""
    return _OF_LINES.sub(lambda found: found[0] if found[1] or found[0] in _KEPT else _IN_PLACE, text)
