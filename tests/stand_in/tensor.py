"""Tensors of the stand-in: torch sees a device of its own, and each operation is launched on a stream.

Their memory is a subject of its own: see `memory`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from manyhosts import device
from manyhosts.snapshot import flatten
from stand_in import group, module, streams
from stand_in.kernels import KERNELS
from stand_in.memory import Memory

NAME = "standin"
_aten = torch.ops.aten
STAGED_BYTES = 1024
"""As much of unpinned memory goes to the device without a wait; 64 KB on a real one, where batches are larger."""
_pinned: set[int] = set()
"""Where pinned host memory begins."""


class OnDevice(Tensor):
    """A tensor on the stand-in. What it holds is in `data_there`, a tensor of the CPU, once the streams have run."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    data_there: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, data: Tensor, memory: Memory | None = None) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            data.shape,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=torch.device(NAME, 0),
        )
        made.data_there = data
        made.memory = memory if memory is not None else Memory(data)
        return made

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({tuple(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        """Its numbers, for which the host waits."""
        return self.detach().cpu().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made = self.detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = made
        return made

    def untyped_storage(self) -> Any:
        """What holds it."""
        return self.memory.storage

    def data_ptr(self) -> int:
        """Where it is."""
        return self.data_there.data_ptr()

    def record_stream(self, stream: Any) -> None:
        """Say that `stream` reads it."""
        self.memory.streams.add(stream)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


_ON_HOST = {"device": torch.device("cpu"), "pin_memory": None}


def _there(value: Any) -> Any:
    return value.data_there if isinstance(value, OnDevice) else value


def _check_devices(func: Any, args: Any, kwargs: Any) -> None:
    """Refuse tensors of the host beside those of the device, as a GPU does: but for single numbers and indices.

    In a list there is no such exception.
    """
    if func._schema.name.startswith("aten::index"):
        return
    for each in (*args, *kwargs.values()):
        listed = isinstance(each, list | tuple)
        for tensor in each if listed else [each]:
            if isinstance(tensor, Tensor) and not isinstance(tensor, OnDevice) and (listed or tensor.dim()):
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but {func} found one of the host, "
                    f"shape {tuple(tensor.shape)}"
                )


def _dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    if func in _SPECIAL:
        return _SPECIAL[func](*args, **kwargs)
    _check_devices(func, args, kwargs)
    if func.namespace == "fsdp":
        return func._op_dk(torch._C.DispatchKey.PrivateUse1, *args, **kwargs)
    if func in KERNELS:
        return _launch_new(KERNELS[func], KERNELS[func], tree_map(_there, args), tree_map(_there, kwargs))
    # Of factories like zeros_like: what they make is on this device, in memory that is the host's.
    kwargs = kwargs | {name: _ON_HOST[name] for name in kwargs.keys() & _ON_HOST.keys()}
    schema = func._schema
    if _is_view(schema):
        return return_and_correct_aliasing(func, args, kwargs, _wrap_view(func, args, kwargs))
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags or func in _READS:
        streams.note_synchronisation(str(func))
        streams.current_stream().run_until(streams.current_stream().launched)
        return tree_map(_wrap_new, func(*tree_map(_there, args), **tree_map(_there, kwargs)))
    there_args, there_kwargs = tree_map(_there, args), tree_map(_there, kwargs)
    run = _with_random(func) if torch.Tag.nondeterministic_seeded in func.tags else func
    if schema.is_mutable and not any(ret.alias_info is None for ret in schema.returns):
        streams.current_stream().launch(lambda: _call(run, there_args, there_kwargs))
        return return_and_correct_aliasing(func, args, kwargs, _mutated(schema, args, kwargs))
    return _launch_new(func, run, there_args, there_kwargs)


def _launch_new(func: Any, run: Any, args: Any, kwargs: Any) -> Any:
    """Launch what gives new tensors. Their shapes and strides are known at once."""
    flat, spec = tree_flatten(_fake(func, args, kwargs))
    there = [_like(each) if isinstance(each, Tensor) else each for each in flat]

    def work() -> None:
        found, _ = tree_flatten(_call(run, args, kwargs))
        for mine, result in zip(there, found, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(result)

    streams.current_stream().launch(work)
    return tree_unflatten([_wrap_new(each) for each in there], spec)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _call(run: Any, args: Any, kwargs: Any) -> Any:
    with torch.no_grad():
        return run(*args, **kwargs)


def _is_view(schema: Any) -> bool:
    return bool(schema.returns) and any(
        ret.alias_info is not None and not ret.alias_info.is_write for ret in schema.returns
    )


def _wrap_view(func: Any, args: Any, kwargs: Any) -> Any:
    base = next(each for each in tree_flatten((args, kwargs))[0] if isinstance(each, OnDevice))
    with torch.no_grad():
        made = func(*tree_map(_there, args), **tree_map(_there, kwargs))
    return tree_map(lambda each: OnDevice(each, base.memory) if isinstance(each, Tensor) else each, made)


def _wrap_new(value: Any) -> Any:
    return OnDevice(value) if isinstance(value, Tensor) else value


def _mutated(schema: Any, args: Any, kwargs: Any) -> Any:
    found = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[place] if place < len(args) else kwargs[argument.name])
    if not schema.returns:
        return None
    return found[0] if len(schema.returns) == 1 else tuple(found)


_fake_mode = FakeTensorMode(allow_non_fake_inputs=False)


_known: dict[Any, Any] = {}
"""What operations gave on tensors of the same shapes before: without it a step takes four times as long."""


def _fake(func: Any, args: Any, kwargs: Any) -> Any:
    flat, spec = tree_flatten((args, kwargs))
    key = func, str(spec), tuple(_kind(each) for each in flat)
    if key not in _known:
        with torch.no_grad():
            fakes = tree_unflatten([_fake_of(each) for each in flat], spec)
            with _fake_mode:
                _known[key] = func(*fakes[0], **fakes[1])
    return _known[key]


def _kind(value: Any) -> Any:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else repr(value)


def _fake_of(value: Any) -> Any:
    return _fake_mode.from_tensor(value.detach()) if isinstance(value, Tensor) else value


def _with_random(func: Any) -> Callable[..., Any]:
    seed = _next_seed()

    def run(*args: Any, **kwargs: Any) -> Any:
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        try:
            return func(*args, **kwargs)
        finally:
            torch.set_rng_state(state)

    return run


generator = torch.Generator()
"""Of the device: each operation that draws random numbers takes its seed from here when it is launched."""


def _next_seed() -> int:
    return int(torch.randint(1 << 62, (), generator=generator))


def is_pinned(tensor: Tensor) -> bool:
    """Whether it is host memory that the device reads and writes by itself."""
    return not isinstance(tensor, OnDevice) and tensor.untyped_storage().data_ptr() in _pinned


def pin(tensor: Tensor) -> Tensor:
    """A copy of it in pinned memory."""
    made = tensor.detach().clone(memory_format=torch.preserve_format)
    place = made.untyped_storage().data_ptr()
    _pinned.add(place)
    weakref.finalize(made.untyped_storage(), _pinned.discard, place)
    return made


def _launch(work: Callable[[], Any]) -> None:
    def run() -> None:
        with torch.no_grad():
            work()

    streams.current_stream().launch(run)


def _wait_for_stream(what: str) -> None:
    streams.note_synchronisation(what)
    streams.current_stream().run_until(streams.current_stream().launched)


def _copy_(own: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    to, origin = _there(own), _there(source)
    if isinstance(own, OnDevice) and isinstance(source, OnDevice):
        _launch(lambda: to.copy_(origin))
        return own
    host = source if isinstance(own, OnDevice) else own
    if non_blocking and is_pinned(host):
        _launch(lambda: to.copy_(origin))
        return own
    if isinstance(own, OnDevice) and non_blocking and source.nbytes <= STAGED_BYTES:
        value = source.clone()
        _launch(lambda: to.copy_(value))
        return own
    _wait_for_stream(f"a copy {'to' if isinstance(own, OnDevice) else 'from'} memory of the host that is not pinned")
    with torch.no_grad():
        to.copy_(origin)
    return own


def _to_copy(
    source: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Tensor:
    shape = torch.empty_like(
        source.data_there if isinstance(source, OnDevice) else source,
        dtype=dtype,
        memory_format=memory_format if memory_format is not None else torch.preserve_format,
    )
    stays = device is None or device.type == NAME
    made = OnDevice(shape) if stays else pin(shape) if non_blocking else shape  # as torch does for such a copy
    return _copy_(made, source, non_blocking)


def _local_scalar_dense(tensor: Tensor) -> Any:
    _wait_for_stream("item()")
    return _there(tensor).item()


_READS = {_aten.equal.default, _aten.is_nonzero.default}
_SPECIAL: dict[Any, Callable[..., Any]] = {
    _aten.copy_.default: _copy_,
    _aten._to_copy.default: _to_copy,
    _aten._local_scalar_dense.default: _local_scalar_dense,
    _aten.is_pinned.default: lambda tensor, device=None: False,
    torch.ops._c10d_functional.all_gather_into_tensor.default: group.gathered,
    torch.ops._c10d_functional.all_reduce.default: group.summed,
    torch.ops._c10d_functional.wait_tensor.default: lambda tensor: tensor,
}


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    return OnDevice(_torch_empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return OnDevice(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, own: Tensor, non_blocking: bool = False) -> Tensor:
    return _copy_(own, source, non_blocking)


_library: torch.library.Library | None = None
_fused: torch.library.Library | None = None
_autocast: torch.library.Library | None = None
"""Autocasting changes no dtype here: what is tried is the scaling of the loss."""
_torch_empty = torch.empty


def _empty_on_host(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
    """`torch.empty`, which would ask an accelerator of C++ for pinned memory."""
    made = _torch_empty(*size, **options)
    return pin(made) if pin_memory else made


_module_to = nn.Module.to


def _to_with_ties(module: nn.Module, *args: Any, **options: Any) -> nn.Module:
    """`Module.to`, which makes new parameters here, and one for each place of a parameter that has several."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((part, name))
    _module_to(module, *args, **options)
    for (first, name), *others in places.values():
        for part, other in others:
            part._parameters[other] = first._parameters[name]
    return module


def install() -> torch.device:
    """Let torch and manyhosts know the device. Once in a process, before anything else is done there."""
    global _library, _autocast, _fused
    if _library is None:
        _setup_privateuseone_for_python_backend(NAME, backend_module=module.Module(generator))
        _library = torch.library.Library("aten", "IMPL")
        _library.impl("empty.memory_format", _empty, "PrivateUse1")
        _library.impl("empty_strided", _empty_strided, "PrivateUse1")
        _library.impl("_copy_from", _copy_from, "PrivateUse1")
        _library.impl("_pin_memory", lambda tensor, device=None: pin(tensor), "CPU")
        _library.impl("is_pinned", lambda tensor, device=None: is_pinned(tensor), "CPU")
        _fused = torch.library.Library("aten", "IMPL", "Meta")
        for name in ("_fused_sgd_", "_fused_adamw_"):
            _fused.impl(name, lambda *args, **kwargs: None)
        _autocast = torch.library.Library("_", "IMPL")
        _autocast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        torch.empty = _empty_on_host  # type: ignore[assignment]
        nn.Module.to = _to_with_ties  # type: ignore[method-assign]
        group.register(NAME)
        flatten.TENSOR_TYPES.add(OnDevice)
        device.ACCELERATORS.clear()
        device.ACCELERATORS[NAME] = device.Kind(backend=NAME, activity="PrivateUse1")
    return torch.device(NAME, 0)
