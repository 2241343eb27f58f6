"""`manyhosts init` writes a script that runs, and never over another one."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from manyhosts.cli.main import main


def test_script_is_written_and_is_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "new" / "project")]) == 0
    path = tmp_path / "new" / "project" / "train.py"
    compile(path.read_text(), str(path), "exec")
    assert f"manyhosts run --workers 2 {path}" in capsys.readouterr().out


def test_script_trains_when_it_is_run_and_not_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["init", str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    for variable in ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"):  # scikit-learn sets them
        monkeypatch.setenv(variable, "TRUE")
    module = runpy.run_path("train.py", run_name="train")
    assert len(module["network"]()) == 10
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"], "nothing has trained"


def test_script_that_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert (tmp_path / "train.py").read_text() == "mine"
    assert f"where: {tmp_path / 'train.py'}" in capsys.readouterr().err


def test_what_is_to_be_typed_can_be_typed_where_a_folder_has_a_space(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my project"
    assert main(["init", str(path)]) == 0
    assert f"manyhosts run --workers 2 '{path}/train.py'\n" in capsys.readouterr().out


def test_folder_that_cannot_be_made_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["init", str(tmp_path / "file" / "project")]) == 2
    assert "manyhosts: nothing can be written there: " in capsys.readouterr().err


def test_name_of_a_script_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "train.py")]) == 2
    assert "fix:   name a folder: `manyhosts init` writes train.py here" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--dry-run", str(tmp_path)]) == 0
    assert "mh.Trainer(" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_loop_of_its_own_is_written_where_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--loop", "--dry-run", str(tmp_path)]) == 0
    script = capsys.readouterr().out.partition("\n")[2]
    compile(script, "train.py", "exec")
    assert "mh.Run(" in script


@pytest.mark.parametrize("there", [True, False])
def test_missing_package_is_named_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], there: bool
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if there else None)
    main(["init", str(tmp_path)])
    assert ("pip install scikit-learn" in capsys.readouterr().out) is not there
