"""The device that a worker computes on: a CPU, or an accelerator that works asynchronously.

PyTorch has one module for each kind of accelerator (`torch.cuda`), all with the same names: streams, events, random
numbers. Code that needs one of these asks for `module(device)` and names no kind. This file alone lists the kinds.
`backward_from` is the backward pass, with less around it on a CPU.
`processor()` is the CPU's make: another one may add in another order.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.overrides import has_torch_function_unary
from torch.profiler import ProfilerActivity

from manyhosts.errors import ConfigError


class Kind(NamedTuple):
    """A kind of accelerator, in PyTorch's words."""

    backend: str
    """Of torch.distributed: carries data between them."""
    activity: str
    """What its profiler calls their work."""


ACCELERATORS = {"cuda": Kind(backend="nccl", activity="CUDA")}
"""The kinds, by the type of their devices."""


class Event(Protocol):
    """A place between two pieces of work on a stream."""

    def record(self) -> None:
        """Record the work of the current stream so far."""

    def wait(self) -> None:
        """Have later work of the current stream wait for it. The host continues."""

    def query(self) -> bool:
        """Whether it is passed."""

    def synchronize(self) -> None:
        """The host waits until it is passed."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from this event to `end`. Both were made with `enable_timing` and have been passed."""


class Stream(Protocol):
    """Work that is done in the order in which it was asked for."""

    def wait_event(self, event: Any, /) -> None:
        """Have later work wait for `event`."""

    def wait_stream(self, stream: Any, /) -> None:
        """Have later work wait for the work of `stream` so far."""

    def record_event(self) -> Event:
        """A new event, recorded after the work so far."""

    def synchronize(self) -> None:
        """The host waits until everything is done."""


class Within(Protocol):
    """A context manager."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None, /
    ) -> object: ...


class Module(Protocol):
    """What is used of `torch.cuda` and its like."""

    def is_available(self) -> bool:
        """Whether this machine has such an accelerator."""

    def is_initialized(self) -> bool:
        """Whether this process uses one."""

    def device_count(self) -> int:
        """How many this process sees."""

    def set_device(self, device: int, /) -> None:
        """Use number `device` from now on."""

    def get_device_name(self, device: torch.device, /) -> str:
        """Its make."""

    def get_device_properties(self, device: torch.device, /) -> Any:
        """What it has: `total_memory`, bytes."""

    def mem_get_info(self, device: torch.device, /) -> tuple[int, int]:
        """Bytes of it that are free, and that it has."""

    def memory_reserved(self, device: torch.device, /) -> int:
        """Bytes that PyTorch has taken of it for this process."""

    def memory_allocated(self, device: torch.device, /) -> int:
        """Bytes that tensors hold."""

    def max_memory_allocated(self, device: torch.device, /) -> int:
        """The peak of allocated bytes."""

    def reset_peak_memory_stats(self, device: torch.device, /) -> None:
        """Begin to look for the most again."""

    def device(self, device: torch.device, /) -> Within:
        """Within, it is the one in use."""

    def synchronize(self, device: torch.device, /) -> None:
        """The host waits until everything is done."""

    def current_stream(self, device: torch.device, /) -> Stream:
        """The one that work goes to."""

    def stream(self, stream: Stream, /) -> Within:
        """Within, work goes to `stream`."""

    def Stream(self, device: torch.device, /) -> Stream:  # as torch names it
        """A new stream."""

    def Event(self, *, enable_timing: bool = False) -> Event:  # as torch names it
        """A new event."""

    def manual_seed(self, seed: int, /) -> None:
        """Seed the random numbers of the one in use."""

    def get_rng_state(self) -> Tensor:
        """The state of its random numbers."""

    def set_rng_state(self, state: Tensor, /) -> None:
        """Take up such a state."""


def is_asynchronous(device: torch.device) -> bool:
    """Whether `device` does later what it is asked for now, so that its numbers are read later and nothing waits."""
    return device.type != "cpu"


def module(device: torch.device | str) -> Module:
    """PyTorch's module for an accelerator of the kind of `device`."""
    # `torch.get_device_module` does the same, but in a rehearsal it takes every device for the CPU that it is.
    found: Module = getattr(torch, device if isinstance(device, str) else device.type)
    return found


def in_use() -> Module | None:
    """The module of the accelerator that this process uses; None where it uses none."""
    for kind in ACCELERATORS:
        if (found := module(kind)).is_initialized():
            return found
    return None


def of_worker(number: int, *, rank: int) -> torch.device:
    """The device for worker `number` of its host: an accelerator of its own where there are any, else the CPU.

    Raises:
        ConfigError: there are fewer accelerators than workers.
    """
    for kind in ACCELERATORS:
        if not (found := module(kind)).is_available():
            continue
        if found.device_count() == 1 and _sees_its_own(number):
            number = 0
        if number >= found.device_count():
            raise ConfigError(
                f"worker {number} of this host finds {found.device_count()} GPUs",
                where=f"rank {rank}",
                fix="start at most one worker per GPU (by srun: --gpus-per-task=1, not --gpu-bind), or hide the GPUs "
                "with CUDA_VISIBLE_DEVICES=",
            )
        found.set_device(number)
        return torch.device(kind, number)
    return torch.device("cpu")


