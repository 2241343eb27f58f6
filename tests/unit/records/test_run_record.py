"""`run.json` holds what is needed to do a run again."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from stories import record

from manyhosts.config.settings import Settings
from manyhosts.config.strategies import DDP
from manyhosts.errors import ConfigError
from manyhosts.records import provenance
from manyhosts.records.run_record import RunRecord, git_commit, plain_settings, versions_for


def test_record_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    record().write(tmp_path / "run.json")
    read = RunRecord.read(tmp_path / "run.json")
    assert (
        dataclasses.replace(
            read, hosts=list(read.hosts), arguments=tuple(read.arguments), environment=tuple(read.environment)
        )
        == record()
    )


def test_settings_become_plain_values_with_the_name_of_the_strategy() -> None:
    plain = plain_settings(Settings(batch_size=3, strategy=DDP(bucket_mb=7)))
    assert plain["batch_size"] == 3
    assert plain["strategy"]["name"] == "ddp"
    assert plain["strategy"]["bucket_mb"] == 7
    assert plain["snapshots"]["keep"] == 3
    json.dumps(plain, allow_nan=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"schema_version": 99}, "schema version 99"), ({"seed": None}, "lacks seed")],
    ids=["newer", "field missing"],
)
def test_record_that_cannot_be_understood_is_refused(tmp_path: Path, change: dict, words: str) -> None:
    path = tmp_path / "run.json"
    record().write(path)
    fields = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({key: value for key, value in fields.items() if value is not None or key == "backend"}))
    with pytest.raises(ConfigError, match=words):
        RunRecord.read(path)


def test_versions_are_found_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from manyhosts.records.run_record import versions_for;"
        "v = versions_for(Path('train.py')); assert v['torch'] and v['manyhosts'] and v['python'], v;"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert set(versions_for(tmp_path / "train.py")) == {"manyhosts", "torch", "python", "git_commit"}


def test_commit_of_the_script_is_noted_and_whether_it_was_changed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("first\n")
    assert git_commit(script) is None
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        me = ["-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", tmp_path, *me, *words], check=True)
    commit = git_commit(script)
    assert commit is not None
    assert len(commit) == 40
    script.write_text("second\n")
    assert git_commit(script) == f"{commit}+changes"


def test_own_code_is_known_where_a_run_is_started_in_the_folder_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "helper.py").write_text("")
    module = types.ModuleType("helper")
    module.__file__ = str(tmp_path / "helper.py")
    monkeypatch.setitem(sys.modules, "helper", module)
    monkeypatch.chdir(Path(str(torch.__file__)).parent)
    provenance._has_own_code.cache_clear()
    assert "helper.py" in provenance._sources(tmp_path, tmp_path / "other.py")
