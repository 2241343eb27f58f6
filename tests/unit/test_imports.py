"""Being called when a module has been imported, without importing it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from manyhosts.imports import when_imported


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "awaited_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("from awaited_package import inner\n")
    (folder / "inner.py").write_text("value = 7\n")
    (folder / "other.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("", ".inner", ".other"):
        monkeypatch.setitem(sys.modules, f"awaited_package{name}", ModuleType("placeholder"))
        del sys.modules[f"awaited_package{name}"]
    return "awaited_package"


def test_module_that_is_loaded_is_handed_over_at_once() -> None:
    seen: list[ModuleType] = []
    when_imported("pathlib", seen.append)
    assert seen == [sys.modules["pathlib"]]


def test_module_that_comes_later_is_handed_over_with_its_code_run(package: str) -> None:
    seen: list[int] = []
    finders = list(sys.meta_path)
    when_imported(f"{package}.inner", lambda module: seen.append(module.value))
    assert seen == []
    importlib.import_module(f"{package}.other")
    assert seen == [7], "its package imports it"
    assert sys.meta_path == finders, "nothing stays behind"


def test_module_that_does_not_exist_is_still_missing(package: str) -> None:
    when_imported(f"{package}.nothing", lambda _: pytest.fail("there is none"))
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        importlib.import_module(f"{package}.nothing")


def test_misspelt_name_of_the_package_is_answered_with_the_nearest() -> None:
    import manyhosts as mh

    with pytest.raises(AttributeError, match=r"has no attribute 'Trianer'\. did you mean 'Trainer'\?"):
        _ = mh.Trianer


def test_all_that_wait_for_one_module_are_called_in_their_order(package: str) -> None:
    seen: list[str] = []
    when_imported(f"{package}.inner", lambda _: seen.append("first"))
    when_imported(f"{package}.inner", lambda _: seen.append("second"))
    finders = len(sys.meta_path)
    importlib.import_module(f"{package}.inner")
    assert seen == ["first", "second"]
    assert len(sys.meta_path) == finders - 1
