"""What the processes that a worker starts must know of it: which store is the run's, and what its script begins with.

`begin()` is called in the worker. A child that is forked has everything; one that `multiprocessing` starts afresh
(`mp.spawn`, a DataLoader with `spawn` or `forkserver`) calls `begin()` before it imports the script. A program that is
started by `subprocess` gets the variables alone.
"""

from __future__ import annotations

import importlib
import multiprocessing.forkserver
import multiprocessing.spawn
import os
from typing import Any

from manyhosts.control import variables
from manyhosts.imports import when_imported

_BEFORE = f"import {__name__}; {__name__}.begin(); "
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_AFRESH = "manyhosts.control.agent.afresh"


def begin() -> None:
    """Prepare this process, and those that will come from it. Once is enough."""
    when_imported("torch.distributed.rendezvous", _choose_store)
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


def _choose_store(rendezvous: Any) -> None:
    """Have workers meet at the run's store only where they mean it.

    A script that chooses a port for processes of its own has no store there yet: torch must open one, as it does
    without a launcher. With the launcher's word that there is one, its processes would wait for it until they time out.
    """
    create = rendezvous._create_c10d_store
    given = os.environ.get(variables.STORE)

    def create_store(hostname: str, port: int, *arguments: Any, **named: Any) -> Any:
        if given in (None, str(port)):
            return create(hostname, port, *arguments, **named)
        asked = os.environ.pop(_AGENT_STORE, None)
        try:
            return create(hostname, port, *arguments, **named)
        finally:
            if asked is not None:
                os.environ[_AGENT_STORE] = asked

    rendezvous._create_c10d_store = create_store
