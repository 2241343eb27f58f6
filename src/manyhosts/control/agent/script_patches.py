"""What is changed in a worker for scripts as they are: processes that they start, process groups, training libraries.

`begin()` is called in the worker. A child that is forked has everything; one that `multiprocessing` starts afresh
(`mp.spawn`, a DataLoader with `spawn` or `forkserver`) calls `begin()` before it imports the script. A program that is
started by `subprocess` gets the variables alone.

A process group is taken down without harm, counted in its exchanges, and refused where it cannot be. Some training
libraries need more than torchrun's variables: under torchrun alone, a script with Accelerate forms no process group on
CPUs, and one with Lightning takes itself for alone where there is no GPU, or for on one node: each worker then trains
by itself. What a user or a script has said counts for more.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing.forkserver
import multiprocessing.spawn
import os
import sys
import threading
from types import ModuleType
from typing import Any

from manyhosts.cluster import store_line
from manyhosts.control import variables
from manyhosts.errors import ConfigError
from manyhosts.imports import when_imported

_BEFORE = f"import {__name__}; {__name__}.begin(); "
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_AFRESH = "manyhosts.control.agent.afresh"


def begin() -> None:
    """Prepare this process, and those that will come from it. Once is enough."""
    when_imported("torch.distributed.rendezvous", _watch_over_stores)
    for name in filter(None, os.environ.get(variables.FIRST, "").split(",")):
        importlib.import_module(name).begin()
    _hand_on()


def _hand_on() -> None:
    """Have processes that `multiprocessing` starts afresh begin in the same way."""
    spawn: Any = multiprocessing.spawn
    command = spawn.get_command_line

    def get_command_line(**named: Any) -> list[str]:
        words: list[str] = command(**named)
        if "-c" in words:
            place = words.index("-c") + 1
            words[place] = _BEFORE + words[place]
        return words

    spawn.get_command_line = get_command_line
    server: Any = multiprocessing.forkserver
    if server._forkserver._preload_modules == ["__main__"]:
        # A server imports the script before anything else: not where something must come before the script.
        before_script = bool(os.environ.get(variables.FIRST))
        server._forkserver._preload_modules = [_AFRESH] if before_script else ["__main__", _AFRESH]


def _watch_over_stores(rendezvous: Any) -> None:
    _choose_store(rendezvous)
    _open_store_first(rendezvous)


def _choose_store(rendezvous: Any) -> None:
    """Have workers use the run's store only where they mean it.

    A script that chooses a port for processes of its own has no store there yet: torch must open one, as it does
    without a launcher. With the launcher's word that there is one, its processes would wait for it until they time out.
    """
    create = rendezvous._create_c10d_store

    def create_store(hostname: str, port: int, *arguments: Any, **named: Any) -> Any:
        if os.environ.get(store_line.PORT) in (None, str(port)):
            return create(hostname, port, *arguments, **named)
        asked = os.environ.pop(_AGENT_STORE, None)
        try:
            return create(hostname, port, *arguments, **named)
        finally:
            if asked is not None:
                os.environ[_AGENT_STORE] = asked

    rendezvous._create_c10d_store = create_store


def _open_store_first(rendezvous: Any) -> None:
    """Have the run's store listen before this process becomes a client of it: it may be shut until somebody asks."""
    kind = rendezvous.TCPStore
    make = kind.__init__

    @functools.wraps(make)
    def __init__(self: Any, host_name: str, port: int, *arguments: Any, **named: Any) -> None:
        if str(port) == os.environ.get(store_line.PORT):
            store_line.open_store()
        make(self, host_name, port, *arguments, **named)

    kind.__init__ = __init__


_made: list[int] = []
"""The exchanges of groups that were taken down."""


def watch_groups(distributed: Any) -> None:
    """Watch over the groups that `torch.distributed.distributed_c10d` makes. Once per worker, before its script."""
    _spare_groups(distributed)
    _look_at_mpi(distributed)


