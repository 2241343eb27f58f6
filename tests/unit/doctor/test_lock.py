"""Hosts are held to what a lock says of them; a container's recipe has the same versions."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from manyhosts.cli.main import main
from manyhosts.doctor import lock
from manyhosts.errors import ConfigError

HOST = {
    "name": "a", "python": "3.11.7", "manyhosts": "0.1.0", "executable": "/usr/bin/python3",
    "packages": {"torch": "2.13.0+cpu", "numpy": "2.4.0", "manyhosts": "0.1.0"},
    "condition": {"cores": 4, "memory": {"total": 8 << 30}}, "graphics": {"gpus": [{"name": "H100"}]},
}  # fmt: skip


def host(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(HOST), **changes}


def kept(folder: Path, *hosts: dict[str, Any]) -> dict[str, Any]:
    lock.write(folder / lock.NAME, hosts)
    found = lock.in_folder(folder)
    assert found is not None
    return found


def test_host_that_is_as_it_was_has_no_finding(tmp_path: Path) -> None:
    assert list(lock.findings(kept(tmp_path, host()), [host()])) == []


def test_other_and_missing_versions_are_errors_that_say_what_to_type(tmp_path: Path) -> None:
    changed = host(packages={"torch": "2.12.0+cpu", "manyhosts": "0.1.0", "extra": "1.0"})
    [finding] = lock.findings(kept(tmp_path, host()), [changed])
    assert (finding.level, finding.check) == ("error", "lock")
    assert finding.what == (
        "host a is not as manyhosts.lock has it: torch is 2.12.0+cpu, not 2.13.0+cpu; numpy is missing, not 2.4.0"
    )
    assert finding.fix.startswith("/usr/bin/python3 -m pip install torch==2.13.0 numpy==2.4.0;")


def test_other_hardware_is_a_warning(tmp_path: Path) -> None:
    changed = host(graphics={"gpus": []}, condition={"cores": 2, "memory": {"total": 8 << 30}})
    found = list(lock.findings(kept(tmp_path, host()), [changed]))
    assert [finding.level for finding in found] == ["warning", "warning"]
    assert "had gpus ['H100'] when manyhosts.lock was written, and has []" in found[0].what


def test_host_that_was_not_there_is_held_to_what_the_first_one_had(tmp_path: Path) -> None:
    locked = kept(tmp_path, host(), host(name="b"))
    assert [finding.what for finding in lock.findings(locked, [host(name="c", python="3.12.1")])] == [
        "host c is not as manyhosts.lock has it: python is 3.12.1, not 3.11.7"
    ]


def test_recipe_installs_the_versions_of_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["env", "container"]) == 2
    assert "there is no manyhosts.lock" in capsys.readouterr().err
    kept(tmp_path, host())
    assert main(["env", "container"]) == 0
    assert capsys.readouterr().out.split() == ["Dockerfile", "requirements.lock"]
    recipe = (tmp_path / "Dockerfile").read_text()
    assert "\nFROM python:3.11.7-slim\n" in recipe
    assert "torch is the build 2.13.0+cpu" in recipe
    assert (
        tmp_path / "requirements.lock"
    ).read_text() == "# The versions of manyhosts.lock.\ntorch==2.13.0\nnumpy==2.4.0\n"


def test_lock_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / lock.NAME).write_text('{"schema_version": 9, "hosts": {}}')
    with pytest.raises(ConfigError, match="schema version 9"):
        lock.in_folder(tmp_path)


def test_recipe_of_somebody_else_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lock.write(tmp_path / "manyhosts.lock", [host()])
    (tmp_path / "Dockerfile").write_text("FROM mine\n")
    assert main(["env", "container"]) == 2
    assert "Dockerfile is there already" in capsys.readouterr().err
    assert (tmp_path / "Dockerfile").read_text() == "FROM mine\n"
    (tmp_path / "Dockerfile").unlink()
    assert main(["env", "container"]) == 0
    assert main(["env", "container"]) == 0, "our own is written again"
    (tmp_path / "Dockerfile").write_text("FROM mine\n")
    assert main(["env", "container"]) == 2, "next to a list of versions of ours, too"
    assert (tmp_path / "Dockerfile").read_text() == "FROM mine\n"
    (tmp_path / "Dockerfile").unlink()
    (tmp_path / "manyhosts.lock").write_text("{")
    capsys.readouterr()
    assert main(["env", "container"]) == 2
    assert "write it again: manyhosts env lock" in capsys.readouterr().err
