"""What is said where Ray is not as it should be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from manyhosts.cli.main import main


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return "train.py"


def test_missing_ray_is_a_sentence_with_the_line_to_type(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["run", "--on", "ray", script]) == 3
    said = capsys.readouterr().err
    assert "Ray is not installed here" in said
    assert "-m pip install 'manyhosts[ray]'" in said


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--hosts", "a,b"], "ray chooses the hosts"),
        (["-o", "gpus=two"], "gpus is 'two'"),
        (["-o", "cpus=0"], "cpus is '0'"),
    ],
)
def test_request_that_makes_no_sense_is_refused(
    words: list[str], what: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--on", "ray", *words, script]) == 2
    assert what in capsys.readouterr().err
