"""Which runs a study is made of, and the command of each."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from manyhosts.cli.study import study
from manyhosts.errors import ConfigError
from manyhosts.study.points import Asked
from manyhosts.study.study import NAME, known, see_that_of, see_that_same, write
from manyhosts.study.study import study as studying
from manyhosts.trials.runs import Interrupted, Outcome, Place


def commands(tmp_path: Path, *words: str) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text("")
    asked = ["--dry-run", "--run-dir", str(tmp_path / "S"), *words, str(script), "--depth", "3"]
    done = CliRunner().invoke(study, asked, standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    lines = done.output.replace(str(tmp_path) + "/", "").splitlines()
    assert all(line.endswith(" train.py --depth 3") for line in lines)
    return [line.removesuffix(" train.py --depth 3").removeprefix("manyhosts run ") for line in lines]


def test_each_size_each_variant_and_each_seed_is_a_run(tmp_path: Path) -> None:
    words = ["--workers", "2,1,2", "--vary", "compression=none,bf16", "--repeat", "2", "--budget", "5 epochs"]
    assert commands(tmp_path, *words) == [
        f"--workers {workers} --set 'duration=5 epochs' --set compression={compression} --set seed={seed} "
        f"--run-dir S/points/{workers}-worker{'s' * (workers > 1)}-compression-{compression}-seed-{seed}"
        for compression in ("none", "bf16")
        for workers in (1, 2)
        for seed in (0, 1)
    ]


def test_a_strategy_that_lacks_a_setting_is_tried_once_without_it(tmp_path: Path) -> None:
    words = ["--vary", "strategy=ddp,fsdp", "--vary", "compression=none,bf16,powersgd", "--vary", "lr=0.1"]
    found = [line.split(" --run-dir")[0] for line in commands(tmp_path, "--workers", "1,2", *words)]
    assert found == [
        f"--workers {workers} {variant} --set lr=0.1"
        for variant in (
            *(f"--set strategy=ddp --set compression={way}" for way in ("none", "bf16", "powersgd")),
            "--set strategy=fsdp",
        )
        for workers in (1, 2)
    ]


def test_hosts_are_taken_from_the_first_on(tmp_path: Path) -> None:
    found = commands(tmp_path, "--hosts", "a,b,c", "--workers-per-node", "2", "-o", "identity=k", "--set", "lr=0.1")
    assert found == [
        f"-o identity=k --hosts {hosts} --workers-per-node 2 --set lr=0.1 --run-dir S/points/{name}"
        for hosts, name in (("a", "2-workers"), ("a,b", "4-workers-on-2-nodes"), ("a,b,c", "6-workers-on-3-nodes"))
    ]


def test_hosts_of_a_cluster_are_known_from_its_table(tmp_path: Path) -> None:
    table = tmp_path / "lab.toml"
    table.write_text('hosts = ["a", "b"]\n')
    assert commands(tmp_path, "--cluster", str(table)) == [
        f"--cluster lab.toml --hosts {hosts} --run-dir S/points/{name}"
        for hosts, name in (("a", "1-node"), ("a,b", "2-nodes"))
    ]


def test_a_scheduler_is_told_how_many_nodes(tmp_path: Path) -> None:
    assert commands(tmp_path, "--on", "slurm", "--nodes", "1,4", "-o", "partition=long") == [
        "--on slurm -o partition=long --nodes 1 --run-dir S/points/1-node",
        "--on slurm -o partition=long --nodes 4 --run-dir S/points/4-nodes",
    ]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "no sizes are given"),
        (["--workers", "1,x"], "--workers is '1,x'"),
        (["--workers", "0,1"], "--workers is '0,1'"),
        (["--workers", "1", "--hosts", "a"], "--workers counts workers on this machine"),
        (["--workers", "1", "--nodes", "2"], "--workers counts workers on this machine"),
        (["--workers", "1", "--workers-per-node", "2"], "--workers counts workers on this machine"),
        (["--nodes", "1,3", "--hosts", "a,b"], "--nodes asks for 3 hosts, and 2 are named"),
        (["--workers", "1", "--repeat", "0"], "--repeat is 0"),
        (["--workers", "1", "--budget", "soon"], "soon"),
        (["--workers", "1", "--vary", "strateggy=ddp"], "there is no setting named 'strateggy'"),
        (["--workers", "1", "--vary", "lr=,"], "cannot read lr="),
        (["--workers", "1", "--vary", "lr=1,fast"], "lr is 'fast', which is not a number"),
        (["--workers", "1", "--vary", "compression=none,bf17"], "there is no compression named 'bf17'"),
        (["--workers", "1", "--vary", "precision=fp32,bf17"], "precision is 'bf17'"),
        (["--workers", "1", "--vary", "batch_norm=none,local"], "batch_norm is 'none'"),
        (["--workers", "1", "--vary", "lr_scaling=none,sqr"], "lr_scaling is 'sqr'"),
        (["--workers", "1", "--vary", "strategy=ddp,local_sgd"], "there is no strategy named 'local_sgd'"),
        (["--workers", "1", "--set", "early_stopping.mode=up"], "mode is 'up'"),
        (["--workers", "1", "--price", "-3"], "--price is -3"),
        (["--workers", "1", "--price", "nan"], "--price is nan"),
        (["--workers", "1", "--vary", "seed=1,2"], "seed is varied, which --repeat is for"),
        (["--workers", "1", "--budget", "1h", "--set", "duration=2h"], "both --budget and duration"),
        (["--workers", "1", "--vary", "lr=1,2", "--set", "lr=1"], "lr is both set and varied"),
        (
            ["--workers", "1", "--vary", "zero=1,2", "--set", "strategy=ddp"],
            "'zero' is no setting of the strategy 'ddp'",
        ),
        (
            ["--workers", "1", "--vary", "strategy=ddp,fsdp", "--vary", "sync_every=4"],
            "'sync_every' is no setting of the strategy 'ddp'",
        ),
        (
            ["--workers", "1", "--vary", "strategy=ddp,fsdp", "--set", "compression=bf16"],
            "write --vary compression=bf16: then it is left out where the strategy lacks it",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_at_once(tmp_path: Path, words: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        commands(tmp_path, *words)
    assert complaint in str(error.value)


def test_a_folder_holds_what_can_be_compared(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    asked = Asked(script=str(script), workers=(1, 2), budget="1h")
    write(known(asked, tmp_path))
    assert (tmp_path / NAME).exists()
    see_that_same(Asked(script=str(script), workers=(1, 2, 4), repeat=3, vary={"lr": ("1",)}, budget="1h"), tmp_path)
    with pytest.raises(ConfigError, match=r"--budget was 1h"):
        see_that_same(Asked(script=str(script), workers=(1, 2)), tmp_path)
    write(known(Asked(script=str(script), workers=(1, 2)), tmp_path / "whole"))
    with pytest.raises(ConfigError, match=r"--budget was not given"):
        see_that_same(asked, tmp_path / "whole")
    script.write_text("1\n")
    with pytest.raises(ConfigError, match="the script has changed since"):
        see_that_same(asked, tmp_path)


def test_runs_on_other_machines_or_with_other_variables_are_not_compared(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("pass\n")

    def asked(*hosts: str, nodes: tuple[int, ...] = (1, 2), size: str = "small") -> Asked:
        return Asked(script=str(script), nodes=nodes, hosts=hosts, environment=(f"MODEL={size}",))

    write(known(asked("a", "b"), tmp_path))
    assert "small" not in (tmp_path / NAME).read_text()
    see_that_same(asked("a", "b", "c", "d", nodes=(1, 2, 4)), tmp_path)
    with pytest.raises(ConfigError, match="its hosts were"):
        see_that_same(asked("c", "d"), tmp_path)
    with pytest.raises(ConfigError, match="--env gave other values"):
        see_that_same(asked("a", "b", size="big"), tmp_path)


def test_settings_that_fit_some_scripts_only_are_left_to_the_runs(tmp_path: Path) -> None:
    words = ["lr_scaling=none,linear", "loader_workers=auto,2", "activation_checkpointing=blocks,0.5", "gather=bf16"]
    words += ["sync_every=4,8", "powersgd_rank=2", "micro_batch_size=none,8", "snapshots.every=5 steps"]
    assert commands(tmp_path, "--workers", "1", *[part for word in words for part in ("--vary", word)])


def test_a_study_is_told_from_one_of_something_else(tmp_path: Path) -> None:
    script, other = tmp_path / "train.py", tmp_path / "other.py"
    script.write_text("pass\n")
    other.write_text("1\n")
    asked = Asked(script=str(script), workers=(1, 2), arguments=("--depth", "3"), settings={"lr": "1", "seed": "4"})
    write(known(asked, tmp_path))
    settings = {"lr": "1", "duration": "3 epochs"}
    see_that_of(tmp_path, str(script), ("--depth", "3"), settings)
    with pytest.raises(ConfigError, match=r"of .*train\.py, not of .*other\.py"):
        see_that_of(tmp_path, str(other), ("--depth", "3"), settings)
    with pytest.raises(ConfigError, match=r"with the arguments --depth 3"):
        see_that_of(tmp_path, str(script), (), settings)
    with pytest.raises(ConfigError, match=r"with --set lr=1"):
        see_that_of(tmp_path, str(script), ("--depth", "3"), {})
    script.write_text("2\n")
    with pytest.raises(ConfigError, match="has changed since"):
        see_that_of(tmp_path, str(script), ("--depth", "3"), settings)
    with pytest.raises(ConfigError, match="there is no study in"):
        see_that_of(tmp_path / "nowhere", str(script), (), {})


def test_a_folder_that_cannot_be_made_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "train.py").write_text("")
    words = ["--workers", "1", "--run-dir", str(tmp_path / "file" / "S"), str(tmp_path / "train.py")]
    done = CliRunner().invoke(study, words, standalone_mode=False)
    assert isinstance(done.exception, ConfigError)
    assert "the study cannot be kept" in str(done.exception)


def test_help_lists_what_there_is() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "manyhosts.cli.main", "study", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "--vary" in done.stdout


def test_study_that_is_interrupted_in_its_last_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped:
        """A run that Ctrl-C ends."""

        def __init__(self, *_: object, **__: object) -> None: ...

        def wait(self, *_: object) -> None:
            signal.raise_signal(signal.SIGINT)

        def outcome(self, place: Place, launched: float | None, *, interrupted: bool) -> Outcome:
            return Outcome(status="interrupted" if interrupted else "completed", launched=launched)

    class Silent:
        def begins(self, *_: object) -> None: ...

        def ends(self, *_: object, before: bool) -> None: ...

        goes_on = begins

    monkeypatch.setattr("manyhosts.study.study.Trial", Stopped)
    (tmp_path / "train.py").write_text("")
    with pytest.raises(Interrupted):
        studying(Asked(script=str(tmp_path / "train.py"), workers=(1,)), tmp_path / "study", [], Silent())
