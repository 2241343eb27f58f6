"""What is drawn on a terminal, of any size and encoding."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from made_runs import LONG_HOST, make_run, story
from rich.console import Console
from studies import make_study

from manyhosts.study.points import Asked
from manyhosts.watch import live_study
from manyhosts.watch.live_run import LiveRun
from manyhosts.watch.live_study import LiveStudy
from manyhosts.watch.screen import Lines, drawn


def shown(live: LiveRun | LiveStudy, width: int = 110, height: int = 60) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    console = Console(file=stream, width=width, height=height, force_terminal=True, color_system=None)
    console.print(drawn(live, console))
    stream.flush()
    return stream.buffer.getvalue().decode()  # type: ignore[attr-defined]


@pytest.fixture
def live(tmp_path: Path) -> LiveRun:
    make_run(tmp_path)
    found = LiveRun(tmp_path)
    while found.refresh():
        pass
    found.close()
    return found


def test_screen_shows_progress_workers_and_what_happened(live: LiveRun) -> None:
    text = shown(live, height=120)
    for part in (
        "train.py",
        "4 workers on 4 hosts",
        "100 %",
        "loss  █",
        "rank 2 on beyond",
        "computing",
        "completed: why",
    ):
        assert part in text, part
    assert "continued with the 3 workers that were left" in text


@pytest.mark.parametrize(("width", "height"), [(40, 20), (80, 24), (200, 10)])
def test_no_line_is_wider_than_the_terminal(width: int, height: int, live: LiveRun) -> None:
    lines = shown(live, width, height).splitlines()
    assert max(map(len, lines)) <= width
    assert any("train.py" in line for line in lines)


def test_on_80_columns_no_word_is_cut(live: LiveRun) -> None:
    text = shown(live, width=80)
    assert "computing" in text
    assert "computi…" not in text
    assert all(word in text for word in ("of that", "waiting", "workers", "for data"))


def test_run_that_has_not_begun_is_drawn_too(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    live = LiveRun(tmp_path)
    live.refresh()
    assert "starting" in shown(live) or "not begun" in shown(live) or "running" in shown(live)
    live.close()


def test_of_many_workers_the_slowest_are_shown(tmp_path: Path) -> None:
    hosts = [f"host-{number}" for number in range(20)]
    make_run(tmp_path, list(story(hosts=hosts)), hosts=hosts)
    live = LiveRun(tmp_path)
    live.refresh()
    text = shown(live)
    assert "the slowest 8 of 20" in text
    assert "rank 2 on host-2" in text
    assert "rank 0 on host-0" not in text
    live.close()


def test_study_shows_each_run_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    folder = tmp_path / "S"
    make_study(folder, Asked(script=str(script), nodes=(1, 2, 4), workers_per_node=1), fails=2)
    monkeypatch.setattr(live_study, "_SETTLE_S", 0.0)
    live, lines = LiveStudy(folder), Lines()
    while live.refresh():
        pass
    text = shown(live)
    assert "study of train.py  2 of 3 runs done" in text
    assert text.count("completed") == 2
    assert text.count("failed") == 1
    assert live.is_over
    assert live.exit_code == 1
    assert [line.partition("  ")[2] for line in lines.new(live)] == [f"{row.name}: {row.status}" for row in live.rows]
    assert lines.new(live) == []
    assert lines.end(live) == "2 of 3 runs ended well"
    live.close()


def test_long_name_of_a_host_stays_on_its_line(live: LiveRun) -> None:
    assert LONG_HOST in shown(live, width=160)
