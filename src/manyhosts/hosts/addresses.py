"""Where this machine is reached from others, and by which interface: what its routes say, never a guess."""

from __future__ import annotations

import fcntl
import re
import socket
import struct
from collections import Counter
from collections.abc import Sequence

from manyhosts.errors import LaunchError
from manyhosts.hosts import remote_probe

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915


def listen(address: str, port: int, *, backlog: int) -> socket.socket:
    """A socket that listens at `address`, which may be one of IPv6. Port 0 is any free one.

    Raises:
        OSError: it is none of this machine, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=backlog)


def may_be_one(address: str) -> bool:
    """Whether that can be an address, or a host name."""
    return re.fullmatch(r"[\w.:%-]{1,253}", address, re.ASCII) is not None


def towards(hosts: Sequence[str]) -> str:
    """Where a head on this machine listens, so that `hosts` reach it: the address that most are talked to from.

    Raises:
        LaunchError: a name does not resolve.
    """
    ways = Counter(remote_probe.way_to(_resolved(host)) for host in hosts)
    for way in [way for way, _ in ways.most_common() if way and way != "::1" and not way.startswith("127.")]:
        return way
    return LOOPBACK


def place(address: str, port: int) -> str:
    """Both as one word: 10.0.0.1:29400, or [fd00::1]:29400."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def address_and_port(place: str) -> tuple[str, int]:
    """What `place` has put together; a name may be given for the address."""
    address, _, port = place.rpartition(":")
    return address.strip("[]"), int(port)


def interface_of(address: str) -> str:
    """The interface that has `address`, of IPv4 or IPv6; empty where none has."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        written = socket.inet_ntop(family, socket.inet_pton(family, address))  # there are several ways in IPv6
    except OSError:  # a name
        return ""
    return next((each["name"] for each in remote_probe.interfaces() if each["address"] == written), "")


def address_on(interface: str) -> str:
    """The IPv4 address of an interface of this machine.

    Raises:
        LaunchError: there is no such interface, or it has none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError as cause:
            raise LaunchError(
                f"the interface {interface} has no address: {cause.strerror}",
                where=f"host {socket.gethostname()}",
                fix="see `ip address` there, and whether that is how its network is called",
            ) from cause
    return socket.inet_ntoa(answer[20:24])


def _resolved(host: str) -> str:
    try:
        found = socket.getaddrinfo(host.rpartition("@")[2].strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as cause:
        raise LaunchError(
            f"the name of host {host} does not resolve",
            where=f"host {host}: {cause.strerror}",
            fix="see how it is written, and that /etc/hosts or the name server knows it",
        ) from cause
    return str(found[0][4][0])
