"""The command line: quick help, errors as what / where / fix, and the exit codes that the design fixes."""

from __future__ import annotations

import os
from pathlib import Path

import click
import pytest

from manyhosts import errors
from manyhosts.cli.main import VERBS, cli, exit_code_of, main


def test_overview_names_every_verb_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for verb, (_, line) in VERBS.items():
        assert f"{verb} {line}" in out


def test_every_verb_can_be_loaded_and_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in VERBS:
        assert isinstance(cli.get_command(click.Context(cli), verb), click.Command)
        assert main([verb, "--help"]) == 0


def test_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    from manyhosts import __version__

    for words in (["--version"], ["version"]):
        assert main(words) == 0
        assert __version__ in capsys.readouterr().out


def test_help_is_a_word_for_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == main(["--help"]) == 0
    first, _, second = capsys.readouterr().out.partition("Usage: ")[2].partition("Usage: ")
    assert first == second != ""
    assert main(["help", "run"]) == 0
    assert "SCRIPT" in capsys.readouterr().out


def test_group_without_its_verb_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshots"]) in (0, 2)  # click 8.1 ends with 0
    said = capsys.readouterr()
    assert (said.out + said.err).startswith("Usage: manyhosts snapshots")


def test_run_without_a_verb_of_snapshots_is_answered_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshots", "last"]) == 2
    assert "manyhosts snapshots ls last" in capsys.readouterr().err
    assert main(["snapshots", "veryfy"]) == 2
    assert "Did you mean 'verify'?" in capsys.readouterr().err


def test_help_is_given_after_a_verb_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "help"]) == 0
    assert capsys.readouterr().out.startswith("Usage: manyhosts run")


