"""What is promised of a script, and whether it holds: one function for each promise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from manyhosts.errors import ManyhostsError
from manyhosts.prove import compare
from manyhosts.prove.causes import find
from manyhosts.prove.compare import (
    EXACT,
    FLOAT32,
    FLOAT32_ALONE,
    FLOAT64,
    PURE,
    Comparison,
    Departure,
    amount_in_words,
)
from manyhosts.prove.experiments import Cause, Experimented
from manyhosts.prove.trace import Trace
from manyhosts.prove.trials import Setup, Trial, Trials, resuming_workers

Status = Literal["holds", "fails", "not judged"]
PARTS = 6
"""Virtual workers by which it is seen whether nothing but random numbers with an address differs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What was found of one promise."""

    promise: str
    status: Status
    note: str = ""
    """How exactly it holds, or what must be known with it, or why it was not judged."""
    where: str = ""
    """Which two trials depart, in words."""
    departure: Departure | None = None
    cause: Cause | None = None

    def to_json(self) -> Mapping[str, Any]:
        """For `--json`."""
        found = self.departure
        place = {} if found is None else {
            "step": found.step, "what": found.what, "name": found.name, "amount": found.amount, "values": found.seen
        }  # fmt: skip
        cause = None if self.cause is None else {
            "kind": self.cause.kind, "what": self.cause.what, "fix": self.cause.fix, "evidence": self.cause.evidence
        }  # fmt: skip
        return {
            "promise": self.promise, "status": self.status, "note": self.note, "where": self.where,
            "departure": place, "cause": cause,
        }  # fmt: skip


def workers(trials: Trials) -> Verdict:
    """The same losses, gradients and weights on any number of workers."""
    numbers, first = trials.asked.workers, trials.asked.workers[0]
    if len(numbers) == 1:
        return Verdict(promise="workers", status="not judged", note="--workers names one number: 1,2 would compare two")
    verdicts = [same(trials, "workers", Setup(workers=first), Setup(workers=count)) for count in numbers[1:]]
    return _worst(verdicts)


def micro(trials: Trials) -> Verdict:
    """The same with half as many samples in a forward pass."""
    full = trials.run(Setup(workers=1))
    if full.trace.is_plain:
        return _plain("micro", "the size of a forward pass is the script's own affair")
    most = max((len(line["own"]) for lines in full.trace.steps.values() for line in lines.values()), default=0)
    settings = full.trace.settings
    now = settings.get("micro_batch_size") or -(-most // (settings.get("virtual_workers") or 1))
    if now < 2:
        return Verdict(promise="micro", status="not judged", note="a forward pass has one sample already")
    halved = Setup(workers=1).with_settings(micro_batch_size=-(-now // 2))
    return same(trials, "micro", Setup(workers=1), halved)


def resume(trials: Trials) -> Verdict:
    """The same bits after all workers were killed in the middle and started again."""
    count = resuming_workers(trials.asked)
    full = trials.run(Setup(workers=count))
    if full.trace.is_plain:
        return _plain("resume", "the script saves and resumes by itself, or not at all")
    if full.error is not None:
        count = trials.asked.workers[0]  # a script that is refused on several workers may yet be killed on one
        full = trials.run(Setup(workers=count))
    if full.error is not None and not full.trace.steps:
        return _does_not_run("resume", full)
    back = trials.run(Setup(workers=count, resumed=True))
    where = f"on {_workers(count)}, undisturbed and after a kill and a resume"
    if back.error is not None and not back.trace.steps:
        # A run that is refused because its data is another is reported by what makes it another.
        cause = Experimented(trials, full).of_data(trials, full, full)
        refused = _refused("resume", back, back.error)
        return refused if cause is None else replace(refused, where=f"{refused.where}: {back.error.what}", cause=cause)
    since = min((line["step"] for line in back.trace.begins.values()), default=0)
    if not since:
        note = "the killed run had written no snapshot in half a minute: a slow or full disk, or a setting of snapshots"
        return Verdict(promise="resume", status="not judged", note=note)
    found = of_start(full.trace, back.trace, since) or compare.in_bits(full.trace, back.trace, since=since)
    if found is None:
        return _holds("resume", f"bit for bit, from step {since}", full, back)
    return Verdict(
        promise="resume", status="fails", where=where, departure=found,
        cause=find(trials, full.setup, back.setup, found, "resume"),
    )  # fmt: skip


def of_start(full: Trace, back: Trace, since: int) -> Departure | None:
    """What the resumed run had not taken up, of the weights and buffers after step `since`.

    Nothing is known of that where workers hold different models: a snapshot has their mean, which no step has had.
    """
    if since not in full.steps or not back.begins or "ranks" in getattr(full.strategy, "gives_up", ()):
        return None
    before = full.of(since)
    return compare.unequal(
        {"weights": before["weights"], "buffers": before["buffers"]}, back.begins[min(back.begins)], since
    )


def samples(trials: Trials) -> Verdict:
    """Each sample once: in a step by one worker, in an epoch in one step."""
    looked = 0
    for count in trials.asked.workers:
        trial = trials.run(Setup(workers=count))
        trace = trial.trace
        if trace.is_plain:
            return _plain("samples", "which samples the script reads is not known")
        if trial.error is not None and not trace.steps:
            return _does_not_run("samples", trial)
        seen: dict[int, set[int]] = {}
        for step in trace.steps:
            taken, line = trace.taken(step), trace.of(step)
            wanted = line["taken"] if not line["shards"] else taken
            before = seen.setdefault(line["epoch"], set())
            repeated = not trace.repeats and (len(set(taken)) < len(taken) or before & set(taken))
            if taken != sorted(wanted) or repeated:
                doubled = sorted((before & set(taken)) or {index for index in taken if taken.count(index) > 1})
                return Verdict(
                    promise="samples", status="fails", where=f"on {_workers(count)}",
                    departure=Departure(step, "samples", seen=(f"wanted {sorted(wanted)[:6]}", f"taken {taken[:6]}")),
                    cause=Cause(
                        "samples",
                        f"samples {doubled[:6]} were taken more than once" if doubled else "some were left out",
                        "leave the choice of samples to mh.Data: give the entire dataset, the same on every worker",
                    ),
                )  # fmt: skip
            before |= set(taken)
            looked += len(taken)
        if trial.error is not None:
            return _broke_off("samples", trial)
    return Verdict(promise="samples", status="holds", note=f"{looked} samples looked at")


def ranks(trials: Trials) -> Verdict:
    """Equal weights and buffers on all workers after every step."""
    looked = []
    for count in trials.asked.workers:
        if count == 1:
            continue
        trial = trials.run(Setup(workers=count))
        if trial.error is not None and not trial.trace.steps:
            return _does_not_run("ranks", trial)
        found = compare.between_ranks(trial.trace, ignore=_own_statistics(trial.trace))
        if found is not None:
            departure, one, other = found
            return Verdict(
                promise="ranks", status="fails", where=f"between rank {one} and rank {other} of {count}",
                departure=departure, cause=find(trials, trial.setup, trial.setup, departure, "ranks"),
            )  # fmt: skip
        if trial.error is not None:
            return _broke_off("ranks", trial)
        looked.append(count)
    if not looked:
        return Verdict(promise="ranks", status="not judged", note="there is one worker")
    return Verdict(promise="ranks", status="holds", note="bit for bit, after every step")


def _own_statistics(trace: Trace) -> list[str]:
    """BatchNorm's buffers, where each worker has its own by the user's wish."""
    if trace.settings.get("batch_norm") != "local":
        return []
    names = {name for line in trace.begins.values() for name in line.get("buffers", {})}
    return [name for name in names if name.endswith(("running_mean", "running_var", "num_batches_tracked"))]


PROMISES: Mapping[str, tuple[str, Callable[[Trials], Verdict]]] = {
    "workers": ("same losses, gradients and weights on {workers} workers", workers),
    "micro": ("the same with half the samples in a forward pass", micro),
    "resume": ("the same after a kill in the middle and a resume", resume),
    "samples": ("each sample once", samples),
    "ranks": ("equal weights on all workers after every step", ranks),
}
"""In the order in which they are printed."""


def same(trials: Trials, promise: str, one: Setup, other: Setup) -> Verdict:
    """Whether two setups give the same: in bits with virtual workers, else but for rounding and by-design chance."""
    ours, theirs = trials.run(one), trials.run(other)
    for trial in (ours, theirs):
        if trial.error is not None and not trial.trace.steps:
            return _does_not_run(promise, trial)
    where = f"{one} and {other}"
    exact = ours.trace.settings.get("virtual_workers") is not None and promise == "workers"
    if exact:
        found = compare.in_bits(ours.trace, theirs.trace)
        if found is None:
            return _holds(promise, "bit for bit", ours, theirs)
        return _fails(trials, promise, one, other, found)
    first: Departure | None = None
    drew = bool(ours.trace.drew or theirs.trace.drew)
    if not drew:
        comparison = Comparison(ours.trace, theirs.trace, FLOAT32)
        first = comparison.first_departure()
        if first is None and (ours.trace.is_plain or not _is_in_doubt(trials, one, comparison)):
            alike = f"equal to {amount_in_words(comparison.largest)}" if comparison.largest else "bit for bit"
            return _holds(promise, alike, ours, theirs)
    if ours.trace.is_plain:
        note = f"{where}: {first}; what a step's batch is, and how the loss weighs it, is the script's own affair"
        return Verdict(promise=promise, status="not judged", note=note)
    return _arbitrated(trials, promise, one, other, drew=drew)


def _is_in_doubt(trials: Trials, setup: Setup, comparison: Comparison) -> bool:
    """Whether float32 may hide a fault: in a growth from step to step, or where gradients are small and no rounding."""
    return comparison.grew or (bool(comparison.noise) and compare.small(trials.run(replace(setup, double=True)).trace))


def _arbitrated(trials: Trials, promise: str, one: Setup, other: Setup, *, drew: bool) -> Verdict:
    """Look at both again in float64 and without dropout, where neither rounding nor chance can be blamed."""
    ours, theirs = (trials.run(replace(setup, double=True)) for setup in (one, other))
    if not (ours.trace.steps and theirs.trace.steps):
        ours, theirs = (trials.run(replace(setup, no_dropout=True)) for setup in (one, other))
    if ours.trace.drew or theirs.trace.drew:
        return _by_address(trials, promise, ours.setup, theirs.setup)
    comparison, found, doubt = _compared(trials, ours, theirs)
    if found is None and ours.setup.double:
        found = Comparison(ours.trace, theirs.trace, EXACT).first_departure()
        if found is not None and comparison.largest_gradient > PURE:
            note = f"{found}, which is rounding where float32 is used within, and else a fault that Adam makes large"
            return Verdict(promise=promise, status="not judged", note=note)
    if found is None:
        size = amount_in_words(comparison.largest)
        if comparison.grew and not doubt:
            doubt = (
                f"no step departs much more than the one before, but in the end by {size}: rounding, or a small fault"
            )
        if doubt:
            return Verdict(promise=promise, status="not judged", note=doubt)
        if drew:
            note = f"equal to {size} without dropout, whose masks differ; equal bits with virtual_workers"
        else:
            note = f"departs by rounding alone: equal to {size}{' in float64' * ours.setup.double}"
        return _holds(promise, note, ours, theirs)
    if promise == "micro" and ours.trace.has_batch_norm:
        return _but_for_batch_norm(trials, promise, ours.setup, theirs.setup, found)
    return _fails(trials, promise, ours.setup, theirs.setup, found)


def _compared(trials: Trials, ours: Trial, theirs: Trial) -> tuple[Comparison, Departure | None, str]:
    """How two trials without chance compare: where they depart, and where that is not known, why.

    In float32 what is within its bounds holds, and what is far beyond them does not; all between may be either.
    """
    if ours.setup.double:
        comparison = Comparison(ours.trace, theirs.trace, FLOAT64)
        return comparison, comparison.first_departure(), ""
    comparison = Comparison(ours.trace, theirs.trace, FLOAT32)
    departs: Departure | str | None = comparison.first_departure()
    if comparison.grew and departs is None:
        departs = f"in the end they depart by {amount_in_words(comparison.largest)}"
    found = Comparison(ours.trace, theirs.trace, FLOAT32_ALONE).first_departure()
    if departs is None or found is not None:
        return comparison, found, ""
    one, other = ours.setup, theirs.setup
    tried = (
        trials.run(Setup(workers=each.workers, settings=each.settings, double=True)).error for each in (one, other)
    )
    why = next((f": {error.what}" for error in tried if error is not None), "")
    doubt = f"{departs}; it could not be run in float64, where rounding and a small fault are told apart{why}"
    return comparison, None, doubt


def _by_address(trials: Trials, promise: str, one: Setup, other: Setup) -> Verdict:
    """The forward pass draws numbers of its own, whose address has the worker's part in it: have the parts be fixed."""
    if promise != "workers":
        return _with_set_draws(trials, promise, one, other)
    asked = [replace(setup, double=False, no_dropout=False) for setup in (one, other)]
    pair = [setup.with_settings(virtual_workers=PARTS) for setup in asked]
    ours, theirs = map(trials.run, pair)
    for trial in (ours, theirs):
        if trial.error is not None and not trial.trace.steps:
            return _does_not_run(promise, trial)
    if (found := compare.in_bits(ours.trace, theirs.trace)) is not None:
        return _fails(trials, promise, pair[0], pair[1], found)
    # Virtual workers are no proof of what the script does without them: there, all that is drawn is set to one value.
    plain = [replace(setup, set_draws=True) for setup in (one, other)]
    ours, theirs = map(trials.run, plain)
    draws = f"the forward pass draws random numbers: bit for bit with virtual_workers={PARTS}"
    if why := _not_comparable(ours, theirs):
        note = f"{draws}; without, that could not be tried, because {why}: set virtual_workers, or compare two runs"
        return Verdict(promise=promise, status="not judged", note=note)
    comparison, found, doubt = _compared(trials, ours, theirs)
    if found is not None:
        return _fails(trials, promise, plain[0], plain[1], found)
    if doubt:
        return Verdict(promise=promise, status="not judged", note=f"{draws}; without, {doubt}")
    if (verdict := _with_rows_drawn(trials, promise, plain[0], plain[1], draws)) is not None:
        return verdict
    size = amount_in_words(comparison.largest)
    return _holds(promise, f"{draws}, and without equal to {size} where all that is drawn is one value", ours, theirs)


