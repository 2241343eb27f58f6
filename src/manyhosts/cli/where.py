"""Where something is to run, as the command line says it: the target, its hosts, their number, the target's options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from manyhosts.errors import ConfigError
from manyhosts.hosts import hostfile as ssh_hostfile


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
                f"--nodes is {most}, but {len(hosts)} hosts are named", where="--nodes", fix="leave --nodes out"
            )
        return hosts, slots

    def least_and_most(self) -> tuple[int | None, int | None]:
        """`4` or `2:4`: the fewest nodes, where they may go and come, and the most."""
        if self.nodes is None:
            return None, None
        least, colon, most = self.nodes.rpartition(":")
        if not most.isdigit() or (colon and not least.isdigit()):
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
