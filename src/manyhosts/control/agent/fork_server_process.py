"""The process that workers are forked from: one per host, with torch loaded once for all of them.

It must never touch CUDA, run a torch operation or start a thread: whatever it has, every worker has. Its agent talks to
it over a socket, one JSON line per request, with the descriptors that a request needs sent along:

    worker    fork a worker; descriptors: its stdout, its stderr, its line to the agent, one for its stack
    store     fork the process that keeps the store; descriptor: the socket it listens on
    signal    send a signal to a worker, or to all that it has started
    warm      load what a worker has imported, as far as that may be done for all (`agent.import_preloader`)
    spare     leave processes alone that workers started: all workers have finished successfully

    rest      end every worker, and wait for the agent of another run (`agent.warm`)
    end       end, and with it every worker

and receives `ready`, once, then `started` and `ended` of each fork, and `warm` with what was loaded. When the agent is
gone, all that it has forked is killed; where the agent was killed itself, the next one may find it (`agent.standby`).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from manyhosts.control import titles
from manyhosts.control.agent import import_preloader, standby, warm, worker
from manyhosts.control.agent.processes import adopt_orphans, die_with_parent, kill_descendants, kill_group

_DESCRIPTORS = {"worker": 4, "store": 1, "signal": 0, "warm": 0, "spare": 0, "rest": 0, "end": 0}
_QUIET = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The agent alone decides when the fork server ends."""
_BURIAL_S = 5.0
"""How long processes that were killed may take to end: the kernel holds some of them."""
_REST_S = 1.0
"""The same at the end of a run. If the script left a process running, no other run waits for it."""


def main() -> None:
    """Load what `sys.argv` names, then fork on request until the agent is gone."""
    titles.set_title("manyhosts fork server of the workers")
    die_with_parent(signal.SIGKILL)
    adopt_orphans()
    agent, began = socket.socket(fileno=int(sys.argv[1])), time.time()
    _load(json.loads(sys.argv[2]))
    die_with_parent(0)  # from here on the end of the agent is noticed, and the workers' children are ended too
    scratch, name, launcher, stays_s = sys.argv[3:]
    waiting = None
    with contextlib.suppress(OSError):
        waiting = standby.Waiting(name, int(launcher)) if name else None
    fork_server = ForkServerProcess(agent, waiting)
    while True:
        try:
            fork_server.serve()
        finally:
            fork_server.end_all()
            if not (fork_server.dismissed or fork_server.rests):
                shutil.rmtree(scratch, ignore_errors=True)  # that of an agent that was killed
        may_stay = float(stays_s) > 0 or not fork_server.rests
        if fork_server.dismissed or waiting is None or not may_stay or not fork_server.bury_all():
            return
        if fork_server.rests:
            fork_server.detach()
        following = waiting.next_agent(float(stays_s) if fork_server.rests else 0.0)
        if following is None or (fork_server.rests and warm.changed_since(began)):
            return
        with contextlib.suppress(OSError, ValueError):
            modules, scratch = standby.take_over(following, waiting)
            _load(modules)
        fork_server.attach(following)


def _load(modules: list[str]) -> None:
    gc.disable()
    import_preloader.load(modules)
    gc.freeze()  # exempt from garbage collection, so that these pages stays shared with the workers


