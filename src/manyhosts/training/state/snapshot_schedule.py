"""What a run keeps on disk to continue from: snapshots of everything, and the best model."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from manyhosts.config.settings import Settings
from manyhosts.config.stopping import Best, EarlyStopping
from manyhosts.config.strategies import Single
from manyhosts.errors import ConfigError, SnapshotError
from manyhosts.events import Note, SnapshotCopied, SnapshotSaved, SnapshotSkipped
from manyhosts.model.frozen_base import KEY
from manyhosts.model.sharded_state import in_parts
from manyhosts.records.manifest import Facts, read
from manyhosts.records.run_directory import RunDirectory
from manyhosts.snapshot.flatten import flatten
from manyhosts.snapshot.load import Loaded, load
from manyhosts.snapshot.set_aside import is_newest
from manyhosts.snapshot.store import Store
from manyhosts.strategies.local_updates import is_cut
from manyhosts.training.consistency.same_given import compare_samples
from manyhosts.training.consistency.same_weights import compare_weights
from manyhosts.training.setup.build import Components
from manyhosts.training.state.registry import ask_for_state, copied, state_of, take_up, training_state_dict, weights_of
from manyhosts.training.state.remote_copy import RemoteCopy
from manyhosts.training.state.resuming import Changes, asked_of, compare
from manyhosts.training.state.run_state import RunState

_NO_RECORDS = "a disk does not take the records of its steps"


class SnapshotSchedule:
    """Saves and restores the parts of a run."""

    def __init__(self, components: Components, settings: Settings, directory: RunDirectory, script: Path) -> None:
        self.components, self.settings, self.directory = components, settings, directory
        self.strategy = settings.strategy.name if components.world.is_shared else Single.name
        self.emit: Callable[[SnapshotSaved | SnapshotSkipped | SnapshotCopied | Note], None] = lambda news: None
        """Hears what becomes of snapshots."""
        self.rule = settings.early_stopping or EarlyStopping(components.watched_loss, mode="min")
        """Which metric early stopping, and a schedule that follows validations, watch, and what is better."""
        self.best_rule = settings.best or Best(self.rule.metric, self.rule.mode)
        """By which metric the best model is chosen."""
        to, keep = settings.snapshots.to, settings.snapshots.keep
        self.second = (
            None if to is None else RemoteCopy(to, directory, keep=keep, script=script, world=components.world)
        )
        """Where each snapshot is copied to, besides the run directory."""
        self.store = Store(directory.snapshots, keep=keep, world=components.world, holds=self._is_needed)
        holding, parameters = components.strategy.holding, components.trained.parameters()
        if self.store.separate_disks and components.world.any(any(is_cut(each, holding) for each in parameters)):
            raise ConfigError(
                f"with strategy {self.strategy!r} each worker writes its part of a snapshot, and these hosts share "
                "no disk",
                where=str(directory.path),
                fix='give a run directory that all hosts see, or choose strategy="ddp"',
            )
        self.newest: SnapshotSaved | None = None
        self.trouble = ""
        """Why the last snapshot that was not written was not, as far as this worker knows."""
        self.best_saved_at = -1
        """The step of the best model that was begun to be written last."""
        self.saved_at = -1
        """The step of the last snapshot that was begun or restored; -1 where it lacks what was found out since."""
        self.is_writing = True
        """Whether there may be news of snapshots; always where they are copied elsewhere."""
        self.changes = Changes()
        """What is other than when the snapshot was made that was restored last."""

    def _is_needed(self, path: Path) -> bool:
        """Whether a snapshot must stay, however old: it is yet to be copied, or what came after it is unproven."""
        if self.second is not None and self.second.copier.holds(path):
            return True
        trusted = None if self.components.auditor is None else self.components.auditor.trusted
        return trusted is not None and is_newest(path, up_to=trusted)

    def check_watched(self, values: Collection[str]) -> None:
        """See that the watched metrics are among `values`.

        Raises:
            ConfigError: one is not.
        """
        watched = {"early_stopping.metric": ("early stopping watches", self.rule.metric)}
        if self.settings.best is not None:
            watched["best.metric"] = ("the best model is chosen by", self.best_rule.metric)
        for where, (does, metric) in watched.items():
            if metric not in values:
                raise ConfigError(
                    f"{does} {metric!r}, which no one reports",
                    where=where,
                    fix=f"choose one of {', '.join(sorted(values))}, or add it to mh.Trainer(metrics=…)",
                )

    def check_kept(self) -> None:
        """See that a snapshot can keep all that is trained by, as far as that is there; nothing is copied.

        Raises:
            ConfigError: it cannot, which the first snapshot would show, perhaps at the end of all training.
        """
        try:
            flatten(in_parts(training_state_dict(self.components), self.components.strategy.holding))
        except SnapshotError as error:
            raise ConfigError(f"no snapshot could be made: {error.what}", where=error.where, fix=error.fix) from error

    def save(self, state: RunState) -> None:
        """Begin a snapshot of everything."""
        components = self.components
        self.saved_at = state.step
        own = {"strategy": components.strategy.state_dict(), "stream": dict(state.stream)}
        holding = components.strategy.holding
        # Where models diverge theirs is the mean.
        weights, base = self._weights(state.step)
        self.store.save(
            in_parts({**training_state_dict(components), **weights, "run": state.to_dict()}, holding),
            self._facts(state, base),
            own=own if any(own.values()) else None,
            unchanged_until_update=map(holding.local, [*_updated(components), *_tensors(components.optimizer.state)]),
            by_stage=holding.by_stage,
        )
        self.listen()
        self.is_writing = True  # the next update lets go of what was copied

    def save_alone(self, state: RunState) -> bool:
        """Make a snapshot of what this worker holds, without any other. Whether it is complete now.

        The model is written as the best one before, where it is that and no one has done it.
        """
        components = self.components
        facts = replace(self._facts(state), run=asked_of(self.settings, components))
        is_uncut = True
        if self.lacks_best(state):
            with components.callbacks.evaluated(components.trained):
                is_uncut = self.store.save_alone(self.directory.best, weights_of(components), facts)
        if is_uncut:
            everything = {**training_state_dict(components), "run": state.to_dict()}
            equal = components.strategy.state_dict()
            own = {"strategy": equal} if equal else None
            is_uncut = self.store.save_alone(self.path_of(state.step), everything, facts, own)
        self.listen()
        return is_uncut

    def lacks_best(self, state: RunState) -> bool:
        """Whether the best model is not on this worker's disk, and should be."""
        if state.best_step < 0 or not self.store.is_writer:
            return False
        try:
            return read(self.directory.best).facts.step != state.best_step
        except (SnapshotError, OSError):
            return True

    def put_aside_best(self, state: RunState) -> str:
        """Take a best model out of the way that is of a step which is none of this run any more.

        A run that is resumed does steps again, perhaps others than before; the best model of those may have replaced
        that of an earlier step. Every worker calls this. Returns what is to be said; empty where all is well.
        """
        if not self.components.world.any(self.lacks_best(state)):
            return ""
        self.store.everywhere(self.directory.best, state.best_step)  # another host may have it
        if not self.components.world.any(self.lacks_best(state)):
            return ""
        name = f"best-{time.strftime('%Y%m%d-%H%M%S')}"
        is_there = self.store.leads_disk() and self.directory.best.exists()
        if is_there:
            self.directory.best.rename(self.directory.path / name)
        other = f": best had that of another step, as of a part of the run that was not resumed, which is in {name} now"
        where = other if self.components.world.any(is_there) else ""  # no one takes it meanwhile
        return (
            f"the best model, of step {state.best_step}, is not on the disk{where}; the best weights are the last ones"
        )

    def leave_out(self, state: RunState) -> None:
        """Make no snapshot here, for a disk does not take the records of the steps that it would count."""
        self.saved_at = state.step
        self.trouble = _NO_RECORDS
        path = self.path_of(state.step)
        self.emit(SnapshotSkipped(step=state.step, path=path, reason=_NO_RECORDS, time=time.time()))

    def save_best(self, state: RunState) -> None:
        """Begin to write the model, with the weights that it was evaluated with, as the best one."""
        self.best_saved_at = state.best_step
        holding, callbacks = self.components.strategy.holding, self.components.callbacks
        with callbacks.evaluated(self.components.trained):
            weights, base = self._weights(state.best_step)
            weights = copied(weights) if callbacks.averaging else weights
        self.store.save_as(
            self.directory.best,
            in_parts(weights, holding),
            self._facts(state, base),
            unchanged_until_update=map(holding.local, _updated(self.components)),
            by_stage=holding.by_stage,
        )
        self.is_writing = True

    def _weights(self, step: int) -> tuple[dict[str, Any], str]:
        """The model, and the loss's state, as all workers hold them: a copy of the mean, where they diverge.

        With the checksum of the frozen weights that are not among them; empty where nothing is left out.

        Raises:
            TrainingError: they do not hold the same.
        """
        components, base = self.components, self.components.frozen_base.for_snapshot()
        with components.strategy.averaged(components.trained) as is_mean:
            compare_weights(components, f"before the snapshot of step {step}")
            weights = weights_of(components, but_frozen=bool(base))
            return copied(weights) if is_mean else weights, base

    def before_update(self) -> None:
        """Wait until a snapshot under way has copied what the update will change."""
        self.store.before_update()
        self.listen()

    def listen(self) -> None:
        """Report what became of snapshots whose writing has ended."""
        self.is_writing = self.second is not None or self.store.under_way is not None
        for news in self.store.finished():
            if isinstance(news, SnapshotSkipped):
                self.trouble = news.reason
            elif news.path.parent == self.directory.snapshots:
                self.newest = news
            if isinstance(news, SnapshotSaved) and self.second is not None:
                self.second.offer(news.path)
            self.emit(news)
        for news_of_copy in self.second.copier.finished() if self.second is not None else []:
            self.emit(news_of_copy)

    def abandon(self, *, after_s: float = 0) -> bool:
        """Give up what is being written: some of those who write it are gone. Whether a snapshot is lost so.

        Not before `after_s` seconds, in which it may still become complete.
        """
        under_way = self.store.under_way
        self.store.abandon(after_s=after_s)
        self.finish()
        return under_way is not None and under_way != self.directory.best

    def finish(self) -> None:
        """Wait until everything is written."""
        self.store.wait()
        self.listen()

    def finish_copies(self, meanwhile: Callable[[], None]) -> None:
        """Wait until everything is in the remote copy, too. Every worker calls this; `meanwhile` now and then."""
        if self.second is not None:
            self.second.finish(meanwhile)
        self.listen()

    def begin(self) -> tuple[RunState, Loaded | None]:
        """Look in the remote copy, then do as `restore`. Every worker calls this before the first step.

        Raises:
            ConfigError, DataError: the remote copy cannot be used, or something has changed that must not, or workers
                hold other samples.
            SnapshotError: there are snapshots, and none can be continued from.
        """
        world = self.components.world
        if world.size > 1 and self.components.watcher is None:  # who watches looks for the reason in what was trained
            compare_samples(world, self.components.batches.identity())
        elif world.is_rank_0:
            self.components.batches.identity()  # now, and not when the first snapshot is made
        if self.second is not None:
            self.store.gather()
            self.second.prepare(self.components.fits())
        self.check_kept()
        return self.restore()

    def has_complete(self, step: int) -> bool:
        """Whether the snapshot of `step` is on rank 0's disk, complete. Every worker calls this, after `finish`."""
        is_there = self.newest is not None and self.newest.step == step
        return not self.components.world.any(self.components.world.is_rank_0 and not is_there)

    def is_short_of_room(self) -> bool:
        """Whether rank 0 could not write the last snapshot for want of room. Every worker calls this."""
        words = (_NO_RECORDS, *(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT)))
        return self.components.world.any(
            self.components.world.is_rank_0 and any(word in self.trouble for word in words)
        )

    def drop_oldest(self) -> bool:
        """Make room: remove the oldest snapshot, on every disk. Never the newest complete one, nor the best.

        Every worker calls this. Returns whether rank 0's disk had one.
        """
        dropped = self.store.drop_oldest()
        if dropped is not None:
            self.emit(Note(text=f"the disk is full: {dropped.name} was removed", step=self.saved_at, time=time.time()))
        return self.components.world.any(self.components.world.is_rank_0 and dropped is not None)

    def path_of(self, step: int) -> Path:
        """Where the snapshot of `step` is, or would be."""
        return self.store.folder / f"step-{step:08d}"

    def last_good(self) -> str:
        """The newest snapshot, in a sentence."""
        self.finish()
        return "There is no snapshot yet." if self.newest is None else f"The last good snapshot is {self.newest.path}."

    def restore(self) -> tuple[RunState, Loaded | None]:
        """Take up the newest snapshot that fits; a fresh state where there is none.

        Raises:
            ConfigError, DataError: something has changed that must not.
            SnapshotError: there are snapshots, and none can be continued from.
        """
        loaded = self.store.latest(self.components.fits(), lambda stored: ask_for_state(stored, self.components))
        self.best_saved_at = -1  # the best model may be of a step that is done again
        if loaded is None:
            return RunState(), None
        components, kept, asked = self.components, state_of(loaded.stored, self.components), loaded.facts.run
        self.changes = compare(asked, lambda: asked_of(self.settings, components), components.world, str(loaded.path))
        state = RunState.from_dict(kept["run"], {})
        take_up(components, kept, schedule=not self.changes.optimizer)
        if self.changes.optimizer:
            moved = state.position.epoch if self.settings.schedule_every == "epoch" else state.step
            components.initial_optimizer.after_steps(
                components.optimizer, components.schedules, steps=moved, kept=kept, asked=asked
            )
        if "kept back" not in self.changes.keys:
            components.strategy.load_state_dict(loaded.owns.under("strategy"))
        self._change(state)
        stream = components.batches.source.of_snapshot(
            loaded.owns.under("stream"), components.world.rank, state.position
        )
        state.stream = dict(stream)  # read now, while the snapshot is there
        loaded.ahead.clear()
        if not components.world.any(self.lacks_best(state)):
            self.best_saved_at = state.best_step  # it stays as it is, with what it says of what trained it
        self.saved_at = loaded.facts.step
        self.newest = SnapshotSaved(
            step=loaded.facts.step,
            path=loaded.path,
            bytes=0,
            seconds=0.0,
            stall_seconds=0.0,
            time=loaded.manifest.time,
        )
        return state, loaded

    def _change(self, state: RunState) -> None:
        """Have in `state` what follows from the changes."""
        begin = self.components.batches.source.begin(state.position)
        if begin != state.position:
            state.position, state.epoch_loss, state.epoch_weight = begin, 0.0, 0.0
            state.epoch_samples, state.epoch_seconds = 0, 0.0
        if "watched" in self.changes.keys:
            state.best, state.best_step = None, -1
        if "stopping" in self.changes.keys:
            state.stopping_best, state.validations_without_gain = None, 0
        is_over = self.settings.early_stopping is not None and state.validations_without_gain >= self.rule.patience
        if "early_stopping" in self.changes.keys and not is_over:
            state.ended = ""

    def take_end(self, step: int) -> bool:
        """Take up the snapshot of `step`, as this worker finds it on the disk. Whether it was there, and complete."""
        self.store.wait()
        try:
            loaded = load(self.path_of(step), self.components.fits())
        except (SnapshotError, OSError):
            return False
        take_up(self.components, state_of(loaded.stored, self.components))
        self.saved_at = step
        return True

    def _facts(self, state: RunState, base: str = "") -> Facts:
        """`base`: the checksum of frozen weights that the snapshot does without."""
        # Others write no manifest, and need not look at the data for it.
        asked = (
            asked_of(self.settings, self.components)
            if self.components.world.is_rank_0 or self.store.separate_disks
            else {}
        )
        return Facts(
            step=state.step,
            epoch=state.position.epoch,
            position={"epoch": state.position.epoch, "sample": state.position.sample},
            strategy=self.strategy,
            model=self.components.fingerprint(),
            run={**asked, KEY: base} if base else asked,
        )


def _updated(components: Components) -> list[torch.Tensor]:
    """The parameters that the optimizer updates. Others may change at any moment: a step may average into them."""
    return [each for group in components.optimizer.param_groups for each in group["params"] if each.requires_grad]


def _tensors(state: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves([*state.values()]) if isinstance(each, torch.Tensor)]
