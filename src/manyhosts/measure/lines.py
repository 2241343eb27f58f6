"""What a worker that measures says: single lines among all that the script prints, wherever that is read."""

from __future__ import annotations

import json
import os
from typing import Any

_SIGN = "manyhosts-measures:"


def send(kind: str, **values: Any) -> None:
    """Say one thing, past whatever the script has done to its streams."""
    line = memoryview(f"\n{_SIGN}{json.dumps({'kind': kind, **values})}\n".encode())
    while line:
        line = line[os.write(1, line) :]


def heard(line: str) -> dict[str, Any] | None:
    """What `line` says, of whatever is before it; None where it is one of the script's own."""
    _, sign, text = line.partition(_SIGN)
    if not sign:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None  # the script has quoted us, or printed into the middle of it
    return found if isinstance(found, dict) and "kind" in found else None
