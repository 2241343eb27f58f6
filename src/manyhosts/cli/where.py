"""Where something is to run, as the command line says it: the target, its hosts, their number, the target's options."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from manyhosts.cli.cluster import target_options
from manyhosts.config import clusters
from manyhosts.control import variables
from manyhosts.errors import ConfigError
from manyhosts.hosts import hostfile as ssh_hostfile

_OPTIONS = (
    click.option("--on", "target", metavar="TARGET", help="Where to run it, as for `run`."),
    click.option("--cluster", metavar="NAME|FILE", help="A table of manyhosts.toml, as for `run`."),
    click.option("--hosts", metavar="A,B,C", help="Hosts that ssh reaches; a size of n takes the first n."),
    click.option("--hostfile", metavar="FILE", help="A file with a host on each line."),
    target_options("An option of the target, as for `run`."),
    click.option("--env", multiple=True, metavar="K[=V]", help="A variable for all workers, as for `run`."),
)
_PRICE = click.option("--price", type=float, metavar="P", help="What one machine costs in an hour, in any currency.")


def place_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add what every verb has that runs a script several times: where, and with which variables."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def sizes_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add what every verb has that runs a script at several sizes: where, with which variables, for which price."""
    return place_options(_PRICE(command))


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """The words of the command line, made sense of.

    Raises:
        ConfigError: they contradict each other, or cannot be read.
    """

    target: str | None
    hosts: str | None
    hostfile: str | None
    nodes: str | None
    options: Sequence[str]

    def named(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The hosts that are named, and how many workers each is to have; nothing where that is not said with them."""
        if self.hosts is not None and self.hostfile is not None:
            raise ConfigError("both --hosts and --hostfile are given", where="--hosts", fix="give one of them")
        hosts, slots = ssh_hostfile.in_file(Path(self.hostfile)) if self.hostfile is not None else ((), ())
        if self.hosts is not None:
            hosts = ssh_hostfile.in_words(self.hosts)
        most = self.least_and_most()[1]
        if hosts and most not in (None, len(hosts)):
            raise ConfigError(
                f"--nodes is {self.nodes}, but {len(hosts)} host{'s are' if len(hosts) > 1 else ' is'} named",
                where="--nodes",
                fix="leave --nodes out, or name as many hosts",
            )
        return hosts, slots

    def least_and_most(self) -> tuple[int | None, int | None]:
        """`4` or `2:4`: the fewest nodes, where they may go and come, and the most."""
        if self.nodes is None:
            return None, None
        least, colon, most = self.nodes.rpartition(":")
        if not most.isdecimal() or (colon and not least.isdecimal()):
            raise ConfigError(f"--nodes is {self.nodes}", where="--nodes", fix="give a number, or MIN:MAX")
        return int(least) if colon else None, int(most)

    def target_or(self, hosts: Sequence[str]) -> str:
        """The target; where none is named, ssh for `hosts`, and else this machine."""
        return self.target or ("ssh" if hosts else "local")


def pairs(words: Sequence[str], option: str) -> dict[str, str]:
    """What `option NAME=value`, given several times, says.

    Raises:
        ConfigError: one is written otherwise.
    """
    for word in words:
        if not word.partition("=")[0] or "=" not in word:
            raise ConfigError(f"cannot read {word!r}", where=option, fix=f"write it as {option} NAME=value")
    return dict(word.split("=", 1) for word in words)


def variables_of(words: Sequence[str]) -> dict[str, str]:
    """What `--env` gives to all workers: `NAME=value`, or `NAME` alone with the value that it has here.

    Raises:
        ConfigError: a name alone has no value here, or a variable is one that differs from worker to worker.
    """
    by_name = [word for word in words if "=" not in word]
    if missing := [name for name in by_name if name not in os.environ]:
        raise ConfigError(
            f"{missing[0]!r} has no value here",
            where="--env",
            fix=f"export it before, or write it as --env {missing[0] or 'NAME'}=value",
        )
    given = pairs([f"{word}={os.environ[word]}" if word in by_name else word for word in words], "--env")
    if own := [name for name in variables.OF_ONE_WORKER if name in given]:
        what = f"{own[0]} differs from worker to worker, and --env gives all of them {given[own[0]]!r}"
        raise ConfigError(what, where="--env", fix="leave it out; ranks go by the order of the hosts")
    return given


def table_of(words: Mapping[str, Any]) -> Mapping[str, Any]:
    """The table that `--cluster` names; empty where it names none."""
    return {} if words["cluster"] is None else clusters.read(words["cluster"], Path.cwd())[1]


def hosts_of(words: Mapping[str, Any]) -> tuple[tuple[str, ...], int | None]:
    """The hosts that are named here or in the cluster's table, and how many workers each is to have.

    Raises:
        ConfigError: they are named twice, or are to have different numbers of workers.
    """
    named = {"hosts": words["hosts"], "hostfile": words["hostfile"]}
    table = table_of(words)
    if table and not any(named.values()):
        hosts = table.get("hosts")
        named = {"hosts": ",".join(hosts) if isinstance(hosts, list) else hosts, "hostfile": table.get("hostfile")}
    hosts, slots = Where(target=words["target"], nodes=None, options=(), **named).named()
    each = words["workers_per_node"]
    if each is None and isinstance(table.get("workers-per-node"), int):
        each = table["workers-per-node"]
    if each is None and len(set(slots)) > 1:
        raise ConfigError(
            "the hosts are to have different numbers of workers, so a size is no number of hosts",
            where="--hostfile",
            fix="give --workers-per-node",
        )
    return hosts, each if each is not None or not slots else slots[0]


def price_of(words: Mapping[str, Any]) -> float | None:
    """What one machine costs in an hour; None where that is not said.

    Raises:
        ConfigError: it is no price.
    """
    price: float | None = words["price"]
    if price is not None and not 0 <= price < float("inf"):
        raise ConfigError(f"--price is {price:g}", where="--price", fix="give what a machine costs in an hour")
    return price


def is_here(words: Mapping[str, Any], hosts: Sequence[str]) -> bool:
    """Whether nothing but this machine is named."""
    return not hosts and words["target"] in (None, "local") and words["cluster"] is None


def said_again(words: Mapping[str, Any]) -> list[str]:
    """The target, its table and its options, for `manyhosts run`; its hosts depend on the size."""
    again = [] if words["target"] is None else ["--on", words["target"]]
    again += [] if words["cluster"] is None else ["--cluster", words["cluster"]]
    for word in pairs(words["options"], "-o").items():
        again += ["-o", "=".join(word)]
    return again


def doubling(most: int) -> tuple[int, ...]:
    """1, 2, 4, … and `most`."""
    return (*(2**power for power in range(most.bit_length()) if 2**power < most), most)


def numbers(text: str, option: str) -> tuple[int, ...]:
    """`1,2,4` as numbers, each once.

    Raises:
        ConfigError: it is written otherwise.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError(f"{option} is {text!r}", where=option, fix="give numbers, such as 1,2,4")
    return tuple(dict.fromkeys(int(word) for word in words))
