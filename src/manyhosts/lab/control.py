"""How a second terminal reaches a lab: its owner takes orders at a socket in the lab's folder."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from manyhosts.errors import ConfigError
from manyhosts.lab import folder
from manyhosts.lab.host import Host
from manyhosts.lab.lab import Lab

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
