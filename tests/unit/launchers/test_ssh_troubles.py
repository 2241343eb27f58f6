"""What ssh shows when it fails is said as what is the matter with the host."""

from __future__ import annotations

import pytest

from manyhosts.hosts.connection import Unreachable, trouble

LOST = "host far was reached, and does not answer any more: it is off, or cut off"


@pytest.mark.parametrize(
    ("code", "said", "expected"),
    [
        (255, "", LOST),
        (255, "Welcome to far\nTimeout, server far not responding.\n", LOST),
        (255, "ssh: connect to host far port 22: Connection timed out", "host far does not answer"),
        (255, "Bad configuration option: fra", "ssh to host far failed: Bad configuration option: fra"),
        (1, "", "ssh to host far failed: exit code 1"),
    ],
)
def test_host_that_was_cut_off_is_told_apart_from_what_else_fails(code: int, said: str, expected: str) -> None:
    error = trouble("far", code, said, ["python3"])
    assert error.what == expected
    assert isinstance(error, Unreachable) is (expected == "host far does not answer")


@pytest.mark.parametrize(
    ("host", "said", "typed"),
    [
        ("me@far:2222", "me@far: Permission denied (publickey).", "`ssh-copy-id -p 2222 me@far`"),
        ("far", "Permission denied (publickey).", "`ssh-copy-id far`"),
        ("me@far:2222", "REMOTE HOST IDENTIFICATION HAS CHANGED!", "`ssh-keygen -R '[far]:2222'`"),
        ("me@far", "Host key verification failed.", "`ssh me@far`"),
    ],
)
def test_what_is_to_be_typed_is_written_as_ssh_takes_it(host: str, said: str, typed: str) -> None:
    assert typed in trouble(host, 255, said, ["python3"]).fix
