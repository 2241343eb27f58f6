"""Which of its interfaces a host uses to talk to the others: the one that its routes lead through, never a guess."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from manyhosts.errors import ConfigError

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""What the libraries that carry the data read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interface:
    """One interface of a host."""

    name: str
    address: str
    kind: str = ""
    """`wireguard` where everything on it is encrypted."""


def with_address(interfaces: Sequence[Mapping[str, str]], address: str) -> Interface | None:
    """The interface that has `address`, from the facts of a host."""
    for one in interfaces:
        if one["address"] == address:
            return Interface(name=one["name"], address=address, kind=one["kind"])
    return None


def use(name: str, variables: MutableMapping[str, str]) -> None:
    """Have Gloo and NCCL use the interface of that name, where `variables` do not say another."""
    for variable in VARIABLES:
        variables.setdefault(variable, name)


def require_encryption(chosen: Mapping[str, Interface]) -> None:
    """See that everything between the hosts (name → its interface) is encrypted.

    Raises:
        ConfigError: the link of a host is not.
    """
    for host, interface in chosen.items():
        if interface.kind != "wireguard":
            raise ConfigError(
                f"--encrypt required, but host {host} talks to the others over {interface.name}"
                f" ({interface.address}), which is no encrypted link",
                where=f"host {host}",
                fix="join the hosts by WireGuard and name them by the addresses that they have on it:"
                " see docs/security.md",
            )
