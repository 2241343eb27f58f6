"""Start a script, or a function of a notebook, on several workers: `mh.launch.run(train, workers=2)`.

A notebook shows lines and progress below the cell, and an error once, without our own stack.
"""

from __future__ import annotations

import hashlib
import linecache
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from manyhosts.config.arguments import answers
from manyhosts.control.display import Display, PlainDisplay
from manyhosts.errors import ConfigError, ManyhostsError
from manyhosts.launchers import launch
from manyhosts.listeners.terminal import live_line
from manyhosts.notebook.worker import FUNCTION, RESULT
from manyhosts.records.run_directory import claimed, drop_if_empty

_WIDTH = 100


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = sys.modules.get("IPython")
    return shell is not None and type(shell.get_ipython()).__name__ == "ZMQInteractiveShell"


class Interrupted(KeyboardInterrupt):
    """The cell was interrupted, and the workers have ended."""

    def _render_traceback_(self) -> list[str]:
        return ["KeyboardInterrupt: the workers have ended"]


class CellDisplay(PlainDisplay):
    """Lines below the cell, and one that moves. A worker's traceback is kept, and shown as the cell's error."""

    def __init__(self) -> None:
        super().__init__(sys.stdout, sys.stderr)
        self._moving: Any = None
        self._raised: dict[str, list[str]] = {}
        """By worker, the lines from the beginning of its traceback on."""

    def line(self, text: str, prefix: str, is_error: bool) -> None:
        """Print it, unless it belongs to a traceback."""
        for each in text.splitlines() or [""]:
            if is_error and each.startswith("Traceback (most recent call last)"):
                self._raised.setdefault(prefix, [])
            if is_error and prefix in self._raised:
                self._raised[prefix].append(each)
            else:
                super().line(each, prefix, is_error)

    def progress(self, fields: Mapping[str, Any]) -> None:
        """Show it in a line that is replaced."""
        from IPython.display import display

        shown = {"text/plain": live_line(dict(fields), _WIDTH)}
        if self._moving is None:
            self._moving = display(shown, raw=True, display_id=True)
        else:
            self._moving.update(shown, raw=True)

    def close(self) -> None:
        """Show tracebacks that led to no error, and remove the moving line."""
        if self._moving is not None:
            self._moving.update({"text/plain": ""}, raw=True)
            self._moving = None
        for prefix, lines in self._raised.items():
            super().line("\n".join(lines), prefix, True)
        self._raised.clear()

    def reported(self, error: ManyhostsError) -> ManyhostsError:
        """`error` as the cell is to show it: what the first worker has raised, once, and none of our frames."""
        lines = _own_frames(next(iter(self._raised.values()), []))
        self._raised.clear()
        head = f"{type(error).__name__}: "
        shown = [*lines, f"{head}{error.what.partition(' failed with ')[0]} failed"] if lines else [f"{head}{error}"]
        kind = type(type(error).__name__, (type(error),), {"_render_traceback_": lambda _: shown})
        error.__class__ = kind
        return error


def _own_frames(lines: list[str]) -> list[str]:
    """A traceback without the frames that lead to the user's function."""
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    ours = [number for number in frames if "manyhosts/notebook/worker.py" in lines[number]]
    if not ours:
        return lines
    following = [number for number in frames if number > ours[-1]]
    shown: list[str] = []
    for line in [lines[0], *lines[following[0] :]] if following else lines:
        if shown:
            shown += _source(shown[-1], line)
        shown.append(line)
    return shown


def _source(frame: str, following: str) -> list[str]:
    """The line that `frame` names, where the worker could not show it: the text of a cell is known here alone."""
    found = re.match(r'  File "(.*)", line (\d+)', frame)
    if found is None or following.startswith("    "):
        return []
    return [f"    {line}" for line in [linecache.getline(found[1], int(found[2])).strip()] if line]


