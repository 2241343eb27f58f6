"""What experiments on the workers of a setup show of a script: each sample, piece and loss is made again.

Nothing is guessed from the text of a script. Each cause names what was seen that shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from manyhosts.prove import compare
from manyhosts.prove.trials import Trial, Trials
from manyhosts.strategies.table import STRATEGIES

_ADDRESS = "draw with torch.rand…, numpy.random or random instead: mh.Trainer seeds them before each sample and step"


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a promise does not hold, and what mends it."""

    kind: str
    """One of a few words, for programs."""
    what: str
    fix: str
    evidence: str = ""
    """What was seen that shows it."""


class Experimented:
    """What the experiments have found on the workers of a setup."""

    def __init__(self, trials: Trials, theirs: Trial) -> None:
        self.setup = replace(theirs.setup, experiments=True, resumed=False, double=True)
        name = theirs.trace.settings.get("strategy", {}).get("name", "")
        if (
            name in STRATEGIES.own and not STRATEGIES.load(name).traits.holds_full_model
        ):  # they look at the script, and put its tensors back
            self.setup = self.setup.with_settings(strategy="ddp")
        trial = trials.run(self.setup)
        if not any(line.get("compute") for line in trial.trace.experiments.values()):
            self.setup = replace(self.setup, double=False, no_dropout=True)
            trial = trials.run(self.setup)
        self.lines = [line for _, line in sorted(trial.trace.experiments.items())]
        self.data = [line["data"] for line in self.lines if line["data"]]
        self.compute = [line["compute"] for line in self.lines if line["compute"]]
        self.exact = self.setup.double

    def of_data(self, trials: Trials, ours: Trial, theirs: Trial) -> Cause | None:
        """Samples that are not what they were."""
        if not self.data:
            return _of_stream(ours, theirs)
        if any(not found["again"] for found in self.data):
            found = next(found for found in self.data if not found["again"])
            return _of_second_reading(found)
        for found in self.data:
            if "collate" in found and not found["collate"]["again"]:
                return _of_second_collate(found["collate"])
        if len({tuple(found["digests"]) for found in self.data}) == 1:
            return None
        alike = trials.run(replace(self.setup, seeds_alike=True)).trace.experiments
        if len({tuple(line["data"]["digests"]) for line in alike.values()}) == 1:
            return Cause(
                "unseeded data",
                "each worker makes other samples: the script draws random numbers for its data that no one has seeded",
                "call torch.manual_seed(0) (and numpy.random.seed, random.seed) before the data is made",
                "the same index gives other samples on other workers; with equal seeds it does not",
            )
        if compare_first(trials, ours):
            return Cause(
                "unseeded data",
                "every process makes other samples: the script draws its data from a generator that no one has seeded",
                "give the generator a seed: numpy.random.default_rng(0), torch.Generator().manual_seed(0)",
                "two equal trials read other samples under the same index",
            )
        return Cause(
            "data depends on the worker",
            "the same index gives other samples on other workers",
            "leave RANK and the number of workers out of the dataset: mh.Data cuts each batch itself",
            "each worker read the same indices, first thing and in the same order",
        )

    def of_forward(self) -> Cause | None:
        """A piece that gives another loss when it is computed again, or on another worker."""
        for found in self.compute:
            if not found["again"]:
                return _of_second_pass(found)
        losses = {found["loss"] for found in self.compute}
        if len(losses) > 1 and len(self.data) == len(self.compute):
            spread = max(losses) - min(losses)
            if spread > (1e-9 if self.exact else 1e-4) * max(abs(loss) for loss in losses):
                low, high = min(losses), max(losses)
                return Cause(
                    "model depends on the worker",
                    "model or loss give another number on another worker, for the same samples and weights",
                    "leave RANK, LOCAL_RANK and what differs between processes out of model and loss",
                    f"the same piece has a loss of {low:.7g} on one worker and {high:.7g} on another",
                )
        return None

    def of_state(self) -> Cause | None:
        """Buffers and parameters that a forward pass changes."""
        return self._of_change(
            "changed_buffers",
            "`forward` changes {names}, once per forward pass: on more workers, or in smaller pieces, by other samples"
            " and more often",
            "move what is to happen once per step (a teacher's average, a target network) into a callback:"
            " mh.Trainer(callbacks=[…]) with after_step, or mh.EMA(); sum what is made of samples over the workers"
            " (torch.distributed.all_reduce)",
        )

    def of_loss(self) -> Cause | None:
        """A loss over a batch that is not the mean of those over its halves."""
        for found in self.compute:
            if "halves" not in found:
                continue
            full, (one, two) = found["loss"], found["halves"]
            bound = (1e-9 if self.exact else 1e-4) * max(abs(full), 1e-6)
            if abs(full - (one + two) / 2) <= bound:
                continue
            seen = f"a batch has a loss of {full:.6g}, its halves of {one:.6g} and {two:.6g}"
            if found["mixes"]:
                return Cause(
                    "samples mixed in the model",
                    "what the model gives for one sample depends on the others in its batch",
                    "use layers that see one sample at a time, or BatchNorm, whose statistics go over all workers",
                    seen,
                )
            if abs(full - (one + two)) <= 10 * bound:
                return Cause(
                    "loss is a sum",
                    "the loss adds up over the samples, and is no mean over them",
                    'use reduction="mean", or divide by the number of samples that step or loss is given',
                    seen,
                )
            return Cause(
                "loss is no mean",
                "the loss of a batch is not the mean of the losses of its samples (weights of classes, tokens that do"
                " not count, padding that does, samples that are compared with each other)",
                "say what a piece counts with Trainer(weight=…), or leave padding out; a loss over pairs of samples"
                " has no such weight",
                seen,
            )
        return None

    def of_counter(self) -> Cause | None:
        """Plain values that a forward pass changes, and that no snapshot has."""
        return self._of_change(
            "changed",
            "a forward pass changes {names}: it counts passes, whose number depends on the workers and begins again"
            " after a resume",
            "keep such state in a registered buffer, which snapshots have, and have nothing depend on how many passes"
            " a step has",
        )

    def _of_change(self, kind: str, what: str, fix: str) -> Cause | None:
        """What a forward pass changes of this `kind`; `what` says it of `{names}`."""
        names = sorted({name for found in self.compute for name in found[kind]})
        if not names:
            return None
        seen = f"{named(names)} had other values after one forward pass"
        return Cause("state changed in forward", what.format(names=named(names)), fix, seen)


