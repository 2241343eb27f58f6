"""The path of a start is as docs/architecture.md has it: what it names is there, and each file leads to the next."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from manyhosts.control.head.run import Head

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "manyhosts"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
MOST_FILES = 10
PHASES = ["wait_for_agents", "check_hosts", "open_store", "start_workers", "watch", "handle_failure", "end"]


def section(title: str) -> str:
    """The part of the page below a heading, up to the next of that rank."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows_of(text: str) -> list[tuple[str, str]]:
    """Every file in a table, and what is named first behind it."""
    return re.findall(r"^\|.*?`([\w/]+\.py)` \| `([\w.]+)`", text, re.MULTILINE)


def names_made_in(path: str) -> set[str]:
    """Classes, functions and methods of a file, with the names of their classes."""
    found = set()
    for node in ast.parse((PACKAGE / path).read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def leads_to(one: str, other: str, call: str) -> bool:
    """Whether the code of a file names what is called in another, or starts it by the name of its module."""
    source = (PACKAGE / one).read_text()
    module = f"manyhosts.{other.removesuffix('.py').replace('/', '.')}"
    return re.search(rf"\b{call.rpartition('.')[2]}\b", source) is not None or module in source


def test_what_the_page_names_of_a_start_exists() -> None:
    found = rows_of(section("The path of a start"))
    assert len(found) > 20
    assert not [(path, call) for path, call in found if call not in names_made_in(path)]


def test_a_start_goes_through_ten_files_each_of_which_is_reached_from_one_above() -> None:
    path = rows_of(section("The path of a start").partition("\n### ")[0])
    assert len({file for file, _ in path}) == len(path) <= MOST_FILES
    for hop, (file, call) in enumerate(path[1:], start=1):
        assert any(leads_to(above, file, call) for above, _ in path[:hop]), f"no file above leads to {file}"


def test_the_run_of_the_head_reads_as_its_phases_and_fits_on_a_screen() -> None:
    source = inspect.getsource(Head.run)
    assert re.findall(r"self\._(\w+)\(\)", source)[1:-1] == PHASES
    assert len(source.splitlines()) < 40
    assert ", ".join(f"`{phase}`" for phase in PHASES) in " ".join(PAGE.split())
