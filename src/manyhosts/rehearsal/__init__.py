"""A script that was written for CUDA and NCCL, run as it is on CPU and Gloo, before paying for GPUs.

`begin()` is called in a worker before its script: devices, backends, autocast and pinned memory are mapped, each kind
of mapping is noted once, and what cannot be mapped is refused with a sentence. What the script computes is what it
would compute on GPUs, slowly and in other roundings; what it sends between its workers is really sent. NCCL and MPI
become Gloo; autocast for CUDA becomes that of the CPU, and fp16 in it bf16, which CPUs compute well.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from threading import Thread
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as meshes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from manyhosts.cluster.place import REHEARSING
from manyhosts.communication.batch_norm import normalise_over
from manyhosts.imports import when_imported
from manyhosts.rehearsal import cuda
from manyhosts.rehearsal.mapping import note, replace


def begin() -> None:
    """Map everything in this process. Once is enough; it cannot be taken back."""
    os.environ[REHEARSING] = "1"
    cuda.map_cuda()
    cuda.map_devices()
    map_number_formats()
    map_distributed()
    map_lightning()


def map_number_formats() -> None:
    """Map autocast and gradient scaling from now on."""
    begin_autocast, begin_scaler = torch.autocast.__init__, torch.amp.GradScaler.__init__

    def autocast(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            note("autocast for CUDA becomes autocast for the CPU")
            device_type, dtype = "cpu", dtype or torch.float16
        if dtype is torch.float16:
            note("fp16 becomes bf16")
            dtype = torch.bfloat16
        begin_autocast(self, device_type, dtype, *args, **kwargs)

    def scaler(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        if device == "cuda":
            note("the gradient scaler for CUDA becomes one for the CPU")
        begin_scaler(self, "cpu", *args, **kwargs)

    replace(torch.autocast, __init__=autocast)
    replace(torch.amp.GradScaler, __init__=scaler)


_HOMES = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")


def map_lightning() -> None:
    """Have it believe us, when a script imports it."""
    for home in _HOMES:
        when_imported(f"{home}.accelerators.cuda", _map_setup)


def _map_setup(module: ModuleType) -> None:
    def setup_device(self: Any, device: Any) -> None:
        """Nothing is to be set up on a CPU."""

    replace(module.CUDAAccelerator, setup_device=setup_device)


Function = Callable[..., Any]
_END_S = 2.0
"""So long the end of a process waits for collectives of Gloo that no other process may join any more."""


def map_distributed() -> None:
    """Map backends, device meshes and DistributedDataParallel from now on."""
    functions = {
        "init_process_group": _init(dist.init_process_group),
        "new_group": _new_group(dist.new_group),
        "barrier": _barrier(dist.barrier),
        "is_nccl_available": lambda: True,
    }
    mesh = _mesh(meshes.init_device_mesh)
    for module in (dist, dist.distributed_c10d):  # some code takes them from where they are made
        replace(module, **functions)
    for module in (dist, meshes):
        replace(module, init_device_mesh=mesh)
    replace(DistributedDataParallel, __init__=_wrapper(DistributedDataParallel.__init__))
    # DDP would refuse a SyncBatchNorm on the CPU, and hands it nothing that is needed here.
    replace(DistributedDataParallel, _passing_sync_batchnorm_handle=lambda self, module: None)
    replace(nn.SyncBatchNorm, forward=_normalise)


def _init(torchs: Function) -> Function:
    def init(backend: Any = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        if backend != "gloo":
            note(f"{backend or 'the default backend'} becomes gloo")
        torchs("gloo", *args, **kwargs)
        atexit.unregister(_end)
        atexit.register(_end)

    return init


def _end() -> None:
    """A process may end with its group under NCCL; under Gloo a thread that still lets go of a tensor aborts it."""
    if dist.is_initialized():
        ending = Thread(target=dist.destroy_process_group, daemon=True)
        ending.start()
        ending.join(_END_S)


def _new_group(torchs: Function) -> Function:
    def group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return torchs(ranks, timeout, "gloo" if backend else None, *args, **kwargs)

    return group


def _barrier(torchs: Function) -> Function:
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, **kwargs: Any) -> Any:
        return torchs(group, async_op, **kwargs)

    return barrier


def _mesh(torchs: Function) -> Function:
    def mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        if device_type == "cuda":
            note("a mesh of GPUs becomes one of CPUs")
        return torchs("cpu", *args, **kwargs)

    return mesh


class _OverWorkers:
    """What a layer's statistics are over: the workers of its process group."""

    def __init__(self, group: Any) -> None:
        self.group, self.ghost = group, False

    def stack(self, row: Tensor) -> Tensor:
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(rows, row.contiguous(), group=self.group)
        return torch.stack(rows)

    def sum(self, own: Tensor) -> Tensor:
        dist.all_reduce(own, group=self.group)
        return own


def _normalise(self: Any, input: Tensor) -> Tensor:
    """`SyncBatchNorm.forward`, which refuses the CPU that every GPU has become: over the batch of the layer's group."""
    self._check_input_dim(input)
    is_alone = not dist.is_initialized() or dist.get_world_size(self.process_group) == 1
    if is_alone or not (self.training or self.running_mean is None):
        return nn.modules.batchnorm._BatchNorm.forward(self, input)
    note("SyncBatchNorm sums its statistics over Gloo")
    track = self.training and self.running_mean is not None
    return normalise_over(_OverWorkers(self.process_group), self, input, track=track)


def _wrapper(torchs: Function) -> Function:
    def wrap(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **more: Any
    ) -> None:
        if device_ids:
            note("device_ids are left out")
        torchs(self, module, None, None, *args, **more)

    return wrap
