"""Pages of runs and studies in a real browser: legible on a screen, a telephone and paper, and offline."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from pathlib import Path

import pytest
from browsers import BROKEN, OVERLAPS, PALE, Browser, see_in_order
from click.testing import CliRunner
from made_runs import HOSTS, make_run, story
from stories import started, stepped
from studies import make_study

from manyhosts.cli.report import report
from manyhosts.study.points import Asked

WIDTHS = [1280, 400]
PLOTS = Path(sys.prefix, "plots")
"""Where matplotlib lies for tests alone."""
LETTERS_PX, LEAST_PX = 12, 10
"""The smallest letters of a plot of a study, drawn as large as it says; and the smallest that are legible."""


def page_of(*words: str | Path) -> str:
    done = CliRunner().invoke(report, [str(word) for word in words], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return Path(done.output.strip()).as_uri()


def make_pages(folder: Path) -> dict[str, str]:
    """Each kind of page, by name."""
    make_run(folder / "whole")
    make_run(folder / "broken-off", list(story(40)), end=None, batch_size=16)
    make_run(folder / "one-step", [started(), stepped(1)], end="failed", pictures=False, hosts=["here"])
    (folder / "nothing").mkdir()
    (folder / "nothing" / "metrics.jsonl").touch()
    (folder / "train.py").write_text("")
    make_study(folder / "study", Asked(script=str(folder / "train.py"), nodes=(1, 2, 4), workers_per_node=1), fails=4)
    names = ("whole", "broken-off", "one-step", "nothing", "study")
    runs = [folder / name for name in names[:3]]
    return {name: page_of(folder / name) for name in names} | {
        "compared": page_of("--output", folder / "compared.html", *runs)
    }


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_pages(tmp_path_factory.mktemp("pages"))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["whole", "broken-off", "one-step", "nothing", "study", "compared"])
def test_page_is_legible_and_fetches_nothing(name: str, width: int, pages: dict[str, str], browser: Browser) -> None:
    browser.open(pages[name], width)
    see_in_order(browser, width)
    assert browser.requests() == [pages[name]]


def test_all_that_there_is_of_a_run_is_on_its_page(pages: dict[str, str], browser: Browser) -> None:
    browser.open(pages["whole"], 1280)
    titles = browser.ask("return [...document.querySelectorAll('h2')].map(each => each.textContent)")
    assert titles == [
        "Curves", "Where the time went", "Workers and steps", "What happened", "The first batch", "Settings",
        "Versions and hosts", "How to do it again",
    ]  # fmt: skip
    assert browser.ask("return document.querySelectorAll('svg.chart').length") == 4
    assert browser.ask("return document.querySelectorAll('.thin svg.strip').length") == len(HOSTS)


def test_slow_worker_is_the_dark_row_of_the_map(pages: dict[str, str], browser: Browser) -> None:
    browser.open(pages["whole"], 1280)
    darkness = browser.ask(
        "return [...document.querySelectorAll('.thin svg.strip')].map(row => [...row.querySelectorAll('rect')]"
        ".map(cell => 255 * 3 - getComputedStyle(cell).fill.match(/\\d+/g).map(Number).reduce((a, b) => a + b)))"
    )
    ends = [row[-1] for row in darkness]
    assert max(ends) == ends[HOSTS.index("beyond")]
    assert ends[HOSTS.index("beyond")] > 3 * ends[0]


def test_page_is_printed_whole(pages: dict[str, str], browser: Browser) -> None:
    browser.open(pages["whole"], 1280)
    printed = base64.b64decode(browser.driver.print_page())
    assert printed.startswith(b"%PDF")
    assert len(printed) > 20_000


@pytest.mark.parametrize("name", ["whole", "one-step", "study", "compared"])
def test_page_fits_on_paper_and_shows_all_there(name: str, pages: dict[str, str], browser: Browser) -> None:
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        browser.open(pages[name], 700)  # a sheet of A4 between its margins
        assert browser.ask("return document.documentElement.scrollWidth") <= 700
        assert browser.ask(OVERLAPS) == []
        assert browser.ask(BROKEN) == []
        folded = (
            "return [...document.querySelectorAll('details > :not(summary)')].filter(each => !each.checkVisibility("
        )
        assert browser.ask(folded + "{contentVisibilityAuto: true})).length") == 0
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def page_with_plots(folder: Path) -> str:
    variables = {**os.environ, "MPLCONFIGDIR": str(folder)}
    variables["PYTHONPATH"] = os.pathsep.join([str(PLOTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    code = "import sys; from manyhosts.cli.main import main; sys.exit(main(['report', sys.argv[1]]))"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip()).as_uri()


@pytest.mark.skipif(
    not (PLOTS / "matplotlib").exists(), reason="matplotlib is not in .venv/plots: make test puts it there"
)
def test_plots_of_a_study_are_legible_and_none_is_empty(tmp_path: Path, browser: Browser) -> None:
    (tmp_path / "train.py").write_text("")
    vary = {"strategy": ("ddp", "fsdp"), "compression": ("none", "bf16", "powersgd")}
    asked = Asked(script=str(tmp_path / "train.py"), nodes=(1, 2, 4), workers_per_node=1, vary=vary, repeat=2)
    make_study(tmp_path / "study", asked)
    address = page_with_plots(tmp_path / "study")
    for width in WIDTHS:
        browser.open(address, width)
        see_in_order(browser, width)
        shown = browser.ask(
            "return [...document.querySelectorAll('.plots img')].map(each => each.width / each.naturalWidth)"
        )
        assert len(shown) == 6
        assert min(shown) * LETTERS_PX >= LEAST_PX
    assert browser.ask(PALE) == []
    browser.ask(
        "document.querySelector('.plots img').src = 'data:image/svg+xml,' + encodeURIComponent("
        '\'<svg xmlns="http://www.w3.org/2000/svg" width="90" height="60"/>\')'
    )
    browser.ask("return document.querySelector('.plots img').decode()")
    assert browser.ask(PALE) == ["Time of an epoch"]


def test_overlap_is_found_where_there_is_one(pages: dict[str, str], browser: Browser) -> None:
    browser.open(pages["whole"], 1280)
    browser.ask("document.querySelector('h2').style.marginTop = '-60px'")
    with pytest.raises(AssertionError, match="H2: Curves"):
        see_in_order(browser, 1280)
    browser.open(pages["whole"], 1280)
    browser.ask("document.querySelectorAll('.chart polyline, .chart circle').forEach(each => each.remove())")
    with pytest.raises(AssertionError, match=r"'empty': \['Loss'"):
        see_in_order(browser, 1280)
    browser.open(pages["whole"], 1280)
    browser.ask("document.querySelector('dl').style.width = '2000px'")
    with pytest.raises(AssertionError, match="wider than the window"):
        see_in_order(browser, 1280)