def _with_set_draws(trials: Trials, promise: str, one: Setup, other: Setup) -> Verdict:
    """Each forward pass draws numbers of its own, so half of one draws others: have all that is drawn be one value."""
    draws = "each forward pass draws random numbers of its own, so half of one draws others"
    ours, theirs = (trials.run(replace(setup, set_draws=True)) for setup in (one, other))
    if why := _not_comparable(ours, theirs):
        return Verdict(promise=promise, status="not judged", note=f"{draws}; with set ones {why}")
    comparison, found, doubt = _compared(trials, ours, theirs)
    if found is not None and ours.trace.has_batch_norm:
        return _but_for_batch_norm(trials, promise, ours.setup, theirs.setup, found)
    if found is not None:
        return _fails(trials, promise, ours.setup, theirs.setup, found)
    if doubt:
        return Verdict(promise=promise, status="not judged", note=f"{draws}; with set ones {doubt}")
    if (verdict := _with_rows_drawn(trials, promise, ours.setup, theirs.setup, draws)) is not None:
        return verdict
    size = amount_in_words(comparison.largest)
    return _holds(promise, f"{draws}: equal to {size} where all that is drawn is one value", ours, theirs)


def _with_rows_drawn(trials: Trials, promise: str, one: Setup, other: Setup, draws: str) -> Verdict | None:
    """What is said where two setups are not equal when each sample has random numbers of its own; None: they are.

    One value for all samples hides what compares samples by what is drawn for them. It is a fault where all that is
    drawn has a row for each sample or the same shape in all passes; else rows may seem distinct where there are none.
    """
    pair = [replace(setup, draw_rows=True) for setup in (one, other)]
    ours, theirs = map(trials.run, pair)
    if why := _not_comparable(ours, theirs):
        return Verdict(promise=promise, status="not judged", note=f"{draws}; with some for each sample {why}")
    _, found, doubt = _compared(trials, ours, theirs)
    if doubt:
        return Verdict(promise=promise, status="not judged", note=f"{draws}; with some for each sample {doubt}")
    if found is None:
        return None
    if len(ours.trace.drawn | theirs.trace.drawn) == 1 and not ours.trace.has_batch_norm:
        return _fails(trials, promise, pair[0], pair[1], found)
    note = f"{draws}; equal where all that is drawn is one value, and not where each sample has its own: {found}"
    return Verdict(promise=promise, status="not judged", note=note)


