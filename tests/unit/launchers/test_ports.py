"""A range of ports: read, kept to, and refused in a sentence where it is none or too narrow."""

from __future__ import annotations

import ctypes
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from manyhosts.cluster import ports as port_range
from manyhosts.cluster.ports import VARIABLE, Range, needed
from manyhosts.control.job import Job
from manyhosts.errors import ConfigError, LaunchError
from manyhosts.hosts import ports, remote_probe

HERE = "127.0.0.1"


@pytest.fixture
def three() -> Iterator[tuple[Range, list[socket.socket]]]:
    """Three ports in a row that were free, and what listens at the first two of them."""
    with ExitStack() as stack:
        for first in range(21000, 32000, 3):
            try:
                held = [stack.enter_context(socket.create_server((HERE, first + number))) for number in range(3)]
            except OSError:
                continue
            held.pop().close()
            yield Range(first, first + 2), held
            return


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("29500", "cannot read '29500' as a range of ports"),
        ("29500:29600", "cannot read '29500:29600' as a range of ports"),
        ("-5-10", "cannot read '-5-10' as a range of ports"),
        ("29600-29500", "the range of ports 29600-29500 ends before it begins"),
        ("80-443", "the range of ports 80-443 has ports that a run cannot open"),
        ("29500-70000", "the range of ports 29500-70000 has ports that a run cannot open"),
    ],
)
def test_what_is_no_range_is_refused(words: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Job(program="x.py", folder=tmp_path, run_dir=tmp_path, ports=words)
    assert caught.value.what == what
    assert "--ports 29500-29600" in caught.value.fix


def test_what_listens_takes_the_ports_of_the_range_that_are_free(three: tuple[Range, list[socket.socket]]) -> None:
    chosen, held = three
    with ports.listen(HERE, chosen, backlog=1, what="the store of the workers") as listening:
        assert listening.getsockname()[1] == chosen.last
        with pytest.raises(LaunchError) as caught:
            ports.listen(HERE, chosen, backlog=1, what="the store of the workers")
        assert caught.value.what == f"none of the ports {chosen} is free for the store of the workers"
        assert remote_probe.listen(HERE, [chosen.first, chosen.last], held) == 0
    assert remote_probe.listen(HERE, [chosen.first, chosen.last], held) == chosen.last
    held.pop().close()
    ports.see_that_enough_are_free(HERE, chosen, 1)
    with pytest.raises(LaunchError) as caught:
        ports.see_that_enough_are_free(HERE, chosen, needed(workers=1))
    assert caught.value.what == f"1 of the ports {chosen} are free, and up to 4 are needed"


def image(machine: int, kind: int, imported: bytes = b"bind") -> tuple[bytes, int]:
    """A library for `machine` as it is in memory, which calls one function, and where it keeps that one's address."""
    names = b"\0socket\0" + imported + b"\0"
    header, dynamic, symbols, strings, jumps, entry = 0, 128, 256, 384, 512, 768
    made = bytearray(1024)
    struct.pack_into(
        "<16sHHIQQQIHHHHHH", made, header, b"\x7fELF\x02\x01\x01", 3, machine, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0
    )
    struct.pack_into("<IIQQQQQQ", made, 64, 2, 6, dynamic, dynamic, dynamic, 80, 80, 8)  # PT_DYNAMIC
    struct.pack_into("<10Q", made, dynamic, 5, strings, 6, symbols, 2, 72, 23, jumps, 0, 0)
    struct.pack_into("<IBBHQQIBBHQQ", made, symbols + 24, 1, 18, 0, 0, 0, 0, 8, 18, 0, 0, 0, 0)
    made[strings : strings + len(names)] = names
    entries = [(entry - 16, (1 << 32) | kind), (entry - 8, (2 << 32) | 1032), (entry, (2 << 32) | kind)]
    for number, (place, info) in enumerate(entries):  # the second is no call, but of the same name
        struct.pack_into("<QQq", made, jumps + 24 * number, place, info, 0)
    return bytes(made), entry


@pytest.mark.parametrize(("machine", "kind"), [(62, 7), (183, 1026)], ids=["x86_64", "aarch64"])
def test_entry_of_a_called_function_is_found_in_libraries_of_both_machines(machine: int, kind: int) -> None:
    made, entry = image(machine, kind)
    memory = ctypes.create_string_buffer(made, len(made))
    base = ctypes.addressof(memory)
    assert port_range.entry_in(base, "bind") == base + entry
    assert port_range.entry_in(base, "listen") == 0
    memory.raw = image(machine, kind + 1)[0]
    assert port_range.entry_in(base, "bind") == 0, "another kind of entry is left alone"
    memory.raw = image(40, kind)[0]
    assert port_range.entry_in(base, "bind") == 0, "a machine that is not known"


GLOO = f"""
import os, psutil, torch.distributed as dist
from manyhosts.cluster import ports
ports.limit_gloo()
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
found = psutil.Process().net_connections("tcp")
print([each.laddr.port for each in found if each.status == psutil.CONN_LISTEN], os.environ["{VARIABLE}"], flush=True)
try:
    dist.new_group()
except RuntimeError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the ports of Gloo cannot be chosen")
def test_gloo_takes_the_port_that_is_left_and_fails_where_none_is(three: tuple[Range, list[socket.socket]]) -> None:
    chosen, _ = three
    words = [sys.executable, "-c", GLOO]
    said = subprocess.run(words, env={"PATH": "", VARIABLE: str(chosen)}, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    first, second = said.stdout.splitlines()
    assert first == f"[{chosen.last}] {chosen}"
    assert "Address already in use" in second
