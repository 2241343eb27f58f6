"""`manyhosts watch`: a run or a study in progress, in the terminal and, on request, as a page on this machine."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from manyhosts.errors import ConfigError
from manyhosts.launchers.named_runs import directory_of
from manyhosts.listeners.paint import writable

if TYPE_CHECKING:
    from rich.console import Console

    from manyhosts.watch.live_run import LiveRun
    from manyhosts.watch.live_study import LiveStudy

_LOOK_S = 0.25
_INTERRUPTED = 130


@click.command()
@click.option("--web", is_flag=True, help="Serve it as a page on this machine, too, until Ctrl-C.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, metavar="N", help="For --web.  [default: a free one]")
@click.option("--trace", is_flag=True, help="Show where in manyhosts an error was raised.")
@click.argument("directory", metavar="RUN")
def watch(directory: str, web: bool, port: int, trace: bool) -> int:
    """Show a run or a study while it continues. Nothing that is done here changes it.

    RUN is a directory, the handle that `run --detach` printed, or `last`.

    Progress, curves, where each worker's time goes, and what happens as it happens. Where the output is no terminal,
    lines. Ends when the run ends; Ctrl-C ends the watching alone.

    Exit codes: 0 it ended well, 1 it failed or broke off, 2 the request was wrong, 130 it, or this, was interrupted.
    """
    if port and not web:
        raise ConfigError("--port is the port of a page", where="--port", fix="give --web, too, or leave --port out")
    from rich.console import Console

    live = _live(directory_of(directory))
    lock = threading.Lock()  # the page is made by other threads
    with contextlib.ExitStack() as stack:
        stack.callback(live.close)
        if web:
            from manyhosts.watch import server
            from manyhosts.watch.server import Content, Server

            def page() -> str:
                with lock:
                    return server.live_page(live)

            def state() -> dict[str, object]:
                with lock:
                    return {"title": server.title(live), "parts": server.parts(live)}

            _read_all(live, lock)
            print(stack.enter_context(Server(Content(page, state), port)).address, flush=True)
            print("the page is there until Ctrl-C", file=sys.stderr, flush=True)
        console = Console()
        can_draw = console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
        try:
            (_draw if can_draw else _print)(live, lock, console, stays=web)
        except KeyboardInterrupt:
            if not live.is_over:
                print("manyhosts: watching has ended; the run continues", file=sys.stderr)
                return _INTERRUPTED
    return live.exit_code


def _live(folder: Path) -> LiveRun | LiveStudy:
    from manyhosts.study.study import NAME
    from manyhosts.watch.live_run import LiveRun
    from manyhosts.watch.live_study import LiveStudy

    return LiveStudy(folder) if (folder / NAME).exists() else LiveRun(folder)


def _read_all(live: LiveRun | LiveStudy, lock: threading.Lock) -> None:
    with lock:
        while live.refresh():
            pass


def _draw(live: LiveRun | LiveStudy, lock: threading.Lock, console: Console, *, stays: bool) -> None:
    """One screen, drawn again several times a second."""
    from rich.live import Live

    from manyhosts.watch.screen import drawn

    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as screen:
        while True:
            with lock:
                more = live.refresh()
                screen.update(drawn(live, console), refresh=True)
                is_over = live.is_over
            if is_over and not stays:
                return
            if not more:
                time.sleep(_LOOK_S)


def _print(live: LiveRun | LiveStudy, lock: threading.Lock, console: Console, *, stays: bool) -> None:
    """Lines, each once."""
    from manyhosts.watch.screen import Lines

    lines, has_said_end = Lines(), False
    while True:
        _read_all(live, lock)
        with lock:
            new, is_over = lines.new(live), live.is_over
            if is_over and not has_said_end:
                new, has_said_end = [*new, lines.end(live)], True
        for line in new:
            print(writable(line, sys.stdout.encoding), flush=True)
        if is_over and not stays:
            return
        time.sleep(_LOOK_S)
