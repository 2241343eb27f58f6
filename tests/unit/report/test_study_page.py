"""The page of a study, and its plots."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from html_pages import Page
from studies import make_study

from manyhosts.cli.report import report
from manyhosts.errors import ConfigError
from manyhosts.study.points import Asked

PLOTS = Path(sys.prefix, "plots")
"""Where matplotlib lies for these tests alone: torchmetrics would load it in every worker that finds it."""


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    script = tmp_path / "<b>train & co.py"
    script.write_text("")
    return Asked(
        script=str(script), nodes=(1, 2, 4), workers_per_node=1, vary={"compression": ("none", "bf16")}, repeat=2
    )


def written(folder: Path, *words: str) -> str:
    done = CliRunner().invoke(report, [*words, str(folder)], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return Path(done.output.strip()).read_text()


def test_the_page_holds_everything_and_fetches_nothing(asked: Asked, tmp_path: Path) -> None:
    study = make_study(tmp_path / "S", asked, fails=2)
    text = written(tmp_path / "S", "--output", str(tmp_path / "page.html"))
    page = Page(text)
    words = " ".join(page.words)
    assert all(source.startswith("data:") for source in page.fetched)
    assert "How <b>train & co.py scales" in words
    for paragraph in study.verdict().split("\n\n"):
        assert paragraph in words
    for row in study.rows:
        if row.efficiency is not None:
            assert row.point.name in words
    assert "RuntimeError: there is no room for so many" in words
    assert "4 of them failed or not run" in words


def test_study_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text('{"schema_version": 9}')
    with pytest.raises(ConfigError, match="schema version 9"):
        written(tmp_path)
    (tmp_path / "study.json").write_text('{"schema_version": 1, "asked": {}}')
    with pytest.raises(ConfigError, match="lacks what was asked"):
        written(tmp_path)


@pytest.mark.skipif(
    not (PLOTS / "matplotlib").exists(), reason="matplotlib is not in .venv/plots: make test puts it there"
)
def test_plots_are_drawn_and_on_the_page(asked: Asked, tmp_path: Path) -> None:
    make_study(tmp_path / "S", asked, fails=2)
    code = (
        "import sys; from pathlib import Path; from manyhosts.study import plots; from manyhosts.cli.main import main\n"
        "from manyhosts.study.study import in_folder\n"
        "plots.draw(in_folder(Path('S')), Path('S/plots'))\n"
        "sys.exit(main(['report', 'S']))"
    )
    path = os.pathsep.join([str(PLOTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    variables = {**os.environ, "PYTHONPATH": path, "MPLCONFIGDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = {"epoch-time", "efficiency", "causes", "loss-steps", "loss-time", "test-accuracy"}
    drawn = {file.name for file in (tmp_path / "S" / "plots").iterdir()}
    assert drawn == {f"{name}.{kind}" for name in names for kind in ("svg", "png")}
    assert all(file.stat().st_size > 5000 for file in (tmp_path / "S" / "plots").iterdir())
    assert Page((tmp_path / "S" / "report.html").read_text()).images == len(names)
