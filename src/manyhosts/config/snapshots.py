"""When snapshots are made, how many are kept, and where to, besides the run directory."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from manyhosts.config.arguments import OF_SNAPSHOTS, answering
from manyhosts.config.kinds import check_kinds
from manyhosts.errors import ConfigError
from manyhosts.units import Duration


@answering(OF_SNAPSHOTS)
@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshots:
    """A snapshot `every` so often, and the newest `keep` of them on disk.

    `every` is a duration (`"500 steps"`, `"1 epoch"`, `"10 min"`, or several joined by `or`). The best model is kept
    next to them, in `best/`. `to` is a remote copy that each one is copied to during training: an object store such as
    `"s3://bucket/path"`, or a folder. A run whose disk is empty continues from there. One run, one address.
    """

    every: str = "10 min"
    keep: int = 3
    to: str | None = None

    def __post_init__(self) -> None:
        check_kinds(self, prefix="snapshots.")
        Duration.parse(self.every, where="snapshots.every")
        if self.keep < 1:
            raise ConfigError(
                f"keep is {self.keep}, but a run needs at least one snapshot to continue from",
                where="snapshots.keep",
                fix="set it to 1 or more; 3 is usual, so that a damaged one has others after it",
            )
        if self.to is not None:
            _check_address(self.to)


def is_address(text: str) -> bool:
    """Whether `text` is the address of a store, such as `s3://bucket/path`, and not a folder's path."""
    scheme, sign, _ = text.partition("://")
    return bool(sign) and scheme.replace("+", "").isalnum()


def _check_address(to: str) -> None:
    if not to.strip():
        raise ConfigError(
            "the remote copy has no name", where="snapshots.to", fix='give "s3://bucket/path", or a folder'
        )
    if is_address(to) and urlsplit(to).password:
        raise ConfigError(
            "there is a password in the address, which every run writes to its record",
            where="snapshots.to",
            fix="take it out: stores find credentials in the environment or in their own files, and ssh its keys",
        )
