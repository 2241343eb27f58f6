"""The switch of a lab and the cables that hang on it, in a namespace of their own: nothing is seen of them here."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from manyhosts.errors import ConfigError

_BRIDGE = "switch"


class Switch:
    """A bridge that every host of a lab hangs on by a cable of its own, as fast as it was asked for."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo ready; exec cat > /dev/null"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None, "it was asked for as a pipe"
        self._process.stdout.readline()
        self._ip([f"link add {_BRIDGE} type bridge", f"link set {_BRIDGE} up"])

    def plug_in(self, port: str, process: int, address: str, rate: str) -> None:
        """Lay a cable of `rate` from `port` to the host whose first process is `process`, as its eth0."""
        hardware = "02:6c:" + ":".join(f"{int(part):02x}" for part in address.split("."))  # kept when it boots again
        self._ip(
            [
                f"link add {port} type veth peer name eth0 address {hardware} netns {process}",
                f"link set {port} master {_BRIDGE}",
                f"link set {port} up",
            ]
        )
        inside(
            process,
            ["ip", "-batch", "-"],
            [
                "link set lo up",
                f"addr add {address}/24 dev eth0",
                "link set eth0 up",
                f"addr add {sixth(address)}/64 dev eth0 nodad",
            ],
        )
        self.shape(port, process, rate)

    def shape(self, port: str, process: int, rate: str) -> None:
        """Make a cable as fast as `rate`, in both directions."""
        wish = f"root tbf rate {rate_in_words(rate)} burst 256kb latency 100ms"
        inside(self._process.pid, ["tc", "-batch", "-"], [f"qdisc replace dev {port} {wish}"])
        inside(process, ["tc", "-batch", "-"], [f"qdisc replace dev eth0 {wish}"])

    def cut(self, port: str) -> None:
        """Pull the cable out of the switch."""
        self._ip([f"link set {port} down"])

    def mend(self, port: str) -> None:
        """Put the cable back."""
        self._ip([f"link set {port} up"])

    def unplug(self, port: str) -> None:
        """Take the cable away. At once, while a namespace with unsent data would keep its end for minutes."""
        self._ip([f"link del {port}"])

    def close(self) -> None:
        """End the switch, and every cable with it."""
        self._process.communicate(b"")

    def _ip(self, lines: Sequence[str]) -> None:
        inside(self._process.pid, ["ip", "-batch", "-"], lines)


def sixth(address: str) -> str:
    """The IPv6 address of the host that has the IPv4 one `address`."""
    return f"fd77::{address.rpartition('.')[2]}"


def inside(process: int, command: Sequence[str], lines: Sequence[str]) -> None:
    """Feed `lines` to `command` in the network of `process`.

    Raises:
        ConfigError: it refused.
    """
    words = ["nsenter", "--target", str(process), "--net", *command]
    done = subprocess.run(words, input="\n".join(lines) + "\n", capture_output=True, text=True)
    if done.returncode != 0:
        raise ConfigError(
            f"this machine cannot lay the cables of a lab: {done.stderr.strip()}",
            where=f"{' '.join(command)}: {'; '.join(lines)}",
            fix="a lab needs bridge, veth and tbf in the kernel, as every distribution has them",
        )


def rate_in_words(text: str) -> str:
    """`text` as tc understands it.

    Raises:
        ConfigError: it is no rate.
    """
    if not re.fullmatch(r"[1-9]\d*(\.\d+)?[kmg]bit", text.lower()):
        raise ConfigError(f"{text!r} is no bandwidth", where="--bandwidth", fix="write it as 1gbit, 100mbit or 500kbit")
    return text.lower()
