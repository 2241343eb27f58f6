"""Handles: words that name a job from any process."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhosts.cli.main import main


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
