"""The doctor's eye and hand on one host: answers questions about it, and tries the ways to other hosts.

It runs with the standard library of Python 3.8 or newer alone, since it is also sent through ssh to hosts that have
nothing else; there it speaks over the standard streams, as a remote probe does. Where an engine starts it, as the
worker of a job, it opens one encrypted connection to the doctor, and both show that they know the examination's token:

    python -m manyhosts.doctor.host_probe

Questions and answers are JSON objects, one on each line. It ends with its input, and
removes what it made.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from manyhosts.control.agent import host_state
from manyhosts.doctor import channel, checksum, fabric, graphics, wires
from manyhosts.hosts import remote_probe
from manyhosts.records import installed

DOCTOR, TOKEN = "MANYHOSTS_DOCTOR", "MANYHOSTS_DOCTOR_TOKEN"  # names of variables, no secret
"""Where a host probe that an engine has started finds the doctor, and what it proves to know."""

_FIREWALLS = ("ufw", "firewall-cmd", "nft", "iptables")

_PROOF_S = 30.0
"""How long the doctor may take to prove itself."""
SCRATCH = "manyhosts-doctor-"
"""How the folder begins that a job of the doctor has for a run directory."""


class HostProbe:
    """Everything that can be asked of this host."""

    def __init__(self) -> None:
        self._listeners: list[wires.Listener] = []
        self._left_files: list[_LeftFile] = []
        self._exercise: _Exercise | None = None

    @property
    def deeds(self) -> dict[str, Callable[..., Any]]:
        """By what is asked: what gives the answer."""
        return {
            "look": _facts,
            "time": time.time,
            "way": remote_probe.way_to,
            "resolve": _resolve,
            "checksum": lambda paths: {path: checksum.of_path(path) for path in paths},
            "listen": self._listen,
            "try_connections": remote_probe.try_all_connections,
            "try out": wires.try_out,
            "leave file": self._leave_file,
            "see file": _see_file,
            "remove file": self._remove_file,
            "begin exercise": self._begin_exercise,
            "await exercise": self._await_exercise,
            "exercise": self._do_exercise,
            "loop": _loop,
        }

    def close(self) -> None:
        """Leave everything as it was."""
        for listener in self._listeners:
            listener.close()
        for left in self._left_files:
            left.remove()
        if self._exercise is not None:
            self._exercise.close()

    def _listen(self, address: str, token: str) -> int:
        self._listeners.append(wires.Listener(address, token))
        return self._listeners[-1].port

    def _leave_file(self, folder: str, name: str, text: str) -> str:
        left = _LeftFile(folder, name)
        self._left_files.append(left)
        return left.write(text)

    def _remove_file(self, with_folders: bool) -> None:
        for left in self._left_files:
            left.remove(with_folders=with_folders)

    def _begin_exercise(self, program: str, environment: dict[str, str]) -> None:
        self._exercise = _Exercise(program, environment)

    def _await_exercise(self, allowed_s: float) -> Any:
        """What the process says first: that it has loaded torch."""
        return {"trouble": "torch was not started"} if self._exercise is None else self._exercise.read_answer(allowed_s)

    def _do_exercise(self, allowed_s: float, **asked: Any) -> Any:
        if self._exercise is None:
            return {"trouble": "torch was not started"}
        self._exercise.ask(asked)
        return self._exercise.read_answer(allowed_s)


class _LeftFile:
    """A file in the run directory, by which hosts see whether they share it; with the folders it took."""

    def __init__(self, folder: str, name: str) -> None:
        self._folder, self._path = folder, os.path.join(folder, name)
        self._made: list[str] = []

    def write(self, text: str) -> str:
        """Returns why it cannot be written, or nothing."""
        missing, place = [], self._folder
        while not os.path.exists(place):
            missing.append(place)
            place = os.path.dirname(place)
        try:
            for folder in reversed(missing):
                with contextlib.suppress(FileExistsError):  # another host was faster
                    os.mkdir(folder)
                    self._made.append(folder)
            with open(self._path, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def remove(self, *, with_folders: bool = True) -> None:
        """Take it away, and the folders that were made for it. Safe to call twice."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        for folder in reversed(self._made if with_folders else []):
            with contextlib.suppress(OSError):  # somebody has put something in it meanwhile
                os.rmdir(folder)


