"""Hosts of a lab fork their fork servers from the tests' own process; what is forked is on the host all the same."""

from __future__ import annotations

from pathlib import Path

from remote import run

from manyhosts.lab import Lab

SHOWS = """
    import os, socket, sys
    loaded = "sklearn.datasets" in sys.modules
    import torch
    address = socket.gethostbyname(socket.gethostname())
    with open("/root/here", "a") as file:
        file.write("was here")
    print(os.uname().nodename, address, os.readlink("/proc/self") == str(os.getpid()), loaded)
"""


def test_what_is_forked_for_a_host_has_its_name_its_address_its_processes_and_its_disk(
    four: Lab, tmp_path: Path
) -> None:
    ended = run(four, tmp_path, SHOWS, "--hosts", "lab1,lab2", "--no-prefix")
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == ["lab1 10.77.0.1 True True", "lab2 10.77.0.2 True True"]
    for host in four:
        assert host.path("/root/here").exists() is (host.name in ("lab1", "lab2"))
    assert not Path("/root/here").exists()
