"""What a notebook shows of a run: lines and progress below the cell, an error once, and without our own stack."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Mapping
from typing import Any

from manyhosts.control.display import PlainDisplay
from manyhosts.errors import ManyhostsError
from manyhosts.listeners.terminal import live_line

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
