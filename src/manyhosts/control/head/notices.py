"""What the user is told of workers that do not train together, or do not learn: by what each `script_probe` has seen.

One line each, once in a run, and none that is not certain: whoever cuts a model up gives its workers the same samples
and different weights, and is right to do so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from manyhosts.control.head.script_faults import on_one_gpu

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

    def hear(self, generation: int, rank: int, account: Account) -> None:
        """Take what one worker has seen: after its first steps, and at its good end."""
        if generation != self._generation:
            self._generation, self._accounts = generation, {}
        self._accounts[rank] = account
        accounts = list(self._accounts.values())
        if len(accounts) == account["workers"] and all(each["steps"] for each in accounts):
            self._tell(diverged(accounts) if len(accounts) > 1 else "")
            self._tell(unlearned(accounts))
            self._tell(on_one_gpu(self._accounts))

    def tell_end(self) -> None:
        """The run has ended well."""
        accounts = list(self._accounts.values())
        if accounts and len(accounts) == accounts[0]["workers"] and all(each["ended"] for each in accounts):
            self._tell(idle(accounts))

    def _tell(self, words: str) -> None:
        if words and words not in self._said:
            self._said.add(words)
            self._say(f"manyhosts: {words}")


def diverged(accounts: list[Account]) -> str:
    """Why workers that all make steps do not train one model together; empty where they do, as far as is known."""
    count = len(accounts)
    largest = max(each["world"] for each in accounts)
    if any(each["apart"] for each in accounts):
        return ""
    if largest <= 1:
        libraries = [name for name in _WAYS_TOGETHER if name in accounts[0]["libraries"]]
        fix = _WAYS_TOGETHER[libraries[-1]] if libraries else _PROCESS_GROUP
        why = f"there is no process group, so this is {count} trainings and none of them is faster"
        return f"each of the {count} workers trains alone: {why}; fix: {fix}"
    if largest < count:
        why = f"init_process_group was told of {largest}"
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
