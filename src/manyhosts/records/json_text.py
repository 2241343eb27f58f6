"""JSON as it is read from disks: whatever is wrong with a text is one kind of error."""

from __future__ import annotations

import json
from typing import Any


def parsed(text: str | bytes | bytearray) -> Any:
    """The value that `text` holds.

    Raises:
        ValueError: it is no JSON, or it is nested deeper than Python can follow.
    """
    try:
        return json.loads(text)
    except RecursionError as cause:
        raise ValueError("its brackets are nested too deeply") from cause
