"""A worker's trace: a line per step; the end after so many of them, or in the middle, to see a resume."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from manyhosts.control.agent.import_preloader import imported_since
from manyhosts.prove.conduct import TrialConfig
from manyhosts.records.run_directory import VARIABLE as RUN_DIR

_PATIENCE_S = 30.0
"""How long a worker waits for others to come as far, and for a snapshot to be written, before it ends all the same."""


class Writer:
    """Adds lines to `trace-<rank>.jsonl`."""

    def __init__(self, conduct: TrialConfig, rank: int) -> None:
        self.conduct, self.rank = conduct, rank
        self.folder = Path(conduct.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._modules = frozenset(sys.modules)
        self._file = (self.folder / f"trace-{rank}.jsonl").open("a")

    def add(self, kind: str, **fields: Any) -> None:
        """One line, with the operating system when this returns."""
        self._file.write(json.dumps({"kind": kind, **fields}) + "\n")
        self._file.flush()

    def after_step(self, step: int) -> None:
        """End where that is due after `step`."""
        last = step >= self.conduct.steps
        if self.conduct.die_after is not None and step >= self.conduct.die_after:
            self._die_with_snapshot(patience_s=_PATIENCE_S if last else 0.0)
        if last:
            self.end()

    def end(self) -> NoReturn:
        """Leave the script, once every worker is here: one that left early would break what others still exchange."""
        if not self.rank:
            (self.folder / "imports.json").write_text(json.dumps(imported_since(self._modules)))
        self._barrier("ended")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _die_with_snapshot(self, *, patience_s: float) -> None:
        """Be killed as by a power cut, if there is a snapshot to continue from by now; the others notice."""
        self._wait(_has_snapshot, patience_s)
        if _has_snapshot():
            os.kill(os.getpid(), signal.SIGKILL)

    def _barrier(self, word: str) -> None:
        (self.folder / f"{word}-{self.rank}").touch()
        size = int(os.environ.get("WORLD_SIZE", "1"))
        self._wait(lambda: len(list(self.folder.glob(f"{word}-*"))) >= size, _PATIENCE_S)

    def _wait(self, is_so: Callable[[], bool], patience_s: float) -> None:
        until = time.monotonic() + patience_s
        while not is_so() and time.monotonic() < until:
            time.sleep(0.01)


def _has_snapshot() -> bool:
    """Whether there is a complete one; what is being written has a dot in its name."""
    found = (Path(os.environ[RUN_DIR]) / "snapshots").glob("step-*/manifest.json")
    names = [manifest.parent.name for manifest in found]
    return any("." not in name and int(name.rpartition("-")[2]) for name in names)  # that of step 0 shows nothing
