"""Which files a script reads: their names, noted as they are opened, for the record of what a run depends on.

Python reports each file that it opens (an audit hook); what a C library opens by itself (HDF5, LMDB) is not seen.
"""

from __future__ import annotations

import os
import sys

MOST = 1000
"""Names that are kept; further ones are counted."""
_CODE = (".py", ".pyc", ".so", ".pyi")
_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/")
_seen: dict[str, None] = {}
_state = {"listens": False, "left_out": 0}
_package = os.path.dirname(os.path.dirname(__file__))  # by hand: pathlib is a third of what `import manyhosts` takes
_own = tuple(os.path.join(folder, "") for folder in (os.path.dirname(os.__file__), _package))


def begin() -> None:
    """Listen from now on, in this process and in those that are forked from it."""
    if not _state["listens"]:
        _state["listens"] = True
        sys.addaudithook(_hear)


def forget() -> None:
    """What was opened so far counts no more: a script begins."""
    _seen.clear()
    _state["left_out"] = 0


def names() -> list[str]:
    """Those that are there: opened for reading, and neither Python's nor a package's."""
    return [name for name in list(_seen) if os.path.isfile(name)]


def left_out() -> int:
    """How many were opened beyond `MOST`."""
    return _state["left_out"]


def is_installed(path: str) -> bool:
    """Whether `path` is a file of Python, of an installed package, or of manyhosts."""
    return path.startswith(_own) or "/site-packages/" in path or "/dist-packages/" in path


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    if event != "open":
        return
    try:
        path, mode = arguments[0], arguments[1]
        if not isinstance(path, str | bytes | os.PathLike) or (isinstance(mode, str) and "r" not in mode):
            return
        if mode is None and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        name = os.path.abspath(os.fsdecode(path))
        if name in _seen or name.endswith(_CODE) or name.startswith(_SYSTEM) or is_installed(name):
            return
        if len(_seen) >= MOST:
            _state["left_out"] += 1
        else:
            _seen[name] = None
    except Exception:  # noqa: S110  # a file is opened all the same
        pass