WRONG = [
    (["rnu"], "there is no verb 'rnu'. did you mean 'run'?"),
    (["train.py", "--workers", "2"], "write manyhosts run train.py --workers 2"),
    (["run"], "Missing argument 'SCRIPT'"),
    (["run", "--workers", "2"], "name the script, as in `manyhosts run train.py`"),
    (["status"], "name a run: `manyhosts status last`"),
    (["report"], "name a run: `manyhosts report last`"),
    (["run", "--workers"], "`manyhosts run --help` lists what it takes"),
    (["run", "--bogus", "x.py"], "No such option '--bogus'"),
    (
        ["run", "--hidden", "6", "x.py"],
        "lists what it takes; options of the script itself go after it",
    ),
    (["--workers", "2", "run", "x.py"], "options go after the verb, as in `manyhosts run --workers 2 train.py`"),
    (["logs", "last", "--rank", "1"], "  fix:   `manyhosts logs --help` lists what it takes"),
    (["run", "--workrs", "2", "x.py"], "  fix:   did you mean '--workers'? `manyhosts run --help`"),
    (["run", "-workers", "2", "x.py"], "  fix:   did you mean '--workers'? `manyhosts run --help`"),
    (["run", "-workers=2", "x.py"], "  fix:   did you mean '--workers'? `manyhosts run --help`"),
    (["doctor", "far-away"], "if it is a host: manyhosts doctor --hosts far-away"),
    (["run", "--set", "batch_size=", __file__], "write an integer, as in --set batch_size=8"),
    (["run", "--workers", "many", "x.py"], "'many' is not a valid integer"),
    (["run", "--workers", "3.5", "x.py"], "  fix:   give an integer, such as 2"),
    (["run", "--set", "lr", "0.1", "x.py"], "  fix:   type: manyhosts run --set lr=0.1 x.py"),
    (["run", "--set", "lr", "=", "0.1", "x.py"], "  fix:   type: manyhosts run --set lr=0.1 x.py"),
    (["run", "no-such-script.py"], "there is no script 'no-such-script.py'"),
    (
        ["run", "--set", "duration=2", "epochs", "x.py"],
        "put a duration between quotes, as in --set duration='2 epochs'",
    ),
    (["run", "python", "train.py"], "  fix:   leave python out: `manyhosts run SCRIPT` starts SCRIPT"),
    (["run", __file__.removesuffix(".py")], f"  fix:   did you mean '{Path(__file__).name}'?"),
    (["run", str(Path(__file__).parents[3] / "pyproject.toml")], "is no Python script"),
    (["run", "--run-dir", "", __file__], "--run-dir is empty"),
    (["run", "--set", "batch_size=0", __file__], "batch_size is 0"),
    (["run", "--set", "lr=-1", __file__], "lr is -1.0"),
    (["run", "--set", "lr=1e999", __file__], "lr is inf"),
    (["run", "--set", "precision=bf16-mixed", __file__], "did you mean 'bf16'?"),
    (["run", "--mixed_precision", "fp16", "x.py"], "  fix:   type: manyhosts run --set precision=fp16 x.py"),
    (["run", "--mixed-precision=no", "x.py"], "  fix:   type: manyhosts run --set precision=fp32 x.py"),
    (["run", "--workers", "0", __file__], "--workers is 0"),
    (["run", "--nodes", "-1", __file__], "--nodes is -1"),
    (["run", "--workers", "1", "--workers-per-node", "1", __file__], "both --workers and --workers-per-node"),
    (["run", "--set", "lr", __file__], "cannot read 'lr'"),
    (["run", "--set", "batch_sise=3", __file__], "there is no setting named 'batch_sise'"),
    (["run", "--set", "lr=fast", __file__], "lr is 'fast', which is not a number"),
    (["run", "--set", "duration=2", __file__], "cannot read the duration '2'"),
    (["run", "--resume", "latest", "x.py"], "  fix:   type: manyhosts run --resume last x.py"),
    (["run", "--resume", "x.py"], "  fix:   type: manyhosts run --resume last x.py"),
    (["run", "--resume", "runs/first", "x.py"], "  fix:   type: manyhosts run --run-dir runs/first x.py"),
    (["run", "--config", "mine.yaml", "x.py"], "  fix:   type: manyhosts run --set mine.yaml x.py"),
    (["run", "--set", "mine.yaml", __file__], "there is no file 'mine.yaml'"),
    (["run", "--env", "NAME", __file__], "'NAME' has no value here"),
    (["run", "--on", "mars", __file__], "there is no target named 'mars'"),
    (["run", "-m", "--no-python", "x"], "exclude each other"),
    (["run", "--rehearse", "--no-python", "python", "x.py"], "--rehearse changes what Python gives a script"),
    (["run", "--bring", "", __file__], "--bring is empty"),
    (["run", "--nodes", "²", __file__], "--nodes is ²"),
    (["doctor", "--nodes", "0"], "--nodes is 0"),
    (["status", "a" * 300], "cannot be used: File name too long"),
    (["report", "a" * 300], "cannot be used: File name too long"),
    (["init", ""], "DIR is empty"),
    (["deploy", "--dry-run", "--to", "docker", "nosuch"], "nosuch"),
    (["export", "--dry-run", "--format", "onnx", "--output", "o", "nosuch"], "there is no such folder"),
    (["serve", "--max-body", "nan", "nosuch"], "--max-body is nan"),
    (["serve", "--timeout", "0", "nosuch"], "give a number above 0"),
    (["serve", "--keep-mb", "3", "nosuch"], "--keep-mb says how much is kept, and nothing is"),
    (["reproduce", "nosuch", "--", "--workers", "2", "--set", "lr=1"], "--set would change more than where"),
    (["reproduce", "nosuch", "--", "--no-prefix"], "it is not said where the workers are"),
]


