"""Numbers that are none, in JSON: it has no word for NaN and the infinities, so they are written as words.

The words are those of Protocol Buffers' JSON; Python's `float` and JavaScript's `Number` read them too.
"""

from __future__ import annotations

import math
from typing import Any

_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_words(value: Any) -> Any:
    """`value`, and what is inside it, with each number that is none as its word."""
    if isinstance(value, dict):
        return {str(key): to_words(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_words(inner) for inner in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def from_words(value: Any) -> Any:
    """`value`, and what is inside it, with each of the words as its number."""
    if isinstance(value, dict):
        return {key: from_words(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [from_words(inner) for inner in value]
    return _NUMBERS.get(value, value) if isinstance(value, str) else value
