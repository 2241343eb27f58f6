"""What is said where Ray is not as it should be."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhosts.cli.main import main


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return "train.py"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["-o", "gpus=two"], "gpus is 'two'"),
        (["-o", "cpus=0"], "cpus is '0'"),
    ],
)
def test_request_that_makes_no_sense_is_refused(
    words: list[str], what: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--on", "ray", *words, script]) == 2
    assert what in capsys.readouterr().err
