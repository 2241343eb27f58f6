"""The live page in a real browser: what comes is shown, and strangers are shown nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from browsers import Browser, see_in_order
from commands import kill_all
from made_runs import HOSTS, add, make_run, story, timed
from stories import ended, stepped, validated
from studies import make_study
from watching import held_run, watching

from manyhosts.records import run_lock
from manyhosts.records.run_directory import RunDirectory
from manyhosts.study.points import Asked


class Watched:
    """`manyhosts watch --web` of a folder; `runs_here`: in which this process runs."""

    def __init__(self, folder: Path, *, runs_here: bool = True) -> None:
        self.lock = run_lock.take(folder, run_lock.new_token(), launches=True) if runs_here else None
        self.process = subprocess.Popen(
            [sys.executable, "-m", "manyhosts.cli.main", "watch", "--web", str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in a shell's background ignore it
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address.startswith("http://127.0.0.1:")

    def close(self) -> int:
        """Ctrl-C; the exit code."""
        if self.lock is not None:
            self.lock.release()
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(timeout=30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    make_run(tmp_path, [event for event in story(96) if event.step <= 60], end=None)
    found = Watched(tmp_path)
    yield found
    if found.process.poll() is None:
        found.close()


def wait_until(browser: Browser, script: str) -> None:
    deadline = time.monotonic() + 60
    while not browser.ask(f"return Boolean({script})"):
        assert time.monotonic() < deadline, script
        time.sleep(0.05)


@pytest.mark.parametrize("width", [1280, 400])
def test_live_page_is_legible_and_asks_its_own_server_alone(width: int, watched: Watched, browser: Browser) -> None:
    browser.open(watched.address, width)
    wait_until(browser, "performance.getEntriesByName(location.href + 'state').length >= 2")
    see_in_order(browser, width)
    assert browser.ask("return document.querySelectorAll('svg.chart').length") == 4
    assert browser.ask("return document.querySelectorAll('#map svg.strip').length") == len(HOSTS)
    assert set(browser.requests()) == {
        watched.address, watched.address + "state",
    }  # fmt: skip


def test_what_comes_is_shown(watched: Watched, browser: Browser, tmp_path: Path) -> None:
    browser.open(watched.address, 1280)
    wait_until(browser, "document.title.startsWith('62 % running')")
    browser.ask("window.same = true")  # a page that was loaded again would not have it
    cells = browser.ask("return document.querySelectorAll('#map rect').length")
    steps = [stepped(step) for step in range(61, 97)]
    directory = RunDirectory(tmp_path)
    add(directory, *steps, timed(96, 36), validated(96, best=True, loss=0.01, accuracy=0.5))
    wait_until(browser, "document.title.startsWith('100 % running')")
    wait_until(browser, "document.querySelector('#happened').textContent.includes('loss 0.0100 (the best)')")
    assert browser.ask("return document.querySelectorAll('#map rect').length") == cells + len(HOSTS)
    add(directory, ended(96, reason="<img src=x onerror='window.broken = true'>"))
    wait_until(browser, "document.title.startsWith('completed')")
    assert browser.ask("return document.querySelector('h1').textContent === document.title"), "the heading, too"
    assert browser.ask("return document.querySelector('#current_facts').textContent.includes('<img src=x')")
    assert browser.ask("return window.same === true && window.broken === undefined")


def test_page_says_when_nobody_answers_any_more(watched: Watched, browser: Browser) -> None:
    browser.open(watched.address, 1280)
    wait_until(browser, "performance.getEntriesByName(location.href + 'state').length >= 1")
    assert browser.ask("return document.getElementById('lost').hidden")
    watched.close()
    wait_until(browser, "!document.getElementById('lost').hidden")


def test_wrong_token_is_shown_nothing(watched: Watched, browser: Browser) -> None:
    place = urlsplit(watched.address)
    for path in ("/", "/wrong/", place.path[:-2] + "/"):
        browser.open(f"http://{place.netloc}{path}", 1280)
        text = browser.ask("return document.body.innerText")
        assert "This address is not known here" in text
        assert "train.py" not in text


def test_page_of_another_origin_reads_nothing(watched: Watched, browser: Browser) -> None:
    browser.open("about:blank", 1280)
    read = browser.driver.execute_async_script(
        "const done = arguments[1]; fetch(arguments[0]).then(a => a.text()).then(done, e => done('refused'))",
        watched.address + "state",
    )
    assert read == "refused"


@pytest.mark.parametrize("width", [1280, 400])
def test_study_is_shown_too(width: int, tmp_path: Path, browser: Browser) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    make_study(tmp_path / "S", Asked(script=str(script), nodes=(1, 2, 4), workers_per_node=1), fails=4)
    watched = Watched(tmp_path / "S")
    try:
        browser.open(watched.address, width)
        wait_until(browser, "document.querySelector('#runs').textContent.includes('completed')")
        assert browser.ask("return document.querySelectorAll('#runs tbody tr').length") == 3
        see_in_order(browser, width)
    finally:
        watched.close()


def happened(browser: Browser) -> list[str]:
    """What the table of the page tells."""
    found: list[str] = browser.ask("return [...document.querySelectorAll('#happened td')].map(td => td.textContent)")
    return found


@pytest.mark.multiprocess
def test_page_follows_a_real_run_to_its_end_beside_two_others_who_watch(tmp_path: Path, browser: Browser) -> None:
    goes_on = r"/^(4|5)\d % running: held_script\.py$/.test(document.title)"
    with held_run(tmp_path) as run, contextlib.ExitStack() as stack:
        run.wait_until_held()
        watched, other = (Watched(run.run_dir, runs_here=False) for _ in range(2))
        stack.callback(watched.close), stack.callback(other.close)
        lines = stack.enter_context(watching(run.run_dir))
        assert watched.address != other.address
        for each in (other, watched):
            browser.open(each.address, 1280)
            wait_until(browser, goes_on)
        assert [words.startswith("validation: loss") for words in happened(browser)].count(True) == 2
        see_in_order(browser, 1280)
        browser.ask("window.same = true")
        run.go_on()
        assert run.end() == 0, run.output
        wait_until(browser, "document.title.startsWith('completed')")
        assert lines.end() == 0, lines.said
        assert [words.startswith("validation: loss") for words in happened(browser)].count(True) == 4
        assert browser.ask("return window.same === true")
        assert browser.ask("return document.querySelectorAll('svg.chart').length") == 3  # no metric but the loss
        assert browser.ask("return document.querySelector('#times').innerText").count("rank 1 on ") == 2
        for width in (1280, 400):
            browser.open(watched.address, width)
            see_in_order(browser, width)
        assert (watched.close(), other.close()) == (0, 0)


@pytest.mark.multiprocess
def test_page_of_a_real_run_that_is_killed_says_that_it_broke_off(tmp_path: Path, browser: Browser) -> None:
    with held_run(tmp_path) as run, contextlib.ExitStack() as stack:
        run.wait_until_held()
        watched = Watched(run.run_dir, runs_here=False)
        stack.callback(watched.close)
        browser.open(watched.address, 1280)
        wait_until(browser, r"/% running: held_script\.py$/.test(document.title)")
        kill_all(run.process)
        wait_until(browser, "document.title.startsWith('broke off')")
        assert "the same command continues" in browser.ask("return document.querySelector('#current_facts').innerText")
        see_in_order(browser, 1280)
        assert watched.close() == 1
