"""What can happen to a run on several hosts: one small function for each kind of fault, and what undoes it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from manyhosts.lab import Host, Lab

AWAY_S = 20.0
"""How long a host stays frozen or cut off: longer than the others take to notice."""
FULL_S = 2.0


@dataclass
class Scene:
    """A run under way, and the hosts that it is on."""

    hosts: Lab
    shared: Path
    """The disk that all hosts share, as seen from here."""
    run_dir: Path
    command: subprocess.Popen[str]
    draw: random.Random
    undo: list[Callable[[], None]] = field(default_factory=list)
    """What ends the fault, once the run has continued or given up."""

    def host(self) -> Host:
        """Any host."""
        return self.draw.choice(list(self.hosts))


def worker_killed(scene: Scene) -> None:
    """SIGKILL to one worker."""
    _kill([scene.draw.choice(workers(scene))])


def agent_killed(scene: Scene) -> None:
    """SIGKILL to the agent of one host: its workers go with it."""
    _kill(_running(scene.host(), "manyhosts agent of node"))


def launcher_killed(scene: Scene) -> None:
    """SIGKILL to the command that the user has typed."""
    scene.hosts.desk.end(scene.command)


def asked_to_stop(scene: Scene) -> None:
    """SIGTERM to one worker, as a scheduler sends it: all stop at one step and save; the command is typed again."""
    os.kill(scene.draw.choice(workers(scene)), signal.SIGTERM)


def host_frozen(scene: Scene) -> None:
    """Everything on one host stands still, and continues later."""
    host = scene.host()
    host.freeze()
    scene.undo.append(lambda: _later(host.thaw))


def cable_cut(scene: Scene) -> None:
    """One host's cable is pulled, and put back later."""
    host = scene.host()
    host.cut()
    scene.undo.append(lambda: _later(host.mend))


def disk_full(scene: Scene) -> None:
    """The disk is full while a snapshot is made, and has room again later."""
    ballast = scene.shared / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))

    def make_room() -> None:
        time.sleep(FULL_S)
        ballast.unlink()

    scene.undo.append(make_room)


def bit_flipped(scene: Scene) -> None:
    """A bit flips in the newest snapshot, and then everything is killed, so that somebody reads it."""
    newest = max(path for path in (scene.run_dir / "snapshots").iterdir() if path.name.count(".") == 0)
    path = scene.draw.choice(sorted(newest.glob("tensors-*")))
    place = scene.draw.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(place)
        old = file.read(1)[0]
        file.seek(place)
        file.write(bytes([old ^ (1 << scene.draw.randrange(8))]))
    power_lost(scene)


def power_lost(scene: Scene) -> None:
    """Every process of the run, on every host, is gone at once. What the hosts' kernels had taken is kept."""
    victims = [pid for host in scene.hosts for pid, words in host.processes().items() if _of_the_run(words)]
    launcher_killed(scene)
    _kill(victims)


KINDS: dict[str, Callable[[Scene], None]] = {
    "worker": worker_killed,
    "agent": agent_killed,
    "launcher": launcher_killed,
    "frozen": host_frozen,
    "cut": cable_cut,
    "sigterm": asked_to_stop,
    "disk-full": disk_full,
    "bit-flip": bit_flipped,
    "power": power_lost,
}
ENDS_THE_COMMAND = {"launcher", "sigterm", "bit-flip", "power"}
"""Kinds after which the user types the command again."""


def workers(scene: Scene) -> list[int]:
    """The processes that train, as counted here. Each has left its number, as counted on its host."""
    found = []
    for host in scene.hosts:
        for pid in host.processes():
            if (scene.shared / "pids" / f"{host.name}-{_inside(pid)}").exists():
                found.append(pid)
    return found


def _inside(pid: int) -> str:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return line.split()[-1]
    return ""


def _of_the_run(words: str) -> bool:
    """Whether a process of a host is one of Python's that the run has started; most of them have titles."""
    return "python" in words or words.startswith("manyhosts ")


def _running(host: Host, word: str) -> list[int]:
    return [pid for pid, words in host.processes().items() if word in words]


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _later(undo: Callable[[], None]) -> None:
    time.sleep(AWAY_S)
    undo()
