"""Limits of a search: read, reckoned, and warned of before they are reached."""

from __future__ import annotations

import json
import shlex
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from manyhosts.errors import ConfigError
from manyhosts.tune import budget
from manyhosts.tune.budget import Alarm, Budget, Spent


def test_each_limit_is_read() -> None:
    found = Budget.parse("2h or $5 or 3 worker-hours", 20, priced=True)
    assert (found.seconds, found.money, found.worker_seconds, found.trials) == (7200, 5, 10800, 20)
    assert Budget.parse("60 worker-s", None, priced=False).worker_seconds == 60


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "nothing says when"),
        ("2 apples", "cannot read the budget"),
        ("3 epochs", "is no time"),
        ("$5", "no price"),
        ("1h or 2h", "twice"),
        ("0 trials", "budget of nothing"),
        ("2h or ", "has an empty limit: between double quotes"),
        (" or 2h", "has an empty limit"),
    ],
)
def test_what_is_no_budget_is_refused(text: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Budget.parse(text, None, priced=False)


def test_a_limit_of_trials_is_named_beside_the_others() -> None:
    assert Budget.parse("1h or $5", 5, priced=True).text == "1h or $5 or 5 trials"
    assert Budget.parse(None, 5, priced=False).text == "5 trials"


def test_the_nearest_limit_counts() -> None:
    found = Budget.parse("100 s or 60 worker-s or $1", None, priced=True)
    spent = Spent(seconds=20, worker_seconds=30, money=0.1)
    assert found.share(spent, 0) == 0.5
    assert found.seconds_left(spent, 2, 0.001) == 15
    assert found.seconds_left(spent, 2, 0.1) == pytest.approx(4.5)


def test_a_price_is_of_a_worker_or_of_a_host_or_in_a_catalog(tmp_path: Path) -> None:
    assert budget.price_of("0.36/worker-hour", 4) == pytest.approx(1e-4)
    assert budget.price_of("0.36/host-hour", 4) == budget.price_of("0.36", 4) == pytest.approx(2.5e-5)
    file = tmp_path / "machines.toml"
    file.write_text("[small]\ncount = 1\n[big]\ncount = 1\nworkers = 8\nprice = 28.8\n")
    assert budget.price_of(f"{file}:big", 1) == pytest.approx(1e-3)
    for text, said in ((str(file), "no price of small"), (f"{file}:huge", "no price of huge"), ("much", "cannot read")):
        with pytest.raises(ConfigError, match=said):
            budget.price_of(text, 1)


def test_a_warning_reaches_the_terminal_the_log_and_a_command(tmp_path: Path) -> None:
    said: list[str] = []
    heard = tmp_path / "heard"
    command = shlex.join([sys.executable, "-c", "import sys; open(sys.argv[1], 'w').write(sys.argv[2])", str(heard)])
    alarm = Alarm(command, tmp_path / "tune.log", said.append)
    alarm.give(80, Budget.parse("60 worker-s", None, priced=False), Spent(worker_seconds=48))
    alarm.close()
    assert said == [
        "warning: 80 % of the budget 60 worker-s is spent, or needed to end in order: 0 s, 48 s of workers' time"
    ]
    assert heard.read_text() == said[0].removeprefix("warning: ")
    assert json.loads((tmp_path / "tune.log").read_text())["level"] == 80


def test_a_warning_reaches_a_webhook_and_one_that_does_not_is_said(tmp_path: Path) -> None:
    got: list[dict] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        said: list[str] = []
        address = f"http://127.0.0.1:{server.server_port}/"
        alarm = Alarm(address, tmp_path / "tune.log", said.append)
        alarm.give(50, Budget.parse("1h", None, priced=False), Spent(seconds=1800))
        alarm.close()
        thread.join()
    assert [each["level"] for each in got] == [50]
    alarm.give(95, Budget.parse("1h", None, priced=False), Spent(seconds=3500))
    alarm.close()
    assert "has not reached" in said[-1]
