"""What a worker sees of a training that it knows nothing about: how far it is, and whether it trains with the others.

The first steps are looked at more closely: the process group, the weights before the first of them and behind the last,
the gradients and the samples of each. What was seen goes to the head, which compares the workers (`notices.py`). A
script that uses `mh.Trainer` tells of itself, and is left alone. Nothing here imports torch, and nothing that fails
here fails the script.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from manyhosts.cluster import reports
from manyhosts.cluster.reports import Reporter
from manyhosts.control.agent.fingerprints import Fingerprints, tensors_in
from manyhosts.control.agent.learning import Learning, is_cut_up
from manyhosts.control.agent.script_faults import ScriptFaults, gpu_of
from manyhosts.imports import when_imported

LOOKS = 3
"""How many steps are looked at closely."""
_PAUSE_S = 0.5
"""The reporter would drop what comes sooner; looking at the clock here is cheaper."""
_OTHER_WAYS = ("horovod", "mpi4py", "deepspeed", "ray.train", "bagua", "oneccl_bindings_for_pytorch")
"""Who imports one of these may train together without a process group of torch, or cut the weights up as it likes."""
_LIBRARIES = ("accelerate", "lightning", "pytorch_lightning")


def begin() -> ScriptProbe | None:
    """Watch what the script of this process will do. Call it once, before the script; None where nobody listens."""
    reporter = Reporter.from_environment()
    if reporter is None:
        return None
    script_probe = ScriptProbe(reporter, int(os.environ.get("WORLD_SIZE", "1")))
    when_imported("torch.optim.optimizer", _harmless(script_probe.watch_steps))
    when_imported("torch.utils.data.dataloader", _harmless(script_probe.faults.watch_passes))
    when_imported("torch.serialization", _harmless(script_probe.faults.watch_files))
    if script_probe.looks_closely:
        when_imported("torch.utils.data.dataloader", _harmless(script_probe.watch_batches))
        when_imported("torch.nn.parallel.distributed", _harmless(script_probe.watch_inputs))
    reports.when_told("trainer", script_probe.withdraw)
    return script_probe


class ScriptProbe:
    """Counts optimizer steps, looks at the first ones, and reports both, where the script does not do so itself.

    Several optimizers that take turns (a GAN's two; one for each parameter; one that wraps another) make one step
    together: a new step begins when one of them steps for the second time.
    """

    def __init__(self, reporter: Reporter, workers: int) -> None:
        self.done = 0
        self._workers = workers
        self._reporter = reporter
        self._turn: set[int] = set()
        """The optimizers, by id, that have had their turn in the present step."""
        self._next_report = 0.0
        self._torch: Any = None
        self._look_untraced, self._count_untraced = self._look, self._count
        self._undo: list[Callable[[], None]] = []
        """Takes out what counts."""
        self._undo_looks: list[Callable[[], None]] = []
        """Takes out what looks closely."""
        self._batch: object = None
        self._fingerprints, self._learning = Fingerprints(), Learning()
        self._account: dict[str, Any] = {"workers": workers, "world": 0, "apart": False, "optimizer": False}
        self._account |= {"shapes": 0, "weights": None, "samples": None, "libraries": []}
        self._account |= {"learning": "", "moved": [], "largest": 0.0}
        self._account |= {"host": os.uname().nodename, "gpu": None}
        self.faults = ScriptFaults(reporter, self._account)
        self._over = False

    @property
    def looks_closely(self) -> bool:
        """Whether there is anybody to be compared with, and a first step is still to come."""
        return self._workers > 1 and not self._over

    def watch_steps(self, optimizers: ModuleType) -> None:
        """Have `torch.optim.optimizer` call us around every step of every optimizer."""
        self._torch = sys.modules["torch"]  # may be half loaded: what is not needed yet is looked up later
        self._count_untraced = self._torch._disable_dynamo(self._count)
        self._look_untraced = self._torch._disable_dynamo(self._look)
        after = optimizers.register_optimizer_step_post_hook(self._after)
        self._undo.append(after.remove)
        before = optimizers.register_optimizer_step_pre_hook(self._before)
        self._undo_looks.append(before.remove)
        made = optimizers.Optimizer.__init__

        @functools.wraps(made)
        def note_optimizer(optimizer: Any, *arguments: Any, **named: Any) -> None:
            self._account["optimizer"] = True
            made(optimizer, *arguments, **named)

        self._put(optimizers.Optimizer, "__init__", note_optimizer)

    def watch_batches(self, loaders: ModuleType) -> None:
        """Remember the newest batch of every `DataLoader`, until the first steps are over."""
        loader = loaders._BaseDataLoaderIter
        fetch = loader.__next__

        @functools.wraps(fetch)
        def fetch_and_remember(iterator: Any) -> Any:
            batch = fetch(iterator)
            if self.looks_closely:
                self._batch = batch
            return batch

        self._put(loader, "__next__", fetch_and_remember)

    def watch_inputs(self, parallel: ModuleType) -> None:
        """Look at what `DistributedDataParallel` is given: a script may cut the batches of its loader up by itself."""
        torch: Any = sys.modules["torch"]
        wrapper = parallel.DistributedDataParallel
        prepare = wrapper._pre_forward

        @functools.wraps(prepare)
        def look_and_prepare(model: Any, *inputs: Any, **named: Any) -> Any:
            if not torch.compiler.is_dynamo_compiling():
                self.faults.note_forward(model)
                if self.looks_closely and model.training:
                    self._add(f"inputs {self.done}", (inputs, named))
            return prepare(model, *inputs, **named)

        wrapper._pre_forward = look_and_prepare  # stays: torch.compile may have looked at it already

    def _put(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        """Replace a method until the first steps are over."""
        original = getattr(owner, name)
        setattr(owner, name, replacement)

        def undo() -> None:
            if getattr(owner, name) is replacement:  # else somebody has put another one around it
                setattr(owner, name, original)

        self._undo_looks.append(undo)

    def withdraw(self) -> None:
        """Watch no longer, and tell nothing."""
        self._stop_looking()
        self.faults.is_off = True
        while self._undo:
            self._undo.pop()()
        self._account.clear()

    def tell_end(self) -> None:
        """The script has come to its end, and it was a good one."""
        if self._account and self._torch is not None:
            self._tell(ended=True)
        self._reporter.close()

    def _before(self, optimizer: Any, arguments: tuple[object, ...] = (), named: Any = None) -> None:
        given = (*arguments[1:], *(named or {}).values())  # the first is the optimizer itself
        if self._torch.compiler.is_dynamo_compiling():
            self._look_untraced(optimizer, given)
        else:
            self._look(optimizer, given)

    def _after(self, optimizer: object, *_: object) -> None:
        if self._torch.compiler.is_dynamo_compiling():
            self._count_untraced(id(optimizer))  # torch.compile leaves it alone, for 3 µs more in each call
        else:
            self._count(id(optimizer))

    def _count(self, number: int) -> None:
        if self._turn and number not in self._turn:
            self._turn.add(number)
            return
        self._turn = {number}
        self.done += 1
        self._reporter.note_step(self.done)
        self.faults.note_step(self.done)
        now = time.monotonic()
        if now >= self._next_report:
            self._next_report = now + _PAUSE_S
            self._reporter.send("step", step=self.done)
        if self.done == LOOKS and not self._over:
            self._look_at_group()
            self._tell(ended=False)

    def _look(self, optimizer: Any, given: tuple[object, ...]) -> None:
        """Before a step: at the weights and the gradients, and at the samples that led to it."""
        if self._over:
            return
        try:
            self._learning.look(optimizer, given)
        except Exception:  # of a tensor that is another's invention, say; the script is to go on
            self._learning.can_tell = False
        if not self.looks_closely or (self._turn and id(optimizer) not in self._turn):
            return
        if self.done == 0:
            self._look_at_group()
            self._look_at_weights(optimizer)
        if self._batch is not None:
            self._add(f"batch {self.done}", self._batch)

    def _look_at_group(self) -> None:
        with contextlib.suppress(Exception):  # torch may have become another one; the script is to go on
            distributed = self._torch.distributed
            together = distributed.is_available() and distributed.is_initialized()
            size = distributed.get_world_size() if together else 0
            parts = sys.modules["torch.distributed.distributed_c10d"]._world.pg_map if together else ()
            self._account["world"] = max(size, self._account["world"])
            self._account["apart"] |= any(group.size() < size for group in parts) or self._uses_other_ways()

    def _uses_other_ways(self) -> bool:
        rpc = sys.modules.get("torch.distributed.rpc")
        remote = rpc is not None and hasattr(rpc, "_is_current_rpc_agent_set") and rpc._is_current_rpc_agent_set()
        stages = sys.modules.get("torch.distributed.pipelining")
        return remote or stages is not None or any(name in sys.modules for name in _OTHER_WAYS)

    def _look_at_weights(self, optimizer: Any) -> None:
        with contextlib.suppress(Exception):
            weights = [each for group in optimizer.param_groups for each in group["params"]]
            self._account["gpu"] = gpu_of(weights[0])
            if any(is_cut_up(each) for each in weights):
                self._account["apart"] = True
            else:
                self._account["shapes"] = zlib.crc32(" ".join(str(list(each.shape)) for each in weights).encode())
                self._fingerprints.add("weights", weights)

    def _add(self, name: str, batch: object) -> None:
        with contextlib.suppress(Exception):
            tensors, words = tensors_in(batch)
            if tensors:
                self._fingerprints.add(name, tensors, words)

    def _tell(self, *, ended: bool) -> None:
        if not self._over:
            self._account["libraries"] = [name for name in _LIBRARIES if name in sys.modules]
            with contextlib.suppress(Exception):
                fingerprints = self._fingerprints.read()
                self._account |= {"weights": fingerprints.pop("weights", None), "samples": fingerprints or None}
            if self.done >= LOOKS and not self._account["apart"]:
                with contextlib.suppress(Exception):
                    moved, largest = self._learning.sketch()
                    self._account |= {"learning": self._learning.trouble(), "moved": moved, "largest": largest}
            self._stop_looking()
        self._reporter.send("script_probe", **self._account, steps=self.done, ended=ended)

    def _stop_looking(self) -> None:
        self._over, self._batch, self._fingerprints, self._learning = True, None, Fingerprints(), Learning()
        while self._undo_looks:
            self._undo_looks.pop()()


def _harmless(watch: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """Some of what is watched is private to torch: where another version has it no more, it is not watched."""

    def try_to_watch(module: ModuleType) -> None:
        with contextlib.suppress(Exception):
            watch(module)

    return try_to_watch