@pytest.mark.parametrize(("words", "what"), WRONG, ids=[" ".join(words[:3]) for words, _ in WRONG])
def test_wrong_request_is_told_with_a_remedy_and_ends_with_2(
    words: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    reported = capsys.readouterr()
    assert reported.out == ""
    assert reported.err.startswith("manyhosts: ")
    assert what in reported.err
    assert "  fix:   " in reported.err
    assert "Traceback" not in reported.err


def test_near_setting_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", "--set", "batch_sise=3", __file__])
    assert "did you mean 'batch_size'?" in capsys.readouterr().err


def test_trace_shows_where_an_error_was_raised(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--trace", "--workers", "0", __file__]) == 2
    reported = capsys.readouterr().err
    assert reported.index("Traceback") < reported.index("manyhosts: --workers is 0")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ScriptError("x"), 1),
        (errors.ConfigError("x"), 2),
        (errors.LaunchError("x"), 3),
        (errors.RankLost("x"), 4),
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
        (click.exceptions.Exit(0), 0),
    ],
)
def test_exit_code_of_each_kind_of_end(error: BaseException, code: int) -> None:
    assert exit_code_of(error) == code


def test_fault_of_our_own_is_seen_whole() -> None:
    with pytest.raises(ZeroDivisionError):
        exit_code_of(ZeroDivisionError())


def test_workers_that_crowd_a_machine_are_spoken_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    Path("train.py").write_text("")
    for workers, is_crowd in ((8, False), (64, True)):
        assert main(["run", "--dry-run", "--workers", str(workers), "train.py"]) == 0
        assert (f"{workers} workers share the 2 cores of this machine" in capsys.readouterr().err) == is_crowd


def test_what_follows_the_script_belongs_to_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("known = '--workers --set'")
    assert main(["run", "--dry-run", "--workers", "2", "train.py", "--workers", "7", "--help", "--", "-x"]) == 0
    out = capsys.readouterr().out
    assert "$ python train.py --workers 7 --help -- -x" in out
    assert "WORLD_SIZE=2" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"], "a dry run touches nothing"


@pytest.mark.parametrize(
    ("before", "behind"),
    [
        (["prove"], ["--steps", "6"]),
        (["plan"], ["--seconds", "4"]),
        (["study"], ["--repeat", "2"]),
        (["tune", "--metric", "min:loss", "--search", "lr=0.1,0.2"], ["--trials", "2"]),
    ],
    ids=["prove", "plan", "study", "tune"],
)
def test_option_of_a_verb_behind_a_script_that_does_not_know_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], before: list[str],
    behind: list[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import manyhosts as mh")
    assert main([*before, "train.py", *behind]) == 2
    said = capsys.readouterr().err
    assert (
        f"{behind[0]} comes after train.py, which does not know it; options of `{before[0]}` belong before it" in said
    )
    assert f"type: manyhosts {' '.join([*before, *behind])} train.py; " in said
    assert f"if it is for the script: manyhosts {' '.join(before)} -- train.py {' '.join(behind)}" in said


@pytest.mark.parametrize(
    ("behind", "note"),
    [
        (["--set=lr=1", "--workers", "7", "x"], "--set, --workers come after train.py and so go to it"),
        (["--set", "lr=1"], "--set comes after train.py and so goes to it; options of `run` belong before it"),
        (["--epochs", "3", "--help", "-m", "--trace"], ""),
    ],
)
def test_option_of_run_behind_the_script_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], behind: list[str], note: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("known = '--workers --set'")
    assert main(["run", "--dry-run", "train.py", *behind]) == 0
    reported = capsys.readouterr().err
    assert reported.startswith(f"manyhosts: {note}") if note else reported == ""


def test_workers_are_as_many_as_there_are_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,3")
    (tmp_path / "train.py").touch()
    main(["run", "--dry-run", str(tmp_path / "train.py")])
    assert "WORLD_SIZE=3" in capsys.readouterr().out
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    main(["run", "--dry-run", str(tmp_path / "train.py")])
    assert "WORLD_SIZE=1" in capsys.readouterr().out


def test_bare_command_shows_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    captured = capsys.readouterr()
    assert "Verbs" in captured.out
    assert captured.err == ""
