"""Plain values as YAML, as much of it as a manifest needs; a reader of YAML gets the same values back."""

from __future__ import annotations

import json
import re
from typing import Any

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}  # YAML takes them for something else


def dump(value: Any) -> str:
    """`value`, made of dicts, lists, texts, numbers, booleans and None, as a YAML document."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict) and value:
        found = []
        for key, inner in value.items():
            below = _lines(inner)
            if isinstance(inner, dict | list) and inner:
                found += [f"{_scalar(key)}:", *(f"  {line}" for line in below)]
            else:
                found.append(f"{_scalar(key)}: {below[0]}")
        return found
    if isinstance(value, list) and value:
        found = []
        for inner in value:
            first, *rest = _lines(inner)
            found += [f"- {first}", *(f"  {line}" for line in rest)]
        return found
    return [_scalar(value)]


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    if not isinstance(value, str):
        return json.dumps(value)
    return re.sub(r"[^ -~]", _escaped, json.dumps(value, ensure_ascii=False))


def _escaped(found: re.Match[str]) -> str:
    """A character that YAML may not take as it is; beyond the first plane it is not written as JSON does it."""
    code = ord(found[0])
    return f"\\U{code:08x}" if code > 0xFFFF else f"\\u{code:04x}"