def _but_for_batch_norm(trials: Trials, promise: str, one: Setup, other: Setup, found: Departure) -> Verdict:
    """Whether two trials with forward passes of other sizes are equal where BatchNorm has its running statistics."""
    frozen = [trials.run(replace(setup, freeze_batch_norm=True)) for setup in (one, other)]
    _, departs, doubt = _compared(trials, frozen[0], frozen[1])
    if departs is not None:
        return _fails(trials, promise, one, other, found)
    note = f"but for BatchNorm, which sees one forward pass at a time: {found}"
    if doubt:
        return Verdict(promise=promise, status="not judged", note=f"{note}; without that {doubt}")
    return Verdict(promise=promise, status="holds", note=note)


def _not_comparable(*pair: Trial) -> str:
    """Why two trials draw what cannot be made alike; empty where they do not."""
    for trial in pair:
        if not trial.trace.steps:
            return "it does not run with set random numbers" + (f" ({trial.error.what})" if trial.error else "")
        if trial.trace.left:
            how = trial.trace.left if trial.trace.left.startswith("by ") else f"by {trial.trace.left}"
            return f"what is drawn {how} has no value that goes for all samples"
    if len(set.union(*(trial.trace.ends for trial in pair))) > 1:
        return "NumPy or random draws as many numbers as there are samples"
    return ""


