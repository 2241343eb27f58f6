"""Which messages agents send to the head, and of which types their fields are: everything else is refused unread.

What the fields mean stands in `agent.agent`. What workers report (`fields`) is theirs to say, and is
looked at by those that it concerns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manyhosts.control.loop import Message

_NUMBER = (int, float)
_WORKER = {"rank": int, "generation": int, "member": int}
_SEEN = {
    **_WORKER,
    "step": (int, type(None)),
    "state": str,
    "cpu_s": _NUMBER,
    "busy": _NUMBER,
    "stack": str,
    "loader": str,
}
_FROM_AGENT: Mapping[str, Mapping[str, Any]] = {
    "alive": {"held_s": _NUMBER},
    "asked": {"signal": int},
    "condition": {"told": dict, "port": int},
    "connectivity": {"port": int},
    "ended": {
        **_WORKER,
        "code": int,
        "signal": int,
        "finished": bool,
        "error": (dict, type(None)),
        "out_of_memory": bool,
    },
    "connections_tried": {"answers": [str]},
    "member": {"member": int, "kind": str, "fields": dict},
    "output": {**_WORKER, "stream": str, "lines": [str]},
    "report": {**_WORKER, "kind": str, "fields": dict},
    "seen": {"round": int, "workers": [_SEEN]},
    "store": {"generation": int, "port": int, "shared": bool},
    "trouble": {"text": str, "where": str, "early": bool},
    "unlogged": {**_WORKER, "why": str},
    "unshown": {**_WORKER, "lines": int},
    "warm": {"modules": [str]},
}
"""By kind, the fields that must be there. A list stands for a list of such values, an object for an object."""
HELLO = {
    "session": str,
    "heard": int,
    "node": int,
    "host": str,
    "address": str,
    "process": int,
    "cores": int,
    "gpus": int,
}

JOINING = {"folder": str, "machine": str, "mark": str, "marks": [str]}
"""What the `hello` of a host has beside that, where it is the host that has come to the run."""


def fault_of(message: Message) -> str:
    """What is wrong with a message of an agent that is known; empty where nothing is."""
    kind = message.get("message")
    if not isinstance(kind, str) or kind not in _FROM_AGENT:
        return f"it is of the kind {_short(kind)}, which this head does not know"
    return fault_in(message, _FROM_AGENT[kind])


def fault_in(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Which of the `wanted` fields (name → type) `found` lacks or has otherwise; empty where it has them all."""
    for name, kind in wanted.items():
        if name not in found:
            return f"it has no {name!r}"
        if not _fits(found[name], kind):
            return f"its {name!r} is {_short(found[name])}"
    return ""


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(kind, list):
        return isinstance(value, list) and all(_fits(each, kind[0]) for each in value)
    if isinstance(kind, Mapping):
        return isinstance(value, dict) and not fault_in(value, kind)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind)


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
