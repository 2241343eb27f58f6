"""Start a script, or a function of a notebook, on several workers: `mh.launch.run(train, workers=2)`."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from manyhosts.control.display import Display, PlainDisplay
from manyhosts.errors import ConfigError, ManyhostsError
from manyhosts.launchers import launch
from manyhosts.notebook.cell import CellDisplay, Interrupted, in_notebook
from manyhosts.notebook.worker import FUNCTION, RESULT

_PROGRAM = '''"""Runs the function of a notebook's cell on each worker."""

import sys

from manyhosts.notebook.worker import main

main(__file__, sys.argv[1])
'''
_INTERRUPTED = 130


def run(  # noqa: PLR0913  # what `manyhosts run` takes
    task: str | os.PathLike[str] | Callable[..., Any],
    arguments: Sequence[Any] = (),
    *,
    workers: int = 1,
    hosts: Sequence[str] = (),
    nodes: int = 1,
    restarts: int = 0,
    hang_timeout_s: float | None = None,
    environment: Mapping[str, str] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    display: Display | None = None,
) -> Any:
    """Run a script, or a function, on `workers` workers: here, or on each of `hosts`, which ssh reaches.

    A function is called as `task(*arguments)` on every worker, in a process that begins again. It may use what the
    notebook has defined and imported, as it is now: small values travel with it, packages must be installed where it
    runs. What it changes, changes there. Open files, locks, and models on a GPU do not travel: make them inside.

    Progress and output are shown below the cell. Interrupting it ends the workers.

    Args:
        task: a script's path, or a function.
        arguments: the script's words, or what the function is given.
        workers: on this machine, or on each host.
        hosts: names that ssh knows; this machine where there are none.
        nodes: hosts that are rehearsed on this machine.
        restarts: how often all workers start again after a failure.
        hang_timeout_s: how long workers may get no further. 0: for ever. None: 600 s where they use mh.Trainer.
        environment: variables of the workers.
        run_dir: where the record is kept; `runs/NAME-TIME` where it is not given.
        display: where lines appear.

    Returns:
        Of a function: what it returned on rank 0, which may be tensors, numbers, texts, and lists, tuples and dicts of
        them. Of a script: 0, or 130 if it was interrupted.

    Raises:
        ConfigError: there is no such script, the function cannot travel, or a number makes no sense.
        KeyboardInterrupt: a function was interrupted; its workers have ended.
        ManyhostsError: workers failed; the error is that of the one that failed first.
    """
    words: dict[str, Any] = {
        "workers": workers, "hosts": hosts, "nodes": nodes, "restarts": restarts, "hang_timeout_s": hang_timeout_s,
        "environment": environment,
    }  # fmt: skip
    if not callable(task):
        return launch.run(task, [str(word) for word in arguments], run_dir=run_dir, display=display, **words)
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "the workers are to be started from a thread, which hears no interrupt",
            where="mh.launch.run",
            fix="call it in the main thread: in a cell itself",
        )
    name = re.sub(r"\W+", "-", getattr(task, "__name__", "function")).strip("-") or "function"
    place = Path(run_dir).absolute() if run_dir is not None else launch.new_run_dir(name)
    packed = _packed(task, arguments)
    if display is None:
        display = CellDisplay() if in_notebook() else PlainDisplay(sys.stdout, sys.stderr)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=Path.cwd()))  # below it: hosts are brought what is there
    try:
        (folder / FUNCTION).write_bytes(packed)
        program = folder / f"{name}.py"
        program.write_text(_PROGRAM)
        digest = hashlib.sha256(packed).hexdigest()
        code = launch.run(program.relative_to(Path.cwd()), [digest], run_dir=place, display=display, **words)
    except ManyhostsError as error:
        raise (display.reported(error) if isinstance(display, CellDisplay) else error) from None
    finally:
        display.close()
        shutil.rmtree(folder, ignore_errors=True)
    if code == _INTERRUPTED:
        raise Interrupted
    return _result(place)


def _packed(task: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    try:
        import cloudpickle
    except ImportError as cause:
        fix = f"{sys.executable} -m pip install cloudpickle"
        raise ConfigError("cloudpickle is not installed here", where=sys.executable, fix=fix) from cause
    try:
        return bytes(cloudpickle.dumps((task, tuple(arguments))))
    except Exception as cause:
        raise ConfigError(
            f"the function cannot be sent to workers: {type(cause).__name__}: {cause}",
            where=f"mh.launch.run({getattr(task, '__name__', 'function')})",
            fix="make what it names there (an open file, a lock, a generator) inside the function",
        ) from None


def _result(place: Path) -> Any:
    import torch

    path = place / RESULT
    return torch.load(path, weights_only=True, map_location="cpu") if path.exists() else None