class ForkServerProcess:
    """Forks workers and reports to the agent how they ended."""

    def __init__(self, agent: socket.socket, waiting: standby.Waiting | None = None) -> None:
        """`waiting` is where another agent may connect."""
        self._agent, self._waiting = agent, waiting
        self.dismissed = False
        """Whether the agent has no use for it any more; else it was killed."""
        self.rests = False
        """Whether the agent's run is over, and that of another may come."""
        self._process = os.getpid()
        self._came = bytearray()
        self._descriptors: list[int] = []
        self._names: dict[int, str] = {}
        """Process id → the agent's name for it."""
        self._private: set[str] = set()
        """The variables in which workers differ."""
        self._trial: tuple[int, list[str]] | None = None
        """Where a child says how far it came with what may be loaded."""
        self._to_load: list[str] = []
        self._is_loading = False
        """Whether an import is in progress: workers that end are still reported, new ones wait for it to finish."""
        self._warm: list[str] = []
        """What was loaded for the workers to come."""
        self._spares = False
        """Whether processes that workers started keep running when this one ends."""
        self._wake, self._woken = os.pipe()
        for end in (self._wake, self._woken):
            os.set_blocking(end, False)

    def serve(self) -> None:
        """Answer the agent until it is gone."""
        signal.signal(signal.SIGCHLD, lambda *_: self._reap() if self._is_loading else None)
        for number in _QUIET:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        self._send("ready")
        while self._wait():
            pass

    def end_all(self) -> None:
        """End what is left: everything that comes from this process, or what it has forked itself."""
        if not self._spares:
            kill_descendants()
        for process in self._names:
            kill_group(process, signal.SIGKILL)

    def bury_all(self) -> bool:
        """See every process end that was killed. Whether none is left."""
        deadline = time.monotonic() + (_REST_S if self.rests else _BURIAL_S)
        while time.monotonic() < deadline:
            self._reap()
            try:
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return True
            time.sleep(0.005)
        return False

    def detach(self) -> None:
        """Hold nothing of the run that is over: its terminal, its folder, its agent."""
        titles.set_title("manyhosts fork server of the workers, kept for the next run")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # it has no workers, so it may end at once
        os.chdir("/")
        with contextlib.suppress(OSError):
            os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for target in (0, 1, 2):
            os.dup2(nothing, target)
        os.close(nothing)
        self._agent.close()

    def attach(self, agent: socket.socket) -> None:
        """Serve another agent."""
        self._agent.close()
        self.rests = False
        self._agent = agent
        self._came.clear()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        if self._trial:
            os.close(self._trial[0])
        self._trial, self._to_load, self._spares = None, [], False

    def _wait(self) -> bool:
        """Do what there is to do; False when the agent is gone."""
        trial = [self._trial[0]] if self._trial else []
        standby = [self._waiting.fileno()] if self._waiting else []
        listening = [self._agent.fileno(), self._wake, *trial, *standby]
        readable, _, _ = select.select(listening, [], [], 0 if self._to_load else None)
        if self._wake in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 512)
            self._reap()
        if self._trial and self._trial[0] in readable:
            self._end_trial(*self._trial)
        if not readable:
            self._load_next()
        is_there = self._agent.fileno() not in readable or self._listen()
        if self._waiting and self._waiting.fileno() in readable and is_there:
            self._waiting.refuse()
        return is_there and not self.dismissed and not self.rests

    def _listen(self) -> bool:
        try:
            chunk, descriptors, _, _ = socket.recv_fds(self._agent, 1 << 16, 64)
        except OSError:
            return False
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        self._descriptors += descriptors
        self._came += chunk
        *lines, rest = self._came.split(b"\n")
        self._came = bytearray(rest)
        for line in lines:
            request = json.loads(line)
            count = _DESCRIPTORS[request["do"]]
            mine, self._descriptors = self._descriptors[:count], self._descriptors[count:]
            self._obey(request, mine)
        return bool(chunk)

    def _obey(self, request: dict[str, Any], descriptors: list[int]) -> None:
        if request["do"] == "signal":
            for process, name in self._names.items():
                if name == request["name"] and request["group"]:
                    kill_group(process, request["signal"])
                elif name == request["name"]:
                    os.kill(process, request["signal"])
            return
        if request["do"] in ("spare", "rest", "end"):
            self._spares = self._spares or request["do"] == "spare"
            self.rests = self.rests or request["do"] == "rest"
            self.dismissed = self.dismissed or request["do"] == "end"
            return
        if request["do"] == "warm":
            self._try_out(request["modules"])
            return
        if request["do"] == "store":
            process = self._fork(lambda: keep_store(descriptors[0]))
        else:
            self._private |= request["environment"].keys()
            process = self._fork(lambda: worker.be(request, descriptors))
        for descriptor in descriptors:
            os.close(descriptor)
        self._names[process] = request["name"]
        self._send("started", name=request["name"], process=process)

    def _fork(self, act: Callable[[], int]) -> int:
        """Have a child do `act` and end with what that gives. Returns its process id."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _QUIET)  # until the child no longer ignores them
        process = os.fork()
        if process == 0:
            self._become(act)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _QUIET)
        return process

    def _become(self, act: Callable[[], int]) -> NoReturn:
        """In the child: forget the fork server and be what `act` is."""
        status = 70
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setsid()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _QUIET)
            die_with_parent(signal.SIGKILL)
            self._agent.close()
            if self._waiting:
                self._waiting.close()
            os.close(self._wake)
            os.close(self._woken)
            if os.getppid() == self._process:  # else the fork server ended before that could be noticed
                gc.enable()
                status = act()
        finally:
            os._exit(status)

    def _try_out(self, names: list[str]) -> None:
        """Have a child see which of `names` may be loaded."""
        if not names or self._trial:
            return
        reading, writing = os.pipe()

        def attempt() -> int:
            os.close(reading)
            import_preloader.try_out(names, self._private, writing)
            return 0

        self._fork(attempt)
        os.close(writing)
        self._trial = reading, names

    def _end_trial(self, reading: int, names: list[str]) -> None:
        """Load the modules that the child could load, and try those after the first that failed in another child."""
        assessment = import_preloader.assess(names, os.read(reading, 64))
        os.close(reading)
        self._trial = None
        self._to_load += assessment.good
        self._try_out(list(assessment.rest))
        if not self._to_load:
            self._end_warming()

    def _load_next(self) -> None:
        """Load one more module while there are no requests."""
        name = self._to_load.pop(0)
        with import_preloader.silence():
            self._is_loading = True
            import_preloader.load([name])
            self._is_loading = False
        self._warm.append(name)
        if not self._to_load:
            self._end_warming()

    def _end_warming(self) -> None:
        if not self._trial:
            gc.freeze()
            self._send("warm", modules=self._warm)

    def _reap(self) -> None:
        """Find who has ended. The group is ended first, while its number still belongs to it."""
        with contextlib.suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                ended_well = found.si_code == os.CLD_EXITED and found.si_status == 0
                if found.si_pid in self._names and not ended_well:
                    kill_group(found.si_pid, signal.SIGKILL)
                _, status, used = os.wait4(found.si_pid, 0)
                name = self._names.pop(found.si_pid, None)  # else an orphan that we have adopted
                code = os.waitstatus_to_exitcode(status)
                if name is not None:
                    peak = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
                    self._send("ended", name=name, code=max(code, 0), signal=max(-code, 0), peak_bytes=peak)

    def _send(self, event: str, **fields: Any) -> None:
        with contextlib.suppress(OSError):
            self._agent.sendall(json.dumps({"event": event, **fields}).encode() + b"\n")


def keep_store(listening: int) -> int:
    """Serve the store of the workers' rendezvous, on a socket that listens already, until this process is killed.

    torch is loaded when the first worker connects, if it is not there yet: a program that never asks costs nothing.
    """
    titles.set_title("manyhosts store")
    select.select([listening], [], [])
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch names it public all the same

    address, port = socket.socket(fileno=os.dup(listening)).getsockname()[:2]
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening)
    while store:
        signal.pause()
    return 0
