"""Has the launcher agents of a test take their fork server from `preloaded.py`, which has torch loaded already.

`preloaded.py` puts a folder with this file and its socket in front of PYTHONPATH: every Python of a test has it.
"""

import sys
from importlib.machinery import PathFinder

AWAITED = "manyhosts.control.agent.fork_server"


class Finder:
    """Stands before the finders that find modules, until the one module that starts fork servers is asked for."""

    @classmethod
    def find_spec(cls, name, path, target=None):
        if name != AWAITED:
            return None
        sys.meta_path.remove(cls)
        spec = PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            module.subprocess = subprocess_that_forks()

        spec.loader.exec_module = exec_module
        return spec


def subprocess_that_forks():
    """The module `subprocess`, with a `Popen` that asks `preloaded.py` first."""
    import subprocess
    import types

    def popen(words, **more):
        return asked_for(words, **more) or subprocess.Popen(words, **more)

    return types.SimpleNamespace(**{**vars(subprocess), "Popen": popen})


def asked_for(words, *, pass_fds, env, cwd, stdin, stdout, stderr):
    """The process that `preloaded.py` forks to be what `words` start; None where it cannot be that."""
    import array
    import json
    import os
    import resource
    import socket
    import subprocess

    assert (stdout, stderr) == (subprocess.DEVNULL, subprocess.PIPE)
    kinds = {number for name, number in vars(resource).items() if name.startswith("RLIMIT_")}
    umask = os.umask(0)
    os.umask(umask)
    request = {
        "words": list(words[3:]),
        "environment": dict(env),
        "folder": os.path.abspath(cwd),
        "prefix": sys.prefix,
        "package": sys.modules["manyhosts"].__file__,
        "limits": {kind: resource.getrlimit(kind) for kind in kinds},
        "umask": umask,
        "cores": sorted(os.sched_getaffinity(0)),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
    }
    nothing = os.open(os.devnull, os.O_RDWR)
    reading, writing = os.pipe()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(20)
    try:
        connection.connect(os.path.join(os.path.dirname(os.path.abspath(__file__)), "requests"))
        given = array.array("i", [0 if stdin is None else nothing, nothing, writing, *pass_fds])
        connection.sendmsg([b"!"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, given)])
        connection.sendall(json.dumps(request).encode() + b"\n")
        answer = connection.recv(64)
    except OSError:
        answer = b""
    finally:
        connection.close()
        os.close(writing)
        os.close(nothing)
    if not answer.strip():
        os.close(reading)
        return None
    return Forked(int(answer), os.fdopen(reading, "rb", buffering=0))


class Forked:
    """A process that another one has forked, as `subprocess.Popen` shows one that was started."""

    def __init__(self, pid, stderr):
        import os

        self.pid, self.stderr = pid, stderr
        try:
            self.process = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended already
            self.process = None

    def wait(self, timeout=None):
        """Wait for its end. Its exit code is known to nobody."""
        import select
        import subprocess

        if self.process is not None and not select.select([self.process], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("fork server", timeout or 0)
        return 0

    def send_signal(self, number):
        """Send it a signal, if it still runs."""
        import contextlib
        import signal

        with contextlib.suppress(ProcessLookupError):
            if self.process is not None:
                signal.pidfd_send_signal(self.process, number)


sys.meta_path.insert(0, Finder)
