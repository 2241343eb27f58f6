"""What a worker sees of a training that it knows nothing about: how far it is, and whether it trains with the others.

The first steps are inspected more closely: the process group, the weights before the first and after the last of them,
the gradients and the samples of each. What was seen goes to the head, which compares the workers (`head.output`). A
script that uses `mh.Trainer` reports itself, and is left alone. What cannot be inspected without changing something (a
captured graph, tensors that are cut up, gradients that a scaler has yet to judge) is left alone, and then nothing is
claimed. Nothing here imports torch, and nothing that fails here fails the script.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from manyhosts.cluster import reports
from manyhosts.cluster.reports import Reporter
from manyhosts.control.agent.script_faults import Fingerprints, ScriptFaults, gpu_of, tensors_in
from manyhosts.imports import when_imported

_CUT_UP = ("DTensor", "ShardedTensor", "FlatParameter")
_ELEMENTS = 1 << 20
"""Of all weights of an optimizer together that are compared before and after."""
_SKETCH = 64
"""How many of them are sent, to compare workers."""


class Learning:
    """Looks at every optimizer before its first steps."""

    def __init__(self) -> None:
        self.can_tell = True
        """Whether nothing of unknown effect has happened in between."""
        self.has_gradient = self.is_nonzero = self.is_finite = False
        """Whether a gradient was there in any step; one above zero; one that is finite."""
        self.takes_closure = False
        self.rate = 0.0
        """The highest learning rate so far."""
        self._weights: dict[int, list[tuple[Any, Any]]] = {}
        """By optimizer: the tensors that are compared of each of its weights, and their values before."""

    def inspect(self, optimizer: Any, arguments: Iterable[object]) -> None:
        """Before a step of `optimizer`, which is called with `arguments`."""
        torch: Any = sys.modules["torch"]
        weights = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
        scaled = getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if scaled or capturing or any(is_cut_up(each) for each in weights):
            self.can_tell = False
        if not self.can_tell:
            return
        self.takes_closure |= any(each is not None for each in arguments)
        self.rate = max([self.rate, *(float(group.get("lr", 0.0)) for group in optimizer.param_groups)])
        with torch.no_grad():
            if id(optimizer) not in self._weights:
                self._weights[id(optimizer)] = _kept(weights)
            gradients = [_values_of(each.grad) for each in weights if each.grad is not None]
            peaks = [each.abs().amax().float().cpu() for each in gradients if each.numel()]
            if peaks:
                self.has_gradient = True
                found = torch.stack(peaks)
                self.is_nonzero |= bool((found != 0).any())  # NaN is not zero
                self.is_finite |= bool(found.isfinite().all())

    def trouble(self) -> str:
        """After the first steps: `nan`, `zero`, `none` or `still`; empty where all is well, or it cannot be decided."""
        if not self.can_tell or not self._weights:
            return ""
        still = self.rate > 0 and not self._have_moved()
        if self.has_gradient and not self.takes_closure:
            if not self.is_finite:
                return "nan"
            if not self.is_nonzero:
                return "zero"
        elif still and not self.takes_closure:
            return "none"
        return "still" if still else ""

    def _have_moved(self) -> bool:
        torch: Any = sys.modules["torch"]
        pairs = [pair for kept in self._weights.values() for pair in kept]
        return not all(torch.equal(_some_of(weight, before.numel()), before) for weight, before in pairs)

    def sketch(self) -> tuple[list[float], float]:
        """How far some of the weights of the first optimizer have moved, and the largest of them."""
        torch: Any = sys.modules["torch"]
        pairs = next(iter(self._weights.values()), [])
        if not self.can_tell or not pairs:
            return [], 0.0
        each_gives = max(1, _SKETCH // len(pairs))
        moved, largest = [], 0.0
        for weight, before in pairs[:_SKETCH]:
            if not before.is_floating_point() or not before.numel():
                continue
            chosen = torch.linspace(0, before.numel() - 1, min(each_gives, before.numel())).long()
            was, now = before.cpu()[chosen].double(), _some_of(weight, before.numel()).cpu()[chosen].double()
            moved += (now - was).tolist()
            largest = max(largest, float(was.abs().amax()))
        return moved, largest


def _kept(weights: list[Any]) -> list[tuple[Any, Any]]:
    total = max(1, sum(each.numel() for each in weights))
    part = min(1.0, _ELEMENTS / total)
    return [(each, _some_of(each, max(1, int(each.numel() * part))).clone()) for each in weights if each.numel()]


def _some_of(weight: Any, count: int) -> Any:
    """So many elements of a weight, evenly spread."""
    flat = weight.detach().reshape(-1)
    return flat if count == flat.numel() else flat[:: flat.numel() // count][:count]


def _values_of(gradient: Any) -> Any:
    return gradient.coalesce().values() if gradient.is_sparse else gradient.detach()


def is_cut_up(weight: Any) -> bool:
    """Whether this worker holds a part of a tensor that others hold the rest of."""
    names = {kind.__name__ for kind in type(weight).__mro__}
    return not names.isdisjoint(_CUT_UP) or any(
        hasattr(weight, mark) for mark in ("_fsdp_flattened", "_is_flat_param", "ds_id")
    )


LOOKS = 3
"""How many steps are inspected closely."""
_PAUSE_S = 0.5
"""The reporter would drop what comes sooner; looking at the clock here is cheaper."""
_OTHER_WAYS = ("horovod", "mpi4py", "deepspeed", "ray.train", "bagua", "oneccl_bindings_for_pytorch")
"""A script that imports one of these may train together without a process group, or shard the weights its own way."""
_LIBRARIES = ("accelerate", "lightning", "pytorch_lightning")


def begin() -> ScriptProbe | None:
    """Watch what the script of this process will do. Call it once, before the script; None where no agent listens."""
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
    reports.on_report("trainer", script_probe.withdraw)
    return script_probe


class ScriptProbe:
    """Counts optimizer steps, inspects the first ones, and reports both, where the script does not do so itself.

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
        self._look_untraced, self._count_untraced = self._inspect, self._count
        self._undo: list[Callable[[], None]] = []
        """Takes out what counts."""
        self._undo_looks: list[Callable[[], None]] = []
        """Takes out what looks closely."""
        self._batch: object = None
        self._fingerprints, self._learning = Fingerprints(), Learning()
        self._account: dict[str, Any] = {"workers": workers, "world": 0, reports.IN_PARTS: False, "optimizer": False}
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
        self._look_untraced = self._torch._disable_dynamo(self._inspect)
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

        wrapper._pre_forward = look_and_prepare  # stays: torch.compile may have seen it already

    def _put(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        """Replace a method until the first steps are over."""
        original = getattr(owner, name)
        setattr(owner, name, replacement)

        def undo() -> None:
            if getattr(owner, name) is replacement:  # else somebody has put another one around it
                setattr(owner, name, original)

        self._undo_looks.append(undo)

    def withdraw(self) -> None:
        """Stop watching, and report nothing."""
        self._stop_looking()
        self.faults.is_off = True
        while self._undo:
            self._undo.pop()()
        self._account.clear()

    def report_end(self) -> None:
        """The script has come to its end, and it was a good one."""
        if self._account and self._torch is not None:
            self._report(ended=True)
        self._reporter.close()

    def _before(self, optimizer: Any, arguments: tuple[object, ...] = (), named: Any = None) -> None:
        given = (*arguments[1:], *(named or {}).values())  # the first is the optimizer itself
        if self._torch.compiler.is_dynamo_compiling():
            self._look_untraced(optimizer, given)
        else:
            self._inspect(optimizer, given)

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
            self._report(ended=False)

    def _inspect(self, optimizer: Any, given: tuple[object, ...]) -> None:
        """Before a step: at the weights and the gradients, and at the samples that led to it."""
        if self._over:
            return
        try:
            self._learning.inspect(optimizer, given)
        except Exception:  # of a tensor that is another's invention, say; the script is to continue
            self._learning.can_tell = False
        if not self.looks_closely or (self._turn and id(optimizer) not in self._turn):
            return
        if self.done == 0:
            self._look_at_group()
            self._look_at_weights(optimizer)
        if self._batch is not None:
            self._add(f"batch {self.done}", self._batch)

    def _look_at_group(self) -> None:
        with contextlib.suppress(Exception):  # torch may have become another one; the script is to continue
            distributed = self._torch.distributed
            together = distributed.is_available() and distributed.is_initialized()
            size = distributed.get_world_size() if together else 0
            parts = sys.modules["torch.distributed.distributed_c10d"]._world.pg_map if together else ()
            self._account["world"] = max(size, self._account["world"])
            self._account[reports.IN_PARTS] |= any(group.size() < size for group in parts) or self._uses_other_ways()

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
                self._account[reports.IN_PARTS] = True
            else:
                self._account["shapes"] = zlib.crc32(" ".join(str(list(each.shape)) for each in weights).encode())
                self._fingerprints.add("weights", weights)

    def _add(self, name: str, batch: object) -> None:
        with contextlib.suppress(Exception):
            tensors, words = tensors_in(batch)
            if tensors:
                self._fingerprints.add(name, tensors, words)

    def _report(self, *, ended: bool) -> None:
        if not self._over:
            self._account["libraries"] = [name for name in _LIBRARIES if name in sys.modules]
            with contextlib.suppress(Exception):
                fingerprints = self._fingerprints.read()
                self._account |= {"weights": fingerprints.pop("weights", None), "samples": fingerprints or None}
            if self.done >= LOOKS and not self._account[reports.IN_PARTS]:
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
