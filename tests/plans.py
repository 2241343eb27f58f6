"""What `--dry-run` prints, compared with what was sent: equal but for the values that are filled in last."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence
from typing import Any


def files_in(printed: str) -> dict[str, str]:
    """Name → what is written or sent under it."""
    return dict(re.findall(r"^--- (.+)\n((?s:.*?))\n---$", printed, flags=re.MULTILINE))


def commands_in(printed: str) -> list[list[str]]:
    """The commands that are printed, the user's own first."""
    return [shlex.split(line) for line in re.findall(r"^ *\$ (.*)$", printed, flags=re.MULTILINE)]


def assert_sent(shown: Any, sent: Any, later: Collection[str]) -> list[Any]:
    """See that `sent` is `shown`, where each value of `later` may be any other. Returns the values in their place."""
    if isinstance(shown, str) and shown in later:
        assert sent != shown, f"{shown!r} was not filled in"
        return [sent]
    if isinstance(shown, dict):
        assert isinstance(sent, dict)
        assert list(shown) == list(sent)
        return [value for key in shown for value in assert_sent(shown[key], sent[key], later)]
    if isinstance(shown, list | tuple):
        assert isinstance(sent, Sequence)
        assert len(shown) == len(sent), f"{shown} and {sent}"
        return [value for one, other in zip(shown, sent, strict=True) for value in assert_sent(one, other, later)]
    assert shown == sent
    return []
