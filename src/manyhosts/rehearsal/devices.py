"""Devices named in calls: every CUDA device is this machine's CPU, however it is named."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from manyhosts.rehearsal.mapping import note, replace

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


def put_in_place() -> None:
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
