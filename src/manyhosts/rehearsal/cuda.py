"""`torch.cuda` and `torch.accelerator` with one GPU per worker, each of which is this machine's CPU."""

from __future__ import annotations

import functools
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from manyhosts.cluster.place import REHEARSED_GPUS
from manyhosts.rehearsal.mapping import note, refuse, replace

_MEMORY_BYTES = 16 << 30
_ZERO = (
    *("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "memory_cached"),
    *("max_memory_cached", "utilization", "temperature", "power_draw", "memory_usage", "clock_rate"),
)
_NOTHING = (
    *("synchronize", "empty_cache", "ipc_collect", "init", "set_stream", "reset_peak_memory_stats"),
    *("reset_max_memory_allocated", "reset_max_memory_cached", "reset_accumulated_memory_stats"),
    *("set_per_process_memory_fraction", "set_sync_debug_mode"),
)
_REFUSED = ("CUDAGraph", "graph", "make_graphed_callables", "MemPool", "CUDAPluggableAllocator", "MemPoolContext")


class Stream:
    """A queue of work that is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")
        self.cuda_stream = self.stream_id = self.native_handle = self.priority = 0
        self.device_index, self.device_type = 0, 1

    def synchronize(self) -> None:
        """Everything is done already."""

    def wait_stream(self, _: Any) -> None:
        """Everything is done already."""

    def wait_event(self, _: Any) -> None:
        """Everything is done already."""

    def query(self) -> bool:
        """Whether everything is done."""
        return True

    def is_capturing(self) -> bool:
        """Whether what is done is put into a graph: never."""
        return False

    def record_event(self, event: Event | None = None) -> Event:
        """An event at this moment."""
        event = event or Event()
        event.record()
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class Event:
    """A moment on the clock of the CPU."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.time_s = 0.0

    def record(self, _: Any = None) -> None:
        """This is the moment."""
        self.time_s = time.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds from this event to `other`."""
        return (other.time_s - self.time_s) * 1000

    def synchronize(self) -> None:
        """It is over already."""

    def wait(self, _: Any = None) -> None:
        """It is over already."""

    def query(self) -> bool:
        """Whether it is over."""
        return True


class _Device:
    """`with torch.cuda.device(1):`."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def __enter__(self) -> _Device:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


@dataclass(slots=True)
class _Gpus:
    """Those of one worker, as its script sees them."""

    count: int
    current: int = 0
    """As on a machine with GPUs, until the script chooses one."""

    def set_device(self, device: Any = 0) -> None:
        note("GPUs become this machine's CPU")
        index = torch.device(device).index if isinstance(device, str | torch.device) else int(device)
        if index is not None and index >= self.count:
            what = f"invalid device ordinal {index}; the rehearsal has {self.count}, one per worker"
            raise RuntimeError(f"CUDA error: {what}")
        self.current = index if index is not None else self.current

    def cuda(self) -> dict[str, Callable[..., Any]]:
        """What functions of `torch.cuda` answer."""
        properties = SimpleNamespace(
            name="rehearsal",
            total_memory=_MEMORY_BYTES,
            major=8,
            minor=0,
            multi_processor_count=1,
            is_integrated=False,
            is_multi_gpu_board=False,
            warp_size=32,
        )
        return {
            "is_available": lambda: True,
            "is_initialized": lambda: False,
            "device_count": lambda: self.count,
            "current_device": lambda: self.current,
            "set_device": self.set_device,
            "device": _Device,
            "device_of": _Device,
            "get_device_name": lambda *_: "rehearsal",
            "get_device_capability": lambda *_: (8, 0),
            "get_device_properties": lambda *_: properties,
            "is_bf16_supported": lambda *_, **__: True,
            "is_tf32_supported": lambda: False,
            "mem_get_info": lambda *_: (_MEMORY_BYTES, _MEMORY_BYTES),
            "memory_stats": lambda *_: {},
            "memory_summary": lambda *_, **__: "",
            "memory_snapshot": lambda *_: [],
            "get_arch_list": list,
            "Stream": Stream,
            "Event": Event,
            "current_stream": lambda *_: Stream(),
            "default_stream": lambda *_: Stream(),
            "stream": lambda _: nullcontext(),
            "is_current_stream_capturing": lambda: False,
            "can_device_access_peer": lambda *_: False,
            "manual_seed": torch.default_generator.manual_seed,
            "manual_seed_all": torch.default_generator.manual_seed,
            "initial_seed": torch.initial_seed,
            "get_rng_state": lambda *_: torch.get_rng_state(),
            "set_rng_state": lambda state, *_: torch.set_rng_state(state),
            "get_rng_state_all": lambda: [torch.get_rng_state()] * self.count,
            "set_rng_state_all": lambda states: torch.set_rng_state(states[self.current]),
        }

    def accelerator(self) -> dict[str, Callable[..., Any]]:
        """What functions of `torch.accelerator` answer."""
        found: dict[str, Callable[..., Any]] = {
            "is_available": lambda: True,
            "device_count": lambda: self.count,
            "current_accelerator": lambda *_, **__: torch.device("cuda"),
            "current_device_index": lambda: self.current,
            "current_device_idx": lambda: self.current,
            "set_device_index": self.set_device,
            "set_device_idx": self.set_device,
            "device_index": _Device,
            "synchronize": _nothing,
            "current_stream": lambda *_: Stream(),
            "set_stream": _nothing,
        }
        for name in ("empty_cache", "reset_peak_memory_stats", "reset_accumulated_memory_stats"):
            found[name] = _nothing
        for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
            found[name] = _zero
        return found


def map_cuda() -> None:
    """Let `torch.cuda` and `torch.accelerator` answer for GPUs that are not there."""
    named = os.environ.get(REHEARSED_GPUS, "")
    gpus = _Gpus(len(named.split(",")) if named else int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    answers = gpus.cuda()
    answers |= {name: _zero for name in _ZERO} | {name: _nothing for name in _NOTHING}
    answers |= {name: _refusing(name) for name in _REFUSED if hasattr(torch.cuda, name)}
    replace(torch.cuda, **answers)
    for module in (torch.cuda.streams, torch.cuda.graphs, torch.cuda.memory):  # some code takes them from there
        replace(module, **{name: answer for name, answer in answers.items() if hasattr(module, name)})
    replace(torch.cuda.nccl, version=lambda: (2, 27, 0))  # some scripts ask before they begin
    replace(torch.cuda.nvtx, range_push=_nothing, range_pop=_nothing, mark=_nothing)
    torch.version.cuda = torch.version.cuda or "12.8"
    replace(torch.accelerator, **gpus.accelerator())


def _zero(*_: Any, **__: Any) -> int:
    return 0


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _refusing(name: str) -> Callable[..., Any]:
    """What refuses to be called, and is a class where torch's is one: libraries name it in types, and ask by it."""

    def refuse_it(*_: Any, **__: Any) -> NoReturn:
        refuse(f"torch.cuda.{name}")

    if not isinstance(getattr(torch.cuda, name), type):
        return refuse_it
    return type(name, (), {"__module__": "torch.cuda", "__new__": refuse_it})


_CPU = torch.device("cpu")
_CUDA_WORD = re.compile(r"cuda(:\d+)?")
_TAKES_A_NUMBER = {Tensor.to, Tensor.cuda}
"""Methods whose first argument may be the number of a GPU."""


def on_cpu(value: Any) -> Any:
    """`value` with the CPU in place of a CUDA device; anything else as it is."""
    if isinstance(value, torch.device) and value.type == "cuda":
        note("GPUs become this machine's CPU")
        return _CPU
    if isinstance(value, str) and _CUDA_WORD.fullmatch(value):
        note("GPUs become this machine's CPU")
        return "cpu"
    return value


def _remember_gpu(model: nn.Module, device: Any) -> None:
    """Leave in the weights of `model` which GPU they would be on, so that a worker on the wrong one is noticed."""
    if type(device) is int:
        index = device
    elif _CUDA_WORD.fullmatch(str(device)):
        number = str(device).partition(":")[2]
        index = int(number) if number else torch.cuda.current_device()
    else:
        return
    for weight in model.parameters():
        weight.rehearsed_gpu = index  # type: ignore[attr-defined]  # torch allows attributes of one's own


class _Mapped(TorchFunctionMode):
    """Every function of torch that a script calls goes through here: factories, `to`, `cuda`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = {key: on_cpu(value) for key, value in (kwargs or {}).items()}
        if isinstance(named.get("device"), int):
            named["device"] = _CPU
        if func is Tensor.cuda:
            note("GPUs become this machine's CPU")
            return args[0]
        if func is Tensor.pin_memory:
            note("pinned memory becomes ordinary memory")
            return args[0]
        if named.get("pin_memory"):
            note("pinned memory becomes ordinary memory")
            named["pin_memory"] = False
        if func in _TAKES_A_NUMBER and len(args) > 1 and type(args[1]) is int:
            args = (args[0], _CPU, *args[2:])
        return func(*map(on_cpu, args), **named)


def _map_threads() -> None:
    """Map devices in other threads too, for PyTorch's mode is that of one thread: in Python's and in those of RPC."""
    begin = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]  # `run` is what scripts override

    def begin_mapped(self: threading.Thread) -> None:
        with _Mapped():
            begin(self)

    replace(threading.Thread, _bootstrap_inner=begin_mapped)
    if torch.distributed.rpc.is_available():
        from torch.distributed.rpc import internal

        call = internal._run_function

        def call_mapped(function: Any) -> Any:
            with _Mapped():
                return call(function)  # type: ignore[no-untyped-call]

        replace(internal, _run_function=call_mapped)


def map_devices() -> None:
    """Map devices in the calls of this process from now on."""
    _Mapped().__enter__()  # type: ignore[no-untyped-call]  # for the life of the process
    _map_threads()
    module_to, load, make_loader = nn.Module.to, torch.load, DataLoader.__init__
    set_default_device, tensor_type = torch.set_default_device, torch.set_default_tensor_type

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        for device in (*args[:1], *([kwargs["device"]] if "device" in kwargs else [])):
            _remember_gpu(self, device)
        args = tuple(_CPU if type(arg) is int else on_cpu(arg) for arg in args)
        return module_to(self, *args, **{key: on_cpu(value) for key, value in kwargs.items()})

    def cuda(self: nn.Module, device: Any = None) -> nn.Module:
        note("GPUs become this machine's CPU")
        _remember_gpu(self, "cuda" if device is None else device)
        return self

    @functools.wraps(load)
    def mapped_load(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        note("saved GPU tensors are loaded to this machine's CPU")
        return load(file, _CPU, *args, **kwargs)

    @functools.wraps(make_loader)  # libraries make a loader again by what its signature says
    def make_unpinned(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("pin_memory"):
            note("pinned memory becomes ordinary memory")
        make_loader(self, *args, **{**kwargs, "pin_memory": False, "pin_memory_device": ""})

    def default_device(device: Any) -> None:
        set_default_device(on_cpu(device))

    def default_tensor_type(kind: Any) -> None:
        tensor_type(kind.replace("torch.cuda.", "torch.") if isinstance(kind, str) else kind)

    replace(nn.Module, to=to, cuda=cuda)
    replace(DataLoader, __init__=make_unpinned)
    replace(torch.serialization, load=mapped_load)  # some code takes it from where it is made
    replace(torch, load=mapped_load, set_default_device=default_device, set_default_tensor_type=default_tensor_type)
