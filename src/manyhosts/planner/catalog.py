"""A catalog of machines that could be had: what each kind has, how fast it talks and what it costs.

[dgx]                            # a name of one's own
count = 1                        # machines of this kind, at most
workers = 8                      # devices in each; 1 where left out
speed = 2.5                      # of one device, as a multiple of the one that is measured; 1 where left out
memory = "80 GB"                 # of one device; where a CPU computes, of the machine. As measured where left out
cores = 96                       # as measured where left out
within = "600 GB/s, 0.01 ms"     # between its devices
between = "25 Gbit/s, 0.05 ms"   # from one machine to another
price = 32.77                    # of one machine, an hour, in any currency
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhosts.errors import ConfigError
from manyhosts.planner.group import Group
from manyhosts.planner.measured import Network
from manyhosts.table import nearest
from manyhosts.units import bytes_of

WITHIN = Network(latency_s=2e-5, bytes_per_second=8e9)
"""Where a catalog says nothing: workers of one machine that talk through its memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """Machines of one kind."""

    name: str
    count: int
    """How many there are, at most."""
    workers: int = 1
    """On each, at most: as many as it has devices."""
    between: Network
    within: Network = WITHIN
    speed: float = 1.0
    """Of one device, as a multiple of the measured one."""
    memory_bytes: int = 0
    """Of one device; where a CPU computes, of the machine. 0: as measured."""
    cores: int | None = None
    """Of one machine; None: as measured."""
    hosts_per_machine: int = 1
    """How many of them are hosts of one and the same machine and share its cores: those of a lab, say."""
    price: float | None = None
    """Of one machine, an hour."""
    as_measured: bool = False
    """Whether it is those machines that workers were tried on."""

    def group(self, nodes: int, workers_per_node: int) -> Group:
        """Some of them."""
        return Group(
            nodes=nodes, workers_per_node=workers_per_node, between=self.between, within=self.within,
            speed=self.speed, cores=self.cores, hosts_per_machine=self.hosts_per_machine,
        )  # fmt: skip

    def sizes(self) -> list[tuple[int, int]]:
        """Numbers of machines and of workers on each that are worth a look, the smallest first.

        One machine with 1, 2, 4 … workers, then 2, 4, 8 … machines with 1 and with as many as they have; and the most.
        """
        here = [(1, workers) for workers in _doubling(self.workers)]
        more = [(nodes, each) for nodes in _doubling(self.count)[1:] for each in sorted({1, self.workers})]
        return sorted({*here, *more}, key=lambda size: (size[0] * size[1], size[0]))


def _doubling(most: int) -> list[int]:
    return sorted({*(1 << power for power in range(most.bit_length())), most})


def read(path: Path) -> list[Machines]:
    """The kinds of machines that the TOML file `path` lists, in its order.

    Raises:
        ConfigError: there is no such file, or something in it cannot be.
    """
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as cause:
        reason = cause.strerror if isinstance(cause, OSError) else "it is no text"
        raise ConfigError(f"cannot read {path.name}: {reason}", where=str(path), fix="name another file") from cause
    except tomllib.TOMLDecodeError as cause:
        raise ConfigError(f"{path.name} is no TOML: {cause}", where=str(path), fix="mend that line") from cause
    if not tables:
        raise ConfigError(f"{path.name} lists no machines", where=str(path), fix="write a table for each kind: [NAME]")
    return [_machines(name, table, f"{path}, [{name}]") for name, table in tables.items()]


def _machines(name: str, table: Any, where: str) -> Machines:
    if not isinstance(table, dict):
        raise ConfigError(f"{name} is outside of any table", where=where, fix="write it below a [NAME]")
    if unknown := [key for key in table if key not in _KEYS]:
        fix = f"{nearest(unknown[0], _KEYS)}it may hold: {', '.join(_KEYS)}"
        raise ConfigError(f"there is no {unknown[0]!r} of a machine", where=where, fix=fix)
    count = _integer(table, "count", where, least=1)
    if count is None:
        raise ConfigError(f"{name} lacks count", where=where, fix="say how many there are: count = 8")
    if "between" not in table and count > 1:
        fix = 'say how fast they talk: between = "25 Gbit/s, 0.05 ms"'
        raise ConfigError(f"{name} has {count} machines, and no network between them", where=where, fix=fix)
    within = _network(table, "within", where) or WITHIN
    return Machines(
        name=name,
        count=count,
        workers=_integer(table, "workers", where, least=1) or 1,
        between=_network(table, "between", where) or within,
        within=within,
        speed=_amount(table, "speed", where, above=True) or 1.0,
        memory_bytes=bytes_of(str(table.get("memory", "0")), where=f"{where} memory"),
        cores=_integer(table, "cores", where, least=1),
        price=_amount(table, "price", where, above=False),
    )


_KEYS = ("count", "workers", "speed", "memory", "cores", "within", "between", "price")


def _integer(table: Mapping[str, Any], key: str, where: str, *, least: int) -> int | None:
    value = table.get(key)
    if value is None:
        return None
    if type(value) is not int or value < least:
        raise ConfigError(f"{key} is {value!r}", where=where, fix=f"give an integer of {least} or more")
    return value


def _amount(table: Mapping[str, Any], key: str, where: str, *, above: bool) -> float | None:
    value = table.get(key)
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (above and value == 0):
        raise ConfigError(
            f"{key} is {value!r}", where=where, fix=f"give a number {'above 0' if above else 'from 0 on'}"
        )
    return float(value)


def _network(table: Mapping[str, Any], key: str, where: str) -> Network | None:
    value = table.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        fix = f'write it as {key} = "25 Gbit/s, 0.05 ms"'
        raise ConfigError(f"{key} is {value!r}", where=where, fix=fix)
    return Network.parse(value, where=f"{where} {key}")
