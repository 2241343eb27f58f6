"""One run: from its directory and its newest snapshot to its end and its records."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from manyhands.cluster.membership import Passed
from manyhands.cluster.reports import Reporter
from manyhands.communication.gathering import gather_words
from manyhands.communication.world import is_break
from manyhands.config.settings import Settings
from manyhands.config.stopping import EarlyStopping
from manyhands.config.strategies import Single
from manyhands.errors import ManyhandsError
from manyhands.events import Event, Listener, Note, RunEnded, RunStarted, StepDone
from manyhands.listeners.broadcast import Broadcast
from manyhands.listeners.metrics_file import WriteMetrics
from manyhands.listeners.standard import standard
from manyhands.records.metrics import MetricsFile
from manyhands.records.run_directory import RunDirectory
from manyhands.records.run_record import RunRecord, plain_settings, versions_for
from manyhands.records.samples import SamplesFile
from manyhands.snapshot.fingerprint import weights_sha256
from manyhands.snapshot.load import Loaded
from manyhands.strategies.alone import Drifting
from manyhands.training.bad_steps import BadStep
from manyhands.training.calls import Calls, Holder
from manyhands.training.copies import copy_records, restore_records
from manyhands.training.evaluate import Evaluation
from manyhands.training.keeping import Keeping
from manyhands.training.loop import Loop, WorkersChange
from manyhands.training.notes import notes
from manyhands.training.recover import Recovery, told_by_all, why_not_survive
from manyhands.training.result import Result
from manyhands.training.rewind import go_back
from manyhands.training.second_place import SecondPlace
from manyhands.training.state import RunState
from manyhands.training.wishes import Wishes

_RECENT_EVENTS = 4096


class Run:
    """What `fit` does around the loop."""

    def __init__(
        self,
        *,
        calls: Calls,
        holder: Holder,
        settings: Settings,
        directory: RunDirectory,
        script: Path,
        validation: Evaluation | None,
        listeners: Sequence[Listener],
        reporter: Reporter | None,
    ) -> None:
        """Nothing is opened, and no other worker met, before `fit`."""
        self.calls, self.holder = calls, holder
        self.parts, self.settings, self.directory, self.validation = holder.parts, settings, directory, validation
        self.world = self.parts.world
        self.reporter = reporter
        self.news = Broadcast([])
        self.recent: deque[Event] = deque(maxlen=_RECENT_EVENTS)
        """What was told last, on every worker: should the leader go, another one knows what it had not yet written."""
        self.script, self.listeners = script, listeners
        self.strategy = settings.strategy.name if self.world.is_shared else Single.name
        to, keep = settings.snapshots.to, settings.snapshots.keep
        second = SecondPlace(to, directory, keep=keep, script=script, world=self.world) if to is not None else None
        self.keeping = Keeping(
            self.parts,
            directory,
            keep=keep,
            strategy=self.strategy,
            rule=settings.early_stopping or EarlyStopping(),
            tell=self.tell,
            second=second,
        )
        self.state = RunState()
        self.loaded: Loaded | None = None
        self.started: RunStarted | None = None
        self.recovery: Recovery | None = None
        self.samples: SamplesFile | None = None
        self.led = False
        self.copies = False
        """Whether this worker writes a copy of the leader's records, on a disk that others do not see."""

    def begin(self, loop: Loop) -> None:
        """Open the run directory, take up its newest snapshot that fits, and tell where the run begins.

        Every worker calls this; where it breaks off, once more.

        Raises:
            ConfigError: the directory is that of another script.
            SnapshotError: there are snapshots, and none can be gone on from.
        """
        self.close()
        self.news, self.led, self.copies = Broadcast([]), False, False
        self.holder.refresh()
        if self.world.is_leader:
            self.directory.open_for(self.script)
        self.world.barrier()  # nobody looks into the directory before the leader has made it
        found, self.loaded = self.keeping.begin()
        self.state.become(found)
        loop.stand()
        loop.began = time.perf_counter() - self.state.seconds
        self.open_records()
        if self.keeping.second is not None:
            self.keeping.second.catch_up()
        self.announce(loop)

    def open_records(self) -> None:
        """Record what was asked, and let the leader have its listeners."""
        hosts = gather_words(self.world, socket.gethostname())
        if self.keeping.store.apart:
            restore_records(self.directory, self.world)
        if self.world.is_leader:
            record = RunRecord(
                script=str(self.script),
                arguments=sys.argv[1:],
                settings=plain_settings(self.settings),
                seed=self.settings.seed,
                versions=versions_for(self.script),
                hosts=list(dict.fromkeys(hosts)),
                workers=self.world.size,
                strategy=self.strategy,
                backend=self.world.backend if self.world.size > 1 else None,
                started=time.time(),
            )
            record.write(self.directory.run_json)
            self.news = Broadcast([*standard(self.directory, record), *self.listeners])
            self.led = True
        self.copy_records()
        self.open_samples()

    def take_lead(self) -> None:
        """Be the leader from now on, and tell what every worker knows and the last leader has not written."""
        was_told = self.lead()
        if was_told is None:
            return
        for event in told_by_all(self.remembered()):
            if not was_told(event):
                self.tell(event)

    def lead(self) -> Callable[[Event], bool] | None:
        """Take over the records of a leader that is gone. Says of an event whether that one has written it."""
        if self.led:
            return None
        self.led = True
        self.news.close()
        metrics = MetricsFile(self.directory.metrics)
        was_told = metrics.take_over()
        record = RunRecord.read(self.directory.run_json)
        self.news = Broadcast(
            [*standard(self.directory, record, metrics=metrics, started=self.started), *self.listeners]
        )
        if self.keeping.second is not None:
            self.keeping.second.catch_up()
        return was_told

    def copy_records(self) -> None:
        """Where hosts share no disk, have another host write down the steps, too, should the leader's be lost."""
        store = self.keeping.store
        if not store.apart:
            return
        lacks = store.keeps_copy() and not self.led and not self.copies
        if self.world.is_leader:
            self.news.flush()
        copy_records(self.directory, self.world, lacks=lacks)
        if lacks:
            self.copies, self.news = True, Broadcast([WriteMetrics(MetricsFile(self.directory.metrics))])

    def remembered(self) -> list[Event]:
        """What was told last, oldest first."""
        return list(self.recent)

    def open_samples(self) -> None:
        """Note this worker's samples under its present rank."""
        if self.samples is not None:
            self.samples.close()
        if self.settings.record_samples:
            self.samples = SamplesFile(self.directory.samples(self.world.rank))

    def note_samples(self, step: int, indices: Sequence[int]) -> None:
        """Write down what `step` takes, before it is computed."""
        if self.samples is not None:
            membership = self.world.membership
            self.samples.add(step, indices, group=0 if membership is None else membership.group)

    def tell(self, event: Event) -> None:
        """Tell the listeners, which are on the leader."""
        if self.world.is_shared:
            self.recent.append(event)
        if self.reporter is not None:
            if isinstance(event, StepDone):
                self.reporter.send("step", step=event.step)
            else:
                self.reporter.send("busy")
        self.news(event)

    def fit(self) -> Result:
        """Train until the run is as long as was asked, and record how it ended."""
        goes_on = self.calls.begin(most=self.settings.virtual_workers or 0, survives=not why_not_survive(self.parts))
        if goes_on:
            most = self.settings.virtual_workers or 0
            self.recovery = Recovery(self.calls, self.holder, self.keeping, self, most=most)
        try:
            outcome = self.train_and_end()
        except Passed as passed:
            outcome = passed.outcome
            self.take_end(outcome, replaces=passed.replaces)
        except BaseException:
            self.calls.fail()
            raise
        finally:
            if self.reporter is not None:
                self.reporter.send("rest")
        self.calls.done(outcome)
        if outcome["asked_by"]:
            raise SystemExit(128 + outcome["asked_by"])
        return Result(**outcome["result"], run_dir=self.directory.path)

    def take_end(self, outcome: dict[str, Any], *, replaces: bool) -> None:
        """The others have finished this training: be where it ended, where this worker was not there."""
        if not self.world.apart:
            return
        self.state.become(RunState.from_dict(outcome["run"], {}))
        is_here = self.keeping.take_end(self.state.step)
        if os.environ.get("RANK") == "0" and not (is_here and replaces):
            # What a script has its leader do is done by another, or must not be done with a model that is untrained.
            os.environ["RANK"] = os.environ["LOCAL_WORLD_SIZE"]

    def train_and_end(self) -> dict[str, Any]:
        """Train, and record how it ended. Returns what came out, in plain values."""
        wishes, recovery = Wishes(), self.recovery
        loop = Loop(
            self.parts,
            settings=self.settings,
            state=self.state,
            validation=self.validation,
            keeping=self.keeping,
            wishes=wishes,
            tell=self.tell,
            flush=self.flush,
            note_samples=self.note_samples if self.settings.record_samples else None,
            keep_buffers=recovery is not None,
        )
        if recovery is not None:
            recovery.use(loop)
        if recovery is not None and self.world.apart:
            recovery.join()
        else:
            self.begin_with_whoever_is_there(loop)
        try:
            with wishes.listening():
                return self.train_with_whoever_is_there(loop)
        except Passed:
            raise
        except ManyhandsError as error:
            self.end("failed", error.what)
            raise
        except Exception as error:
            self.end("failed", f"{type(error).__name__}: {error}")
            raise
        except KeyboardInterrupt:
            self.end("interrupted", "a second signal, obeyed at once")
            raise

    def conclude(self, loop: Loop, reason: str) -> dict[str, Any]:
        """Record that training is over. Returns what came out, in plain values."""
        state, wishes = self.state, loop.wishes
        status = "interrupted" if wishes.granted else "stopped early" if state.ended else "completed"
        weights = self.end(status, reason)
        if self.keeping.second is not None:
            self.keeping.second.keep_end()
        result = {
            "status": status,
            "reason": reason,
            "steps": state.step,
            "epochs": self.parts.source.epochs(state.position),
            "validation": dict(state.validation),
            "best": state.best,
            "best_step": state.best_step,
            "seconds": state.seconds,
            "weights_sha256": weights,
        }
        return {"result": result, "run": state.to_dict(), "asked_by": wishes.number if wishes.granted else 0}

    def begin_with_whoever_is_there(self, loop: Loop) -> None:
        """Begin, whoever goes and comes meanwhile: perhaps where others have come to by then."""
        try:
            if self.recovery is not None:
                self.recovery.check()
            self.begin(loop)
        except Exception as error:
            if self.recovery is None or not is_break(error):
                raise
            self.recovery.stand_nowhere()
            self.recovery.go_on(error)

    def train_with_whoever_is_there(self, loop: Loop) -> dict[str, Any]:
        """Train to the end, whoever goes and comes meanwhile. Returns what came out, in plain values."""
        recovery, bad = self.recovery, None
        while True:
            try:
                if bad is not None:
                    self.rewind(bad, loop)
                    bad = None
                outcome = self.conclude(loop, self.train(loop))
                if recovery is not None:
                    self.world.barrier()  # nobody leaves before everybody has done its part
            except BadStep as found:
                bad, loop.torn = found, True  # what this worker holds is of no use to those that have not come so far
            except Exception as error:
                if recovery is None or not (isinstance(error, WorkersChange) or is_break(error)):
                    raise
                bad = None  # whoever goes on stands before it, and will come to it again
                recovery.go_on(error)
            else:
                return outcome

    def rewind(self, bad: BadStep, loop: Loop) -> None:
        """Go back to the last snapshot, in the records too."""
        news = go_back(bad, loop, self.keeping)
        self.recent.clear()  # it is told again
        if self.samples is not None:
            self.samples.resume_at(self.state.step)
        self.tell(news)
        self.flush()

    def train(self, loop: Loop) -> str:
        """Train, validate and save. Returns why it ended. Called anew where workers went or came."""
        state = self.state
        if self.settings.on_bad_step == "rewind" and self.keeping.saved_at < 0:
            loop.save()  # so that there always is one to go back to
        reason = loop.run()
        if self.validation is not None and state.step and state.validated_at != state.step and not loop.wishes.granted:
            loop.validate()
        loop.keep_best()
        if self.keeping.saved_at != state.step:
            loop.save()
        self.keeping.finish()
        self.keeping.finish_copies(self.say_busy)
        if isinstance(self.parts.strategy, Drifting):
            self.parts.strategy.average(self.parts.model)  # a run ends with one model
        return reason

    def say_busy(self) -> None:
        """Tell the head that this worker has something to do that is no step."""
        if self.reporter is not None:
            self.reporter.send("busy")

    def announce(self, loop: Loop) -> None:
        """Tell where the run begins, and with what."""
        state, limit = self.state, loop.limit
        per_epoch = self.parts.source.steps_per_epoch
        ends = [] if limit.steps is None else [limit.steps]
        if limit.epochs is not None and per_epoch is not None:
            ends.append(round(limit.epochs * per_epoch))
        now = time.time()
        if self.samples is not None:
            self.samples.resume_at(state.step)
        self.started = RunStarted(
            step=state.step,
            epoch=state.position.epoch,
            steps_per_epoch=per_epoch,
            total_steps=min(ends) if ends else None,
            time=now,
            resumed_from="" if self.loaded is None else str(self.loaded.path),
        )
        self.tell(self.started)
        for skipped in self.loaded.skipped if self.loaded is not None else []:
            self.tell(skipped)
        for text in notes(self, loop):
            self.tell(Note(text=text, step=state.step, time=now))

    def flush(self) -> bool:
        """Have everything that was told on the disk: a snapshot must not be ahead of the records. Whether it is there.

        Where the disk is full the lines wait, and training goes on.
        """
        written = self.news.flush()
        if self.samples is not None:
            try:
                self.samples.flush()
            except OSError:
                return False
        return written

    def end(self, status: str, reason: str) -> str:
        """Record how the run ended. Returns the hash of the weights."""
        weights = weights_sha256(self.parts.model)
        position = self.state.position
        self.tell(
            RunEnded(
                step=self.state.step,
                epoch=position.epoch,
                status=status,
                reason=reason,
                weights_sha256=weights,
                time=time.time(),
            )
        )
        self.flush()
        return weights

    def close(self) -> None:
        """Let the listeners finish. Safe to call twice."""
        self.news.close()
        if self.samples is not None:
            self.samples.close()
