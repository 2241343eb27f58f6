"""Forks the commands and agents that tests start from one process that has loaded what they load.

`python -P -m manyhosts.cli.main run` takes a third of a second of CPU time to load what it needs, and each agent as
much again. Tests start them by the hundred. Here `subprocess.Popen` of these two modules is answered with a fork of a
process that has loaded all that, but neither module itself: `runpy` runs them as `-m` does. What is forked is a child
of whoever called `Popen`, so that waiting, signals, exit codes and pipes are those of the system. A command has a
forker of its own, forked before it began, from which its agents come in the same way.

What a fork cannot be the same as is started as ever: another interpreter or cgroup, other variables that Python reads
when it starts, something of the caller's to be called first. So are tests marked `starts_cold`.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import importlib
import json
import os
import platform
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

LOADED = [
    "manyhosts.cli.run",
    "manyhosts.launchers.detached",
    "manyhosts.launchers.scripts",
    "manyhosts.launchers.launch",
    "manyhosts.launchers.local",
    "manyhosts.control.head.run",
    "manyhosts.control.session",
    "manyhosts.listeners.terminal",
    "manyhosts.records.run_record",
    "manyhosts.control.agent.connectivity",
    "manyhosts.control.agent.log",
    "manyhosts.control.agent.warm",
    "manyhosts.control.agent.workers",
    "argparse",
    "csv",
    "faulthandler",
    "tomllib",
]
COMMAND, AGENT = "manyhosts.cli.main", "manyhosts.control.agent.agent"
FORKED = [COMMAND, AGENT]
ROOM = 16_000
"""Bytes for the words of a command, which are written over those of the forker; what has more is started as ever."""
CLONES = {"x86_64": 56, "aarch64": 220}
"""The number of the system call `clone`."""
CLONE_PARENT, SET_TID, CLEAR_TID = 0x8000, 0x01000000, 0x00200000
GET_TID_ADDRESS, SET_MM, ARG_END = 40, 35, 9  # of prctl
FIRST_OWN = 200
"""Descriptors of the forker's own stand here and above, where no program that is forked looks for any."""
OWN_ANSWER = b"-"
started_truly = subprocess.Popen._execute_child  # type: ignore[attr-defined]  # as Python has it


