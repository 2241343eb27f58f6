"""Ctrl-C while a host still loads what workers need: nobody is there to be asked, and nobody is waited for."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, cast

import pytest

from manyhosts.control.agent.workers import LocalWorkers


class Server:
    """A fork server, as far as it is asked."""

    def __init__(self, *, ready: bool) -> None:
        self.ready = ready
        self.asked: list[str] = []
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def ask(self, do: str, **_: Any) -> None:
        self.asked.append(do)


class Worker:
    """One that was asked for."""

    def __init__(self) -> None:
        self.worker_id = type("Id", (), {"generation": 0, "member": 1, "name": "0"})()
        self.ended: tuple[int, int] | None = None

    def end(self, code: int, number: int) -> None:
        self.ended = code, number


@pytest.mark.parametrize("ready", [False, True])
def test_workers_that_were_not_started_end_at_once(ready: bool, tmp_path: Path) -> None:
    server, worker = Server(ready=ready), Worker()
    workers = cast(Any, LocalWorkers.__new__(LocalWorkers))
    workers._reports = type("Reports", (), {"address": tmp_path / "reports"})()
    workers._fork_server, workers._watched = server, {"0": worker}
    workers.ask_to_stop(0, signal.SIGTERM, signal.SIGINT)
    assert worker.ended == (None if ready else (0, signal.SIGTERM))
    assert server.asked == (["signal"] if ready else [])
    # Else it forks them when it has loaded, and they train while the run ends around them
    assert server.closed == (not ready)
    assert workers._fork_server is (server if ready else None)
