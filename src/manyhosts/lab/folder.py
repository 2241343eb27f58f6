"""What a lab keeps on disk while it lives: keys, names, how ssh reaches its hosts; and what dead ones have left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from manyhosts.errors import ConfigError
from manyhosts.lab.network import sixth

PLACE = Path("/run/manyhosts-lab")
"""Every lab has a folder in here; its owner holds a lock in it for as long as it lives."""

_SSH_CONFIG = """\
Host {names}
    User root
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking yes
    LogLevel ERROR
"""

_SSHD_CONFIG = """\
Port 22
HostKey {folder}/{name}.host_key
AuthorizedKeysFile /root/.ssh/authorized_keys
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PrintMotd no
StrictModes no
MaxStartups 100
AcceptEnv LANG LC_*
Subsystem sftp internal-sftp
"""


class Folder:
    """The folder of one lab. It is this process's own until `remove`, or until the process ends."""

    def __init__(self) -> None:
        try:
            PLACE.mkdir(mode=0o755, parents=True, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=PLACE))
        except OSError as cause:
            raise ConfigError(
                f"a lab cannot keep its files here: {cause.strerror}", where=str(PLACE), fix="start it as root"
            ) from cause
        self._lock = _locked(self.path)

    @property
    def name(self) -> str:
        """The name by which this lab is distinguished from others on this machine."""
        return self.path.name

    @property
    def control(self) -> Path:
        """The socket at which the lab's owner takes orders."""
        return self.path / "control"

    @property
    def public_key(self) -> str:
        """The key that opens every host of the lab."""
        return (self.path / "key.pub").read_text()

    def write(self, addresses: Mapping[str, str], desk: str) -> None:
        """Make keys for everybody in `addresses` (by name), and write down who is who. `desk` takes no visits."""
        _make_key(self.path / "key")
        known = []
        for name, address in addresses.items():
            if name == desk:
                continue
            key = self.path / f"{name}.host_key"
            _make_key(key)
            known.append(f"{name},{address},{sixth(address)} {key.with_suffix('.host_key.pub').read_text()}")
            config = _SSHD_CONFIG.format(folder=self.path, name=name)
            config += "".join(f'SetEnv {name}="{value}"\n' for name, value in python_path().items())
            (self.path / f"{name}.sshd_config").write_text(config)
        (self.path / "known_hosts").write_text("".join(known))
        lines = ["127.0.0.1 localhost", "::1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
        (self.path / "hosts").write_text("\n".join(lines) + "\n")
        (self.path / "resolv.conf").write_text("# A lab knows its own hosts only.\n")
        names = " ".join(
            [*(name for name in addresses if name != desk), *addresses.values(), *map(sixth, addresses.values())]
        )
        (self.path / "ssh_config").write_text(_SSH_CONFIG.format(names=names, folder=self.path))

    def remove(self) -> None:
        """Remove everything. Safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:  # closed once only: the number may belong to another file by now
            os.close(self._lock)
            self._lock = -1
        with contextlib.suppress(OSError):
            PLACE.rmdir()  # the last one turns off the light


def python_path() -> dict[str, str]:
    """Where this process looks for packages: hosts that are equal to this machine look there, too."""
    return {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}


def living() -> list[Path]:
    """The folders of the labs that there are on this machine, oldest first."""
    return sorted((path for path in _folders() if not _abandoned(path)), key=lambda path: path.stat().st_mtime)


def clean() -> list[Path]:
    """Remove what labs have left whose owner was killed. Their hosts ended with them. Returns the folders."""
    gone = [path for path in _folders() if _abandoned(path)]
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        PLACE.rmdir()
    return gone


def _folders() -> list[Path]:
    return [path for path in PLACE.glob("*") if path.is_dir()]


def _locked(path: Path) -> int:
    lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def _abandoned(path: Path) -> bool:
    """Whether no process has the lock. The kernel releases it when the owner ends, however that happens."""
    try:
        lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False  # being made, or being removed, at this moment
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def _make_key(path: Path) -> None:
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "manyhosts lab", "-f", str(path)]
    subprocess.run(words, check=True, capture_output=True)