def exchanges_made() -> int | None:
    """How many exchanges this worker has begun in the group of all; None where there was none, or it does not count."""
    if _made:
        return _made[-1]
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    with contextlib.suppress(Exception):
        if distributed is not None and distributed.is_initialized():
            return int(distributed._get_default_group()._get_sequence_number_for_group())
    return None


def _spare_groups(distributed: Any) -> None:
    """Run no destructor of a group that the script takes down, unless another one is exchanges_made after it.

    At the end of a script Gloo's hung in 7 of 14 runs: it waits for threads that wait for peers which are gone. What is
    left of the group ends with the process. A script that continues in another group is to keep no port, no connection
    and no thread of the one before: its destructor runs on a thread of its own, which may wait as long as it likes.
    """
    take_down, make = distributed.destroy_process_group, distributed.init_process_group
    spared: list[Any] = []

    @functools.wraps(take_down)
    def destroy_process_group(group: Any = None) -> None:
        if group is None and (count := exchanges_made()) is not None:
            _made.append(count)
        spared.extend(distributed._world.pg_map)
        take_down(group)

    @functools.wraps(make)
    def init_process_group(*arguments: Any, **named: Any) -> Any:
        group = make(*arguments, **named)
        if spared:
            groups = spared.copy()
            spared.clear()  # first, so that the last references are the other thread's
            threading.Thread(target=groups.clear, name="manyhosts-groups", daemon=True).start()
        return group

    _put(distributed, "destroy_process_group", destroy_process_group)
    _put(distributed, "init_process_group", init_process_group)


def _look_at_mpi(distributed: Any) -> None:
    """Say in a sentence why the MPI backend of torch is not to be had; where torch has it, see that it knows all.

    MPI takes its ranks from mpirun. A worker that mpirun knows nothing of is alone in its group, and trains alone.
    """
    make = distributed.init_process_group
    gloo = "give it 'gloo' on CPUs or 'nccl' on GPUs"

    @functools.wraps(make)
    def init_process_group(backend: Any = None, *arguments: Any, **named: Any) -> Any:
        by_mpi = str(backend or "").lower() == "mpi"
        if by_mpi and not distributed.is_mpi_available():
            raise ConfigError(
                "this torch has no MPI backend: PyTorch's wheels come without",
                where="torch.distributed.init_process_group",
                fix=f"{gloo}; `--on mpi` has mpirun start the hosts with either",
            )
        group = make(backend, *arguments, **named)
        known, workers = int(distributed.get_world_size()) if by_mpi else 0, os.environ.get("WORLD_SIZE", "1")
        if by_mpi and known != int(workers):
            raise ConfigError(
                f"mpirun knows {known} of the {workers} workers, and the MPI backend takes its ranks from it",
                where="torch.distributed.init_process_group",
                fix=f"{gloo}; or `--on mpi` with one worker per node; or start the script with mpirun itself",
            )
        return group

    _put(distributed, "init_process_group", init_process_group)


def _put(distributed: Any, name: str, replacement: Any) -> None:
    for module in (distributed, sys.modules["torch.distributed"]):  # the second takes it from the first, if not yet
        vars(module)[name] = replacement


def configure_libraries() -> None:
    """Configure them when the script imports them. Call it once, before the script."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        when_imported("accelerate.state", _configure_accelerate)
        for name in ("lightning.pytorch", "pytorch_lightning"):
            when_imported(f"{name}.trainer.trainer", _configure_lightning)


def _configure_accelerate(_: ModuleType) -> None:
    """What `accelerate launch --cpu` says, on a host that has nothing else: only then does it use Gloo."""
    torch: Any = sys.modules["torch"]
    if not torch.accelerator.is_available() and not torch.cuda.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def _configure_lightning(_: ModuleType) -> None:
    """How many workers there are; by default it believes in one for each GPU of one node. Its strategy is then DDP."""
    os.environ.setdefault("PL_TRAINER_DEVICES", os.environ["LOCAL_WORLD_SIZE"])
    os.environ.setdefault("PL_TRAINER_NUM_NODES", os.environ["GROUP_WORLD_SIZE"])
