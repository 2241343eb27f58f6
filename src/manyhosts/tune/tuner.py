"""The search: asks Optuna what to try, runs it, stops what is bad, and ends within the budget, wherever it was killed.

What is known of a trial lies in Optuna's storage: its settings and values, and as attributes its folder, its seconds
and how it ended. One that was interrupted is reported as failed, and enqueued with settings and folder: it resumes.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from manyhosts.control.agent import warm
from manyhosts.errors import ConfigError, ManyhostsError, ScriptError
from manyhosts.records import metrics, run_lock
from manyhosts.records.atomic_file import write_json
from manyhosts.records.follower import Follower
from manyhosts.trials.runs import LOOK_S, Place, Signals, Trial
from manyhosts.tune import range_test, search
from manyhosts.tune.asked import Asked, Slot
from manyhosts.tune.budget import LEVELS, Alarm, Spent
from manyhosts.tune.kept_trials import RUNS, Heartbeats, KeptTrials, UnderWay

NAME, ASKED = "tune.json", "asked.json"
SCHEMA_VERSION = 1
_BEAT_S = 2.0
_STOP_S = 2.0
"""What it takes a run to end in order, until one has been seen to."""
_AS_LONG = 0.5
"""At first, ending is reckoned with this share of what beginning took."""
_WARM_S = 5.0
_SAFE = 0.8
"""Of trials that ran to their end, this share was shorter than what the next one is reckoned with."""
_FEW = 3
"""So many trials that fail, and none that does not: the script is at fault."""


class Tuner:
    """One search, in one folder."""

    def __init__(
        self,
        asked: Asked,
        folder: Path,
        program: Sequence[str],
        say: Callable[[str], None],
        show: Callable[[str], None],
    ) -> None:
        """`say` gets lines that stay, `show` one that the next replaces. Nothing runs before `run`.

        Raises:
            ConfigError: the storage cannot be opened, or holds another search.
            LaunchError: Optuna is not installed.
        """
        self.asked, self.folder, self.program, self.say, self.show = asked, folder, tuple(program), say, show
        self.parameters = asked.parameters
        self.kept = KeptTrials(asked, folder)
        self.alarm = Alarm(asked.warn, folder / "tune.log", say)
        self.under_way: list[UnderWay] = []
        self.beats = Heartbeats()
        self.reason = ""
        """Why no more trials are begun."""
        self._sessions = float(self.kept.attribute("seconds", {}).get(str(folder), 0.0))
        self._began = self._beaten = time.monotonic()
        self._stop_s = _STOP_S
        self.importance: dict[str, float] = {}
        self._others_s = 0.0
        """Spent on trials that are not under way here."""
        self._count()

    def run(self) -> None:
        """Search until the budget is spent, all is tried, or a signal comes.

        Raises:
            ConfigError: another search continues in the folder, or no trial has the metric.
            ScriptError: the first trials all failed.
            Interrupted: by a signal, when everything under way has ended in order.
        """
        lock = run_lock.take(self.folder, run_lock.new_token(), launches=True)
        try:
            with Signals() as signals:
                self.kept.take_over(signals)
                self._count()
                self.parameters = range_test.with_rates(self.kept, partial(self._test_rates, signals), self.say)
                self._count()
                if self.asked.sampler == "grid":
                    self.kept.enqueue_grid(self.parameters)
                self._search(signals)
        finally:
            self.alarm.close()
            self.importance = self.kept.importance()
            self.write()
            if lock is not None:
                lock.release()

    def _search(self, signals: Signals) -> None:
        try:
            while True:
                self._look()
                self._begin_what_fits(signals)
                if not self.under_way:
                    signals.check()
                    return
                self.show(self._line())
                time.sleep(LOOK_S)
        except ManyhostsError:
            self._end_all("stopped")
            raise

    def _look(self) -> None:
        """Hear from every run, end what is bad or beyond the budget, and give the warnings that are due."""
        for each in list(self.under_way):
            over = each.run.has_ended()
            self._follow(each)
            if over:
                self._settle(each)
        left = self._seconds_left()
        if left <= self._stop_s and self.under_way:
            self.reason = self.reason or f"the budget {self.asked.budget.text} is spent"
            for each in self.under_way:
                self._ask_to_end(each, "stopped")
        self._warn()
        if time.monotonic() - self._beaten >= _BEAT_S:
            self._beat()

    def _begin_what_fits(self, signals: Signals) -> None:
        free = [slot for slot in self.asked.slots if all(each.slot is not slot for each in self.under_way)]
        for slot in free:
            if signals.came or not self._may_begin():
                return
            self._begin(slot, signals)

    # The budget.

    def spent(self) -> Spent:
        """Up to this moment, by all who share the storage."""
        seconds = self._others_s + sum(each.seconds(waits=self.asked.waits_in_queue) for each in self.under_way)
        return self._plus(Spent(seconds=self._sessions + time.monotonic() - self._began), seconds)

    def _plus(self, spent: Spent, seconds: float) -> Spent:
        """With `seconds` more of trials."""
        workers, price = spent.worker_seconds + seconds * self.asked.workers, self.asked.price_s
        return replace(spent, worker_seconds=workers, money=None if price is None else workers * price)

    def _seconds_left(self, extra: float = 0.0, workers: int | None = None) -> float:
        """How long what is under way may continue; `extra`: seconds of trials that are promised already."""
        spent = self._plus(self.spent(), extra)
        busy = self.asked.workers * max(1, len(self.under_way)) if workers is None else workers
        return self.asked.budget.seconds_left(spent, busy, self.asked.price_s or 0.0)

    def estimate(self) -> float | None:
        """What a trial is reckoned to take that no one stops, in seconds; None: nothing is known yet."""
        if done := self.kept.complete_s():
            return float(done[min(len(done) - 1, int(_SAFE * len(done)))])
        running = [
            (each.before + each.run.seconds) * each.steps[1] / each.steps[0] for each in self.under_way if each.steps[0]
        ]
        return max(running) if running and all(running) else None

    def _may_begin(self) -> bool:
        """Whether one more trial is to be begun now; `reason` says why not."""
        if len(self.kept.begun()) >= (self.asked.budget.trials or math.inf):
            self.reason = f"{self.asked.budget.trials} trials are done"
            return False
        if self.asked.sampler == "grid" and all(each.state.name != "WAITING" for each in self.kept.all()):
            self.reason = "every combination is tried"
            return False
        needs = self.estimate()
        promised = sum(max(0.0, (needs or 0.0) - each.run.seconds) for each in self.under_way)
        left = self._seconds_left(promised, self.asked.workers)
        if left < (needs or 0.0) + self._stop_s:
            takes = "takes what is not known yet" if needs is None else f"would take about {needs:.0f} s"
            self.reason = f"the next trial {takes}, and {max(0.0, left):.0f} s are left"
            return False
        # Until the first one shows what a trial costs, it is alone.
        return needs is not None or not self.under_way or math.isinf(left)

    def _warn(self) -> None:
        spent, given = self.spent(), self.kept.attribute("warned", [])
        ending = self._stop_s * len(self.under_way)  # else they would be ended before the last warning is due
        share = self.asked.budget.share(self._plus(spent, ending), len(self.kept.ended()))
        marks = {f"{self.asked.budget.text} {level}": level for level in LEVELS if share * 100 >= level}
        if due := [mark for mark in marks if mark not in given]:
            self.kept.study.set_user_attr("warned", [*given, *due])
            self.alarm.give(marks[due[-1]], self.asked.budget, spent)  # of several at once, the last says it

    # One trial.

    def _begin(self, slot: Slot, signals: Signals) -> None:
        trial = self.kept.study.ask()
        chosen = search.suggest(trial, self.parameters)
        name = trial.user_attrs.get("run", str(trial.number))
        for key, value in (
            ("folder", str(self.folder)),
            ("run", name),
            ("workers", self.asked.workers),
            ("seconds", 0.0),
        ):
            trial.set_user_attr(key, value)
        place = Place(self.folder / RUNS, name)
        words = self.asked.command(slot, chosen, ["--run-dir", str(place.run.path)])
        run = self._start(words, place.log, slot)
        before = trial.user_attrs.get("before", 0.0)
        self.under_way.append(UnderWay(trial, slot, place, run, Follower(place.run.metrics, metrics.decoded), before))
        signals.trials.add(run)
        if signals.came:
            run.stop()
        self.write()

    def _start(self, words: Sequence[str], log: Path, slot: Slot) -> Trial:
        environment = dict(slot.environment)
        if self.asked.is_here and warm.IS_POSSIBLE:
            environment = {warm.VARIABLE: os.environ.get(warm.VARIABLE, str(_WARM_S)), **environment}
            words = [words[0], "--warm", *words[1:]]
        return Trial([*self.program, *words], log, environment=environment, outlives=False)

    def _follow(self, each: UnderWay) -> None:
        """Take in what its run has recorded, and have it end where Optuna says that it is bad.

        Raises:
            ConfigError: it validates, and not this metric.
        """
        more = True
        while more:
            news = each.follower.look()
            more = news.more
            if news.began_again:  # what a rewind took back has not been
                each.seen.clear()
            for line in news.lines:
                if each.begun is None:
                    each.begun = time.monotonic()
                    if not self.asked.waits_in_queue:  # what is slow to begin is slow to end
                        self._stop_s = max(self._stop_s, _AS_LONG * each.run.seconds)
                if line["event"] == "start":
                    each.steps = (each.steps[0], int(line.get("total_steps") or 0))
                elif line["event"] == "step":
                    each.steps = (int(line["step"]), each.steps[1])
                elif line["event"] == "validation" and line["step"] not in each.seen:
                    self._decide(each, line)

    def _decide(self, each: UnderWay, line: Mapping[str, Any]) -> None:
        values = line["values"]
        if self.asked.metric not in values:
            raise ConfigError(
                f"validations have no {self.asked.metric!r}", where="--metric", fix=f"it is one of: {', '.join(values)}"
            )
        value = float(values[self.asked.metric])
        each.seen[line["step"]] = value
        if math.isfinite(value):
            each.trial.report(value, len(each.seen))
            if not each.asked_to_end and each.trial.should_prune():
                self._ask_to_end(each, "pruned")

    def _ask_to_end(self, each: UnderWay, why: str) -> None:
        if not each.asked_to_end:
            each.asked_to_end, each.ended_since = why, time.monotonic()
            each.run.stop()

    def _settle(self, each: UnderWay) -> None:
        """Report to Optuna how a trial has ended."""
        self.under_way.remove(each)
        each.follower.close()
        if each.ended_since:
            self._stop_s = max(self._stop_s, 1.2 * (time.monotonic() - each.ended_since))
        outcome = each.run.outcome(each.place, None, interrupted=True)
        status, reason = ("completed" if outcome.done else each.asked_to_end or "interrupted"), ""
        if status == "interrupted" and not each.was_stopped():
            outcome = each.run.outcome(each.place, None, interrupted=False)
            status, reason = "failed", outcome.reason
        values = [value for value in each.seen.values() if math.isfinite(value)]
        best = (max if self.asked.maximise else min)(values, default=None)
        if status in ("completed", "pruned") and best is None:
            status, reason = "failed", f"no validation has given a number for {self.asked.metric!r}"
        for key, value in (
            ("status", status), ("seconds", each.seconds(waits=self.asked.waits_in_queue)), ("best", best),
            ("reason", reason),
        ):  # fmt: skip
            each.trial.set_user_attr(key, value)
        states = self.kept.states
        state = {"completed": states.COMPLETE, "pruned": states.PRUNED}.get(status, states.FAIL)
        self.kept.study.tell(each.trial, best if status == "completed" else None, state=state)
        self._count()
        self.write()
        shown = ", ".join(
            f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in each.trial.params.items()
        )
        value = "" if best is None else f", {self.asked.metric} {best:.4g}"
        why = "".join(f"\n  {line}" for line in reason.splitlines())
        self.say(f"trial {each.trial.number}: {shown}: {status}{value}, {each.run.seconds:.0f} s{why}")
        self._see_that_some_succeed()

    def _see_that_some_succeed(self) -> None:
        ended = self.kept.ended()
        if len(ended) >= _FEW and all(each.user_attrs.get("status") == "failed" for each in ended):
            raise ScriptError(
                f"the first {len(ended)} trials have all failed: {ended[-1].user_attrs.get('reason', '')}",
                where=str(self.folder / RUNS / str(ended[-1].user_attrs.get("run"))),
                fix="mend the script, or narrow the search; manyhosts run with the settings above shows the fault",
            )

    def _end_all(self, why: str) -> None:
        for each in self.under_way:
            self._ask_to_end(each, why)
        while self.under_way:
            for each in list(self.under_way):
                if each.run.has_ended():
                    with contextlib.suppress(ManyhostsError):
                        self._settle(each)
            time.sleep(LOOK_S)

    def _count(self) -> None:
        self._others_s = self.kept.seconds(without=[each.trial.number for each in self.under_way])

    def _test_rates(self, signals: Signals, place: Place, words: Sequence[str]) -> tuple[Trial, float]:
        run = self._start(words, place.log, self.asked.slots[0])
        begun = None if self.asked.waits_in_queue else 0.0

        def look(seconds: float) -> None:
            nonlocal begun
            if begun is None and place.run.metrics.exists():  # until then it waits in a queue, which costs nothing
                begun = seconds
            spent = 0.0 if begun is None else seconds - begun
            self.show(f"range test, {spent:.0f} s")
            if self._seconds_left() - spent <= self._stop_s:
                run.stop()

        run.wait(signals, look)
        signals.check()
        return run, 0.0 if begun is None else run.seconds - begun

    def _beat(self) -> None:
        """Show that this search lives, keep what was spent, and look whether others that share the storage died."""
        self._beaten = time.monotonic()
        for each in self.under_way:
            each.trial.set_user_attr("heartbeat", f"{os.getpid()} {self._beaten}")
            each.trial.set_user_attr("seconds", each.seconds(waits=self.asked.waits_in_queue))
        self._keep_time()
        own = {each.trial.number for each in self.under_way}
        for each in self.kept.all():
            if each.state.name == "RUNNING" and each.number not in own and self.beats.is_dead(each):
                self.say(f"trial {each.number} was left by a search that is gone; it is run again")
                self.kept.leave(each)
        self._count()

    def _keep_time(self) -> None:
        seconds = {**self.kept.attribute("seconds", {}), str(self.folder): self.spent().seconds}
        self.kept.study.set_user_attr("seconds", seconds)

    def write(self) -> None:
        """Put `tune.json` into the folder, and what was asked next to it."""
        self._keep_time()
        write_json(self.folder / NAME, self.to_json())
        names = [(each.name, each.kind, each.low, each.high, each.step, each.choices) for each in self.parameters]
        asked = {
            "schema_version": SCHEMA_VERSION, **self.asked.in_common(), "maximise": self.asked.maximise,
            "sampler": self.asked.sampler, "pruner": self.asked.pruner, "parameters": names, "reason": self.reason,
            "importance": self.importance,
        }  # fmt: skip
        write_json(self.folder / ASKED, asked)

    def to_json(self) -> dict[str, Any]:
        """What `tune.json` holds."""
        best = self.kept.best()
        return {
            "schema_version": SCHEMA_VERSION,
            "trials": self.kept.to_json(),
            "best": None
            if best is None
            else {
                "number": best.number,
                "settings": dict(best.params),
                "value": best.user_attrs["best"],
                "status": best.user_attrs.get("status", "running"),
                "run_dir": str(Path(best.user_attrs["folder"]) / RUNS / best.user_attrs["run"]),
                "command": shlex.join(["manyhosts", *self.asked.command(self.asked.slots[0], best.params)]),
            },
            "spent": {key: getattr(self.spent(), key) for key in ("seconds", "worker_seconds", "money")},
            "budget": asdict(self.asked.budget),
        }

    def _line(self) -> str:
        done, best = len(self.kept.ended()), self.kept.best()
        value = "" if best is None else f", best {self.asked.metric} {best.user_attrs['best']:.4g}"
        spent = f"{self.asked.budget.share(self.spent(), done):.0%} of the budget"
        return f"{done} trials done, {len(self.under_way)} under way{value}, {spent}"
