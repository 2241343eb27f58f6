"""The remote copy that snapshots go to, an object store or a folder: looked at before the first step, copied to after.

Rank 0 alone talks to it. Where it is a new machine with an empty disk, it brings from there what the run continues
from, before anybody looks at the disk; where rank 0 goes, the next one takes over.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.world import World
from manyhosts.errors import ConfigError, ManyhostsError, SnapshotError
from manyhosts.records.run_directory import RunDirectory
from manyhosts.snapshot.disk import Disk
from manyhosts.snapshot.load import Fits, newest_complete
from manyhosts.snapshot.objects.client import Client, sentence
from manyhosts.snapshot.objects.copies import Copier, bring_best, bring_newer, bring_records
from manyhosts.snapshot.objects.location import ObjectStoreLocation

_RECORD = "run.json"
_LOOK_EVERY_S = 1.0


class RemoteCopy:
    """What one run keeps at `address`, besides its directory."""

    def __init__(self, address: str, directory: RunDirectory, *, keep: int, script: Path, world: World) -> None:
        self.address, self._directory, self._script, self._world = address, directory, script, world
        self._records = {_RECORD: directory.run_json, "metrics.jsonl": directory.metrics}
        self.copier = Copier(lambda: self._location, address, keep=keep, records=self._records)
        self.notes: list[str] = []
        """What is worth saying once training begins."""

    @cached_property
    def _location(self) -> ObjectStoreLocation:
        return ObjectStoreLocation(Client(self.address))

    def prepare(self, fits: Fits) -> None:
        """See that snapshots can be kept there, and bring the newest one that fits where the disk has none as new.

        Every worker calls this, before it looks at the disk.

        Raises:
            ConfigError: it cannot be reached or written to, or holds what another script has kept.
            SnapshotError: it has snapshots, the disk has none, and none can be continued from.
        """
        notes: list[str] = []
        raised: list[BaseException] = []

        def bring() -> None:
            try:
                notes.extend(self._bring(fits))
            except OSError as trouble:
                fix = "see that this machine reaches the store, and that the disk has room; then start it again"
                raised.append(SnapshotError(sentence(trouble), where=self.address, fix=fix))
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=bring, name="manyhosts-bring", daemon=True)
        if self._world.is_rank_0:
            thread.start()
        while self._world.any(_still_runs(thread)):  # so that no one takes a long download for a worker that is gone
            pass
        error = next(iter(raised), None)
        if error is not None and not isinstance(error, ManyhostsError):
            raise error  # a fault of ours
        self.notes = gather_plain(self._world, notes, error)[0]

    def _bring(self, fits: Fits) -> list[str]:
        location, folder, disk = self._location, self._directory.snapshots, Disk()
        location.client.check()
        self._see_whose_it_is(location)
        here = newest_complete(folder)
        brought = bring_newer(location, folder, fits, than=-1 if here is None else here.step, disk=disk)
        notes = [f"passed over {each}" for each in brought.passed_over]
        if brought.found is None:
            if brought.passed_over and here is None:
                raise SnapshotError(
                    "no snapshot there can be continued from:\n"
                    + "\n".join(f"  {each}" for each in brought.passed_over),
                    where=self.address,
                    fix="take back the change, or begin again with another snapshots.to",
                )
            return notes
        bring_best(location, self._directory.best, fits, disk)
        lost = bring_records(location, brought.found, self._records)
        notes += [f"{name} is incomplete at {self.address}: the record begins again" for name in lost]
        return [*notes, f"brought the snapshot of step {brought.found.step} from {self.address}"]

    def _see_whose_it_is(self, location: ObjectStoreLocation) -> None:
        kept = next((found for found in location.found() if not found.how), None)
        record = None if kept is None else location.record(kept, _RECORD)
        if record is None:
            return
        script = str(json.loads(record).get("script", ""))
        if Path(script).name != self._script.name:
            raise ConfigError(
                f"the snapshots of {script} are kept there, not those of {self._script.name}",
                where=f"snapshots.to={self.address!r}",
                fix="give each run an address of its own",
            )

    def offer(self, path: Path) -> None:
        """Copy the entire snapshot in the folder `path`, soon, where this worker is rank 0."""
        if self._world.is_rank_0:
            self.copier.offer(path)

    def catch_up(self) -> None:
        """Copy what the disk has and the store lacks, as after a rank 0 that is gone, where this worker leads now."""
        if not self._world.is_rank_0:
            return
        if (newest := newest_complete(self._directory.snapshots, content=False)) is not None:
            self.offer(newest.path)
        if self._directory.best.exists():
            self.offer(self._directory.best)

    def keep_end(self) -> None:
        """Have the record's last lines there, too. All else is there already, so a failure is not worth a word."""
        newest = newest_complete(self._directory.snapshots, content=False) if self._world.is_rank_0 else None
        if newest is not None:
            with suppress(OSError, ManyhostsError):
                self._location.add_end(newest.path, self._records)

    def finish(self, meanwhile: Callable[[], None]) -> None:
        """Wait until all is copied. Every worker calls this; `meanwhile` is called now and then."""
        while self._world.any(not self.copier.wait(_LOOK_EVERY_S)):
            meanwhile()


def _still_runs(thread: threading.Thread) -> bool:
    if thread.ident is not None:
        thread.join(_LOOK_EVERY_S)
    return thread.is_alive()