def _fails(trials: Trials, promise: str, one: Setup, other: Setup, found: Departure) -> Verdict:
    cause = find(trials, one, other, found, promise)
    return Verdict(promise=promise, status="fails", where=f"{one} and {other}", departure=found, cause=cause)


_KEPT = "is kept from one batch to the next"
"""In what a run could not try: no snapshot has that either, and each part of a batch changes it."""


def _holds(promise: str, note: str, *pair: Trial) -> Verdict:
    """It holds for all steps that both have made; one that broke off early is reported instead.

    What the runs could not try of the loss is not held to be right, though these steps were equal.
    """
    untried = next(
        (
            each.not_tried
            for each in pair
            if each.not_tried and (promise in ("workers", "micro") or _KEPT in each.not_tried)
        ),
        "",
    )
    if untried and all(trial.error is None for trial in pair):
        return Verdict(promise=promise, status="not judged", note=f"in these steps {note}; but {untried}")
    broken = next((trial for trial in pair if trial.error is not None), None)
    return Verdict(promise=promise, status="holds", note=note) if broken is None else _does_not_run(promise, broken)


def _broke_off(promise: str, trial: Trial) -> Verdict:
    """It holds as far as the trial came, which is not to its end."""
    assert trial.error is not None, "called for a trial that has failed"
    steps = max(trial.trace.steps)
    note = f"with {trial.setup} the script ends after step {steps}; until then it holds: {trial.error.what}"
    return Verdict(promise=promise, status="not judged", note=note)


def _does_not_run(promise: str, trial: Trial) -> Verdict:
    """That a script is refused on some number of workers breaks the promise of the same answer, and no other."""
    error: ManyhostsError | None = trial.error
    assert error is not None, "called for a trial that has failed"
    if trial.trace.untried or promise not in ("workers", "micro"):
        note = f"with {trial.setup} it could not be tried, because {trial.trace.untried or error.what}; {error.fix}"
        return Verdict(promise=promise, status="not judged", note=note)
    return _refused(promise, trial, error)


def _refused(promise: str, trial: Trial, error: ManyhostsError) -> Verdict:
    cause = Cause("does not run", error.what, error.fix, evidence=error.where)
    return Verdict(promise=promise, status="fails", where=f"with {trial.setup} it does not run", cause=cause)


def _plain(promise: str, why: str) -> Verdict:
    return Verdict(promise=promise, status="not judged", note=f"without mh.Trainer {why}")


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count != 1)}"


def _worst(verdicts: list[Verdict]) -> Verdict:
    """One that fails, else one that was not judged, else the one with most to say."""
    order = {"fails": 0, "not judged": 1, "holds": 2}
    return min(verdicts, key=lambda verdict: (order[verdict.status], -len(verdict.note)))
