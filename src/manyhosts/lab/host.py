"""One host of a lab, as the lab's owner sees it: run commands there, pull its cable, freeze it, switch it off."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhosts.errors import ConfigError
from manyhosts.lab.folder import python_path
from manyhosts.lab.network import Switch, inside

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NAMESPACES = ("--net", "--uts", "--ipc", "--pid", "--mount")
_FIRST_PROCESS = (sys.executable, "-P", "-m", "manyhosts.lab.machine")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSpec:
    """What a host is to be."""

    name: str
    address: str
    rate: str
    port: str
    """Where its cable ends at the switch."""
    folder: Path
    """The lab's own."""
    is_desk: bool = False
    """Whether it is where the user sits: with this machine's disk, and no ssh server."""
    empty: tuple[str, ...] = ()
    """Folders, without the leading slash, that it has empty in addition to the usual ones."""
    shown: tuple[str, ...] = ()
    """Folders that it sees as they are on this machine, also below one that is its own."""
    shared: Mapping[str, str] = field(default_factory=dict)
    """Its path → folder of this machine: a disk that hosts of the lab share, and the desk has not."""


class Host:
    """A machine with its own name, address, disk, processes and cable. On from the moment it is made."""

    def __init__(self, spec: HostSpec, switch: Switch) -> None:
        """Begin to start it; `wait_until_ready` ends that. Many can so start at once."""
        self.name, self.address = spec.name, spec.address
        self._wishes, self._switch = spec, switch
        self._frozen: list[int] = []
        self._entered: list[subprocess.Popen[str]] = []
        self._begin()

    def boot(self) -> None:
        """Switch it on again after `kill`, with an empty disk."""
        self._begin()
        self.wait_until_ready()

    def run(self, words: Sequence[str], *, timeout_s: float = 60, check: bool = True, **more: Any) -> Any:
        """Run a command there to its end. Returns what `subprocess.run` returns, with text.

        Raises:
            subprocess.CalledProcessError: it failed, and `check` is set.
            subprocess.TimeoutExpired: it took longer than `timeout_s` seconds.
        """
        process = self.start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            self.end(process)
            process.communicate()
            raise
        done = subprocess.CompletedProcess(list(words), process.returncode, out, err)
        if check and done.returncode:
            raise subprocess.CalledProcessError(done.returncode, list(words), out, err)
        return done

    def start(
        self, words: Sequence[str], *, folder: str = "/root", env: Mapping[str, str] | None = None, **more: Any
    ) -> subprocess.Popen[str]:
        """Start a command there, as after a login: `env` is added to a login's variables. `more` is for Popen."""
        more.setdefault("stdin", subprocess.DEVNULL)
        self._entered = [each for each in self._entered if each.poll() is None]
        self._entered.append(subprocess.Popen(self.command(words, folder=folder, env=env), text=True, **more))
        return self._entered[-1]

    def command(
        self, words: Sequence[str], *, folder: str = "/root", env: Mapping[str, str] | None = None
    ) -> list[str]:
        """What this machine's root would type to run `words` there."""
        variables = {**self._login(), **(env or {})}
        enter = ["nsenter", "--target", str(self.process), *_NAMESPACES, "--"]
        return [*enter, "env", "-i", "-C", folder, *(f"{name}={value}" for name, value in variables.items()), *words]

    def end(self, started: subprocess.Popen[str], number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to what `start` started: to the command itself, which is a child of what entered the host."""
        children = Path(f"/proc/{started.pid}/task/{started.pid}/children")
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                os.kill(int(child), number)

    def processes(self) -> dict[int, str]:
        """Everything that runs there, by process id as counted here, but for the host's own first process."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                here = os.readlink(entry / "ns" / "pid") == self._namespace and int(entry.name) != self.process
                if here and "\nState:\tZ" not in (entry / "status").read_text():
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ").strip()
        return found

    def ports(self) -> set[int]:
        """TCP ports that somebody listens on there."""
        return {
            int(words[1].rpartition(":")[2], 16)
            for table in ("tcp", "tcp6")
            for words in map(str.split, Path(f"/proc/{self.process}/net/{table}").read_text().splitlines()[1:])
            if words[3] == "0A"
        }

    def path(self, path: str | Path) -> Path:
        """Where a path of that host is seen from here."""
        return Path(f"/proc/{self.process}/root{path}")

    # What happens to real hosts.

    def cut(self) -> None:
        """Pull its cable."""
        self._switch.cut(self._wishes.port)

    def mend(self) -> None:
        """Put its cable back."""
        self._switch.mend(self._wishes.port)

    def slow(self, rate: str) -> None:
        """Make its cable as fast as `rate` says: `100mbit`."""
        self._switch.shape(self._wishes.port, self.process, rate)

    def freeze(self) -> None:
        """Stop everything that runs there. Its kernel still answers, as that of a host without memory does."""
        while fresh := self.processes().keys() - set(self._frozen):
            for process in fresh:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGSTOP)
            self._frozen += fresh

    def thaw(self) -> None:
        """Let it continue."""
        for process in self._frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
        self._frozen = []
        for entered in self._entered:
            entered.send_signal(signal.SIGCONT)  # what leads into a host stops itself when its child is stopped

    def block(self, other: Host) -> None:
        """Let no packet through between this host and `other`, as a firewall that drops them does."""
        for one, two in ((self, other), (other, self)):
            # A neighbour that does not exist swallows everything, and needs no firewall in the kernel.
            inside(
                one.process, ["ip", "-batch", "-"], [f"neigh replace {two.address} lladdr 02:00:00:00:00:00 dev eth0"]
            )

    def unblock(self, other: Host) -> None:
        """Take `block` back."""
        for one, two in ((self, other), (other, self)):
            inside(one.process, ["ip", "-batch", "-"], [f"neigh del {two.address} dev eth0"])

    def kill(self) -> None:
        """Cut its power: no process says goodbye, and its disk is empty when it comes back. Safe to call twice."""
        if self._machine.poll() is not None:
            return
        with contextlib.suppress(ConfigError):
            self._switch.cut(self._wishes.port)  # first, or its kernel would still inform the others
        try:
            self._machine.communicate(timeout=10)  # its first process ends with its input, and takes all others along
        except subprocess.TimeoutExpired:
            self._machine.kill()
            self._machine.communicate()
        self.thaw()
        with contextlib.suppress(ConfigError):
            self._switch.unplug(self._wishes.port)

    # How it starts.

    def _begin(self) -> None:
        spec = self._wishes
        description = {
            "name": spec.name,
            "folder": str(spec.folder),
            "is_desk": spec.is_desk,
            "empty": list(spec.empty),
            "shown": list(spec.shown),
            "shared": dict(spec.shared),
        }
        self._machine = subprocess.Popen(
            ["unshare", *_NAMESPACES, "--fork", "--kill-child", *_FIRST_PROCESS, json.dumps(description)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # Ctrl-C is for what runs in the lab, not for the lab
        )
        assert self._machine.stdin is not None, "it was asked for as a pipe"
        self.process = int(self._read_line() or 0)
        if self.process:
            self._namespace = os.readlink(f"/proc/{self.process}/ns/pid")
            self._switch.plug_in(spec.port, self.process, spec.address, spec.rate)
            self._machine.stdin.write("go\n")
            self._machine.stdin.flush()

    def wait_until_ready(self) -> None:
        """Wait until its ssh server listens.

        Raises:
            ConfigError: it did not come up.
        """
        if not self.process or self._read_line() != "ready":
            raise ConfigError(
                "a host of the lab did not start",
                where=self.name,
                fix="what was printed above says what it missed; a lab needs root and the overlay file system",
            )

    def _read_line(self) -> str:
        assert self._machine.stdout is not None, "it was asked for as a pipe"
        return self._machine.stdout.readline().strip()

    def _login(self) -> dict[str, str]:
        if self._wishes.is_desk:
            return dict(os.environ)
        login = {"HOME": "/root", "USER": "root", "LOGNAME": "root", "SHELL": "/bin/bash", "LANG": "C.UTF-8"}
        return {**login, "PATH": _SYSTEM_PATH, **python_path()}
