"""The search: asks Optuna what to try, runs it, stops what is bad, and ends within the budget, wherever it was killed.

What is known of a trial lies in Optuna's storage: its settings and values, and as attributes its folder, its seconds
and how it ended. One that was interrupted is told as failed, and enqueued with settings and folder: its run resumes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from manyhosts.control import variables
from manyhosts.control.agent import warm
from manyhosts.errors import ConfigError, ManyhostsError, ScriptError
from manyhosts.records import metrics, run_lock
from manyhosts.records.follower import Follower
from manyhosts.records.whole_file import read_json, write_json_whole
from manyhosts.trials.runs import LOOK_S, Place, Signals, Trial
from manyhosts.tune import range_test, search, storage
from manyhosts.tune.budget import LEVELS, Alarm, Budget, Spent
from manyhosts.tune.search import Parameter

NAME, ASKED, RUNS = "tune.json", "asked.json", "trials"
SCHEMA_VERSION = 1
INSIDE = "manyhosts.tune.in_worker"
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
_FALLBACK = (1e-5, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Where one trial at a time runs."""

    words: tuple[str, ...]
    """Behind `manyhosts run`: `--workers 2`, or `--hosts a,b`."""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a person asked of a search."""

    script: str
    arguments: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...]
    metric: str
    maximise: bool
    budget: Budget
    price_s: float | None = None
    """What one worker costs in a second."""
    sampler: str = "tpe"
    pruner: str = "median"
    seed: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)
    """As `--set` gives them, for every trial."""
    slots: tuple[Slot, ...]
    workers: int
    """Of each trial."""
    is_here: bool = True
    """Whether all trials run on this machine."""
    waits_in_queue: bool = False
    """Whether a scheduler starts the trials: what they wait for it costs nothing."""
    storage: str | None = None
    name: str
    """Of the study in the storage."""
    warn: str | None = None

    def in_common(self) -> dict[str, Any]:
        """What all trials of one search share."""
        return {
            "script": Path(self.script).name,
            "script_sha256": hashlib.sha256(Path(self.script).read_bytes()).hexdigest(),
            "arguments": list(self.arguments),
            "metric": self.metric,
            "settings": dict(self.settings),
            "search": [(each.name, each.kind, list(each.choices)) for each in self.parameters],
        }

    def command(self, slot: Slot, chosen: Mapping[str, search.Value], more: Sequence[str] = ()) -> list[str]:
        """What is typed behind `manyhosts` for a run with these values."""
        settings, flags = search.words(chosen)
        fixed = [word for key, value in self.settings.items() for word in ("--set", f"{key}={value}")]
        return ["run", *slot.words, *more, *fixed, *settings, self.script, *self.arguments, *flags]


@dataclass(slots=True)
class _UnderWay:
    """A trial whose run is in progress."""

    trial: Any
    slot: Slot
    place: Place
    run: Trial
    follower: Follower
    before: float
    """Seconds that it had taken when it was interrupted."""
    seen: dict[int, float] = field(default_factory=dict)
    """Optimizer step of each validation → value."""
    steps: tuple[int, int] = (0, 0)
    """How far it is, and how far it goes; 0: not known."""
    asked_to_end: str = ""
    """`pruned` or `stopped`."""
    ended_since: float = 0.0
    begun: float | None = None
    """When its workers were there, where a scheduler starts them."""

    def seconds(self, *, waits: bool) -> float:
        """What it has cost so far, this time."""
        if waits:
            return 0.0 if self.begun is None else time.monotonic() - self.begun
        return self.run.seconds


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
        self.optuna = storage.library()
        self.study = storage.open_study(
            folder, asked.storage, asked.name, maximise=asked.maximise, sampler=asked.sampler, pruner=asked.pruner,
            seed=asked.seed,
        )  # fmt: skip
        self._see_that_same()
        self.alarm = Alarm(asked.warn, folder / "tune.log", say)
        self.under_way: list[_UnderWay] = []
        self.beats = storage.Heartbeats()
        self.number_of_beat = 0
        self.reason = ""
        """Why no more trials are begun."""
        self._sessions = float(self._attribute("seconds", {}).get(str(folder), 0.0))
        self._began = self._beaten = time.monotonic()
        self._stop_s = _STOP_S
        self._kept = 0.0
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
                self._take_over(signals)
                self._find_rates(signals)
                if self.asked.sampler == "grid":
                    self._enqueue_grid()
                self._search(signals)
        finally:
            self.alarm.close()
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
        waits = self.asked.waits_in_queue
        seconds = self._kept + sum(each.seconds(waits=waits) for each in self.under_way)
        workers = seconds * self.asked.workers
        price = self.asked.price_s
        return Spent(
            seconds=self._sessions + time.monotonic() - self._began,
            worker_seconds=workers,
            money=None if price is None else workers * price,
        )

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
        """What a trial is reckoned to take that nobody stops, in seconds; None: nothing is known yet."""
        done = sorted(
            each.user_attrs["seconds"] + each.user_attrs.get("before", 0.0)
            for each in self._trials()
            if each.user_attrs.get("status") == "completed"
        )
        if done:
            return float(done[min(len(done) - 1, int(_SAFE * len(done)))])
        running = [
            (each.before + each.run.seconds) * each.steps[1] / each.steps[0] for each in self.under_way if each.steps[0]
        ]
        return max(running) if running and all(running) else None

    def _may_begin(self) -> bool:
        """Whether one more trial is to be begun now; `reason` says why not."""
        waiting = any(each.state.name == "WAITING" for each in self._trials())
        limit = self.asked.budget.trials
        if limit is not None and len(self._begun()) >= limit:
            self.reason = f"{limit} trials are done"
            return False
        if self.asked.sampler == "grid" and not waiting:
            self.reason = "every combination is tried"
            return False
        needs = self.estimate()
        promised = sum(max(0.0, (needs or 0.0) - each.run.seconds) for each in self.under_way)
        left = self._seconds_left(promised, self.asked.workers)
        if left < (needs or 0.0) + self._stop_s:
            self.reason = (
                f"the next trial would take about {needs or self._stop_s:.0f} s, and {max(0.0, left):.0f} s are left"
            )
            return False
        # Until the first one shows what a trial costs, it is alone.
        return needs is not None or not self.under_way or math.isinf(left)

    def _warn(self) -> None:
        spent, given = self.spent(), self._attribute("warned", [])
        ending = self._stop_s * len(self.under_way)  # else they would be ended before the last warning is due
        done = sum(
            each.state.is_finished() and each.number not in self._attribute("left", []) for each in self._trials()
        )
        share = self.asked.budget.share(self._plus(spent, ending), done)
        for level in LEVELS:
            mark = f"{self.asked.budget.text} {level}"
            if share * 100 >= level and mark not in given:
                given = [*given, mark]
                self.study.set_user_attr("warned", given)
                self.alarm.give(level, self.asked.budget, spent)

    # One trial.

    def _begin(self, slot: Slot, signals: Signals) -> None:
        trial = self.study.ask()
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
        self.under_way.append(_UnderWay(trial, slot, place, run, Follower(place.run.metrics, metrics.decoded), before))
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

    def _follow(self, each: _UnderWay) -> None:
        """Take in what its run has recorded, and have it end where Optuna says that it is bad.

        Raises:
            ConfigError: it validates, and not this metric.
        """
        more = True
        while more:
            news = each.follower.look()
            more = news.more
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

    def _decide(self, each: _UnderWay, line: Mapping[str, Any]) -> None:
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

    def _ask_to_end(self, each: _UnderWay, why: str) -> None:
        if not each.asked_to_end:
            each.asked_to_end, each.ended_since = why, time.monotonic()
            each.run.stop()

    def _settle(self, each: _UnderWay) -> None:
        """Tell Optuna how a trial has ended."""
        self.under_way.remove(each)
        each.follower.close()
        if each.ended_since:
            self._stop_s = max(self._stop_s, 1.2 * (time.monotonic() - each.ended_since))
        outcome = each.run.outcome(each.place, None, interrupted=True)
        status, reason = ("completed" if outcome.done else each.asked_to_end or "interrupted"), ""
        if status == "interrupted" and not self._was_stopped(each):
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
        states = self.optuna.trial.TrialState
        state = {"completed": states.COMPLETE, "pruned": states.PRUNED}.get(status, states.FAIL)
        self.study.tell(each.trial, best if status == "completed" else None, state=state)
        self._count()
        self.write()
        shown = ", ".join(f"{key}={_short(value)}" for key, value in each.trial.params.items())
        value = "" if best is None else f", {self.asked.metric} {best:.4g}"
        self.say(f"trial {each.trial.number}: {shown}: {status}{value}, {each.run.seconds:.0f} s" + _indented(reason))
        self._see_that_some_succeed()

    def _was_stopped(self, each: _UnderWay) -> bool:
        """Whether a signal ended it, rather than a fault of its own: the run itself says so."""
        with contextlib.suppress(ConfigError):
            return str(read_json(each.place.run.summary).get("status")) == "interrupted"
        return each.run.process.returncode in (130, 143, -2, -15)

    def _see_that_some_succeed(self) -> None:
        ended = [
            each
            for each in self._trials()
            if each.state.is_finished() and each.number not in self._attribute("left", [])
        ]
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

    # What was before.

    def _see_that_same(self) -> None:
        now = json.loads(json.dumps(self.asked.in_common()))
        before = self.study.user_attrs.get("asked")
        if before is not None and (differs := [key for key in now if before.get(key) != now[key]]):
            raise ConfigError(
                f"this search was begun with another {differs[0].replace('_sha256', ' (its text has changed)')}: its "
                "trials cannot be compared",
                where=str(self.folder),
                fix="give another --run-dir (and --study, in a storage that is shared), or ask as before",
            )
        self.study.set_user_attr("asked", now)

    def _take_over(self, signals: Signals) -> None:
        """Trials that a search in this folder left: their runs are waited for, and are resumed."""
        for each in self._begun():
            mine = each.user_attrs.get("folder", str(self.folder) if self.asked.storage is None else "")
            if mine != str(self.folder):
                continue
            if each.state.name == "RUNNING":
                path = self.folder / RUNS / str(each.user_attrs.get("run", each.number))
                while _goes_on(path):
                    signals.check()
                    time.sleep(LOOK_S)
                self._leave(each)
            elif each.user_attrs.get("status") in ("interrupted", "stopped") and each.number not in self._attribute(
                "left", []
            ):
                self._once_more(each)
        self._count()

    def _leave(self, each: Any) -> None:
        """Give up a trial that nobody runs any more, and have its run resumed by another one."""
        keep = self.study._storage
        try:
            keep.set_trial_user_attr(each._trial_id, "status", "interrupted")
            self.study.tell(each.number, state=self.optuna.trial.TrialState.FAIL)
        except (ValueError, RuntimeError):
            return  # another search that shares the storage was first
        self._once_more(each)

    def _once_more(self, each: Any) -> None:
        attributes = each.user_attrs
        if not each.params:
            return
        spent = attributes.get("seconds", 0.0) + attributes.get("before", 0.0)
        self.study.enqueue_trial(
            each.params, user_attrs={"run": attributes.get("run", str(each.number)), "before": spent}
        )
        self.study.set_user_attr("left", [*self._attribute("left", []), each.number])

    def _enqueue_grid(self) -> None:
        tried = [each.system_attrs.get("fixed_params", each.params) for each in self._trials()]
        for chosen in search.grid(self.parameters):
            if chosen not in tried:
                self.study.enqueue_trial(chosen)

    def _find_rates(self, signals: Signals) -> None:
        """Give `lr=auto` its range, by a range test unless one was made before."""
        if not any(each.kind == "auto" for each in self.parameters):
            return
        found = self.study.user_attrs.get("rates")
        if found is None:
            self.say("learning-rate range test: 100 steps with rates from 1e-6 to 10")
            found, seconds = self._range_test(signals)
            self.study.set_user_attr("rates", found)
            self.study.set_user_attr("range test seconds", seconds)
            if found is not None and len(found) > 2:
                self.study.enqueue_trial({"lr": found[2]})
            self._count()
        low, high = found[:2]
        self.parameters = tuple(
            replace(each, kind="log", low=low, high=high) if each.kind == "auto" else each for each in self.parameters
        )

    def _range_test(self, signals: Signals) -> tuple[list[float], float]:
        """The lowest and the highest rate, and a first guess where there is one; and the seconds it took."""
        place = Place(self.folder, "range-test")
        asked = replace(self.asked, settings={**self.asked.settings, **range_test.SETTINGS})
        words = asked.command(
            asked.slots[0], {}, ["--env", f"{variables.FIRST}={INSIDE}", "--run-dir", str(place.run.path)]
        )
        run = self._start(words, place.log, asked.slots[0])

        def look(seconds: float) -> None:
            self.show(f"range test, {seconds:.0f} s")
            if self._seconds_left() - seconds <= self._stop_s:
                run.stop()

        run.wait(signals, look)
        signals.check()
        lines = metrics.read(place.run.metrics) if place.run.metrics.exists() else []
        if not any(line["event"] == "step" for line in lines):
            raise ScriptError(
                f"the learning-rate range test has made no step: {run.reason()}",
                where=str(place.log),
                fix="give the range yourself: --search lr=log:1e-5:1, or search other settings",
            )
        found = range_test.of_steps(lines)
        if found is None:
            low, high = _FALLBACK
            self.say(f"its losses do not say which rates are good: {low:g} to {high:g} are tried")
            return [low, high], run.seconds
        low, guess, high = found
        self.say(f"rates from {low:.2g} to {high:.2g} are tried, {guess:.2g} first")
        return [low, high, guess], run.seconds

    # Records.

    def _trials(self) -> list[Any]:
        return list(self.study.get_trials(deepcopy=False))

    def _begun(self) -> list[Any]:
        """Each once, though its run was taken over by another trial."""
        left = self._attribute("left", [])
        return [each for each in self._trials() if each.state.name != "WAITING" and each.number not in left]

    def _attribute(self, name: str, otherwise: Any) -> Any:
        return self.study.user_attrs.get(name, otherwise)

    def _count(self) -> None:
        """Add up what was spent on trials that are not under way here."""
        own = {each.trial.number for each in self.under_way}
        self._kept = sum(
            float(each.user_attrs.get("seconds", 0.0)) for each in self._trials() if each.number not in own
        )
        self._kept += float(self._attribute("range test seconds", 0.0))

    def _beat(self) -> None:
        """Show that this search lives, keep what was spent, and look whether others that share the storage died."""
        self._beaten = time.monotonic()
        self.number_of_beat += 1
        for each in self.under_way:
            each.trial.set_user_attr("heartbeat", f"{os.getpid()} {self.number_of_beat}")
            each.trial.set_user_attr("seconds", each.seconds(waits=self.asked.waits_in_queue))
        self._keep_time()
        own = {each.trial.number for each in self.under_way}
        for each in self._trials():
            if each.state.name == "RUNNING" and each.number not in own and self.beats.is_dead(each):
                self.say(f"trial {each.number} was left by a search that is gone; it is run again")
                self._leave(each)
        self._count()

    def _keep_time(self) -> None:
        seconds = {**self._attribute("seconds", {}), str(self.folder): self.spent().seconds}
        self.study.set_user_attr("seconds", seconds)

    def best(self) -> Any:
        """The trial with the best value, or None."""
        valued = [each for each in self._trials() if each.user_attrs.get("best") is not None]
        sign = 1 if self.asked.maximise else -1
        return max(valued, key=lambda each: sign * each.user_attrs["best"], default=None)

    def write(self) -> None:
        """Put `tune.json` into the folder, and what was asked beside it."""
        self._keep_time()
        write_json_whole(self.folder / NAME, self.to_json())
        names = [(each.name, each.kind, each.low, each.high, each.step, each.choices) for each in self.parameters]
        asked = {
            "schema_version": SCHEMA_VERSION, **self.asked.in_common(), "maximise": self.asked.maximise,
            "sampler": self.asked.sampler, "pruner": self.asked.pruner, "parameters": names, "reason": self.reason,
        }  # fmt: skip
        write_json_whole(self.folder / ASKED, asked)

    def to_json(self) -> dict[str, Any]:
        """What `tune.json` holds."""
        best = self.best()
        return {
            "schema_version": SCHEMA_VERSION,
            "trials": [
                {
                    "number": each.number,
                    "settings": dict(each.params),
                    "status": "running" if each.state.name == "RUNNING" else each.user_attrs.get("status", "failed"),
                    "value": each.user_attrs.get("best"),
                    "seconds": each.user_attrs.get("seconds", 0.0),
                }
                for each in self._trials()
                if each.state.name != "WAITING"
            ],
            "best": None
            if best is None
            else {
                "number": best.number,
                "settings": dict(best.params),
                "value": best.user_attrs["best"],
                "run_dir": str(Path(best.user_attrs["folder"]) / RUNS / best.user_attrs["run"]),
                "command": shlex.join(["manyhosts", *self.asked.command(self.asked.slots[0], best.params)]),
            },
            "spent": {key: getattr(self.spent(), key) for key in ("seconds", "worker_seconds", "money")},
            "budget": self.asked.budget.to_json(),
        }

    def _line(self) -> str:
        done = sum(each.state.is_finished() for each in self._trials())
        best = self.best()
        value = "" if best is None else f", best {self.asked.metric} {best.user_attrs['best']:.4g}"
        share = self.asked.budget.share(self.spent(), done)
        return f"{done} trials done, {len(self.under_way)} under way{value}, {share:.0%} of the budget"


def _goes_on(path: Path) -> bool:
    try:
        run_lock.see_that_free(path)
    except ConfigError:
        return True
    return False


def _short(value: search.Value) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _indented(text: str) -> str:
    return "".join(f"\n  {line}" for line in text.splitlines())