class Forker:
    """That process, as the tests see it."""

    def __init__(self, python_path: str) -> None:
        """Start it with the PYTHONPATH that commands will have, and wait until it has loaded everything."""
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        tests = str(Path(__file__).parent)
        code = f"import sys; sys.path.insert(0, {tests!r}); import forker; del sys.path[0]; forker.main()"
        environment = {**os.environ, "PYTHONPATH": python_path}
        environment.pop("PYTHONUNBUFFERED", None)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, str(theirs.fileno()), " " * ROOM],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            process_group=0,
        )
        theirs.close()
        assert self.line.recv(64) == b"ready", "it did not begin"

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Have commands that are started meanwhile come from it."""
        before = subprocess.Popen._execute_child  # type: ignore[attr-defined]
        _have_started_from(self.line)
        try:
            yield
        finally:
            subprocess.Popen._execute_child = before  # type: ignore[attr-defined]

    def close(self) -> None:
        """End it."""
        self.line.close()
        self.process.wait(30)


def can_be() -> bool:
    """Whether this system lets a process fork a child for its own parent."""
    return sys.platform == "linux" and platform.machine() in CLONES and platform.libc_ver()[0] == "glibc"


# In whoever starts a command: the tests, and commands that were forked themselves.


def _have_started_from(line: socket.socket) -> None:
    own, lock = os.getpid(), threading.Lock()

    def execute_child(process: Any, args: Any, executable: Any, *more: Any) -> None:
        request = _request(args, executable, *more) if os.getpid() == own else None
        if request is not None:
            given = [number if number >= 0 else place for place, number in enumerate(more[i] for i in (8, 11, 13))]
            descriptors = [*given, *request["targets"][3:]]
            with lock:
                pid = _forked(line, request, descriptors)
            if pid is not None:
                process.pid, process._child_created = pid, True
                process._close_pipe_fds(*more[8:14])
                return
        started_truly(process, args, executable, *more)

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]


def _forked(line: socket.socket, request: dict[str, Any], descriptors: Sequence[int]) -> int | None:
    """The process id of what was forked; None where it could not be."""
    with contextlib.suppress(OSError):
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        line.sendmsg([json.dumps(request).encode()], [rights])
        answer = line.recv(64)
        return None if answer in (b"", OWN_ANSWER) else int(answer)
    return None


def _request(
    args: Any,
    executable: Any,
    preexec_fn: Any,
    close_fds: bool,
    pass_fds: Sequence[int],
    cwd: Any,
    env: Mapping[str, str] | None,
    startupinfo: Any,
    creationflags: Any,
    shell: bool,
    *more: Any,
) -> dict[str, Any] | None:
    """What the forker must know, where it can be the one to start this."""
    restore_signals, gid, gids, uid, umask, new_session, process_group = more[6:]
    words = [] if isinstance(args, (str, bytes, os.PathLike)) else list(args)
    if words[:3] != [sys.executable, "-P", "-m"] or len(words) < 4 or words[3] not in FORKED:
        return None
    if executable or preexec_fn or not close_fds or shell or not restore_signals:
        return None
    if any(each is not None for each in (gid, gids, uid)) or umask != -1 or len(pass_fds) > 16:
        return None
    try:
        here = os.path.abspath(os.fspath(cwd) if cwd is not None else os.getcwd())
        cgroup = Path("/proc/self/cgroup").read_text()
    except OSError:
        return None
    if not os.path.isdir(here) or not all(isinstance(each, str) for each in words):
        return None
    ignored = [n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN]
    kinds = {number for name, number in vars(resource).items() if name.startswith("RLIMIT_")}
    return {
        "words": words,
        "environment": dict(os.environ if env is None else env),
        "folder": here,
        "cgroup": cgroup,
        "targets": [0, 1, 2, *pass_fds],
        "ignored": [int(n) for n in ignored if n not in (signal.SIGPIPE, signal.SIGXFSZ)],  # as Popen restores them
        "blocked": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "limits": {kind: resource.getrlimit(kind) for kind in kinds},
        "umask": _umask(),
        "cores": sorted(os.sched_getaffinity(0)),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "group": 0 if process_group == 0 else (os.getpgid(0) if process_group < 0 else process_group),
        "session": bool(new_session),
    }


def _umask() -> int:
    return int(next(line for line in Path("/proc/self/status").read_text().splitlines() if line[:6] == "Umask:")[6:], 8)


# In the forker itself.


def main() -> None:
    """Load everything and fork until the line ends; in what was forked: be what was asked for."""
    line = socket.socket(fileno=_moved_up(int(sys.argv[1])))
    for name in LOADED:
        importlib.import_module(name)
    assert not {COMMAND, AGENT, "torch"} & sys.modules.keys()
    assert len(os.listdir("/proc/self/task")) == 1, "what forks must have one thread"
    line.send(b"ready")
    module = _serve(line)
    if module is not None:
        names = vars(sys.modules["__main__"])
        for name in [each for each in names if not each.startswith("__")]:
            del names[name]
        runpy._run_module_as_main(module)  # type: ignore[attr-defined]  # what `python -m` calls


def _serve(line: socket.socket) -> str | None:
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(line, 1 << 20, 32)
        except OSError:
            return None
        if not message:
            return None
        request = json.loads(message)
        extra = _extra_paths(request, paths)
        pid = None
        with contextlib.suppress(OSError):  # a sandbox that knows no such fork: Python is started as ever
            pid = None if extra is None else _fork_for_parent()
        if pid == 0:
            return _become(request, extra or [], line, descriptors)
        for each in descriptors:
            os.close(each)
        line.send(OWN_ANSWER if pid is None else str(pid).encode())


def _extra_paths(request: dict[str, Any], paths: Sequence[str]) -> list[str] | None:
    """The folders that stand before those of this process; None where a fork could not be what is asked for."""
    theirs = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
    extra = theirs[: -len(paths)]
    same = (
        theirs[-len(paths) :] == list(paths)
        and _read_at_start(request["environment"]) == _read_at_start(os.environ)
        and request["cgroup"] == Path("/proc/self/cgroup").read_text()
        and sum(len(os.fsencode(word)) + 1 for word in request["words"]) < ROOM
        and all(os.path.isabs(path) and not _hides_a_module(path) for path in extra)
    )
    return extra if same else None


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    taken_over = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")
    read = ("PYTHON", "LD_", "MALLOC", "LC_", "LANG", "TZ", "OPENSSL")
    return {name: value for name, value in environment.items() if name.startswith(read) and name not in taken_over}


def _hides_a_module(path: str) -> bool:
    """Whether a folder has another module by the name of one that is loaded here."""
    loaded = {name.partition(".")[0] for name in sys.modules} - {"forker"}
    with contextlib.suppress(OSError):
        return any(name.partition(".")[0] in loaded for name in os.listdir(path))
    return False


def _fork_for_parent() -> int:
    """As `os.fork`, but the child is one of this process's parent."""
    libc, python = ctypes.PyDLL(None, use_errno=True), ctypes.pythonapi
    tid = ctypes.c_void_p()
    libc.prctl(GET_TID_ADDRESS, ctypes.byref(tid), 0, 0, 0)
    flags = CLONE_PARENT | signal.SIGCHLD | (SET_TID | CLEAR_TID if tid.value else 0)
    child, nothing = ctypes.c_void_p(tid.value), ctypes.c_void_p(0)
    last = (child, nothing) if platform.machine() == "x86_64" else (nothing, child)
    call = ctypes.c_long(CLONES[platform.machine()])
    libc.syscall.restype = ctypes.c_long
    python.PyOS_BeforeFork()
    pid: int = libc.syscall(call, ctypes.c_long(flags), nothing, nothing, *last)
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return pid