_PROGRAM = '''"""Runs the function of a notebook's cell on each worker."""

import sys
from pathlib import Path

from manyhosts.notebook.worker import main

sys.path[:1] = [str(Path(__file__).resolve().parents[1] / folder) for folder in FOLDERS]
main(__file__, sys.argv[1])
'''
_INTERRUPTED = 130


_BY_OTHER_NAMES = {
    **dict.fromkeys(("nprocs", "num_processes", "nproc_per_node", "world_size"), "workers=2"),
    **dict.fromkeys(
        ("args", "kwargs"), "the second argument is a list of what the function is given: run(train, [0.1])"
    ),
}


@answers("mh.launch.run", _BY_OTHER_NAMES)
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
        hang_timeout_s: how long workers may get no further. 0: for ever. None: 600 s where they use a trainer.
        environment: variables of the workers.
        run_dir: where the record is kept; `runs/NAME-TIME` where it is not given.
        display: where lines appear.

    Returns:
        Of a function: what it returned on rank 0, which may be tensors, numbers, texts, and lists, tuples and dicts of
        them. Of a script: 0, or 130 if it was interrupted.

    Raises:
        ConfigError: there is no such script, the function cannot travel, a number makes no sense, or this process is a
            worker itself.
        KeyboardInterrupt: a function was interrupted; its workers have ended.
        ManyhostsError: workers failed; the error is that of the one that failed first.
    """
    if {"RANK", "TORCHELASTIC_RUN_ID"} <= os.environ.keys():
        raise ConfigError(
            "this is a worker of a run already, and each of its workers would start a run of its own",
            where="mh.launch.run",
            fix="start the program that calls it by itself, `python PROGRAM`; what runs on workers does not call "
            "it again",
        )
    if not callable(task) and not isinstance(task, str | os.PathLike):
        raise ConfigError(
            f"a {type(task).__name__} comes where a script's path or a function belongs",
            where="mh.launch.run",
            fix="give the function itself, and not what it returns: mh.launch.run(train, [0.1], workers=2)",
        )
    if isinstance(arguments, str | bytes | Mapping) or not isinstance(arguments, Sequence):
        raise ConfigError(
            f"arguments is {arguments!r:.80}, and not a list of what the script or function is given",
            where="mh.launch.run(…, arguments)",
            fix="give a list or a tuple, as in mh.launch.run(train, [0.1], workers=2); how many workers is workers=",
        )
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
    packed = _packed(task, arguments)
    place = Path(run_dir).absolute() if run_dir is not None else claimed(launch.new_run_dir(name))
    if display is None:
        display = CellDisplay() if in_notebook() else PlainDisplay(sys.stdout, sys.stderr)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=Path.cwd()))  # below it: hosts are brought what is there
    try:
        (folder / FUNCTION).write_bytes(packed)
        program = folder / f"{name}.py"
        program.write_text(_PROGRAM.replace("FOLDERS", repr(_own_folders())))
        digest = hashlib.sha256(packed).hexdigest()
        (place / RESULT).unlink(missing_ok=True)  # of a call before
        code = launch.run(program.relative_to(Path.cwd()), [digest], run_dir=place, display=display, **words)
    except ManyhostsError as error:
        raise (display.reported(error) if isinstance(display, CellDisplay) else error) from None
    finally:
        display.close()
        shutil.rmtree(folder, ignore_errors=True)
        if run_dir is None:
            drop_if_empty(place)
    if code == _INTERRUPTED:
        raise Interrupted
    return _result(place)


def _own_folders() -> list[str]:
    """Where modules are found here that Python has not installed; below the working directory as seen from there."""
    here, installed = Path.cwd(), (Path(sys.prefix), Path(sys.base_prefix))
    found = [path for each in sys.path if (path := Path(each).resolve()).is_dir()]
    own = [path for path in found if path == here or not any(path.is_relative_to(each) for each in installed)]
    return list(dict.fromkeys(str(path.relative_to(here) if path.is_relative_to(here) else path) for path in own))


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
