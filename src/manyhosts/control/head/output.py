"""What the user sees of the workers while they run: their lines, with host and rank, their progress, and notices.

Notices are one line each, once in a run, and none that is not certain: of workers that do not train together or do not
learn (model parallelism gives workers the same samples and different weights, rightly so), and of
faults that a script brings along. They are made from what each worker has seen (`agent.script_probe`,
`agent.script_faults`).

Before a run's first word a terminal shows a line that says what is awaited, and counts the seconds: an import of torch
takes seconds, a host that does not answer takes longer, and an empty terminal looks the same in both cases.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from manyhosts.cluster.reports import IN_PARTS
from manyhosts.control.display import Display
from manyhosts.control.head.state import HeadState, Node
from manyhosts.control.tracebacks import (
    is_idle_notice,
    is_native_frame,
    may_hold_noise,
    what_gave_up,
    without_native_frames,
)

_TICK_S = 1.0
_NAMED = 3
"""Hosts that are named; of more, only their number."""


class Beginning:
    """The live line until there is something better to show."""

    def __init__(self, display: Display, after: Callable[[float, Callable[[], None]], object]) -> None:
        """`after` calls back after so many seconds."""
        self._display, self._after = display, after
        self._began = time.monotonic()
        self._awaited = ""
        self._over = False

    def await_hosts(self, missing: Sequence[str], count: int) -> None:
        """The agents of `missing` hosts, of `count`, have yet to answer."""
        named = ", ".join(missing) if len(missing) <= _NAMED else f"{len(missing)} of {count} hosts"
        self._show(f"waiting for {named}" if count > 1 else "starting")

    def await_workers(self, count: int) -> None:
        """All hosts are here; `count` workers start, and the script is imported."""
        self._show("starting the script" if count == 1 else f"starting {count} workers")

    def await_end(self) -> None:
        """The workers were asked to end before there was a word of theirs."""
        if self._awaited:
            self._awaited = "ending the workers"

    def end(self) -> None:
        """There was a first word."""
        if not self._over:
            self._over = True
            self._display.progress({"ended": True})

    def _show(self, awaited: str) -> None:
        ticks = bool(self._awaited)
        self._awaited = awaited
        if not ticks:
            self._tick()

    def _tick(self) -> None:
        if self._over:
            return
        self._display.progress({"awaited": self._awaited, "seconds": time.monotonic() - self._began})
        self._after(_TICK_S, self._tick)


Fields = Mapping[str, Any]


class ScriptFaults:
    """Compares what workers report, and says what is wrong. Remembers what was saved over restarts."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()
        self._writers: dict[tuple[int, str, str], set[int]] = defaultdict(set)
        """By start of the workers, host and path: the ranks that have written it."""
        self._validations: dict[int, dict[int, Fields]] = defaultdict(dict)
        """By start, then by rank: the first pass over data that it does not train on."""
        self._saved: dict[str, tuple[int, bool, int]] = {}
        """Path → the epoch that was trained last when it was saved, whether that was over, and in which start."""

    def add_report(self, generation: int, rank: int, fields: Fields) -> None:
        """Take what one worker has seen."""
        match fields["fault"]:
            case "order":
                self._warn("order", _ORDER)
            case "file":
                self._hear_of_file(generation, rank, fields)
            case "validation":
                self._hear_of_validation(generation, rank, fields)
            case "saved" if rank == 0:
                self._saved[fields["path"]] = (fields["epoch"], fields["whole"], generation)
            case "began" if rank == 0:
                self._hear_of_beginning(generation, fields)

    def _hear_of_file(self, generation: int, rank: int, fields: Fields) -> None:
        path = fields["path"]
        writers = self._writers[generation, fields["host"], path]
        writers.add(rank)
        if len(writers) > 1:
            ranks = " and ".join(map(str, sorted(writers)))
            what = f"ranks {ranks} all write {Path(path).name}, each over the others"
            fix = "let one do it (`if rank == 0:`), or give each a name of its own"
            self._warn("file", f"{what}: {path}; fix: {fix}")

    def _hear_of_validation(self, generation: int, rank: int, fields: Fields) -> None:
        if fields["train_mode"]:
            self._warn("mode", _MODE.format(samples=fields["samples"]))
        seen = self._validations[generation]
        seen.setdefault(rank, fields)
        together = fields["workers"] == fields["world"] and not fields[IN_PARTS]
        if len(seen) < fields["workers"] or fields["workers"] == 1 or not together:
            return
        same = {(each["samples"], each["batches"], each["fingerprint"]) for each in seen.values()}
        if len(same) == 1:
            self._warn("validation", _VALIDATION.format(workers=fields["workers"], samples=fields["samples"]))

    def _hear_of_beginning(self, generation: int, fields: Fields) -> None:
        """The first steps of a start: what was saved in the one before, and where does this one continue?"""
        before = {path: saved for path, saved in self._saved.items() if saved[2] < generation}
        if not before:
            return
        loaded = [path for path in fields["loaded"] if path in before]
        if not fields["loaded"] and not fields["other_ways"]:
            names = ", ".join(sorted(Path(path).name for path in before))
            self._warn("again", _ANEW.format(names=names))
        elif loaded and fields["epoch"] is not None:
            epoch, is_complete, _ = before[loaded[-1]]
            if is_complete and fields["epoch"] <= epoch:
                self._warn("again", _AGAIN.format(name=Path(loaded[-1]).name, epoch=epoch, first=fields["epoch"]))

    def _warn(self, kind: str, words: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._say(f"manyhosts: {words}")


def on_one_gpu(accounts: Mapping[int, Fields]) -> str:
    """Whether the workers of a host, by rank, are all on one of its GPUs; empty where they are not."""
    hosts: dict[str, list[tuple[int, Fields]]] = defaultdict(list)
    for rank, account in sorted(accounts.items()):
        hosts[account.get("host", "")].append((rank, account))
    for host, workers in hosts.items():
        places = {tuple(account.get("gpu") or ()) for _, account in workers}
        if len(workers) > 1 and len(places) == 1 and (place := next(iter(places))) and place[1] > 1:
            fix = "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before the model is made"
            many = f"all {len(workers)} workers of host {host} are on GPU {place[0]}, one of {place[1]}"
            return f"{many}: the others do nothing; fix: {fix}"
    return ""


_ORDER = (
    "each epoch has its samples in the same order, because sampler.set_epoch is not called;"
    " fix: sampler.set_epoch(epoch) at the beginning of each epoch"
)
_MODE = (
    "the model was in train mode while it went through {samples} samples that it does not train on: dropout and"
    " BatchNorm act as in training; fix: model.eval() before, and model.train() after"
)
_VALIDATION = (
    "each of the {workers} workers goes through the same {samples} samples that it does not train on, so that this"
    " takes as long on any number of them; fix: divide them with DistributedSampler(..., shuffle=False) and sum what is"
    " counted, or let rank 0 alone do it"
)
_ANEW = (
    "the workers were started again and loaded nothing of what was saved ({names});"
    " fix: see where the script looks for it"
)
_AGAIN = (
    "epoch {epoch} was over when {name} was saved, and the script continues with epoch {first}: it is trained again;"
    " fix: save the number of the next epoch"
)


Account = Mapping[str, Any]

_PROCESS_GROUP = (
    "call torch.distributed.init_process_group() and wrap the model in DistributedDataParallel; or use one worker"
)
_WAYS_TOGETHER = {
    "accelerate": "on CPUs, let Accelerate form its group: --env ACCELERATE_USE_CPU=true, or Accelerator(cpu=True)",
    "lightning": "give Fabric, or the Trainer, devices=WORKERS_PER_NODE, num_nodes=NODES and strategy='ddp'",
    "pytorch_lightning": "give the Trainer devices=WORKERS_PER_NODE, num_nodes=NODES and strategy='ddp'",
}
"""By library that a script has imported; where it has several, the last one counts."""


_ROUNDED, _EXACT = 0.01, 1e-6
"""What is no difference: so much of the longest way that a weight has gone, and of the largest weight."""
_UNLEARNED = {
    "none": "the weights do not change: no parameter of the optimizer has a gradient in the first steps; fix: make the"
    " optimizer of the parameters of the model whose loss goes backward",
    "zero": "the gradient is zero in all of the first steps, so nothing is learned; fix: see that the loss depends on"
    " what the model gives (the cross entropy of one column is always 0), and that zero_grad() comes before backward()",
    "nan": "the gradient is NaN or infinite in all of the first steps; fix: see that inputs and targets are finite, and"
    " that nothing divides by zero or takes the logarithm of it",
    "still": "no weight has changed in the first steps, yet the learning rate is above 0; fix: see that the optimizer"
    " does its step, and that its steps are not too small for the dtype of the weights",
}
"""By what the workers have seen."""


class Notices:
    """Waits until all workers have been heard, compares them, and says what is wrong."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._generation = -1
        self._accounts: dict[int, Account] = {}
        """By rank, of the workers that were started last."""
        self._said: set[str] = set()

    def add_report(self, generation: int, rank: int, account: Account) -> None:
        """Take what one worker has seen: after its first steps, and at its good end."""
        if generation != self._generation:
            self._generation, self._accounts = generation, {}
        self._accounts[rank] = account
        accounts = list(self._accounts.values())
        if len(accounts) == account["workers"] and all(each["steps"] for each in accounts):
            self._warn(diverged(accounts) if len(accounts) > 1 else "")
            self._warn(unlearned(accounts))
            self._warn(on_one_gpu(self._accounts))

    def report_end(self) -> None:
        """The run has ended well."""
        accounts = list(self._accounts.values())
        if accounts and len(accounts) == accounts[0]["workers"] and all(each["ended"] for each in accounts):
            self._warn(idle(accounts))

    def _warn(self, words: str) -> None:
        if words and words not in self._said:
            self._said.add(words)
            self._say(f"manyhosts: {words}")


def diverged(accounts: list[Account]) -> str:
    """Why workers that all make steps do not train one model together; empty where they do, as far as is known."""
    count = len(accounts)
    largest = max(each["world"] for each in accounts)
    if any(each[IN_PARTS] for each in accounts):
        return ""
    if largest <= 1:
        libraries = [name for name in _WAYS_TOGETHER if name in accounts[0]["libraries"]]
        fix = _WAYS_TOGETHER[libraries[-1]] if libraries else _PROCESS_GROUP
        why = f"there is no process group, so this is {count} trainings and none of them is faster"
        return f"each of the {count} workers trains alone: {why}; fix: {fix}"
    if largest < count:
        why = f"init_process_group was called with world_size={largest}"
        fix = "leave rank and world_size out of it, so that RANK and WORLD_SIZE count"
        return f"the {count} workers train in groups of {largest} that know nothing of each other: {why}; fix: {fix}"
    return _unlike(accounts)


def _unlike(accounts: list[Account]) -> str:
    """What is wrong with the weights and samples of workers that are all in one group."""
    count = len(accounts)
    first = accounts[0]
    comparable = all(each["weights"] and each["shapes"] == first["shapes"] for each in accounts)
    alike = comparable and all(each["weights"] == first["weights"] for each in accounts)
    known = [bool(each["samples"]) for each in accounts]
    same_samples = all(known) and all(each["samples"] == first["samples"] for each in accounts)
    if comparable and not alike and not same_samples and all(known) == any(known):
        fix = (
            "wrap the model in DistributedDataParallel, which brings rank 0's to all, or seed all workers alike before"
        )
        return f"the {count} workers began with different weights, so they do not train one model; fix: {fix}"
    if alike and same_samples:
        why = f"each step does the same work {count} times"
        fix = "DataLoader(..., sampler=DistributedSampler(dataset)), and sampler.set_epoch(epoch) in each epoch"
        return f"all {count} workers train on the same samples: {why}; fix: {fix}"
    if alike and all(known) and _have_parted(accounts):
        why = f"they began alike and have not exchanged their gradients, so these are {count} trainings"
        fix = "wrap the model in DistributedDataParallel; nothing is wrong where the script averages the models later"
        return f"after the first steps the {count} workers hold different weights: {why}; fix: {fix}"
    return ""


def _have_parted(accounts: list[Account]) -> bool:
    """Whether weights that were equal have moved differently, by more than processors may round differently."""
    first, *others = [each.get("moved", []) for each in accounts]
    if not first or any(len(each) != len(first) for each in others):
        return False
    furthest = max(abs(step) for each in (first, *others) for step in each)
    least = max(_ROUNDED * furthest, _EXACT * max(each["largest"] for each in accounts))
    return any(abs(one - other) > least for each in others for one, other in zip(first, each, strict=True))


def unlearned(accounts: list[Account]) -> str:
    """Why a script that makes steps learns nothing, where all its workers have seen the same; else empty."""
    kinds = {each.get("learning", "") for each in accounts}
    return _UNLEARNED.get(kinds.pop(), "") if len(kinds) == 1 else ""


def idle(accounts: list[Account]) -> str:
    """Whether a script that has made an optimizer has ended without one step."""
    if any(each["steps"] for each in accounts) or not any(each["optimizer"] for each in accounts):
        return ""
    fix = "see that its loop gets a batch; nothing is wrong where it only evaluates, or had been trained to its end"
    return f"the script ended without one optimizer step, so nothing was trained; fix: {fix}"


class WorkerOutput:
    """Passes on to the display what workers say."""

    def __init__(self, state: HeadState, nodes: int) -> None:
        """`nodes` is the number of hosts: a prefix names the host only where there are several."""
        self._state, self._nodes = state, nodes
        self._notices = Notices(state.display.warn)
        self._faults = ScriptFaults(state.display.warn)
        self.beginning = Beginning(state.display, state.loop.after)

    def show(self, node: Node, rank: int, lines: list[str], *, is_error: bool) -> None:
        """Lines that a worker has printed."""
        self.beginning.end()
        if self._state.job.show and rank not in self._state.job.show:
            return
        text = "\n".join(lines)
        if gave_up := what_gave_up(text):
            self._state.display.warn(f"manyhosts: rank {rank} on host {node.name}: {gave_up}")
        if may_hold_noise(text):
            lines = [line for line in lines if not is_native_frame(line) and not is_idle_notice(line)]
            text = "\n".join(lines)
        if lines:
            self._state.display.line(text, self._prefix(node, rank), is_error)

    def _prefix(self, node: Node, rank: int) -> str:
        job = self._state.job
        if job.workers == 1 or not job.prefix:
            return ""
        return f"[{rank}] " if self._nodes == 1 else f"[{node.name} {rank}] "

    def take_report(self, rank: int, kind: str, fields: dict[str, Any]) -> None:
        """What a worker has said through `cluster.reports`."""
        if kind in ("progress", "say"):
            self.beginning.end()
        if kind == "progress" and rank == 0:
            self._state.display.progress(fields)
        elif kind == "say":
            self._state.display.say(str(fields.get("text", "")))
        elif kind == "trainer":
            self._state.trainer_seen = True
        elif kind == "directory":
            self._state.directories.add(Path(str(fields["path"])))
        elif kind == "fault":
            self._faults.add_report(self._state.generation, rank, fields)
        elif kind == "script_probe":
            self._notices.add_report(self._state.generation, rank, fields)

    def report_end(self) -> None:
        """The run has ended successfully: show the notices that can be certain only now."""
        self._notices.report_end()
        job = self._state.job
        for option in (*(["--set"] if job.overrides else []), *job.for_trainer):
            if not self._state.trainer_seen:
                self._state.display.warn(f"manyhosts: {option} had no effect, because the script made no mh.Trainer")

    def report_gaps(self, node: Node, rank: int, why: str) -> None:
        """The log of a worker cannot be written. What it prints is shown all the same."""
        self._state.display.warn(f"manyhosts: the log of rank {rank} on host {node.name} is incomplete: {why}")

    def report_unshown(self, node: Node, rank: int, lines: int) -> None:
        """A worker has printed more than is passed on."""
        which = f"{lines} line{'s' if lines > 1 else ''} of rank {rank} on host {node.name}"
        why = "printed faster than they could be passed on; its log has them"
        self._state.display.warn(f"manyhosts: {which} are not shown here: {why}")

    def show_traceback(self, text: str) -> None:
        """The traceback of the worker that failed first."""
        for line in without_native_frames(text).splitlines():
            self._state.display.line(line, "", is_error=True)
