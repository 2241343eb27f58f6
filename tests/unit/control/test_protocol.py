"""What goes over the wire between head and agents is what was said, and nothing else is taken for it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, replace
from typing import Any

import pytest

from manyhosts.control.handshake import FROM_CALLED, FROM_CALLER
from manyhosts.control.protocol import FROM_AGENT, FROM_HEAD, Ended, NewWorker, SeenWorker, Start, WorkerStates
from manyhosts.control.wire_format import MOST_LEVELS, content_of, read

WORKER = {"rank": 1, "generation": 0, "member": 5}
SEEN = SeenWorker(**WORKER, step=None, state="S", cpu_s=1, busy=0.5, stack="", loader="")
ENDED = {**WORKER, "code": 0, "signal": 9, "finished": False, "error": None, "out_of_memory": False}


def example_of(kind: Any) -> Any:
    """A message with something in every field."""
    values = {"int": 3, "float": 0.5, "str": "x", "bool": True, "list[str]": ["a"], "list[list[Any]]": [["h", 1]]}
    values |= {"dict[str, Any]": {"a": [1]}, "dict[str, Any] | None": {"a": 1}, "int | None": None}
    values |= {"Text": "one\ntwo", "AsPrinted": ["\x1b[1A\r"]}
    values |= {"dict[str, str]": {"A": "b"}, "list[SeenWorker]": [SEEN], "float | None": 0.5}
    values["list[NewWorker]"] = [NewWorker(rank=0, local_rank=0, member=1, environment={"A": "b"})]
    return kind(**{entry.name: values[entry.type] for entry in fields(kind)})


def default_of(entry: Field[Any]) -> Any:
    return entry.default if entry.default_factory is MISSING else entry.default_factory()


@pytest.mark.parametrize("kinds", [FROM_AGENT, FROM_HEAD, FROM_CALLER, FROM_CALLED])
def test_every_message_comes_as_it_was_said_and_lacks_no_field(kinds: Mapping[str, Any]) -> None:
    assert len(kinds) >= 4
    for kind in kinds.values():
        said = example_of(kind)
        wire = json.loads(json.dumps({"message": kind.NAME, **content_of(said)}))
        assert read(wire, kinds) == said
        for entry in fields(kind):
            less = {name: value for name, value in wire.items() if name != entry.name}
            wrong = {**wire, entry.name: b"bytes are no JSON"}
            with pytest.raises(ValueError, match=f"its '{entry.name}' is "):
                read(wrong, kinds)
            if entry.default is MISSING and entry.default_factory is MISSING:
                with pytest.raises(ValueError, match=f"it has no '{entry.name}'"):
                    read(less, kinds)
            else:
                assert read(less, kinds) == replace(said, **{entry.name: default_of(entry)})


@pytest.mark.parametrize(
    ("wire", "fault"),
    [
        ({"message": "ended", **ENDED, "code": True}, "its 'code' is True"),
        ({"message": "ended", **ENDED, "finished": 1}, "its 'finished' is 1"),
        (
            {"message": "seen", "round": 1, "workers": [{**WORKER, "step": 1}]},
            "its 'workers' is [{'rank': 1, 'generation': 0, 'member...",
        ),
        ({"message": "seen", "round": 1, "workers": {}}, "its 'workers' is {}"),
        ({"message": "connections_tried", "answers": ["", 1]}, "its 'answers' is ['', 1]"),
        ({"message": "start"}, "it is of the kind 'start', which this version does not know"),
        ({"message": ["ended"]}, "it is of the kind ['ended'], which this version does not know"),
        ({}, "it is of the kind None, which this version does not know"),
    ],
)
def test_what_is_no_message_of_an_agent_is_refused_in_words(wire: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(fault)}$"):
        read(wire, FROM_AGENT)


HOSTILE = "b\x1b]0;title\x07\x1b[2J\r\nmanyhosts: all is well\u202e"


def nested(levels: int) -> Any:
    found: Any = HOSTILE
    for level in range(levels):
        found = [found] if level % 2 else {"a": found}
    return found


def test_what_people_may_see_of_a_message_moves_no_cursor_and_begins_no_line() -> None:
    shown = read({"message": "unlogged", **WORKER, "why": HOSTILE}, FROM_AGENT)
    assert content_of(shown)["why"] == "b\ufffd]0;title\ufffd\ufffd[2J\ufffd\ufffdmanyhosts: all is well\ufffd"
    error = {"what": HOSTILE, "deep": nested(9), "paint": "\x1b[31mred\x1b[0m"}
    found = content_of(read({"message": "ended", **ENDED, "error": error}, FROM_AGENT))["error"]
    assert "\n" in found["what"], "a traceback keeps its lines"
    assert found["paint"] == error["paint"]
    assert not set("\x1b\x07\r\u202e") & set(json.dumps({**found, "paint": ""}, ensure_ascii=False))
    lines = [HOSTILE, "\x1b[1A 40 %\r"]
    output = read({"message": "output", **WORKER, "stream": "out", "lines": lines}, FROM_AGENT)
    assert content_of(output)["lines"] == lines, "what a script prints is its own affair"
    outcome = {"message": "member", "member": 1, "kind": "done", "fields": {"outcome": HOSTILE}}
    assert content_of(read(outcome, FROM_AGENT))["fields"] == {"outcome": HOSTILE}, "for another worker"


@pytest.mark.parametrize("levels", [MOST_LEVELS + 1, 400])
def test_what_is_nested_deeper_than_it_can_be_written_down_is_refused(levels: int) -> None:
    wire = {"message": "member", "member": 1, "kind": "done", "fields": {"outcome": nested(levels)}}
    with pytest.raises(ValueError, match="its 'fields' is nested too deeply"):
        read(wire, FROM_AGENT)
    wire["fields"] = {"outcome": nested(MOST_LEVELS - 2)}
    read(wire, FROM_AGENT)


@pytest.mark.parametrize("number", [9999, 0, -15])
def test_signal_that_no_system_has_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match=f"its 'signal' is {number}, which no system has"):
        read({"message": "asked", "signal": number}, FROM_AGENT)


@pytest.mark.parametrize(
    "wire",
    [
        {"message": "condition", "reported": {}, "port": 70_000},
        {"message": "connectivity", "port": -1},
        {"message": "store", "generation": 0, "port": 1 << 40, "shared": True, "listens": True},
        {"message": "ended", **ENDED, "code": 10**30},
        {"message": "ended", **ENDED, "signal": 9999},
    ],
)
def test_number_that_no_host_can_mean_is_refused_before_others_are_told_it(wire: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"its '(port|code|signal)' is "):
        read(wire, FROM_AGENT)


def test_what_is_not_known_beside_a_message_is_not_looked_at_and_what_may_lack_has_its_default() -> None:
    assert read({"message": "ended", **ENDED, "new": 1}, FROM_AGENT) == Ended(**ENDED)
    assert Ended(**ENDED).memory == {}
    assert content_of(Start(generation=2, workers=[])) == {"generation": 2, "workers": []}
    assert content_of(WorkerStates(round=1, workers=[SEEN]))["workers"][0]["state"] == "S"
