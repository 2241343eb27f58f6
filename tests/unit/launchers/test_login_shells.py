"""What a host's start files say, ask, set or end, as an ssh that is bash on this machine has it: obeyed or named."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from manyhosts.errors import LaunchError
from manyhosts.hosts.connection import Connection

SSH = """#!/bin/bash
. {login}
eval "${{!#}}"
"""


@pytest.fixture
def reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, object]]:
    """The facts of a host whose start file is this."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "ssh").write_text(SSH.format(login=tmp_path / "login"))
    (tmp_path / "ssh").chmod(0o755)

    def reach(login: str) -> dict[str, object]:
        (tmp_path / "login").write_text(login)
        connection = Connection("far", tmp_path, [sys.executable])
        try:
            return connection.facts()
        finally:
            connection.close()

    return reach


@pytest.mark.parametrize(
    "login",
    [
        "printf 'Welcome'",
        r"printf '\e]0;far\a\e[?2004h'",
        r"printf 'manyhosts: {\r'; printf '\0\377'",
        "echo one; printf two >&2; printf three",
        "set -r",
        "read -t 0",
        "cat < /dev/null; unset HOME",
    ],
)
def test_what_a_login_says_is_not_taken_for_an_answer(login: str, reach: Callable[[str], dict[str, object]]) -> None:
    assert reach(login)["executable"] == sys.executable


def test_start_file_that_is_slow_is_waited_for(reach: Callable[[str], dict[str, object]]) -> None:
    assert reach("sleep 6")["executable"] == sys.executable


@pytest.mark.parametrize(
    ("login", "expected"),
    [
        ("read answer", "the login shell of host far reads standard input itself"),
        ("head -c 100 > /dev/null", "the login shell of host far reads standard input itself"),
        ("cat", "the login shell of host far reads standard input itself"),
        ("tee /dev/null", "the login shell of host far reads standard input itself"),
        ("cat > /dev/null", "the login shell of host far reads standard input itself"),
        ("while read -r line; do :; done", "the login shell of host far reads standard input itself"),
        ("exit 0", "the login shell of host far ends before it runs our command"),
        ("exec true", "the login shell of host far ends before it runs our command"),
        (
            "sh() { echo rbash: sh: command not found >&2; exit 127; }",
            "is a restricted one (rbash)",
        ),
        ("echo 'rbash: /bin/sh: restricted: cannot specify / in command names' >&2; exit 1", "restricted one (rbash)"),
        ("export PYTHONHOME=/opt", "Python does not start on host far: PYTHONHOME, set there for every login,"),
    ],
)
def test_start_file_that_lets_nothing_run_is_named(
    login: str, expected: str, reach: Callable[[str], dict[str, object]]
) -> None:
    with pytest.raises(LaunchError) as raised:
        reach(login)
    assert expected in raised.value.what
    assert "there" in (raised.value.fix or "")
