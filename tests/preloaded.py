"""Forks the fork servers of `manyhosts run` from one process that has torch, and what tests use beside it, loaded.

A fork server loads torch for the workers of its host, and each worker loads what its script needs: together some 5 s of
CPU time for a run of two workers that trains for half a second. Tests start such runs by the hundred. Here one process
per session loads all of it once. An agent's `Popen` of its fork server is answered with a fork of that process, which
takes the environment, the descriptors, the limits and the namespaces of the agent, and then is what it would have
started: `fork_server_process.main()`. Everything else about a run is as a user has it.

Where a fork could not be the same (torch is not to be loaded, another interpreter or user, other variables that are
read when Python or a library starts, a module of the test's own in place of one that is loaded) the agent starts Python
as ever. So do the tests that are about that start, or about whose children processes are: those marked `starts_cold`.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib
import json
import os
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import psutil
from ranks import PRELOADED

from manyhosts.control import variables

SITE = Path(__file__).parent / "preloaded_site" / "sitecustomize.py"
READ_AT_START = re.compile(
    "PYTHON(?!PATH$|UNBUFFERED$|DONTWRITEBYTECODE$)|LD_|MALLOC|OMP_(?!NUM_THREADS)|GOMP|KMP|MKL|OPENBLAS|ATEN"
    "|NUMPY|SKLEARN|TORCH_|PYTORCH|LC_|LANG|TZ$|CUDA"
)
"""Variables that Python or a library reads when it is loaded: they must be the same."""
UTF_8 = ("C", "C.UTF-8")
"""Values of LANG and LC_... that are the same to Python."""
NAMESPACES = ("ipc", "net", "pid", "uts", "mnt")  # the file system last: /proc is found in it


class Preloaded:
    """That process, as the tests see it."""

    def __init__(self) -> None:
        """Start it, and wait until it has loaded everything."""
        self.folder = Path(tempfile.mkdtemp(prefix="preloaded-"))
        self.folder.chmod(0o755)
        (self.folder / SITE.name).symlink_to(SITE)
        environment = {**os.environ, **variables.of_host(os.environ, cores=1, workers=1)}  # as an agent gives them
        environment.pop("PYTHONUNBUFFERED", None)
        code = f"import sys; sys.path[0] = {str(SITE.parents[1])!r}; import preloaded; preloaded.serve(sys.argv[1])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(self.folder)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n", "it did not begin"

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Have what is started meanwhile find it."""
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(self.folder), *([before] if before else [])])
        try:
            yield
        finally:
            os.environ.pop("PYTHONPATH")
            if before is not None:
                os.environ["PYTHONPATH"] = before

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(30)
        shutil.rmtree(self.folder)


def children(of: psutil.Process) -> list[psutil.Process]:
    """The processes that `of` has started, and the fork servers that were forked for it."""
    folder, forked = os.environ.get("PYTHONPATH", "").split(os.pathsep)[0], []
    with contextlib.suppress(OSError):
        for line in Path(folder, f"forked-for-{of.pid}").read_text().split():
            with contextlib.suppress(psutil.NoSuchProcess):
                forked.append(psutil.Process(int(line)))
    return [*of.children(), *forked]


def descendants(of: psutil.Process) -> list[psutil.Process]:
    """All that come from `of`: its children, theirs, and so on."""
    found, waiting = [], [of]
    while waiting:
        with contextlib.suppress(psutil.NoSuchProcess):
            below = children(waiting.pop(0))
            found += below
            waiting += below
    return found


# In the process itself.