def _of_stream(ours: Trial, theirs: Trial) -> Cause | None:
    """A stream has no index: see whether a sample with one number is the same in both trials."""
    for step in compare.steps_of(ours.trace, theirs.trace):
        mine, yours = ours.trace.data(step), theirs.trace.data(step)
        other = [index for index in mine.keys() & yours.keys() if mine[index] != yours[index]]
        if other:
            return Cause(
                "data depends on the worker",
                f"the stream gives other samples: number {min(other, key=int)}, in step {step}, has another content",
                "seed what the stream draws from inside `__iter__`, alike on every worker; leave the split to mh.Data",
                "the hashes of the samples that both trials took",
            )
    return None


def compare_first(trials: Trials, ours: Trial) -> bool:
    """Whether a second, equal trial has read other content under the same index."""
    again = trials.run(replace(ours.setup, again=1, resumed=False))
    first = trials.run(replace(ours.setup, resumed=False))
    for step in compare.steps_of(first.trace, again.trace):
        mine, yours = first.trace.data(step), again.trace.data(step)
        if any(mine[index] != yours.get(index) for index in mine):
            return True
    return False


def _of_second_reading(found: Mapping[str, Any]) -> Cause:
    names = found["changed"]
    generators = [name.removeprefix("generator ") for name in names if name.startswith("generator ")]
    if generators:
        return Cause(
            "own generator in the dataset",
            f"the dataset draws from a generator of its own, {named(generators)}: what a sample is like depends on how"
            " many were read before it",
            _ADDRESS,
            f"a sample that is read twice is not the same, and {named(generators)} has moved on",
        )
    if found.get("with_stopped_clock"):
        return Cause(
            "data depends on the time",
            "what a sample is like depends on when it is read",
            "leave the clock out of the dataset",
            "a sample that is read twice is not the same; with a stopped clock it is",
        )
    if names:
        return Cause(
            "data depends on the order of reading",
            f"reading a sample changes {named(names)}, and the sample with it",
            "have __getitem__ depend on its index alone",
            f"a sample that is read twice is not the same, and {named(names)} has changed",
        )
    return Cause(
        "data is not repeatable",
        "a sample is not the same when it is read again, and nothing that the dataset holds has changed",
        "see what __getitem__ reads from outside: a service, a file that changes, os.urandom",
        "the same index was read twice under the same seeds",
    )


def _of_second_collate(found: Mapping[str, Any]) -> Cause:
    if names := [name.removeprefix("generator ") for name in found["changed"]] or found["moved"]:
        return Cause(
            "own generator in collate",
            f"collate draws from {named(names)}, which is not seeded for each batch",
            _ADDRESS,
            f"the same samples, put together twice, are not the same batch, and {named(names)} has moved on",
        )
    return Cause(
        "collate is not repeatable",
        "the same samples, put together twice, are not the same batch",
        "see what collate takes from outside: the clock, a service, os.urandom",
        "one batch was put together twice under the same seed",
    )


def _of_second_pass(found: Mapping[str, Any]) -> Cause:
    names = found["changed"]
    generators = [name.removeprefix("generator ") for name in names if name.startswith("generator ")]
    if drawn := generators or found["moved"]:
        return Cause(
            "own generator in the step",
            f"model, loss or step draw from {named(drawn)}, which is not seeded for each piece",
            _ADDRESS,
            f"the same piece has another loss when it is computed again, and {named(drawn)} has moved on",
        )
    if found.get("with_stopped_clock"):
        return Cause(
            "step depends on the time",
            "model, loss or step read the clock",
            "leave it out of what is computed",
            "the same piece has another loss when it is computed again; with a stopped clock it has not",
        )
    if names:
        return Cause(
            "state changed in forward",
            f"a forward pass changes {named(names)}, and what it gives with it",
            "keep such state in a registered buffer, which snapshots have, and have nothing depend on how many passes"
            " a step has",
            f"the same piece has another loss when it is computed again, and {named(names)} has changed",
        )
    return Cause(
        "step is not repeatable",
        "the same piece has another loss when it is computed again under the same seeds",
        "see what model, loss or step take from outside",
        "one piece was computed twice from the same weights",
    )


def named(names: list[str]) -> str:
    """The first few of `names`, and how many more there are."""
    shown = ", ".join(f"`{name}`" for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
