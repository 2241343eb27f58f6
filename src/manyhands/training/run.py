"""One run: from its directory and its newest snapshot to its end and its records."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from manyhands.cluster.reports import Reporter
from manyhands.communication.gathering import gather_words
from manyhands.config.settings import Settings
from manyhands.config.stopping import EarlyStopping
from manyhands.config.strategies import Single
from manyhands.errors import ManyhandsError
from manyhands.events import Event, Listener, Note, RunEnded, RunStarted
from manyhands.listeners.broadcast import Broadcast
from manyhands.listeners.standard import standard
from manyhands.records.run_directory import RunDirectory
from manyhands.records.run_record import RunRecord, plain_settings, versions_for
from manyhands.records.samples import SamplesFile
from manyhands.snapshot.fingerprint import weights_sha256
from manyhands.strategies.alone import Drifting
from manyhands.training.build import Parts
from manyhands.training.evaluate import Evaluation
from manyhands.training.keeping import Keeping
from manyhands.training.loop import Loop
from manyhands.training.marks import reached
from manyhands.training.result import Result
from manyhands.training.wishes import Wishes
from manyhands.units import Duration


class Run:
    """What `fit` does around the loop."""

    def __init__(
        self,
        *,
        parts: Parts,
        settings: Settings,
        directory: RunDirectory,
        script: Path,
        validation: Evaluation | None,
        listeners: Sequence[Listener],
        reporter: Reporter | None,
    ) -> None:
        """Open the run directory, and take up its newest snapshot that fits.

        Raises:
            ConfigError: the directory is that of another script.
            SnapshotError: there are snapshots, and none can be gone on from.
        """
        self.parts, self.settings, self.directory, self.validation = parts, settings, directory, validation
        self.world = parts.world
        self.reporter = reporter
        self.news = Broadcast([])
        if self.world.is_leader:
            directory.open_for(script)
        self.world.barrier()  # nobody looks into the directory before the leader has made it
        strategy = Single.name if self.world.size == 1 else settings.strategy.name
        self.keeping = Keeping(
            parts,
            directory,
            keep=settings.snapshots.keep,
            strategy=strategy,
            rule=settings.early_stopping or EarlyStopping(),
            tell=self.tell,
        )
        self.state, self.loaded = self.keeping.restore()
        hosts = gather_words(self.world, socket.gethostname())
        if self.world.is_leader:
            record = RunRecord(
                script=str(script),
                arguments=sys.argv[1:],
                settings=plain_settings(settings),
                seed=settings.seed,
                versions=versions_for(script),
                hosts=list(dict.fromkeys(hosts)),
                workers=self.world.size,
                strategy=strategy,
                backend=self.world.backend if self.world.size > 1 else None,
                started=time.time(),
            )
            record.write(directory.run_json)
            self.news = Broadcast([*standard(directory, record), *listeners])
        self.samples = SamplesFile(directory.samples(self.world.rank)) if settings.record_samples else None

    def tell(self, event: Event) -> None:
        """Tell the listeners, which are on the leader."""
        self.news(event)

    def fit(self) -> Result:
        """Train until the run is as long as was asked, and record how it ended."""
        state = self.state
        wishes = Wishes()
        loop = Loop(
            self.parts,
            settings=self.settings,
            state=state,
            validation=self.validation,
            keeping=self.keeping,
            wishes=wishes,
            tell=self.tell,
            flush=self.flush,
            note_samples=self.samples.add if self.samples is not None else None,
        )
        self.announce(loop)
        try:
            with ExitStack() as stack:
                stack.enter_context(wishes.listening())
                reason = loop.run()
                if (
                    self.validation is not None
                    and state.step
                    and state.validated_at != state.step
                    and not wishes.granted
                ):
                    loop.validate()
                if self.keeping.saved_at != state.step:
                    loop.save()
                self.keeping.finish()
                if isinstance(self.parts.strategy, Drifting):
                    self.parts.strategy.average(self.parts.model)  # a run ends with one model
        except ManyhandsError as error:
            self.end("failed", error.what)
            raise
        except Exception as error:
            self.end("failed", f"{type(error).__name__}: {error}")
            raise
        except KeyboardInterrupt:
            self.end("interrupted", "a second signal, obeyed at once")
            raise
        status = "interrupted" if wishes.granted else "stopped early" if state.ended else "completed"
        weights = self.end(status, reason)
        if wishes.granted:
            raise SystemExit(128 + wishes.number)
        return Result(
            status=status,
            reason=reason,
            steps=state.step,
            epochs=self.parts.source.epochs(state.position),
            validation=dict(state.validation),
            best=state.best,
            best_step=state.best_step,
            seconds=state.seconds,
            weights_sha256=weights,
            run_dir=self.directory.path,
        )

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
        self.tell(
            RunStarted(
                step=state.step,
                epoch=state.position.epoch,
                steps_per_epoch=per_epoch,
                total_steps=min(ends) if ends else None,
                time=now,
                resumed_from="" if self.loaded is None else str(self.loaded.path),
            )
        )
        for skipped in self.loaded.skipped if self.loaded is not None else []:
            self.tell(skipped)
        for text in self.notes(loop):
            self.tell(Note(text=text, step=state.step, time=now))

    def notes(self, loop: Loop) -> list[str]:
        """What is worth saying once."""
        notes = []
        if (virtual := self.settings.virtual_workers) is not None:
            threads = torch.get_num_threads()
            notes.append(
                f"each batch is cut into {virtual} parts (threads: {threads}), for the same bits on 1 to {virtual} "
                "workers; BatchNorm sees one part"
            )
        elif self.parts.membership is not None:
            notes.append("BatchNorm sees the batch of all workers; batch_norm='local' is faster and another model")
        elif self.world.size > 1 and self.settings.batch_norm == "local":
            notes.append("BatchNorm sees each worker's own samples, so the number of workers changes the model")
        if self.loaded is not None and (reached(loop.limit, loop.mark()) or self.state.ended):
            why = self.state.ended or f"it is {Duration.parse(self.settings.duration)} long already"
            notes.append(f"this run is finished ({why}); ask for a longer one, or choose another run directory")
        return notes

    def flush(self) -> None:
        """Have everything that was told on the disk: a snapshot must not be ahead of the records."""
        self.news.flush()
        if self.samples is not None:
            self.samples.flush()

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
