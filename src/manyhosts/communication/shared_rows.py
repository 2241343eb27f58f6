"""Short rows of numbers between workers of one host, through memory that they share, in place of Gloo's sockets.

A small exchange over Gloo costs a tenth of a millisecond and more, nearly all of it for waking threads; a model with
BatchNorm in every block makes dozens of them in each step, and none can be hidden behind computing. Here a worker
writes its row and a number after it, and reads the rows of the others when their numbers are as high.

Each worker has two rows, used in turn: the next but one is written when all others have the number of the next,
and those had read the one before. On x86 what one core writes is seen by others in that order; machines of other kinds
exchange by Gloo. A worker holds a lock on its byte of the file, which the system lets go of when the worker ends,
however it ends: so those who wait for it notice. The file never has a name, so that nothing of it is left where
all of them are killed: the others open it by way of the first one's process.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import platform
import secrets
import time
import weakref
from typing import cast

import torch
from torch import Tensor

from manyhosts.communication.collectives import Collectives
from manyhosts.errors import CommunicationError

_NAME = "manyhosts-rows-"
_LINE = 64
"""Bytes that cores exchange at once: numbers of different workers are that far from each other."""
_SPINS = 300
"""Looks before a core is given to others; about 50 microseconds."""
_YIELD_S = 0.002
"""How long a waiting worker gives its core away only to come back at once; then it sleeps between two looks."""
_SLEEP_S, _LOOK_S = 0.0002, 0.05
"""How often it sees whether those whom it waits for are alive."""
_TOLD_BYTES = 64
"""What the first one sends about it, as words: its process, the descriptor there, and the name of this memory."""


def is_possible() -> bool:
    """Whether workers of this host can share memory in the order that is needed."""
    return platform.machine().lower() in ("x86_64", "amd64", "i686") and hasattr(os, "memfd_create")


class SharedRows:
    """Rows of up to `length` numbers, one of each member. Made by `among`."""

    def __init__(self, members: Collectives, descriptor: int, length: int, timeout_s: float) -> None:
        """Map the file of `descriptor`, which has the size `bytes_for` and is this one's from now on."""
        size = members.size
        self.members, self.rank, self.size, self.length = members, members.rank, size, length
        self.timeout_s = timeout_s
        self._file = descriptor
        self.close = weakref.finalize(self, os.close, descriptor)
        """Lets go of the file, and so of this worker's lock, once: also where this object is gone."""
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self.rank)
        memory = mmap.mmap(self._file, bytes_for(size, length))
        self._numbers = memoryview(memory).cast("q")
        self._places = [rank * _LINE // 8 for rank in range(size)]
        rows = torch.frombuffer(memory, dtype=torch.float64, offset=size * _LINE)
        self._rows = rows.view(2, size, length)
        self._done = 0

    def stack(self, row: Tensor) -> Tensor:
        """The rows of all members, shape (size, n), of one of shape (n,) from each; every bit as it was.

        Raises:
            CommunicationError: a member is gone, or does not come within the timeout of the group.
        """
        count = row.numel()
        rows = self._rows[self._done % 2]
        rows[self.rank, :count].copy_(row)
        self._done += 1
        self._numbers[self._places[self.rank]] = self._done
        for rank, place in enumerate(self._places):
            if self._numbers[place] < self._done:
                self._wait_for(rank, place)
        return rows[:, :count].to(row.dtype, copy=True)

    def _wait_for(self, rank: int, place: int) -> None:
        numbers, wanted = self._numbers, self._done
        for _ in range(_SPINS):
            if numbers[place] >= wanted:
                return
        begin = time.perf_counter()
        look, sleep = begin + _LOOK_S, 0.0
        while numbers[place] < wanted:
            time.sleep(sleep)  # also lets other threads of this worker have Python
            now = time.perf_counter()
            sleep = _SLEEP_S if now - begin > _YIELD_S else 0.0
            if self.members.is_broken:
                raise _gone(self.rank, rank)
            if now > look:
                look = now + _LOOK_S
                # What the member wrote before it ended counts.
                if self._is_gone(rank) and numbers[place] < wanted:
                    raise _gone(self.rank, rank)
                if now - begin > self.timeout_s:
                    raise CommunicationError(
                        f"rank {self.rank} waited {self.timeout_s:.0f} s for rank {rank} in a BatchNorm layer",
                        where="memory that workers of one host share",
                        fix="see what that rank does: `manyhosts run --hang-timeout` says where it is",
                    )

    def _is_gone(self, rank: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return True


def _gone(own: int, rank: int) -> CommunicationError:
    return CommunicationError(
        f"rank {own} waited in a BatchNorm layer for rank {rank}, which is gone",
        where="memory that workers of one host share",
        fix="see what was printed about the others",
    )


def bytes_for(size: int, length: int) -> int:
    """Of the file: a number for each of `size` members, and two rows of `length` numbers."""
    return size * _LINE + 2 * size * length * 8


def among(members: Collectives, length: int, *, same_host: bool, timeout_s: float = 600) -> SharedRows | None:
    """Rows of up to `length` numbers that `members` share; called by all of them together.

    None on all of them where some cannot: they are on several hosts, or in containers that share no memory.
    """
    able = same_host and is_possible()
    own, reported = _make(bytes_for(members.size, length)) if members.rank == 0 and able else (-1, b"")
    made: SharedRows | None = None
    try:
        words = torch.zeros(_TOLD_BYTES, dtype=torch.uint8, device=members.device)
        words[: len(reported)] = torch.tensor(list(reported), dtype=torch.uint8)
        reported = bytes(cast(list[int], members.broadcast(words).tolist())).rstrip(b"\0")
        if able and reported:
            with contextlib.suppress(OSError):
                own = own if members.rank == 0 else _open(reported)
                made = SharedRows(members, own, length, timeout_s)
        if not members.any(made is None):
            own = -1  # what was made keeps it
            return made
        return None
    finally:
        if own >= 0:
            os.close(own)


def _make(size: int) -> tuple[int, bytes]:
    """Memory of `size` bytes that has no name: its descriptor, and what `_open` takes. Or -1 and nothing: no room."""
    token = secrets.token_hex(8)
    try:
        descriptor = os.memfd_create(_NAME + token)
    except OSError:
        return -1, b""
    try:
        os.posix_fallocate(descriptor, 0, size)  # later there might be none, which would be the end of this process
    except OSError:
        os.close(descriptor)
        return -1, b""
    return descriptor, f"{os.getpid()} {descriptor} {token}".encode()


def _open(reported: bytes) -> int:
    """A descriptor of what `_make` made in another process.

    Raises:
        OSError: that process is not to be seen from here: it is another user's, or in another container.
    """
    process, number, token = reported.decode().split()
    path = f"/proc/{process}/fd/{number}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}{token}"):
        raise FileNotFoundError(path)
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)
