"""The page of a run, however it stands, and of several."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from html_pages import Page
from made_runs import HOSTS, make_run, story, timed
from stories import record, started, stepped, validated

from manyhosts.cli.report import report
from manyhosts.errors import ConfigError
from manyhosts.records import metrics, run_lock
from manyhosts.records.line_file import Line
from manyhosts.records.run_directory import RunDirectory
from manyhosts.records.run_record import RunRecord
from manyhosts.records.summary import summarise
from manyhosts.report import run_sections
from manyhosts.report.run import read_run
from manyhosts.report.run_list import listed
from manyhosts.report.run_page import run_page
from manyhosts.report.windows import Spent


def written(*words: str | Path) -> Page:
    done = CliRunner().invoke(report, [str(word) for word in words], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return Page(Path(done.output.strip()).read_text())


def words_of(page: Page) -> str:
    return " ".join(" ".join(page.words).split())


def test_page_tells_everything_and_fetches_nothing(tmp_path: Path) -> None:
    make_run(tmp_path)
    page = written(tmp_path)
    words = words_of(page)
    assert all(source.startswith("data:") for source in page.fetched)
    assert page.images == 6  # the first batch
    for part in (
        "A run of train.py", "completed: why it completed", "test accuracy 97.00 %", "Validation accuracy",
        "rank 3 on a-host-with-a-rather-long-name", "continued with the 3 workers that were left", "<5>",
        "host beyond is 2.4 times as slow", "<b>& another model</b>", "early_stopping.metric", "ab" * 32,
        "manyhosts run --hosts here,there,beyond,", "--workers-per-node 1 train.py --width 'a b'", "2.4 times as slow",
        "slow: host beyond", "continued after a failure",
    ):  # fmt: skip
        assert part in words, part
    assert "rank 0 alone" not in words


def test_browser_is_asked_not_to_darken_a_page_whose_axes_would_vanish(tmp_path: Path) -> None:
    assert "color-scheme: only light" in run_page(read_run(make_run(tmp_path / "run").path))


def test_record_is_read_once_for_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path)
    stream, read = metrics.stream, list[Path]()

    def counted(path: Path) -> Iterator[Line]:
        read.append(path)
        return stream(path)

    monkeypatch.setattr(metrics, "stream", counted)
    written(tmp_path)
    assert read == [tmp_path / "metrics.jsonl"]


@pytest.mark.parametrize("end", ["completed", "stopped early", "interrupted", "failed"])
def test_page_tells_how_the_run_ended(end: str, tmp_path: Path) -> None:
    make_run(tmp_path, end=end)
    assert f"{end}: why it {end}" in words_of(written(tmp_path))


def test_run_that_broke_off_says_so_and_how_to_go_on(tmp_path: Path) -> None:
    make_run(tmp_path, end=None)
    words = words_of(written(tmp_path))
    assert "broke off: no end is on record; the last step is 96, and the same command continues" in words


def test_run_whose_launcher_alone_knows_why_it_failed(tmp_path: Path) -> None:
    directory = make_run(tmp_path, end=None)
    lines = metrics.stream(directory.metrics)
    summarise(lines, record(), failure="rank 1 on there was killed").write(directory.summary)
    assert "failed: rank 1 on there was killed" in words_of(written(tmp_path))


def test_run_that_goes_on_says_so(tmp_path: Path) -> None:
    make_run(tmp_path, end=None)
    lock = run_lock.take(tmp_path, run_lock.new_token(), launches=True)
    assert lock is not None
    try:
        words = words_of(written(tmp_path))
    finally:
        lock.release()
    assert "status running" in words
    assert "step 96 of 96" in words


def test_run_that_has_not_begun_has_sentences_and_no_plots(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    page = written(tmp_path)
    words = words_of(page)
    assert "not begun" in words
    assert "No step is on record" in words
    assert page.svgs == 0


def test_run_of_one_step_whose_loss_is_no_number_has_no_empty_plot(tmp_path: Path) -> None:
    make_run(tmp_path, [started(), stepped(1, loss=math.nan)], end="failed", pictures=False, hosts=["here"])
    page = written(tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert ">Loss<" not in text  # but rate and speed have a point
    assert text.count("<figure>") == text.count('class="chart"') == text.count("<circle") == 2
    assert "failed" in words_of(page)


def test_run_of_several_workers_without_their_times_says_whose_they_are(tmp_path: Path) -> None:
    make_run(tmp_path, list(story(hosts=["here"])), hosts=HOSTS)
    assert "This record holds the times of rank 0 alone" in words_of(written(tmp_path))


def test_map_of_workers_begins_at_the_first_step_and_not_where_its_first_cell_ends(tmp_path: Path) -> None:
    make_run(tmp_path, [started(), timed(112, 112), timed(224, 112)])
    text = run_page(read_run(tmp_path))
    drawn = text[text.index("Workers and steps") : text.index("What happened")]
    assert "steps 1 to 112: " in drawn
    assert "steps 113 to 224: " in drawn
    assert re.findall(r"<span>([\d,]+)</span>", drawn)[-3:] == ["1", "112", "224"]


def test_script_that_failed_before_it_trained_is_listed_with_how_it_did(tmp_path: Path) -> None:
    logs = tmp_path / "early" / "logs"
    logs.mkdir(parents=True)
    (tmp_path / "begun" / "logs").mkdir(parents=True)
    (logs / "vm-0-error-0.json").write_text(json.dumps({"message": {"message": "ValueError: early"}}))
    early, other = sorted(listed(tmp_path), key=lambda each: each.state)
    assert (early.state, early.steps) == ("failed", 0)
    assert early.reason == f"ValueError: early, before training began; its log is in {logs}"
    assert other.state == "no record"


def test_run_in_the_background_that_never_began_is_listed_as_it_ended(tmp_path: Path) -> None:
    for name, state, reason in (("lost", "failed", "host a is not there"), ("left", "cancelled", "")):
        folder = tmp_path / name / "detached"
        folder.mkdir(parents=True)
        (folder / "handle.json").write_text(json.dumps({"handle": f"local://{name}"}))
        (folder / "state.json").write_text(json.dumps({"state": state, "reason": reason}))
    found = {Path(each.directory).name: (each.state, each.reason) for each in listed(tmp_path)}
    assert found == {"lost": ("failed", "host a is not there"), "left": ("interrupted", "")}


def test_file_that_lacks_what_it_should_have_costs_no_page(tmp_path: Path) -> None:
    make_run(tmp_path)
    before = run_page(read_run(tmp_path))
    (tmp_path / "analysis.json").write_text('{"schema_version": 1}')
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("{}\n")
    assert len(run_page(read_run(tmp_path))) == pytest.approx(len(before), rel=0.01)


def test_runs_are_compared(tmp_path: Path) -> None:
    make_run(tmp_path / "a" / "run")
    make_run(tmp_path / "b" / "run", list(story(48)), end=None, batch_size=16)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").touch()
    place = tmp_path / "page.html"
    page = written("--output", place, tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "empty")
    words = words_of(page)
    assert "3 runs compared" in words
    assert "status completed broke off not begun workers 4 4 - steps 96 48 - epochs 24 12 -" in words
    assert "batch_size 8 16 -" in words
    assert "clip_gradients" not in words  # None in both, and the same
    assert place.read_text().count("<figure>") == 9
    assert place.read_text().count("<polyline") == 18


def test_runs_that_were_asked_the_same_say_so(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name)
    words = words_of(written("--output", tmp_path / "page.html", tmp_path / "a", tmp_path / "b"))
    assert "Script, arguments, settings, versions and hosts are the same." in words


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds neither a run nor a study"):
        written(tmp_path)
    with pytest.raises(ConfigError, match="there is no such folder"):
        written(tmp_path / "nowhere")
    make_run(tmp_path / "runs" / "two")
    for given, what, fix in (
        ("runs", "holds neither a run nor a study", f"the newest is {tmp_path}/runs/two, and `manyhosts runs "),
        ("runs/tow", "there is no such folder", f"did you mean {tmp_path}/runs/two?"),
        ("two", "there is no such folder", f"did you mean {tmp_path}/runs/two?"),
        ("runs/two/metrics.jsonl", "this is a file", f"name its run: {tmp_path}/runs/two"),
    ):
        with pytest.raises(ConfigError, match=what) as found:
            written(tmp_path / given)
        assert fix in found.value.fix
    (tmp_path / "plain" / "logs").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"nothing but what the workers printed is on record here"):
        written(tmp_path / "plain")
    RunDirectory(tmp_path / "plain").interruption.touch()
    with pytest.raises(ConfigError, match=r"the run was interrupted before its first step, at \d{4}-") as interrupted:
        written(tmp_path / "plain")
    assert f"--run-dir {tmp_path / 'plain'}" in interrupted.value.fix
    make_run(tmp_path / "a")
    with pytest.raises(ConfigError, match="named twice"):
        written(tmp_path / "a", tmp_path / "a")
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "study.json").write_text("{}")
    with pytest.raises(ConfigError, match="a study cannot be compared"):
        written(tmp_path / "a", tmp_path / "s")
    (tmp_path / "a" / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="schema version None"):
        written(tmp_path / "a")


def test_command_to_do_it_again_has_what_was_typed_by_set_and_by_env(tmp_path: Path) -> None:
    make_run(tmp_path)
    path = RunDirectory(tmp_path).run_json
    typed = {"overrides": {"lr": "0.5", "duration": "3 epochs"}, "environment": ["TOKEN"]}
    replace(RunRecord.read(path), **typed).write(path)
    reported = words_of(written(tmp_path))
    assert "--set lr=0.5 --set 'duration=3 epochs' --env TOKEN train.py" in reported
    assert "named without their values" in reported


def test_page_of_many_validations_folds_all_but_the_newest(tmp_path: Path) -> None:
    make_run(tmp_path, [started(), *(validated(step, loss=1.0) for step in range(1, 151))])
    page = run_page(read_run(tmp_path))
    table = page[page.index("What happened") :]
    seen, _, folded = table.partition("<details><summary>")
    assert seen.count("<tr>") == 31
    assert folded.startswith("12")
    assert "earlier ones" in folded


def test_part_that_rounding_left_of_no_time_is_not_drawn() -> None:
    spent = Spent(1, {"compute": 0.01, "other": 8.67e-19})
    assert [piece.words for piece in run_sections._bar(spent, 0.01)] == ["computing: 10 ms"]
