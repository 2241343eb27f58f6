"""Tables of `manyhosts.toml`, read and made into words."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhosts.config import clusters
from manyhosts.errors import ConfigError

KNOWN = ("hosts", "nodes", "workers-per-node", "no-sync", "o", "env")
PAIRS = ("o", "env")


def words(table: dict[str, object]) -> dict[str, object]:
    return clusters.words(table, "manyhosts.toml", KNOWN, PAIRS)


def test_table_is_found_in_the_nearest_file_above(tmp_path: Path) -> None:
    (tmp_path / "manyhosts.toml").write_text("[lab]\nnodes = 2\n")
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert clusters.read("lab", tmp_path / "a" / "b") == (tmp_path / "manyhosts.toml", {"nodes": 2})
    (tmp_path / "a" / "manyhosts.toml").write_text("[lab]\nnodes = 3\n")
    assert clusters.read("lab", tmp_path / "a" / "b")[1] == {"nodes": 3}


def test_file_is_a_table_itself(tmp_path: Path) -> None:
    (tmp_path / "gpus.toml").write_text("nodes = 4\n")
    assert clusters.read(str(tmp_path / "gpus.toml"), tmp_path)[1] == {"nodes": 4}


@pytest.mark.parametrize(
    ("content", "wanted", "what", "fix"),
    [
        (None, "lab", "there is no manyhosts.toml for --cluster lab", "write one with a table [lab]"),
        ("[labor]\nnodes = 2\n", "lab", "there is no cluster named 'lab'", "did you mean 'labor'? it has: labor"),
        ("nodes = 2\n", "lab", "there is no cluster named 'lab'", "it has: none"),
        ("[lab\n", "lab", "manyhosts.toml is no TOML", "mend that line"),
        (None, "gpus.toml", "cannot read gpus.toml: No such file or directory", "name another file"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, content: str | None, wanted: str, what: str, fix: str) -> None:
    if content is not None:
        (tmp_path / "manyhosts.toml").write_text(content)
    with pytest.raises(ConfigError) as error:
        clusters.read(wanted, tmp_path)
    assert error.value.what.startswith(what)
    assert fix in error.value.fix


def test_values_become_what_would_have_been_typed() -> None:
    said = words(
        {"hosts": ["a", "b"], "nodes": 2, "no-sync": True, "o": {"time": "1:00"}, "env": {"N": 3, "FAST": True}}
    )
    assert said == {"hosts": "a,b", "nodes": 2, "no-sync": True, "o": ("time=1:00",), "env": ("N=3", "FAST=true")}


@pytest.mark.parametrize(
    ("table", "what", "fix"),
    [
        ({"host": "a"}, "there is no option named 'host'", "did you mean 'hosts'?"),
        ({"env": "A=1"}, "env is 'A=1'", 'write it as env = { NAME = "value" }'),
        ({"hosts": {"a": 1}}, "hosts is {'a': 1}", "give a text, a number, true or false"),
        ({"hosts": [1, 2]}, "hosts is [1, 2]", "give a text, a number, true or false"),
    ],
)
def test_slip_of_the_pen_is_named(table: dict[str, object], what: str, fix: str) -> None:
    with pytest.raises(ConfigError) as error:
        words(table)
    assert error.value.what == what
    assert fix in error.value.fix
