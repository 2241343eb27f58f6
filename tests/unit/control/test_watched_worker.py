"""What an agent does with a worker's pipes and reports."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from manyhosts.cluster.reports import Reporter
from manyhosts.cluster.store_line import StoreGone, StoreLine, StoreTimeout
from manyhosts.control.agent.store_lines import StoreLines
from manyhosts.control.agent.watched_worker import ReportServer, WatchedWorker, WorkerId
from manyhosts.control.loop import Loop
from manyhosts.control.protocol import AnswerStore, FromAgent
from manyhosts.control.wire_format import content_of


class Host:
    """One worker's seat on a host, and all that the head is told of it."""

    def __init__(self, folder: Path, address: Path) -> None:
        self.loop = Loop()
        (folder / "logs").mkdir()
        self.reported: list[tuple[str, dict[str, Any]]] = []
        self.store = StoreLines(self.report)
        self.desk = ReportServer(
            self.loop,
            address,
            lambda _, kind, fields: self.reported.append(("report", {"kind": kind, **fields})),
            lambda member, kind, fields: self.reported.append(("member", {"member": member, "kind": kind, **fields})),
            self.store,
        )
        self.error_file = folder / "error.json"
        self.failed = 0
        self.imported: list[str] = []
        self.worker = WatchedWorker(
            self.loop,
            WorkerId(rank=3, local_rank=1, generation=0, member=5),
            log=folder / "logs" / "n1-3.log",
            log_bytes=0,
            error_file=self.error_file,
            report=self.report,
            show=self.report,
            on_failure=self.note_failure,
            before_end=self.desk.drain,
            on_imported=self.imported.extend,
        )
        self.out, self.err, self.line, self.stack = self.worker.open_pipes()

    def report(self, message: FromAgent) -> None:
        self.reported.append((message.NAME, content_of(message)))

    def note_failure(self, worker: WatchedWorker) -> None:
        self.failed += 1

    def say(self, **record: Any) -> None:
        os.write(self.line, json.dumps(record).encode() + b"\n")

    def end(self, code: int = 0, number: int = 0) -> dict[str, Any]:
        for pipe in (self.out, self.err, self.line, self.stack):
            os.close(pipe)
        self.worker.end(code, number)
        self.loop.run(until=lambda: self.worker.ended)
        kind, fields = self.reported[-1]
        assert kind == "ended"
        return fields


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders have names too long for a Unix socket
        made = Host(tmp_path, Path(folder, "agent"))
        yield made
        made.loop.close()
        made.desk.close()


def test_end_is_told_after_everything_that_was_written(host: Host) -> None:
    os.write(host.out, b"one\ntwo")
    os.write(host.err, b"three\n")
    host.end(0, 0)
    lines = [line for kind, fields in host.reported if kind == "output" for line in fields["lines"]]
    assert sorted(lines) == ["one", "three", "two"]
    assert [kind for kind, _ in host.reported].index("ended") == len(host.reported) - 1


def test_log_that_cannot_be_written_is_told_once_and_every_line_is_passed_on(host: Host, tmp_path: Path) -> None:
    host.end(0, 0)  # of the worker that the scene came with
    (tmp_path / "logs" / "full-3.log").symlink_to("/dev/full")
    host.worker = WatchedWorker(
        host.loop,
        host.worker.worker_id,
        log=tmp_path / "logs" / "full-3.log",
        log_bytes=0,
        error_file=host.error_file,
        report=host.report,
        show=host.report,
        on_failure=host.note_failure,
        before_end=host.desk.drain,
        on_imported=host.imported.extend,
    )
    host.out, host.err, host.line, host.stack = host.worker.open_pipes()
    os.write(host.out, b"one\n")
    os.write(host.err, b"two\n")
    host.end(0, 0)
    assert [fields["why"] for kind, fields in host.reported if kind == "unlogged"] == ["No space left on device"]
    lines = [line for kind, fields in host.reported if kind == "output" for line in fields["lines"]]
    assert sorted(lines) == ["one", "two"]


def test_last_report_is_told_before_the_end(host: Host) -> None:
    reporter = Reporter(str(host.desk.address), 1)
    for pipe in (host.out, host.err, host.line):
        os.close(pipe)
    host.worker.end(0, 0)  # the agent has heard of the end first
    reporter.send("say", text="last words")
    host.loop.run(until=lambda: host.worker.ended)
    reporter.close()
    assert [kind for kind, _ in host.reported] == ["report", "ended"]


def test_main_module_that_ended_well_is_told_whatever_comes_then(host: Host) -> None:
    host.say(record="finished", code=0)
    ended = host.end(0, 6)
    assert (ended["finished"], ended["signal"], host.failed) == (True, 6, 0)