class _Exercise:
    """The process that has torch."""

    def __init__(self, program: str, environment: dict[str, str]) -> None:
        kept = {name: value for name, value in os.environ.items() if name not in _OF_A_WORKER}
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**environment, **kept},  # what the user has set counts
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            universal_newlines=True,
        )
        self._said: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, asked: dict[str, Any]) -> None:
        """Say what to do."""
        assert self._process.stdin is not None, "it was asked for as a pipe"
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()

    def read_answer(self, limit_s: float) -> Any:
        """Its next answer, or a `trouble`."""
        try:
            line = self._said.get(timeout=limit_s)
        except queue.Empty:
            self._process.kill()
            return {"trouble": f"no answer within {limit_s:.0f} s"}
        return json.loads(line) if line else {"trouble": f"its process ended with code {self._process.wait()}"}

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None, "it was asked for as a pipe"
        with self._process.stdout as stream:
            for line in stream:
                self._said.put(line)
        self._said.put("")


_OF_A_WORKER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", TOKEN)


def hello() -> dict[str, Any]:
    """What a host probe says first: what is installed here, and which addresses this host has."""
    return {**remote_probe.facts(), "group_rank": os.environ.get("GROUP_RANK", "")}


def _facts(run_dir: str, script: str) -> dict[str, Any]:
    """Everything about this host that needs no other one."""
    mtu = {}
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError, ValueError), open(f"/sys/class/net/{name}/mtu") as file:
            mtu[name] = int(file.read())
    return {
        "condition": host_state.gather(run_dir, _environment()),
        "graphics": graphics.probe(),
        "fabric": fabric.probe(),
        "mtu": mtu,
        "machine": _machine(),
        "ports": _ports(),
        "firewall": next(filter(shutil.which, _FIREWALLS), ""),
        "script": checksum.of_path(script) if script else None,
        "packages": installed.packages(),
    }


def _ports() -> list[int]:
    """The first and the last port that the system gives to programs that choose none."""
    with contextlib.suppress(OSError, ValueError), open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        return [int(word) for word in file.read().split()]
    return []


def _environment() -> dict[str, str]:
    """What workers would find. Where an engine started this, that is what its parent has: ours has a rank already."""
    if DOCTOR not in os.environ:
        return dict(os.environ)
    with contextlib.suppress(OSError), open(f"/proc/{os.getppid()}/environ", "rb") as file:
        pairs = (entry.decode(errors="replace").partition("=") for entry in file.read().split(b"\0") if entry)
        return {name: value for name, _, value in pairs}
    return {name: value for name, value in os.environ.items() if name not in _OF_A_WORKER}


def _machine() -> str:
    """What is equal for hosts that are one machine in truth: containers, hosts of a lab."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return socket.gethostname()


def _resolve(names: list[str]) -> dict[str, str]:
    """The address of each name here; empty for none."""
    found = {}
    for name in names:
        found[name] = ""
        with contextlib.suppress(OSError):
            found[name] = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    return found


def _loop(seconds: float) -> dict[str, float]:
    """Rounds in a second of a small loop on one core: how fast this host is, where there is no torch to ask.

    Only CPU time counts; its share of the elapsed time is reported, too.
    """
    rounds, number = 0, 1
    begin, begin_own = time.perf_counter(), time.thread_time()
    while time.perf_counter() - begin < seconds:
        for _ in range(20000):
            number = number * 1103515245 + 12345 & 0x7FFFFFFF
        rounds += 1
    own = max(time.thread_time() - begin_own, 1e-9)
    return {"cpu": rounds / own, "share": min(1.0, own / (time.perf_counter() - begin))}


def _see_file(folder: str, name: str) -> str:
    with contextlib.suppress(OSError), open(os.path.join(folder, name)) as file:
        return file.read()
    return ""


def serve(coming: Iterable[str], going: TextIO | channel.Channel) -> None:
    """Say hello on `going`, then answer what comes until nothing does."""
    host_probe = HostProbe()
    remote_probe.serve(coming, going, hello(), host_probe.deeds, host_probe.close)


def main() -> None:
    """Answer over the standard streams, or over a connection to the doctor where the environment names one."""
    place = os.environ.get(DOCTOR)
    if not place:
        serve(sys.stdin, sys.stdout)
        return
    host, _, port = place.rpartition(":")
    folder = os.environ.get("MANYHOSTS_RUN_DIR", "")
    if os.path.basename(folder).startswith(SCRATCH):
        shutil.rmtree(folder, ignore_errors=True)  # the agent has made it for logs, which are not needed
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        speak(connection, os.environ.pop(TOKEN))


def speak(connection: socket.socket, token: str) -> None:
    """Answer the doctor at the other end, which proves that it knows the token, until it asks no more.

    Raises:
        OSError: it does not know it.
    """
    doctor = channel.call(connection, token, _PROOF_S)
    serve(doctor, doctor)


if __name__ == "__main__":
    main()
