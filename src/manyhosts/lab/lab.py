"""Makes the hosts of a lab and removes them again. A second terminal sends orders to a socket in the lab's folder."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from manyhosts.errors import ConfigError
from manyhosts.lab import folder
from manyhosts.lab.folder import Folder, clean
from manyhosts.lab.host import Host, HostSpec
from manyhosts.lab.network import Switch, rate_in_words

DESK = "desk"
MOST_HOSTS = 64
_PROGRAMS = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "pivot_root": "util-linux",
    "ip": "iproute2",
    "tc": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
}
"""What a lab is built with, and the Debian package that brings it."""


class Lab:
    """Hosts, and the desk that the user sits at: a host on the same switch that has this machine's disk."""

    def __init__(self, folder: Folder, hosts: list[Host], desk: Host) -> None:
        self.folder, self.hosts, self.desk = folder, hosts, desk

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __len__(self) -> int:
        return len(self.hosts)

    @property
    def names(self) -> list[str]:
        """What the hosts are called, in order."""
        return [host.name for host in self.hosts]

    def host(self, name: str) -> Host:
        """The host of that name.

        Raises:
            ConfigError: there is none.
        """
        for host in self.hosts:
            if host.name == name:
                return host
        raise ConfigError(
            f"this lab has no host {name!r}", where=self.folder.name, fix=f"it has {', '.join(self.names)}"
        )


@contextmanager
def lab(
    hosts: int = 4,
    *,
    bandwidth: str = "1gbit",
    prefix: str = "lab",
    empty: tuple[str, ...] = (),
    shown: tuple[str, ...] = (),
    shared: Mapping[str, Sequence[int]] | None = None,
) -> Iterator[Lab]:
    """Make `hosts` hosts named `prefix`1, `prefix`2, …, each on a cable of `bandwidth` in each direction.

    `empty` are more folders, without the leading slash, that are every host's own and empty; `shown` are folders that
    hosts see as they are here, read-only, wherever they lie. `shared`, path → numbers of hosts from 0, is a disk that
    these hosts have in common at that path, and the desk has not. Everything is gone when the block ends, and when
    this process is ended by SIGTERM or SIGHUP; where it is killed, `clean` removes the files, which the next lab does.

    Raises:
        ConfigError: this machine, or this user, cannot make one.
    """
    check(hosts, bandwidth)
    clean()
    with _unwinding_when_ended(), ExitStack() as undo:
        folder = Folder()
        undo.callback(folder.remove)
        names = [f"{prefix}{number}" for number in range(1, hosts + 1)]
        addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, start=1)}
        addresses[DESK] = "10.77.0.254"
        folder.write(addresses, DESK)
        (folder.path / "empty").mkdir()
        disks = {path: folder.path / f"disk{number}" for number, path in enumerate(shared or {})}
        for disk in disks.values():
            disk.mkdir()
        switch = Switch()
        undo.callback(switch.close)
        made = []
        for number, (name, address) in enumerate(addresses.items()):
            spec = HostSpec(
                name=name,
                address=address,
                rate=bandwidth,
                port=f"port{number}",
                folder=folder.path,
                is_desk=name == DESK,
                empty=empty,
                shown=shown,
                shared={path: str(disks[path]) for path, having in (shared or {}).items() if number in having},
            )
            made.append(Host(spec, switch))
            undo.callback(made[-1].kill)
        for host in made:
            host.wait_until_ready()
        yield Lab(folder, made[:-1], made[-1])


@contextmanager
def _unwinding_when_ended() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP end the block as Ctrl-C does, where nothing else has been said about them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]

    def end(number: int, _frame: FrameType | None) -> None:
        for each in ours:
            signal.signal(each, signal.SIG_IGN)  # one sender may send both, and several times
        raise SystemExit(128 + number)

    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def check(hosts: int, bandwidth: str) -> None:
    """See that a lab can be made here.

    Raises:
        ConfigError: it cannot; the error says what is missing.
    """
    rate_in_words(bandwidth)
    if not 1 <= hosts <= MOST_HOSTS:
        raise ConfigError(f"--hosts is {hosts}", where="--hosts", fix=f"give 1 to {MOST_HOSTS}")
    if reason := why_not():
        raise ConfigError(reason.what, where=reason.where, fix=reason.fix)


