"""The live page of a run, served on this machine alone, to clients that know the token in its address.

It has the sections of a run's page; a small script of its own asks for them again every second. The token is compared
in constant time, and the name by which the server was called must be one of this machine's own: a page elsewhere whose
name was made to lead here (DNS rebinding) is refused.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from http.server import BaseHTTPRequestHandler
from typing import Any

from manyhosts.errors import ConfigError
from manyhosts.listeners.figures import rate
from manyhosts.listeners.http_server import HttpServer
from manyhosts.report.page import Section, page, pairs, paragraphs, table
from manyhosts.report.run_page import under
from manyhosts.report.run_sections import (
    current_facts,
    curves,
    happenings,
    time_line,
    where_time_went,
    workers_by_steps,
)
from manyhosts.watch.live_run import LiveRun
from manyhosts.watch.live_study import LiveStudy

_ADDRESS = "127.0.0.1"
_NAMES = (_ADDRESS, "localhost")
_SLOWEST_S = 10.0
"""So long a browser may take to say what it wants."""
_FRESH_S = 0.4
"""So long one answer serves all who ask."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Content:
    """What is served. Both are called from threads, one at a time."""

    page: Callable[[], str]
    state: Callable[[], dict[str, Any]]


class Server:
    """Serves `content` from when it is entered until it is left."""

    def __init__(self, content: Content, port: int = 0) -> None:
        """Port 0: one that is free.

        Raises:
            ConfigError: the port is taken, or must not be used.
        """
        self.token = secrets.token_urlsafe(32)
        try:
            self._http = HttpServer(_ADDRESS, port, _handler(self.token, _Fresh(content)))
        except (OSError, OverflowError) as cause:
            raise ConfigError(
                f"cannot serve a page at port {port}: {getattr(cause, 'strerror', None) or cause}",
                where="--port",
                fix="choose another port, or leave --port out for one that is free",
            ) from cause
        self._thread = threading.Thread(target=self._http.serve_forever, name="serves the live page", daemon=True)

    @property
    def address(self) -> str:
        """What a browser is given."""
        return f"http://{_ADDRESS}:{self._http.server_address[1]}/{self.token}/"

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Fresh:
    """Answers that are made once for all who ask at about the same time."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._lock = threading.Lock()
        self._made: tuple[float, bytes] = (0.0, b"")

    def page(self) -> bytes:
        with self._lock:
            return self._content.page().encode(errors="replace")

    def state(self) -> bytes:
        with self._lock:
            if not self._made[1] or time.monotonic() - self._made[0] > _FRESH_S:
                self._made = (time.monotonic(), json.dumps(self._content.state()).encode())
            return self._made[1]


def _handler(token: str, answers: _Fresh) -> type[BaseHTTPRequestHandler]:
    """A class, for that is what the standard library asks for."""

    class Handler(BaseHTTPRequestHandler):
        timeout = _SLOWEST_S
        server_version, sys_version = "manyhosts", ""

        def do_GET(self) -> None:
            name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
            given, _, what = self.path.partition("?")[0].removeprefix("/").partition("/")
            knows = hmac.compare_digest(given.encode(), token.encode())
            if name not in _NAMES or not knows:
                self._answer(403, "text/plain", b"This address is not known here: take the one that was printed.\n")
            elif what == "" and self.path.partition("?")[0].endswith("/"):
                self._answer(200, "text/html", answers.page())
            elif what == "state":
                self._answer(200, "application/json", answers.state())
            else:
                self._answer(404, "text/plain", b"There is nothing here.\n")

        def _answer(self, code: int, kind: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            for header, value in _HEADERS.items():
                self.send_header(header, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the terminal shows the run."""

    return Handler


Parts = dict[str, str]
_MOST_TOLD = 30  # what is folded would fold again with each answer
_TITLES = {
    "progress": "",
    "current_facts": "",
    "runs": "Runs",
    "curves": "Curves",
    "times": "Where the time of a step went",
    "map": "Workers and steps",
    "happened": "What happened",
}
_LOST = "No answer: manyhosts watch has ended, or cannot be reached. What is shown is its last state."
SCRIPT = """
const shown = new Map();
function put(state) {
  for (const [name, html] of Object.entries(state.parts)) {
    if (shown.get(name) === html) continue;
    shown.set(name, html);
    const part = document.getElementById(name);
    part.querySelector(".body").innerHTML = html;
    part.hidden = html === "";
  }
  document.title = state.title;
  document.querySelector("h1").textContent = state.title;
}
async function look() {
  const lost = document.getElementById("lost");
  try {
    const answer = await fetch("state", {cache: "no-store"});
    if (!answer.ok) throw new Error(String(answer.status));
    put(await answer.json());
    lost.hidden = true;
  } catch {
    lost.hidden = false;
  }
  setTimeout(look, 1000);
}
look();
"""


def live_page(live: LiveRun | LiveStudy) -> str:
    """The page as it is now; its script keeps it so."""
    now = parts(live)
    sections = [Section(title, now.get(name, ""), name) for name, title in _TITLES.items()]
    lost = Section("", paragraphs([_LOST]), "lost", hidden=True)
    below = "Live from manyhosts watch, on this machine only."
    return page(title(live), below, [lost, *sections], script=SCRIPT)


def title(live: LiveRun | LiveStudy) -> str:
    """For the window: what runs, and how far it is."""
    if isinstance(live, LiveStudy):
        return f"{live.done} of {len(live.rows)} runs: study of {live.script}"
    run = live.run
    fraction = run.history.fraction(run.longest_s)
    done = "" if fraction is None or run.status != "running" else f"{100 * fraction:.0f} % "
    return f"{done}{run.status}: {run.script}"


def parts(live: LiveRun | LiveStudy) -> Parts:
    """Each part of the page in HTML; empty where it has nothing to show."""
    if isinstance(live, LiveStudy):
        return _of_study(live)
    run = live.run
    return {
        "progress": _bar(run.history.fraction(run.longest_s)),
        "current_facts": pairs([*current_facts(run), ("run", under(run))]),
        "runs": "",
        "curves": curves(run),
        "times": where_time_went(run),
        "map": workers_by_steps(run),
        "happened": time_line(run) + happenings(run, most=_MOST_TOLD),
    }


def _of_study(live: LiveStudy) -> Parts:
    rows = [["run", "status", "done", "step", "speed", "loss"]]
    for row in live.rows:
        done = "" if row.fraction is None else f"{100 * row.fraction:.0f} %"
        rows.append([row.name, row.status, done, row.step, "" if row.speed is None else rate(row.speed), row.loss])
    said = "running" if live.is_running else "over; manyhosts report makes a page of it"
    empty = dict.fromkeys(_TITLES, "")
    counted = [("runs done", f"{live.done} of {len(live.rows)}"), ("status", said)]
    return empty | {"progress": _bar(live.share), "current_facts": pairs(counted), "runs": table(rows, kind="named")}


def _bar(fraction: float | None) -> str:
    if fraction is None:
        return ""
    words = f"{100 * fraction:.0f} %"
    return f'<progress max="1" value="{fraction:.4f}">{escape(words)}</progress>'
