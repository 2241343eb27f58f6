"""A folder of snapshots, each either complete or absent, written during training by all workers together.

store.save(state, facts)          returns when what may change is copied; copying the rest, hashing and writing continue
... forward and backward pass
store.before_update()             waits until the rest is copied, too: usually not at all
... the optimizer changes the parameters
store.finished()                  returns what became of it
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from manyhosts.cluster.place import Place
from manyhosts.communication.side_group import SideGroup
from manyhosts.communication.world import World
from manyhosts.errors import SnapshotError
from manyhosts.events import SnapshotSaved, SnapshotSkipped
from manyhosts.records import run_directory
from manyhosts.records.manifest import Facts, found_in
from manyhosts.snapshot.commit import Part, discard, hear, remove_halves, report_part
from manyhosts.snapshot.copy import Copying, CopySpace
from manyhosts.snapshot.disk import Disk
from manyhosts.snapshot.flatten import flatten, merged
from manyhosts.snapshot.load import Ask, Fits, Loaded, everything_fits, newest, newest_complete
from manyhosts.snapshot.prune import surplus
from manyhosts.snapshot.separate_disks import bring_best, bring_newest, first_of_disk, keepers, sharers_of_disk
from manyhosts.snapshot.writing import Owns, Share, Task, seal, see_one_moment, sent, sentence, share_of, write_files

__all__ = ["Facts", "Loaded", "Store"]

_LOOK_S = 2.0
"""How often a wait looks whether more is written."""


class Store:
    """Snapshots of a run, the newest `keep` of them, in `folder`, which the workers of `world` may or may not share."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        world: World | None = None,
        disk: Disk | None = None,
        patience_s: float = 600,
        separate_disks: bool | None = None,
        holds: Callable[[Path], bool] = lambda _: False,
    ) -> None:
        """`patience_s`: how long rank 0, done with its own part, waits for those of the others.

        `separate_disks`: whether hosts have disks of their own, so that two of them keep everything; None: as the
        launcher has said. `holds`: whether a snapshot is still needed by somebody, however old it is.
        """
        self.folder = folder
        self.keep = keep
        self.stalled_s = 0.0
        """Seconds that training has been stalled by snapshots, in all."""
        self._world = world or World(Place())
        self._disk = disk or Disk()
        self._patience_s = patience_s
        self._holds = holds
        reported = bool(os.environ.get(run_directory.SEPARATE_DISKS))
        self.separate_disks = self._world.is_shared and (reported if separate_disks is None else separate_disks)
        """Whether hosts have disks of their own."""
        self.is_writer = not self.separate_disks
        """Whether the last snapshot is on this worker's disk, as far as it knows."""
        self._space = CopySpace(self._world.device)
        self._copying: Copying | None = None
        self._all_at_once = False  # whether something changed that no one but the update should change
        self._side: SideGroup | None = None
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._stall_s = 0.0  # of the snapshot under way
        self._gave_up = ""  # why no one waits for the parts of the others any more
        self._failed = False  # whether the last part of this worker failed
        self._news: deque[SnapshotSaved | SnapshotSkipped] = deque()
        self._crash: BaseException | None = None
        self._passed_over: set[Path] = set()
        self.meanwhile: Callable[[], None] = lambda: None
        """Called now and then while a snapshot is waited for that is being written."""

    def save(
        self,
        state: Mapping[str, Any],
        facts: Facts,
        *,
        own: Mapping[str, Any] | None = None,
        unchanged_until_update: Iterable[Tensor] = (),
        by_stage: bool = False,
    ) -> None:
        """Begin to write `state` as the snapshot of `facts.step`. Every worker calls this, at the same step.

        `state` is equal on all workers, but for tensors of which each gives what it holds, as a `TensorPart`; and with
        `by_stage` some may have values and tensors that others have not (`flatten.merged`). Each
        writes its parts, and a share of the full tensors; where hosts share no disk, one worker of two hosts all.
        `own` is this worker's alone; those of all workers are kept. What shares memory with one of the tensors
        `unchanged_until_update` (parameters, optimizer state) is copied during what comes next, and `before_update`
        must be called before it changes; everything else is copied before this returns. One of them that has changed
        all the same costs this snapshot, and from then on all is copied at once. Where a snapshot is still being
        written, this waits for it.

        What the disk refuses costs this snapshot and nothing else: `finished` says so.

        Raises:
            SnapshotError: a value in `state` or `own` is of a kind that cannot be kept.
        """
        self.save_as(
            self.folder / f"step-{facts.step:08d}",
            state,
            facts,
            own=own,
            unchanged_until_update=unchanged_until_update,
            by_stage=by_stage,
        )

    def save_as(
        self,
        path: Path,
        state: Mapping[str, Any],
        facts: Facts,
        *,
        own: Mapping[str, Any] | None = None,
        unchanged_until_update: Iterable[Tensor] = (),
        by_stage: bool = False,
    ) -> None:
        """The same under another name (`best`, say), in place of what is there: at no moment is there none."""
        begin = time.perf_counter()
        self._make_way()
        world = self._world
        # Rank 0 draws a number for this try, so that nothing left over from another can get into it.
        token = f"{int(world.agree(float(int.from_bytes(os.urandom(6), 'big')))):012x}"
        shared, own_state = flatten(state), flatten(own) if own else None
        if by_stage:
            shared = merged(shared, world)
        rank, writers, exchange = world.rank, range(world.size), None
        if self.separate_disks:
            to = keepers(world)
            self.is_writer = rank in to
            exchange = partial(sent, None if own_state is None else own_state.nodes, self._side_group(), to)
            rank, writers = 0, range(1)  # the only one, as far as its disk goes
            share = share_of(shared, None, rank=0, writers=1) if self.is_writer else Share()
            share = replace(share, own={} if own_state is None else own_state.tensors)
        else:
            share = share_of(shared, own_state, rank=rank, writers=world.size)
        self._copying = self._space.begin(share.originals, () if self._all_at_once else unchanged_until_update)
        task = Task(
            path=path,
            half=path.with_name(f"{path.name}.{token}.half"),
            facts=facts,
            copying=self._copying,
            share=share.of(self._copying.copies),
            rank=rank,
            size=world.size,
            writers=writers,
            begin=begin,
            exchange=exchange,
        )
        self._gave_up = ""
        self._stall_s = 0.0
        self._path = path
        self._thread = threading.Thread(target=self._run, args=(task,), name="manyhosts-snapshot", daemon=True)
        self._thread.start()
        self._count_stall(begin)

    def _side_group(self) -> SideGroup | None:
        """The connections that a snapshot travels over, made again where the workers have changed. All call this."""
        if self._world.size > 1 and (self._side is None or not self._side.is_of(self._world)):
            self._side = SideGroup(self._world)
        return self._side

    def save_alone(
        self, path: Path, state: Mapping[str, Any], facts: Facts, own: Mapping[str, Any] | None = None
    ) -> bool:
        """Write `state`, all of it, as the snapshot in `path`, without any other worker, before this returns.

        For a worker that is about to end. Whether it is complete; `finished` has the details. `own` is kept as that of
        the first worker.

        Raises:
            SnapshotError: a value in `state` or `own` is of a kind that cannot be kept.
        """
        self.wait()
        begin, share = time.perf_counter(), share_of(flatten(state), flatten(own) if own else None, rank=0, writers=1)
        self._failed, self._gave_up, self._stall_s = False, "", 0.0
        copying = self._space.begin(share.originals, ())
        task = Task(
            path=path,
            half=path.with_name(f"{path.name}.{os.urandom(6).hex()}.half"),
            facts=facts,
            copying=copying,
            share=share.of(copying.copies),
            rank=0,
            size=self._world.size,
            writers=range(1),
            begin=begin,
        )
        self._run(task)
        self._raise_crash()
        return not self._failed

    def before_update(self) -> None:
        """Wait until the parameters may change: usually not at all. Call it right before anything changes them."""
        copying = self._copying
        if copying is None:
            return
        begin = time.perf_counter()
        copying.done.wait()
        self._copying = None
        self._count_stall(begin)

    def _make_way(self) -> None:
        """Wait for the snapshot before this one, but not for a part that will not come.

        A worker whose part failed says so in the folder; where its disk refused even that, here.
        """
        if not self._world.is_rank_0:
            self.wait()
        if self._world.any(self._failed):
            self._gave_up = "another worker could not write its part, nor say why"
        self.wait()
        self._failed = False

    def _count_stall(self, begin: float) -> None:
        seconds = time.perf_counter() - begin
        self._stall_s += seconds
        self.stalled_s += seconds

    def _count_sent(self) -> None:
        if self._side is not None:
            self._world.bytes_sent += self._side.uncounted()

    def finished(self) -> list[SnapshotSaved | SnapshotSkipped]:
        """What became of the snapshots whose writing ended since the last call. Never waits.

        Rank 0 hears of each; another worker only of those in which its own part failed.
        """
        self._raise_crash()
        self._count_sent()
        return [self._news.popleft() for _ in range(len(self._news))]

    def wait(self) -> None:
        """Wait until nothing is being written."""
        written = 0
        while self._thread is not None:
            self._thread.join(_LOOK_S)
            if not self._thread.is_alive():
                self._thread = None
            elif (now := self._written()) > written:  # it grows, so that no one takes this wait for a hang
                written = now
                self.meanwhile()
        self._copying = None
        self._count_sent()
        self._raise_crash()

    def _written(self) -> int:
        """Bytes that are on this disk of the snapshot under way."""
        assert self._path is not None, "one is under way"
        found = 0
        for each in self._path.parent.glob(f"{self._path.name}.*.half/*"):
            with contextlib.suppress(OSError):
                found += each.stat().st_size
        return found

    @property
    def under_way(self) -> Path | None:
        """The snapshot that this worker is still writing its part of, or waits for the parts of the others."""
        return self._path if self._thread is not None and self._thread.is_alive() else None

    def abandon(self, *, after_s: float = 0) -> None:
        """Give up what is being written: the workers changed, and the parts of those that went will not come.

        Not before `after_s` seconds, in which it may still become complete.
        """
        if self._thread is not None:
            self._thread.join(after_s)
        self._gave_up = "the workers changed while it was being written"

    def drop_oldest(self) -> Path | None:
        """Remove the oldest snapshot of this worker's disk, where it leads or keeps everything. Returns which.

        The newest complete one stays, and what somebody still needs. Every worker calls this.
        """
        self.wait()
        keeps_all = self.separate_disks and self._world.rank in keepers(self._world)
        if not (self._world.is_rank_0 or keeps_all):
            return None
        kept = newest_complete(self.folder)
        for found in reversed(found_in(self.folder)):
            if found.step >= 0 and found.how != "half" and found != kept and not self._holds(found.path):
                with suppress(OSError):
                    discard(found.path, self._disk)
                    return found.path
        return None

    def latest(self, fits: Fits = everything_fits, ask: Ask | None = None) -> Loaded | None:
        """The newest snapshot that is complete and fits, the same on every worker; None where there never was one.

        `fits` looks at a manifest and says why not, or nothing. `ask` asks for what this worker will take: it is read
        now, each file by one worker for all that share a disk. Every worker calls this. Those that were passed over are
        named in `skipped`.

        Raises:
            SnapshotError: there are snapshots, and none can be continued from; each is named with its reason.
        """
        self.gather()
        sharers = sharers_of_disk(self._world) if self.separate_disks else None
        loaded = newest(self.folder, fits, self._world, sharers=sharers, ask=ask)
        if loaded is not None:
            self._passed_over = {skipped.path for skipped in loaded.skipped}
        return loaded

    def gather(self) -> None:
        """Where hosts have disks of their own, bring the newest on any of them to all. Every worker calls this."""
        self.wait()
        if self.separate_disks:
            bring_newest(self.folder, self._world, self._disk)

    def everywhere(self, path: Path, step: int) -> None:
        """See that all hosts have at `path` the best model, of `step`, where there is one. All call this."""
        self.wait()
        if self.separate_disks:
            self._world.barrier()  # rank 0's is complete
            bring_best(path, self._world, self._disk, step)

    def leads_disk(self) -> bool:
        """Whether this worker is the first of those that share its disk. Every worker calls this."""
        return first_of_disk(self._world) if self.separate_disks else self._world.is_rank_0

    def _raise_crash(self) -> None:
        if self._crash is not None:
            crash, self._crash = self._crash, None
            raise crash

    # What follows runs on the writing thread.

    def _run(self, task: Task) -> None:
        try:
            task.copying.finish()
            self._all_at_once |= bool(task.copying.changed)
            owns = {} if task.exchange is None else task.exchange(task.share.own)
            if task.share.file:
                self._write(task, owns)
        except (OSError, SnapshotError) as trouble:
            news = SnapshotSkipped(step=task.facts.step, path=task.path, reason=sentence(trouble), time=time.time())
            self._failed = True
            self._news.append(news)
        except BaseException as crash:  # a fault of ours: raised again where training sees it
            self._crash = crash

    def _write(self, task: Task, owns: Owns) -> None:
        leads = task.rank == 0
        try:
            if leads:
                with suppress(OSError):  # what clings to the disk takes room, and no more
                    remove_halves(task.path.parent, self._disk, but=task.half)
            self._disk.make_folder(task.half)
            see_one_moment(task.copying)
            report_part(task.half, task.rank, write_files(task, owns, self._disk), self._disk)
            if leads:
                self._commit(task)
        except Exception as trouble:
            self._clean_up(task, trouble)
            raise

    def _commit(self, task: Task) -> None:
        reported = hear(task.half, task.writers, self._patience_s, lambda: self._gave_up)
        manifest = seal(task, reported, self._disk)
        self._news.append(
            SnapshotSaved(
                step=task.facts.step,
                path=task.path,
                bytes=manifest.bytes,
                seconds=time.perf_counter() - task.begin,
                stall_seconds=self._stall_s,
                time=manifest.time,
            )
        )
        self._passed_over.discard(task.path)
        if task.path.parent == self.folder:
            with suppress(OSError):  # the snapshot is complete all the same; the next one tries again
                for path in surplus(self.folder, keep=self.keep, newest=task.facts.step, bad=self._passed_over):
                    if not self._holds(path):
                        discard(path, self._disk)

    def _clean_up(self, task: Task, trouble: Exception) -> None:
        """Leave nothing half-written. The disk is in trouble already, so more of it here is no news."""
        try:
            if task.rank == 0:
                self._disk.remove_folder(task.half)
            else:
                for name in (task.share.file, task.share.own_file, *task.share.texts):  # makes room to say so
                    if name and (task.half / name).exists():
                        self._disk.remove_file(task.half / name)
                report_part(task.half, task.rank, Part(failure=sentence(trouble)), self._disk)
        except OSError:
            return
