"""`--env`: by value or by name, and its values are shown nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhosts.cli.main import main


def test_env_by_name_takes_the_callers_value_and_a_dry_run_shows_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUR_KEY", "s3cret")
    Path("train.py").touch()
    assert main(["run", "--dry-run", "--env", "OUR_KEY", "--env", "OTHER=s3cret", "train.py"]) == 0
    out = capsys.readouterr().out
    assert "    OTHER=…hidden\n    OUR_KEY=…hidden\n" in out
    assert "s3cret" not in out
    for name in ("NOT_HERE", ""):
        assert main(["run", "--dry-run", "--env", name, "train.py"]) == 2
        assert f"{name!r} has no value here" in capsys.readouterr().err


def test_profile_and_metrics_port_travel_as_variables_and_bad_ones_are_refused_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert main(["run", "--dry-run", "--profile", "20 steps", "--metrics-port", "9400", "train.py"]) == 0
    out = capsys.readouterr().out
    assert "MANYHOSTS_PROFILE=20 steps@0\n" in out
    assert "MANYHOSTS_METRICS_PORT=127.0.0.1:9400" in out
    for option, word in (("--profile", "2 epochs"), ("--metrics-port", "http")):
        assert main(["run", "--dry-run", option, word, "train.py"]) == 2
        assert f"where: {option}" in capsys.readouterr().err