def serve(folder: str) -> None:
    """Load everything, then fork until standard input ends."""
    before = dict(os.environ)
    for name in [*PRELOADED, "manyhosts.control.agent.fork_server_process"]:
        importlib.import_module(name)
    os.environ.clear()
    os.environ.update(before)  # scikit-learn sets some
    del sys.path[0]
    gc.freeze()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(f"{folder}/requests")
    os.chmod(f"{folder}/requests", 0o666)
    listening.listen(64)
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    os.write(1, b"ready\n")
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError, ValueError):
            _answer(connection, listening, folder)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _answer(connection: socket.socket, listening: socket.socket, folder: str) -> None:
    connection.settimeout(20)
    descriptors = array.array("i")
    _, messages, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(16 * descriptors.itemsize))
    for _, _, data in messages:
        descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    try:
        with connection.makefile("rb") as lines:
            request = json.loads(lines.readline())
        agent, user, _ = array.array("i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid() or not _can_be(request, agent):
            return
        process = os.fork()
        if process == 0:
            _become(request, agent, connection, listening, list(descriptors))
        with open(f"{folder}/forked-for-{agent}", "a") as file:
            file.write(f"{process}\n")
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _can_be(request: dict[str, Any], agent: int) -> bool:
    """Whether a fork of this process is as what the agent would start."""
    if (request["prefix"], request["package"]) != (sys.prefix, sys.modules["manyhosts"].__file__):
        return False
    if "torch" not in json.loads(request["words"][1]):  # a script that sets something before it loads torch, say
        return False
    if Path(f"/proc/{agent}/cgroup").read_text() != Path("/proc/self/cgroup").read_text():
        return False
    theirs, ours = (_read_at_start(each) for each in (request["environment"], os.environ))
    if _is_elsewhere(agent):  # a login on a host of a lab has none of what this machine sets by itself
        ours = {name: value for name, value in ours.items() if name in theirs}
    paths = [f"/proc/{agent}/root{path}" for path in _paths(request["environment"])]
    return theirs == ours and not any(_hides_a_module(path) for path in paths)


def _is_elsewhere(agent: int) -> bool:
    """Whether a process sees another disk than this one."""
    return os.readlink(f"/proc/{agent}/ns/mnt") != os.readlink("/proc/self/ns/mnt")


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if READ_AT_START.match(name) and value not in UTF_8}


def _paths(environment: Mapping[str, str]) -> list[str]:
    return [os.path.abspath(path) for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]


def _hides_a_module(path: str) -> bool:
    """Whether a folder has another module by the name of one that is loaded here."""
    loaded = {name.partition(".")[0] for name in sys.modules} - {"sitecustomize", "preloaded", "ranks", "manyhosts"}
    with contextlib.suppress(OSError):
        return any(name.partition(".")[0] in loaded for name in os.listdir(path))
    return False


def _become(
    request: dict[str, Any], agent: int, connection: socket.socket, listening: socket.socket, descriptors: list[int]
) -> NoReturn:
    """In the child: be what the agent would have started."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        listening.close()
        if _enter(agent) and (born := os.fork()):  # a process is in another process namespace from its birth on
            for each in descriptors:
                os.close(each)
            connection.close()
            os.waitpid(born, 0)  # a host ends when nothing of it is left: not everybody's first process buries that
            os._exit(0)
        os.setsid()
        connection.sendall(f"{os.getpid()}\n".encode())
        connection.close()
        for target, source in enumerate(descriptors[:3]):
            os.dup2(source, target)
            os.close(source)
        environment, own = request["environment"], len(_paths(os.environ))
        folders = [path for path in _paths(environment) if Path(path).exists()]
        os.chdir(request["folder"])
        os.umask(request["umask"])
        for kind, limit in request["limits"].items():
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(int(kind), limit)
        os.sched_setaffinity(0, request["cores"])
        os.setpriority(os.PRIO_PROCESS, 0, request["nice"])
        os.environ.clear()
        os.environ.update(environment)
        sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=bool(environment.get("PYTHONUNBUFFERED")))  # type: ignore[union-attr]
        sys.path[:] = list(dict.fromkeys([*folders, *sys.path[own:]]))
        sys.argv = ["-c", str(descriptors[3]), *request["words"][1:]]
        for name in ("preloaded", "ranks"):
            sys.modules.pop(name, None)
        from manyhosts.control.agent import fork_server_process

        fork_server_process.main()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(status)


def _enter(agent: int) -> bool:
    """Enter the namespaces of a process. Whether processes have other numbers there."""
    libc, pairs = ctypes.CDLL(None, use_errno=True), {}
    for name in NAMESPACES:
        theirs, ours = (f"/proc/{process}/ns/{name}" for process in (agent, "self"))
        if os.readlink(theirs) != os.readlink(ours):
            pairs[name] = os.open(theirs, os.O_RDONLY)
    for name, descriptor in pairs.items():
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter {name} of {agent}")
        os.close(descriptor)
    return "pid" in pairs
