"""A fork server that stays after its run, for the next one of the same person: found by what would have made it equal.

Its name is a hash of the Python, the packages, the variables and the limits that it was started with. So a run that
finds it would have started one just like it, and what may differ (the folder, the run, the terminal) is taken from the
next agent. Both sides ask the kernel for the other's user (`agent.standby`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from manyhosts import __version__

STAYS_S = 600.0
VARIABLE = "MANYHOSTS_WARM_S"
"""Says how many seconds a fork server stays, where that is not the usual time."""
IS_POSSIBLE = hasattr(os, "pidfd_open")
"""Linux alone has names of sockets without a file, and processes that can be waited for by anybody."""
_OF_A_TERMINAL = (
    *("PWD", "OLDPWD", "SHLVL", "_", "TERM", "COLORTERM", "COLUMNS", "LINES", "DISPLAY", "WINDOWID", "TMUX"),
    *(
        "TMUX_PANE",
        "STY",
        "GPG_TTY",
        "VTE_VERSION",
        "SSH_CLIENT",
        "SSH_CONNECTION",
        "SSH_TTY",
        "SSH_AUTH_SOCK",
        "XDG_SESSION_ID",
    ),
)
"""Variables in which the terminals of one evening differ, and that nothing reads when it is loaded."""
_OWN = "MANYHOSTS_"  # read where they are used, and the next agent's replace them
_STATUS = ("Umask", "Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed")
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


def name_for(node: int, environment: Mapping[str, str], preload: Sequence[str], folder: str) -> str:
    """What a fork server is known by that an agent of node `node` can use; empty where the system cannot do this."""
    if not IS_POSSIBLE:
        return ""
    kept = sorted(
        (name, value) for name, value in environment.items() if name not in _OF_A_TERMINAL and not name.startswith(_OWN)
    )
    paths = (environment.get("PYTHONPATH") or os.sep).split(os.pathsep)
    relative = not all(map(os.path.isabs, paths))  # to the folder that Python is started in
    python = [sys.executable, sys.prefix, sys.version, __version__, _packages()]
    facts = ["warm", node, kept, list(preload), folder if relative else "", python, _limits()]
    return "manyhosts-" + hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _packages() -> list[tuple[str, int]]:
    """When something was installed into, or removed from, each folder that Python looks into."""
    found = []
    for path in sys.path:
        with contextlib.suppress(OSError):
            found.append((path, os.stat(path).st_mtime_ns))
    return found


def _limits() -> list[str]:
    """What the kernel grants to this process and to whatever it starts."""
    own = Path("/proc/self")
    found = [own.joinpath(name).read_text() for name in ("limits", "cgroup", "oom_score_adj")]
    found += [os.readlink(own / "ns" / name) for name in _NAMESPACES if (own / "ns" / name).exists()]
    status = own.joinpath("status").read_text().splitlines()
    found += [line for line in status if line.startswith(_STATUS)]
    return [*found, os.readlink(own / "root"), str(os.getpriority(os.PRIO_PROCESS, 0))]


def changed_since(began: float) -> str:
    """The first file of a module loaded here that was changed or removed after `began`, by the clock; or empty."""
    files = {str(vars(module).get("__file__")) for module in list(sys.modules.values()) if hasattr(module, "__dict__")}
    for file in filter(os.path.isabs, files):  # what torch makes at run time has names such as `_ops.py`
        try:
            if os.stat(file).st_ctime >= began:  # set by the kernel, and cannot be set back
                return str(file)
        except OSError:
            return str(file)
    return ""
