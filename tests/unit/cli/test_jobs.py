"""Handles: words that name a job from any process."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import make_run

from manyhosts.cli.main import main
from manyhosts.launchers import named_runs
from manyhosts.report.run import read_run


@pytest.mark.parametrize("verb", ["status", "logs", "cancel"])
@pytest.mark.parametrize("handle", ["slurmm://4711", "slurm://", "://4711"])
def test_word_that_is_no_handle_is_a_wrong_request(verb: str, handle: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, handle]) == 2
    assert f"{handle!r} is no handle of a job" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["local", "ssh", "mpi", "ray"])
@pytest.mark.parametrize("verb", ["status", "logs", "cancel"])
def test_handle_of_a_run_that_is_not_on_this_machine_gets_a_sentence(
    verb: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, f"{target}://{tmp_path}/gone"]) == 2
    assert "there is no detached run of that name on this machine" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["slurm", "mpi", "ssh", "local", "ray", "kubernetes", "sagemaker"])
def test_help_of_a_target_lists_its_options(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--on", target, "--help"]) == 0
    assert f"Options of {target}, each as -o KEY=VALUE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("verb", "code", "told"),
    [
        ("status", 0, "cancelled · interrupted; no training is on record"),
        ("logs", 0, "one line"),
        ("runs", 0, "interrupted"),
    ],
)
def test_run_that_somebody_ended_before_it_trained_is_interrupted(
    verb: str, code: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "logs" / "here-0.log").write_text("one line\n")
    named_runs.keep_interruption(run, interrupted=True)
    assert main([verb, str(tmp_path if verb == "runs" else run)]) == code
    assert told in capsys.readouterr().out
    named_runs.keep_interruption(run, interrupted=False)
    assert not named_runs.was_interrupted(run)


def test_run_that_was_ended_before_there_was_a_log_is_interrupted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named_runs.keep_interruption(tmp_path, interrupted=True)
    assert main(["status", str(tmp_path)]) == 0
    assert "cancelled · interrupted; no training is on record" in capsys.readouterr().out


def test_cancelling_a_run_that_has_ended_shows_with_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path)
    summary = read_run(tmp_path).summary
    assert summary is not None
    summary.write(tmp_path / "summary.json")
    assert main(["cancel", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("it has ended before: done · why it completed · here,")


def test_lines_of_several_workers_begin_with_the_name_of_their_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    for rank in (0, 1):
        (tmp_path / "logs" / f"here-{rank}.log").write_text("one line\n")
    assert main(["logs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "here-0: one line\nhere-1: one line\n"


def test_run_without_a_launcher_has_no_log_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert main(["logs", str(tmp_path)]) == 2
    assert "printed to its own terminal" in capsys.readouterr().err
