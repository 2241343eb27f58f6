"""Why two trials depart: found by looking at what went in, and by running again with one thing changed.

Nothing is guessed from the text of a script. Each cause names what was seen that shows it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from manyhosts.config.strategies import gives_up
from manyhosts.prove import compare
from manyhosts.prove.compare import FLOAT32, FLOAT64, Comparison, Departure
from manyhosts.prove.experiments import Cause, Experimented, named
from manyhosts.prove.trace import Trace
from manyhosts.prove.trials import Setup, Trial, Trials


def find(trials: Trials, one: Setup, other: Setup, found: Departure, promise: str) -> Cause:
    """The cause of a departure between two setups, the first one that something shows."""
    for cause in _suspects(trials, trials.run(one), trials.run(other), found, promise):
        if cause is not None:
            return cause
    if promise == "workers" and (cause := _of_sum(trials.run(one), trials.run(other), found)):
        return cause
    if found.what == "value" and promise in ("workers", "micro"):
        return Cause(
            "a logged value is no mean",
            f"the value {found.name!r} that the script logs is no mean over its samples (a root of a mean, a maximum), "
            "so it depends on the pieces of a batch; up to it all is equal",
            "give a metric for it, mh.Trainer(metrics=…), or log what is a mean over the samples",
            "losses and the inputs of the step are equal",
        )
    return Cause(
        "unknown",
        "no cause was found in the data, in a second pass over the same samples, nor, where that can be tried, in "
        "halves of a batch",
        "look at what the script does between the last step that is equal and the one that is not",
    )


def _of_sum(ours: Trial, theirs: Trial, found: Departure) -> Cause | None:
    """A loss that is as many times as large as the batch is cut into more pieces: of loops that cannot be tried."""
    try:
        first, second = map(float, found.seen)
    except ValueError:
        return None
    ratio = theirs.setup.workers / ours.setup.workers
    if found.what != "loss" or not second or not math.isclose(first / second, ratio, rel_tol=1e-3):
        return None
    return Cause(
        "loss is a sum",
        "the loss adds up over the samples, and is no mean over them",
        'use reduction="mean", or give what it counts: {"loss": loss, "count": n} from run.backward\'s function',
        f"the loss of step {found.step} is {first:g}, and on {ratio:g} times as many workers {second:g}",
    )


def _suspects(trials: Trials, ours: Trial, theirs: Trial, found: Departure, promise: str) -> Iterator[Cause | None]:
    """What may be the cause, cheap evidence first; a further trial is run only when its turn comes."""
    yield _of_resumed_inputs(found) if promise == "resume" else of_inputs(ours, theirs, found)
    yield of_changed_workers(theirs.trace)
    if promise == "workers":
        yield from _of_settings(trials, ours, theirs)
    yield _of_outside(theirs, found)
    if found.step == 0:
        yield _of_start(trials, ours)
    experimented = Experimented(trials, theirs)
    yield experimented.of_data(trials, ours, theirs)
    yield experimented.of_forward()
    if promise == "resume":
        yield _of_snapshot(ours, theirs, found)
    yield experimented.of_state()
    yield experimented.of_loss()
    yield experimented.of_counter()
    yield _of_repetition(trials, ours)
    if promise == "workers":
        yield _of_loader(trials, ours, theirs)


def of_inputs(ours: Trial, theirs: Trial, found: Departure) -> Cause | None:
    """Steps that take another number of samples, or another learning rate."""
    settings = theirs.trace.settings
    if found.what == "samples":
        if settings.get("batch_size_per_worker"):
            return Cause(
                "batch per worker",
                f"batch_size_per_worker={settings['batch_size_per_worker']} lets the batch grow with the workers",
                "give mh.Data(batch_size=…), which is over all workers, to have one answer on any number",
                f"step {found.step} takes {found.seen[0]} samples in one trial and {found.seen[1]} in the other",
            )
        return Cause(
            "samples",
            "the trials take other samples in a step",
            "give mh.Data the same dataset, of the same length, on every worker",
            f"step {found.step} takes {found.seen[0]} and {found.seen[1]}",
        )
    if found.what == "learning rate":
        return Cause(
            "learning rate",
            f"the learning rate of step {found.step} is {found.seen[0]} in one trial and {found.seen[1]} in the other",
            "make optimizer and schedule of numbers that do not depend on WORLD_SIZE; leave lr_scaling out",
            "the rates that the optimizer had in each step",
        )
    for step in compare.steps_of(ours.trace, theirs.trace):
        pairs = zip(ours.trace.of(step)["lr"], theirs.trace.of(step)["lr"], strict=False)
        if step <= found.step and any(not math.isclose(one, other, rel_tol=1e-9) for one, other in pairs):
            return of_inputs(ours, theirs, Departure(step, "learning rate"))
    return None


def _of_resumed_inputs(found: Departure) -> Cause | None:
    """The same of a run that has been resumed."""
    if found.what == "samples":
        return Cause(
            "samples",
            "after the resume the run takes other samples than it would have taken: some twice, or some never",
            "give mh.Data the same dataset in the same order each time; a stream must continue where it stopped",
            f"step {found.step} takes {found.seen[0]} undisturbed, and {found.seen[1]} after a kill and a resume",
        )
    if found.what == "learning rate":
        return Cause(
            "lost by the resume",
            f"the learning rate of step {found.step} is {found.seen[0]} undisturbed, and {found.seen[1]} after a kill"
            " and a resume",
            "give the schedule as mh.Trainer(schedule=…), and keep what it counts with in its state_dict",
            "the rates that the optimizer had in each step",
        )
    return None


def of_changed_workers(trace: Trace) -> Cause | None:
    """Weights that something changes between two steps, and not on all workers alike."""
    steps = [step for step in trace.steps if step + 1 in trace.steps]
    for step in steps:
        changed: dict[str, dict[int, str]] = {}
        for rank, line in trace.steps[step].items():
            after = {**line["weights"], **line["buffers"]}
            for name, digest in trace.steps[step + 1].get(rank, {}).get("before", {}).items():
                if name in after and after[name][0] != digest:
                    changed.setdefault(name, {})[rank] = digest
        for name, ranks in changed.items():
            if len(ranks) < len(trace.steps[step]) or len(set(ranks.values())) > 1:
                who = "rank " + ", ".join(map(str, sorted(ranks)))
                return Cause(
                    "changed between steps",
                    f"something outside the step changes {name} on {who} alone, between steps {step} and {step + 1}",
                    "change weights in `step` or in the optimizer, on every worker alike; listeners are for watching",
                    f"{name} is another tensor when step {step + 1} begins than when step {step} ended",
                )
    return None


def _of_settings(trials: Trials, ours: Trial, theirs: Trial) -> Iterator[Cause | None]:
    """Settings that let the workers differ by design: with another value, do the trials agree?"""
    settings = theirs.trace.settings
    strategy, own = settings.get("strategy", {}), theirs.trace.strategy
    asked: list[tuple[bool, dict[str, Any], str, str]] = [
        (
            settings.get("batch_norm") == "local" and theirs.trace.has_batch_norm,
            {"batch_norm": "global"},
            'batch_norm="local" gives each worker\'s BatchNorm the statistics of its own samples',
            'leave batch_norm out: "global" is the default, and the same on any number of workers',
        ),
        (
            own is not None and gives_up(own) != (),
            {"strategy": "ddp"},
            f"strategy {strategy.get('name')!r} {getattr(own, 'by_design', '')}",
            'that is its design; strategy="ddp" gives one answer on any number of workers',
        ),
        (
            strategy.get("compression", "none") != "none",
            {"compression": "none"},
            f"compression={strategy.get('compression')!r} rounds the gradients that are exchanged",
            "that is its design; leave compression out for one answer on any number of workers",
        ),
    ]
    for applies, change, what, fix in asked:
        if applies and _agree(trials, ours, theirs, change):
            key, value = next(iter(change.items()))
            yield Cause(key.replace("_", " "), what, fix, f"with {key}={value} the trials agree")


def _agree(trials: Trials, ours: Trial, theirs: Trial, change: Mapping[str, str]) -> bool:
    pair = [trials.run(trial.setup.with_settings(**change)).trace for trial in (ours, theirs)]
    if not (pair[0].steps and pair[1].steps):
        return False
    tolerance = FLOAT64 if ours.setup.double else FLOAT32
    return Comparison(pair[0], pair[1], tolerance).first_departure() is None


def _of_outside(theirs: Trial, found: Departure) -> Cause | None:
    """Parameters that the optimizer has and the model has not."""
    outside: list[list[int]] = next((line.get("outside", []) for line in theirs.trace.begins.values()), [])
    if not outside:
        return None
    shapes = ", ".join(f"({', '.join(map(str, shape))})" for shape in outside[:3])
    return Cause(
        "parameters outside the model",
        f"the optimizer has {len(outside)} parameters that the model has not, of shape {shapes}: they are neither equal"
        " on all workers nor in snapshots",
        "put them into the model, or into a loss that is a torch.nn.Module",
        f"param_groups against model.parameters(); {found.name or found.what} departs first",
    )


def _of_start(trials: Trials, ours: Trial) -> Cause | None:
    again = trials.run(replace(ours.setup, again=1))
    if compare.in_bits(ours.trace, again.trace) is None:
        return None
    return Cause(
        "initial weights",
        "the model begins with other weights each time",
        "pass model=callable, which mh.Trainer calls under the run's seed, or call torch.manual_seed before making it",
        "two equal trials began with different weights",
    )


def _of_snapshot(ours: Trial, theirs: Trial, found: Departure) -> Cause | None:
    """State that a resumed run has not got back."""
    since = min((line["step"] for line in theirs.trace.begins.values()), default=0)
    if found.step == since and found.what in ("parameter", "buffer"):
        persistent = {name for line in theirs.trace.begins.values() for name in line.get("persistent", ())}
        kept = found.name in persistent or found.what == "parameter"
        why = "" if kept else ": it is registered with persistent=False, or not in the model"
        return Cause(
            "not in the snapshot",
            f"{found.what} {found.name} is not what it was when the snapshot was made{why}",
            "change it between steps alone, in a callback: mh.Trainer(callbacks=[…]) with after_step"
            if kept
            else "register it as a persistent buffer, or as a parameter",
            "the weights at the end of the step of the snapshot against those that the resumed run began with",
        )
    kept = ours.trace.of(since).get("optimizer", {}) if since in ours.trace.steps else {}
    back: Mapping[str, str] = next((line.get("optimizer", {}) for line in theirs.trace.begins.values()), {})
    lost = [name for name, digest in kept.items() if back.get(name) != digest]
    if lost:
        return Cause(
            "lost by the resume",
            f"what the optimizer keeps is not what it was when the snapshot was made: {named(lost)}",
            "have everything that the optimizer needs in its state_dict, and take it up in load_state_dict",
            "the optimizer's state after the step of the snapshot against that which the resumed run began with",
        )
    return None


def _of_repetition(trials: Trials, ours: Trial) -> Cause | None:
    again = trials.run(replace(ours.setup, again=1, resumed=False))
    first = trials.run(replace(ours.setup, resumed=False))
    found = compare.in_bits(first.trace, again.trace)
    if found is None:
        return None
    return Cause(
        "not repeatable",
        f"two equal trials differ: {found}",
        "see what the script takes from outside: unseeded generators, the clock, the order of threads",
        "the same setup was run twice",
    )


def _of_loader(trials: Trials, ours: Trial, theirs: Trial) -> Cause | None:
    if not theirs.trace.settings.get("loader_workers") or not _agree(trials, ours, theirs, {"loader_workers": "0"}):
        return None
    return Cause(
        "loader processes",
        "the dataset keeps something in the process that reads it, and several loader processes each have their own",
        "have __getitem__ depend on its index alone, or set loader_workers=0",
        "with loader_workers=0 the trials agree",
    )
