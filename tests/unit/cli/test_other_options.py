"""What people type to `run` from habit is answered with the line that does it."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import make_run

from manyhosts.cli.init import TRAIN
from manyhosts.cli.main import main

MEANT = {
    "--gpus 2 train.py": "--workers 2 train.py",
    "--num_gpus=2 train.py x": "--workers 2 train.py x",
    "-n 4 train.py": "--workers 4 train.py",
    "-np 4 train.py": "--workers 4 train.py",
    "--epochs 5 train.py": "--set 'duration=5 epochs' train.py",
    "--workers 2 --max-epochs=5 train.py": "--workers 2 --set 'duration=5 epochs' train.py",
    "--batch-size 32 train.py": "--set batch_size=32 train.py",
    "--lr 0.1 --seed 3 train.py": "--set lr=0.1 --seed 3 train.py",
    "--host a,b train.py": "--hosts a,b train.py",
    "--output runs/mine train.py": "--run-dir runs/mine train.py",
    "--ckpt_path runs/first/best train.py": "--run-dir RUN train.py",
    "--config_file default.yaml train.py": "--workers 3 train.py",
    "--amp train.py": "--set precision=VALUE train.py",
    "--compile train.py --lr 1": "--set compile=true train.py --lr 1",
}


@pytest.mark.parametrize(("typed", "meant"), MEANT.items())
def test_option_of_other_programs_is_answered_with_ours(
    typed: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "default.yaml").write_text("compute_environment: LOCAL_MACHINE\nnum_processes: 3\n")
    assert main(["run", *typed.split()]) == 2
    assert f"fix:   type: manyhosts run {meant}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "given", "meant"),
    [
        (["--gpus", "1", "--workers", "2", "train.py"], "--workers 2", "--workers 2 train.py"),
        (["--workers=2", "--gpus=1", "train.py"], "--workers=2", "--workers=2 train.py"),
        (
            ["--epochs", "3", "--set", "duration=5 epochs", "train.py"],
            "--set 'duration=5 epochs'",
            "--set 'duration=5 epochs' train.py",
        ),
    ],
)
def test_option_of_other_programs_next_to_ours_is_left_out(
    typed: list[str], given: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *typed]) == 2
    assert f"fix:   {given} is given already; type: manyhosts run {meant}\n" in capsys.readouterr().err


def test_option_that_nobody_knows_is_said_to_be_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--colour", "train.py"]) == 2
    assert "such option --colour" in capsys.readouterr().err.replace("'", "").replace(":", "")


def test_verb_and_settings_of_other_programs_are_answered_with_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "pkg").mkdir()
    (tmp_path / "first" / "snapshots").mkdir(parents=True)
    (tmp_path / "first" / "run.json").write_text("{}")
    (tmp_path / "pkg" / "inner.py").touch()
    for words, answer in (
        (["train", "train.py"], "to train train.py: manyhosts run train.py"),
        (["run", "--set", "epochs=3", "train.py"], 'write --set duration="3 epochs"'),
        (["run", "--set", "learning_rate=3", "train.py"], "write --set lr=3"),
        (["run", "--set", "accumulate_grad_batches=4", "train.py"], "write --set micro_batch_size="),
        (["run", "--set", "max_grad_norm=2", "train.py"], "write --set clip_gradients=2"),
        (["run", "--set", "optimizer=sgd", "train.py"], "'optimizer' is given in the script alone"),
        (["run", "--run-dir", "first/snapshots", "train.py"], "name the run to continue it: --run-dir"),
        (["stop", "last"], "fix:   manyhosts cancel RUN"),
        (["run", "pkg.inner"], "it is the name of a module: manyhosts run -m pkg.inner"),
        (["run", "-m", "pkg/inner.py"], "write -m pkg.inner"),
        (["run", "--run-dir=~/mine", "train.py"], f"write {Path('~/mine').expanduser()}"),
    ):
        assert main(words) == 2
        assert answer in capsys.readouterr().err


SCRIPTS = {
    "argparse": ("import argparse\nargparse.ArgumentParser().add_argument('--workers')", True),
    "short and long": ("import argparse\np = argparse.ArgumentParser()\np.add_argument('-j', '--workers')", True),
    "dataclass": ("import dataclasses\n@dataclasses.dataclass\nclass Arguments:\n    workers: int = 4", True),
    "function": ("import fire\ndef main(workers=1): ...\nfire.Fire(main)", True),
    "docopt": ('"""Usage: train.py [--workers=N]"""', True),
    "own module": ("import options", True),
    "nothing": ("import sys\n# any number of workers\nprint('two workers')", False),
    "trainer": (TRAIN, False),
}


@pytest.mark.parametrize(("source", "knows"), SCRIPTS.values(), ids=SCRIPTS)
def test_option_behind_a_script_that_does_not_know_it_is_refused(
    source: str, knows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("options.py").write_text("import argparse\nargparse.ArgumentParser().add_argument('--workers')")
    Path("train.py").write_text(source)
    code = main(["run", "--dry-run", "train.py", "--workers", "2"])
    reported = capsys.readouterr().err
    assert code == (0 if knows else 2)
    assert ("type: manyhosts run --dry-run --workers 2 train.py; if it is for the script" in reported) is not knows
    assert ("--workers comes after train.py and so goes to it" in reported) is knows
    assert main(["run", "--dry-run", "--", "train.py", "--workers", "2"]) == 0, "marked as the script's own"


def test_what_was_typed_besides_stays_where_an_option_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN)
    typed = ["--set", "lr=0.1", "train.py", "data.csv", "--workers", "2", "--no-prefix", "rest"]
    assert main(["run", "--dry-run", *typed]) == 2
    answer = "type: manyhosts run --dry-run --set lr=0.1 --workers 2 --no-prefix train.py data.csv rest; "
    answer += "if it is for the script: manyhosts run --dry-run --set lr=0.1 -- train.py data.csv --workers 2"
    assert answer in capsys.readouterr().err
    assert main(["run", "--dry-run", "-m", "train", "--workers", "2"]) == 2
    assert "type: manyhosts run --dry-run -m --workers 2 train; " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "reads"), [(TRAIN, False), (f"import argparse\n{TRAIN}", True), (f"from sys import argv\n{TRAIN}", True)]
)
def test_arguments_that_nobody_reads_are_said_to_have_no_effect(
    source: str, reads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(source)
    assert main(["run", "--dry-run", "train.py", "--epochs", "5"]) == 0
    assert ("train.py does not read its arguments, so --epochs 5 has no effect" in capsys.readouterr().err) is not reads


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--resume --workers 2 train.py", "manyhosts run --resume last --workers 2 train.py"),
        ("--gpus 0,1 train.py", "CUDA_VISIBLE_DEVICES=0,1 manyhosts run --workers 2 train.py"),
        ("--devices auto train.py", "manyhosts run --workers N train.py"),
        ("--gpus all train.py", "manyhosts run --workers N train.py"),
        ("--gpus 0,1, train.py", "CUDA_VISIBLE_DEVICES=0,1 manyhosts run --workers 2 train.py"),
        ("--hosts a,b --gpus 0,1 train.py", "manyhosts run --hosts a,b --workers-per-node 2 train.py"),
        (
            "--on slurm --nodes 2 --ntasks 4 train.py",
            "manyhosts run --on slurm --nodes 2 --workers-per-node 4 train.py",
        ),
    ],
)
def test_line_to_type_keeps_every_word_and_is_one_that_is_taken(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *typed.split()]) == 2
    assert f"type: {meant}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "--port", "99999", "RUN"], "give a number from 0 to 65535"),
        (["run", "--workers", "1", "--show", "1", "train.py"], "there is one worker"),
        (["run", "--on", "slurm", "--nodes", "4", "--workers", "8", "train.py"], "use --workers-per-node, with"),
        (["run", "--workers-per-node", "0", "--hosts", "a,b", "train.py"], "--workers-per-node is 0"),
        (["run", "--no-python", "train.sh"], "write ./train.sh"),
        (["run", "train.sh"], "`manyhosts run --no-python ./FILE.sh`"),
        (["study", "--vary", "seed=1,2", "--workers", "1,2", "train.py"], "seed is varied, which --repeat is for"),
        (["run", "--profile", "20", "train.py"], '--profile "20 steps"'),
        (["predict", "train.py"], "no verb 'predict'"),
    ],
)
def test_remedy_is_of_what_was_typed(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "train.sh"):
        (tmp_path / name).touch()
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_run_directory_of_the_environment_is_that_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("MANYHOSTS_RUN_DIR", "runs/mine")
    assert main(["run", "--dry-run", "train.py"]) == 0
    assert f"{tmp_path}/runs/mine" in capsys.readouterr().out
    assert main(["run", "--dry-run", "--run-dir", "runs/other", "train.py"]) == 0
    assert "runs/mine" not in capsys.readouterr().out
    monkeypatch.setenv("MANYHOSTS_RUN_DIR", "")
    assert main(["run", "--dry-run", "train.py"]) == 0, "it names none"
    monkeypatch.setenv("MANYHOSTS_RUN_DIR", "runs/mine")
    monkeypatch.setenv("RANK", "0")  # of a worker, which starts a run of its own
    assert main(["run", "--dry-run", "train.py"]) == 0
    assert "runs/mine" not in capsys.readouterr().out


def test_place_of_a_page_that_is_a_folder_and_a_run_in_place_of_runs_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "one")
    for place in (".", "/", "runs"):
        assert main(["report", "--output", place, "runs/one"]) == 2
        assert "name a file: --output" in capsys.readouterr().err
    assert main(["runs", "runs/one"]) == 2
    assert "to see it: manyhosts status runs/one; runs next to it: manyhosts runs runs" in capsys.readouterr().err
    assert main(["runs", "runs/one/run.json"]) == 2
    assert "this is a file" in capsys.readouterr().err
