"""Handles: words that name a job from any process."""

from __future__ import annotations

import pytest

from manyhands.cli.main import main


@pytest.mark.parametrize("verb", ["status", "logs", "cancel"])
@pytest.mark.parametrize("handle", ["4711", "slurmm://4711", "slurm://"])
def test_word_that_is_no_handle_is_a_wrong_request(verb: str, handle: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, handle]) == 2
    assert f"{handle!r} is no handle of a job" in capsys.readouterr().err


def test_handle_of_a_target_that_keeps_no_jobs_is_a_wrong_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "local://1"]) == 2
    assert "belong to the terminal" in capsys.readouterr().err


def test_detaching_from_a_target_that_keeps_no_jobs_is_a_wrong_request(
    tmp_path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert main(["run", "--detach", "train.py"]) == 2
    assert "slurm" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["slurm", "mpi", "ssh", "local"])
def test_help_of_a_target_lists_its_options(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--on", target, "--help"]) == 0
    assert f"Options of {target}, each as -o KEY=VALUE" in capsys.readouterr().out
