"""Reads what others on the same network and on the same host could read of a run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from manyhosts.lab import Host

_LISTEN = """
import socket, sys
everything = socket.ntohs(3)  # ETH_P_ALL
listening = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, everything)
listening.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE: no packet is lost on a busy machine
print("listening", flush=True)
while True:
    sys.stdout.buffer.write(listening.recv(1 << 17))
    sys.stdout.buffer.flush()
"""


@contextmanager
def recorded(host: Host, into: Path) -> Iterator[Path]:
    """Within, everything that goes over the network interfaces of `host` is written to the file `into`."""
    with into.open("w") as file:
        listener = host.start([sys.executable, "-u", "-c", _LISTEN], stdout=file, stderr=subprocess.STDOUT)
    try:
        while not into.read_bytes().startswith(b"listening\n"):
            assert listener.poll() is None, into.read_text()
        yield into
    finally:
        host.end(listener)
        listener.communicate()


def told_by_processes(host: Host, secret: str, kind: str) -> list[str]:
    """The processes of `host` that have `secret` in their `environ` or their `cmdline`."""
    found = []
    for process, words in host.processes().items():
        try:
            if secret.encode() in Path(f"/proc/{process}/{kind}").read_bytes():
                found.append(words)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
    return found
