"""A `torch.distributed.Store` whose values the head keeps: a rendezvous over the channel of their agents.

No one else can read or change what they exchange there, and no port is opened for it. `docs/decisions/0060` says
for which groups it is used.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from manyhosts.cluster.store_line import StoreGone, StoreLine, StoreTimeout


class ChannelStore(dist.Store):  # type: ignore[name-defined,misc]  # torch names it public all the same
    """The rendezvous of one group of workers. Code that uses it in a process group keeps it: C++ calls these methods.

    A worker of Gloo asks for the address of each worker by itself, twice: to wait for it, and to have it. Where it is
    known how many there are (`expecting`), the first such question is one for all of them, and the others are answered
    here.

    Every method raises `dist.DistStoreError` where the group has lost a worker, or where what is waited for does not
    come in time.
    """

    def __init__(self, line: StoreLine, timeout: timedelta) -> None:
        """`timeout` is how long `get` and `wait` wait where no time is given."""
        super().__init__()
        self._line, self._timeout = line, timeout
        self._clones: list[ChannelStore] = []
        self._expected = [0]
        """How many workers the group has that is being made, for the clones, too; 0 where it is not known."""
        self._sizes: dict[str, int] = {}
        """How many workers put something at a name that begins so, and ends in their rank: this one has, too."""
        self._known: dict[str, bytes] = {}
        """What has come of the others and was not asked for yet. It is handed out once."""

    def close(self) -> None:
        """Have those that wait wait no more, in any thread."""
        self._line.close()

    def clone(self) -> ChannelStore:
        """The same values, for C++ to use, too."""
        self._clones.append(ChannelStore(self._line, self._timeout))
        self._clones[-1]._expected = self._expected
        return self._clones[-1]

    @contextmanager
    def expecting(self, size: int) -> Iterator[None]:
        """While a group of `size` workers is made through this store."""
        self._expected[0] = size
        try:
            yield
        finally:
            self._expected[0] = 0

    def set_timeout(self, timeout: timedelta) -> None:
        """How long `get` and `wait` wait from now on."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """How long `get` and `wait` wait where no time is given."""
        return self._timeout

    def set(self, key: str, value: bytes | str) -> None:
        """Put `value` there, in place of what was there."""
        if self._expected[0] and (begin := _before_rank(key)):
            self._sizes[begin] = self._expected[0]
        self._ask("set", values={key: _text(value)})

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """The same for several keys."""
        self._ask("set", values=dict(zip(keys, map(_text, values), strict=True)))

    def get(self, key: str) -> bytes:
        """What is there, when somebody has put something there."""
        return self._known.pop(key) if self._has(key) else self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The same for several keys."""
        return [b64decode(text) for text in self._ask("get", names=list(keys))]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until somebody has put something at all of `keys`."""
        if len(keys) != 1 or not self._has(keys[0], timeout):
            self._ask("wait", timeout, names=list(keys))

    def _has(self, key: str, timeout: timedelta | None = None) -> bool:
        """Whether what every worker puts at a name like `key` is here, after it was asked for once."""
        begin = _before_rank(key)
        if key not in self._known and (size := self._sizes.pop(begin, 0)):
            texts = self._ask("get_all", timeout, begin=begin, size=size)
            self._known |= {f"{begin}{rank}": b64decode(text) for rank, text in enumerate(texts)}
        return key in self._known

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first. Returns the sum."""
        return int(self._ask("add", name=key, amount=int(amount)))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Put `desired` there if `expected` is there, or nothing while that is empty. Returns what is there then."""
        return b64decode(self._ask("compare_set", name=key, expected=_text(expected), desired=_text(desired)))

    def append(self, key: str, value: bytes | str) -> None:
        """Put `value` after what is there."""
        self._ask("append", name=key, value=_text(value))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether there is something at all of `keys`."""
        return bool(self._ask("check", names=list(keys)))

    def delete_key(self, key: str) -> bool:
        """Take away what is there. Returns whether there was something."""
        return bool(self._ask("delete", name=key))

    def num_keys(self) -> int:
        """At how many keys there is something."""
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        """The keys at which there is something."""
        return [str(name) for name in self._ask("names")]

    def has_extended_api(self) -> bool:
        """Whether there are `append`, `multi_get` and `multi_set`."""
        return True

    def _ask(self, do: str, timeout: timedelta | None = None, /, **fields: Any) -> Any:
        try:
            return self._line.ask(do, (timeout or self._timeout).total_seconds(), **fields)
        except StoreGone as gone:
            raise dist.DistStoreError(f"some workers of this group are gone: {gone}") from gone
        except StoreTimeout as late:
            awaited = ", ".join(fields.get("names", ())) or fields.get("begin", do)
            raise dist.DistStoreError(f"workers did not come to the rendezvous: {late} ({awaited})") from late


def _before_rank(key: str) -> str:
    """What is before the number at the end of `key`; nothing where there is none."""
    begin, slash, rank = key.rpartition("/")
    return begin + slash if rank.isdecimal() else ""


def _text(value: bytes | str) -> str:
    return b64encode(value.encode() if isinstance(value, str) else bytes(value)).decode()
