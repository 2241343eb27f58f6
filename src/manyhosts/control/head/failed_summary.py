"""`summary.json` of a run that failed: the head alone knows which worker failed first, and the leader may be gone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from manyhosts.errors import ConfigError, ManyhostsError
from manyhosts.records.metrics import stream
from manyhosts.records.run_directory import RunDirectory
from manyhosts.records.run_record import RunRecord
from manyhosts.records.summary import summarise


def write(run_dirs: Iterable[Path], error: ManyhostsError) -> None:
    """Have each of `run_dirs` whose training has not come to its end say that it failed with `error`.

    Those that this machine does not have are passed over: the record is where the leader was.
    """
    for directory in map(RunDirectory, run_dirs):
        if not (directory.run_json.exists() and directory.metrics.exists()):
            continue
        with contextlib.suppress(OSError, ConfigError):  # the failure itself is told all the same
            summary = summarise(stream(directory.metrics), RunRecord.read(directory.run_json), failure=error.what)
            if summary.status == "failed":
                summary.write(directory.summary)