def why_not() -> ConfigError | None:
    """Why there can be no lab on this machine, or None where there can."""
    if sys.platform != "linux":
        return ConfigError(
            f"a lab is made of Linux's namespaces, and this is {sys.platform}",
            where="manyhosts lab",
            fix="use a Linux machine, or rehearse several nodes with `manyhosts run --nodes 4`",
        )
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [program for program in _PROGRAMS if shutil.which(program, path=path) is None]
    if missing:
        packages = sorted({_PROGRAMS[program] for program in missing})
        return ConfigError(
            f"a lab needs {', '.join(missing)}", where="PATH", fix=f"as root: apt-get install {' '.join(packages)}"
        )
    if os.geteuid() != 0:
        return ConfigError(
            "only root may make the hosts of a lab", where="manyhosts lab", fix="start it with sudo, or as root"
        )
    return None


ORDERS: Mapping[str, Callable[[Host, str], None]] = {
    "cut": lambda host, _: host.cut(),
    "mend": lambda host, _: host.mend(),
    "freeze": lambda host, _: host.freeze(),
    "thaw": lambda host, _: host.thaw(),
    "slow": lambda host, rate: host.slow(rate),
    "kill": lambda host, _: host.kill(),
    "boot": lambda host, _: host.boot(),
}


_PATIENCE_S = 5.0
"""How long one that connects may take to give its order: the others wait for it."""
_LONGEST_ORDER = 1 << 16


class Control:
    """Takes orders for `lab` on a thread of its own, until `close`."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(str(lab.folder.control))
        self._listening.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more orders."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError, ValueError):  # the sender of the order may be gone
                connection.settimeout(_PATIENCE_S)
                with connection.makefile("rw") as stream:
                    stream.write(json.dumps(self._obey(stream.readline(_LONGEST_ORDER))) + "\n")

    def _obey(self, line: str) -> dict[str, Any]:
        try:
            order = json.loads(line)
            if order["do"] == "list":
                return {"hosts": {host.name: host.address for host in self._lab}}
            ORDERS[order["do"]](self._lab.host(order["host"]), order["rate"])
        except ConfigError as error:
            return {"what": error.what, "where": error.where, "fix": error.fix}
        except (ValueError, LookupError, TypeError, RecursionError, OSError) as error:
            return {"what": f"that could not be done: {error}", "where": "", "fix": ""}
        return {}


def send_order(order: str, host: str = "", *, rate: str = "", name: str = "") -> dict[str, Any]:
    """Give an order to the lab called `name`, or to the only one. Returns its answer.

    Raises:
        ConfigError: there is no lab, there are several, or it refused.
    """
    place = _chosen(name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(str(place / "control"))
        except OSError as cause:
            raise ConfigError(
                f"this lab takes no orders: {cause.strerror}", where=str(place), fix="`manyhosts lab clean` removes it"
            ) from cause
        with connection.makefile("rw") as stream:
            stream.write(json.dumps({"do": order, "host": host, "rate": rate}) + "\n")
            stream.flush()
            answer: dict[str, Any] = json.loads(stream.readline() or "{}")
    if "what" in answer:
        raise ConfigError(answer["what"], where=answer["where"], fix=answer["fix"])
    return answer


def _chosen(name: str) -> Path:
    labs = {path.name: path for path in folder.living() if (path / "control").exists()}
    if not labs:
        raise ConfigError("there is no lab on this machine", where=str(folder.PLACE), fix="`manyhosts lab` makes one")
    if name and name not in labs:
        raise ConfigError(f"there is no lab {name!r}", where=str(folder.PLACE), fix=f"there are: {', '.join(labs)}")
    if not name and len(labs) > 1:
        raise ConfigError(
            f"there are {len(labs)} labs on this machine", where=str(folder.PLACE), fix=f"--lab {' or '.join(labs)}"
        )
    return labs[name or next(iter(labs))]
