"""What the user is told of faults that a script brings along, from what its workers have seen (`agent.script_faults`).

One line each, once in a run, and none that is not certain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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

    def hear(self, generation: int, rank: int, fields: Fields) -> None:
        """Take what one worker has seen."""
        match fields["fault"]:
            case "order":
                self._tell("order", _ORDER)
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
            self._tell("file", f"{what}: {path}; fix: {fix}")

    def _hear_of_validation(self, generation: int, rank: int, fields: Fields) -> None:
        if fields["train_mode"]:
            self._tell("mode", _MODE.format(samples=fields["samples"]))
        seen = self._validations[generation]
        seen.setdefault(rank, fields)
        together = fields["workers"] == fields["world"] and not fields["apart"]
        if len(seen) < fields["workers"] or fields["workers"] == 1 or not together:
            return
        same = {(each["samples"], each["batches"], each["fingerprint"]) for each in seen.values()}
        if len(same) == 1:
            self._tell("validation", _VALIDATION.format(workers=fields["workers"], samples=fields["samples"]))

    def _hear_of_beginning(self, generation: int, fields: Fields) -> None:
        """The first steps of a start: what was saved in the one before, and where does this one go on?"""
        before = {path: saved for path, saved in self._saved.items() if saved[2] < generation}
        if not before:
            return
        loaded = [path for path in fields["loaded"] if path in before]
        if not fields["loaded"] and not fields["other_ways"]:
            names = ", ".join(sorted(Path(path).name for path in before))
            self._tell("anew", _ANEW.format(names=names))
        elif loaded and fields["epoch"] is not None:
            epoch, whole, _ = before[loaded[-1]]
            if whole and fields["epoch"] <= epoch:
                self._tell("again", _AGAIN.format(name=Path(loaded[-1]).name, epoch=epoch, first=fields["epoch"]))

    def _tell(self, kind: str, words: str) -> None:
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
    "epoch {epoch} was over when {name} was saved, and the script goes on with epoch {first}: it is trained again;"
    " fix: save the number of the next epoch"
)