def _become(request: dict[str, Any], extra: Sequence[str], line: socket.socket, descriptors: list[int]) -> str | None:
    """In the child: be what was asked for. The module to run, unless this is the forker for what that one starts."""
    try:
        _join_group(request)
        above = max([FIRST_OWN, *request["targets"]]) + 1
        given = [_moved_up(each, above) for each in descriptors]
        line.close()
        words = request["words"]
        if words[3] == COMMAND:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if os.fork() == 0:
                ours.close()
                for each in given:
                    os.close(each)
                os.setpgid(0, 0)  # Ctrl-C is for the command
                return _serve(theirs)
            theirs.close()
            kept = socket.socket(fileno=_moved_up(ours.detach(), above))
            _have_started_from(kept)
        for target, source in zip(request["targets"], given, strict=True):
            os.dup2(source, target)
            os.close(source)
        _show(words)
        _take_over(request, extra)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    module: str = words[3]
    return module


def _join_group(request: dict[str, Any]) -> None:
    if request["session"]:
        os.setsid()
    else:
        os.setpgid(0, request["group"])


def _take_over(request: dict[str, Any], extra: Sequence[str]) -> None:
    environment, words = request["environment"], request["words"]
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cores"])
    os.setpriority(os.PRIO_PROCESS, 0, request["nice"])
    os.environ.clear()
    os.environ.update(environment)
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    for stream in (sys.stdout, sys.stderr):
        unbuffered = bool(environment.get("PYTHONUNBUFFERED"))
        lines = not unbuffered and (stream is sys.stderr or stream.isatty())
        stream.reconfigure(line_buffering=lines, write_through=unbuffered)  # type: ignore[union-attr]
    sys.path[:0] = extra
    sys.argv, sys.orig_argv = ["-m", *words[4:]], list(words)
    for name in ("forker",):
        sys.modules.pop(name, None)
    for kind, limit in request["limits"].items():
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(int(kind), limit)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        if number in request["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        elif signal.getsignal(number) == signal.SIG_IGN:  # the tests were started in the background of a shell, say
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])


def _show(words: Sequence[str]) -> None:
    """Write the words over the command line of this process, where `ps` reads it."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, behind = int(after_name[45]), int(after_name[46])
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    ctypes.memmove(first, text + b"\0" * (behind - first - len(text)), behind - first)
    ctypes.CDLL(None).prctl(SET_MM, ARG_END, ctypes.c_void_p(first + len(text)), 0, 0)  # where we are root


def _moved_up(descriptor: int, above: int = FIRST_OWN) -> int:
    import fcntl

    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above)
    os.close(descriptor)
    return moved