def _sees_its_own(number: int) -> bool:
    """Whether worker `number` is a task of srun, which gave each task of the host a GPU that no other one sees."""
    given = "SLURM_GPUS_PER_TASK" in os.environ or "gpu" in os.environ.get("SLURM_TRES_PER_TASK", "")
    return given and os.environ.get("SLURM_LOCALID") == str(number)


_LOG_OF_GRAPHS = logging.getLogger("torch.autograd.graph")


def backward_from(loss: Tensor) -> None:
    """`loss.backward()`, of one number on the CPU by the engine itself.

    What PyTorch does before it asks its engine is for other tensors, for code that is compiled and for a log of each
    node: it takes a fifth of a small model's backward pass.
    """
    is_plain = loss.is_cpu and loss.requires_grad and not loss.dim() and loss.is_floating_point()
    if is_plain and not (
        has_torch_function_unary(loss) or "torch._dynamo" in sys.modules or _LOG_OF_GRAPHS.isEnabledFor(logging.DEBUG)
    ):
        one = torch.ones_like(loss)
        Variable._execution_engine.run_backward(
            (loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    else:
        loss.backward()


def backend_for(device: torch.device) -> str:
    """The backend of torch.distributed that carries data between such devices."""
    return ACCELERATORS[device.type].backend if device.type in ACCELERATORS else "gloo"


def activities(device: torch.device) -> list[ProfilerActivity]:
    """What PyTorch's profiler calls the work of an accelerator; none for a CPU."""
    kinds = [ACCELERATORS[device.type]] if device.type in ACCELERATORS else []
    return [getattr(ProfilerActivity, kind.activity) for kind in kinds]


def make(device: torch.device) -> str:
    """The make of an accelerator, and what computes on it: of one make all give the same bits."""
    return f"{module(device).get_device_name(device)}, {torch.version.cuda}, {torch.backends.cudnn.version()}"


def by_device(tensors: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    """`tensors` by where they lie, in their order: no operation takes some of a host and some of a GPU."""
    found: dict[torch.device, list[Tensor]] = {}
    for each in tensors:
        found.setdefault(each.device, []).append(each)
    return found


def read_here(tensor: Tensor) -> None:
    """Say that the current stream of a GPU reads `tensor`, which may have been made on another one.

    Let go of there, its memory would otherwise be another's before it is read.
    """
    if is_asynchronous(tensor.device):
        tensor.record_stream(module(tensor.device).current_stream(tensor.device))  # type: ignore[arg-type]


def memory_left(device: torch.device) -> int:
    """Free bytes of an accelerator, and those that PyTorch has reserved for this process and not used."""
    memory = module(device)
    free, _ = memory.mem_get_info(device)
    return free + memory.memory_reserved(device) - memory.memory_allocated(device)


def wait_for(device: torch.device) -> None:
    """The host waits until `device` has done everything."""
    if is_asynchronous(device):
        module(device).synchronize(device)


class LateNumbers:
    """Numbers on their way from the device: each is read some calls later, so that the host waits for none of them.

    The lag is fixed, so that all workers read the numbers of the same step at the same place.
    """

    def __init__(self, device: torch.device, *, lag: int = 2) -> None:
        self._device, self._lag = device, lag
        self._pending: deque[tuple[Tensor, Event]] = deque()

    def read(self, newest: Sequence[float] | Tensor) -> list[float] | None:
        """Those that are old enough now that `newest`, shape (n,), are on their way; None where none are."""
        if not is_asynchronous(self._device) or not isinstance(newest, Tensor):
            return torch.as_tensor(newest).tolist()
        on_host = newest.to("cpu", non_blocking=True)
        self._pending.append((on_host, module(self._device).current_stream(self._device).record_event()))
        if len(self._pending) <= self._lag:
            return None
        numbers, event = self._pending.popleft()
        event.synchronize()
        return numbers.tolist()


_KEYS = ("vendor_id", "cpu family", "model", "model name", "CPU implementer", "CPU architecture", "CPU part")
_VECTOR_FLAGS = ("mmx", "sse", "ssse", "avx", "fma", "f16c", "bmi", "amx", "asimd", "sve", "sme", "bf16", "i8mm")
"""Beginnings of the flags by which kernels are chosen. Others depend on the version of the operating system."""


def processor(cpuinfo: str | None = None) -> tuple[str, str]:
    """The name of the processor, and everything about it by which a library chooses its kernels.

    `cpuinfo` is the content of /proc/cpuinfo. Where there is none, what Python knows has to do.
    """
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            cpuinfo = ""
    first = cpuinfo.strip().split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    facts = {key.strip(): value.strip() for key, _, value in pairs}
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    vector = sorted(flag for flag in flags if flag.startswith(_VECTOR_FLAGS))
    known = [f"{key} {facts[key]}" for key in _KEYS if key in facts]
    name = facts.get("model name") or platform.processor() or platform.machine()
    return name, ", ".join([platform.machine(), *(known or [name]), *vector])