def test_failure_is_known_before_the_process_ends_and_kept_in_the_log(host: Host, tmp_path: Path) -> None:
    host.say(record="failed", summary="ValueError: boom", text="Traceback\nValueError: boom")
    host.say(record="finished", code=1)
    host.loop.run(until=lambda: host.failed > 0)
    ended = host.end(1, 0)
    assert (ended["finished"], ended["error"]["summary"]) == (False, "ValueError: boom")
    assert (tmp_path / "logs" / "n1-3.log").read_text() == "Traceback\nValueError: boom\n"


def test_error_file_is_read_where_the_worker_said_nothing(host: Host) -> None:
    message = {"message": "KeyError: 'x'", "extraInfo": {"py_callstack": "Traceback\nKeyError: 'x'", "timestamp": "1"}}
    host.error_file.write_text(json.dumps({"message": message}))
    assert host.end(1, 0)["error"] == {"summary": "KeyError: 'x'", "text": "Traceback\nKeyError: 'x'"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"message": "plain text"}'])
def test_error_file_that_cannot_be_read_is_left_out(host: Host, text: str) -> None:
    host.error_file.write_text(text)
    assert host.end(1, 0)["error"] is None


def test_pipe_that_a_child_keeps_open_does_not_hold_up_the_end(host: Host) -> None:
    kept = os.dup(host.out)
    assert host.end(0, 0)["code"] == 0
    os.close(kept)


def test_report_that_makes_no_sense_harms_nobody(host: Host) -> None:
    reporter = Reporter(str(host.desk.address), 1)
    reporter._socket.sendall(b'{"worker": "x", "kind": 3}\n{"kind": "say"}\n')
    reporter.send("say", text="sense")
    reporter.close()
    host.end()
    assert [fields.get("text") for kind, fields in host.reported if kind == "report"] == ["sense"]


def test_what_a_worker_has_imported_is_passed_on(host: Host) -> None:
    host.say(record="imported", modules=["one", "two"])
    host.end(0, 0)
    assert host.imported == ["one", "two"]


def ask(host: Host, line: StoreLine, do: str, timeout_s: float = 60, **fields: Any) -> Future[Any]:
    """What the worker is answered, on a thread of its own; the question has reached the head when this returns."""
    before = len(host.reported)
    found = ThreadPoolExecutor(max_workers=1).submit(line.ask, do, timeout_s, **fields)
    host.loop.run(until=lambda: len(host.reported) > before)
    return found


def answer(host: Host, reported: int, **content: Any) -> None:
    kind, question = host.reported[reported]
    assert kind == "ask_store"
    host.store.answer(AnswerStore(line=question["line"], answer={"id": question["id"], **content}))


def test_questions_of_workers_to_the_store_are_answered_each_to_the_one_that_has_asked(host: Host) -> None:
    one, other = (StoreLine(str(host.desk.address), start=0, group=4) for _ in range(2))
    asked = [ask(host, one, "get", names=["a"]), ask(host, other, "get", names=["b"])]
    assert [fields["fields"] for _, fields in host.reported] == [{"group": [0, 4], "names": [name]} for name in "ab"]
    answer(host, 1, value=["2"])
    answer(host, 0, value=["1"])
    assert [each.result(60) for each in asked] == [["1"], ["2"]]
    lost = ask(host, one, "wait", names=["c"])
    answer(host, 2, error="a worker of this group is lost")
    with pytest.raises(StoreGone, match="a worker of this group is lost"):
        lost.result(60)
    one.close()
    other.close()
    host.end()


def test_worker_that_has_waited_long_enough_takes_no_old_answer_for_a_new_one(host: Host) -> None:
    line = StoreLine(str(host.desk.address), start=0, group=0)
    with pytest.raises(StoreTimeout):
        ask(host, line, "wait", 0.05, names=["a"]).result(60)
    answer(host, 0, value="old")
    again = ask(host, line, "names")
    answer(host, 1, value="new")
    assert again.result(60) == "new"
    line.close()
    host.end()


def test_worker_that_waits_is_woken_where_its_line_is_closed_or_the_agent_is_gone(host: Host) -> None:
    mine, theirs = (StoreLine(str(host.desk.address), start=0, group=0) for _ in range(2))
    waiting = ask(host, mine, "wait", names=["a"])
    mine.close()
    with pytest.raises(StoreGone, match="this group was left"):
        waiting.result(60)
    with pytest.raises(StoreGone, match="this group was left"):
        mine.ask("names", 60)
    waiting = ask(host, theirs, "wait", names=["a"])
    host.end()
    host.desk.close()
    with pytest.raises(StoreGone, match="the agent of this host does not answer"):
        waiting.result(60)
