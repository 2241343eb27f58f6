"""Who runs in a run directory: a process of this machine, of another one, or of another container."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, fields
from pathlib import Path

from manyhosts.errors import ConfigError
from manyhosts.records.json_text import parsed


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """Who runs in a run directory: what `lock.json` holds."""

    token: str
    """The same for all processes of one start."""
    host: str
    process: int
    launches: bool
    """Whether it is the head of a launch, which outlives its workers."""
    machine: str
    """This start of the kernel: process numbers mean something within it only."""
    processes: str
    """The name space of process numbers: a container has its own."""
    began: str
    """When the process began, in the kernel's words: its number may be another's by now. Empty: not known."""
    since: float
    """Seconds since the Unix epoch."""

    @classmethod
    def here(cls, token: str, *, launches: bool) -> Owner:
        """This process."""
        return cls(
            token=token,
            host=socket.gethostname(),
            process=os.getpid(),
            launches=launches,
            machine=_words("/proc/sys/kernel/random/boot_id") or socket.gethostname(),
            processes=_process_names(),
            began=began(os.getpid()) or "",
            since=time.time(),
        )

    @property
    def is_here(self) -> bool:
        """Whether its process number means the same here."""
        here = Owner.here("", launches=False)
        return (self.machine, self.processes) == (here.machine, here.processes)

    @property
    def is_this_process(self) -> bool:
        """Whether it is the process that asks."""
        return self.is_here and self.process == os.getpid() and self.began == (began(os.getpid()) or "")

    @property
    def may_live(self) -> bool:
        """Whether its process is there, as far as that is known here."""
        return not self.is_here or began(self.process) == self.began

    def refusal(self, run_dir: Path) -> ConfigError:
        """That this owner runs in `run_dir`."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return ConfigError(
            f"a run in this directory is in progress: process {self.process} on host {self.host}, since {since}",
            where=str(run_dir),
            fix="wait for its end or end it, or give another directory with --run-dir DIR",
        )


def read(path: Path) -> Owner | None:
    """Who a lock's file names; None where there is none, or it was never written to its end."""
    try:
        found = parsed(path.read_bytes())
        return Owner(**{entry.name: found[entry.name] for entry in fields(Owner)})
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def began(process: int) -> str | None:
    """When a process of this machine began; None where there is none, or it has ended and was not buried yet."""
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return ""
    words = _words(f"/proc/{process}/stat").rpartition(")")[2].split()
    return words[19] if len(words) > 19 and words[0] not in "ZX" else None


def _words(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _process_names() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
