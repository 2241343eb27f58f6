"""Commands in containers: what is put before a command so that a host runs it in one, and what goes wrong there.

Which runtime a host has, and whether it has the image, is found there by a few lines for its shell, so a host needs no
Python of its own. Network, process ids, shared memory, user and the paths of the working directory and of the run
directory are those of the host: agent and workers do in a container what they do without one.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhosts.errors import LaunchError

VARIABLE = "MANYHOSTS_IMAGE"
"""What runs in a container finds here the runtime, and the words by which its image is known there."""
NO_RUNTIME = 125
"""The exit code of a container that was never started."""
_SSH_FAILED, _NOT_EXECUTABLE, _NOT_FOUND = 255, 126, 127
SCRIPT = "start_in_container.sh"


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """How commands of one job start in a container."""

    image: str
    runtime: str = "any"
    folder: Path
    """The working directory; host and container have it at the same path."""
    run_dir: Path
    mounts: tuple[str, ...] = ()
    """Further ones, each as SOURCE:TARGET or SOURCE:TARGET:ro."""
    gpus: bool = True
    leaves_nothing: bool = False
    """Whether folders that a host lacks are left as they are, and commands begin in `/`."""

    @property
    def is_file(self) -> bool:
        """Whether the image is a path on every host."""
        return self.image.startswith("/")

    def command(self, words: Sequence[str], text: str = "") -> list[str]:
        """What starts `words` on a host, in a container. `text` is a placeholder until the script is filled in."""
        return ["sh", "-c", text or script(), *self._arguments(), *words]

    def looked_after(self, words: Sequence[str]) -> list[str]:
        """What starts `words` in the container itself, if their Python is there and has manyhosts."""
        return ["sh", "-c", _LOOK, self.image, *words]

    def srun_options(self) -> list[str]:
        """The options of srun where it starts the container itself, by Pyxis."""
        mounts = [*self._own_mounts(), *self.mounts]
        return [
            f"--container-image={self.image}",
            f"--container-mounts={','.join(mounts)}",
            f"--container-workdir={self.folder}",
            "--no-container-mount-home",  # its Python packages are not those of the image
        ]

    def _arguments(self) -> list[str]:
        return [
            "manyhosts-container",
            self.runtime,
            self.image,
            "look" if self.leaves_nothing else "make",
            ",".join(self._own_mounts()),
            ",".join(self.mounts),
            "gpus" if self.gpus else "no-gpus",
        ]

    def _own_mounts(self) -> list[str]:
        return [f"{path}:{path}" for path in dict.fromkeys((self.folder, self.run_dir))]


_LOOK = " ".join(
    (
        'image=$0; host=$(uname -n 2>/dev/null || echo "$HOSTNAME"); lacks=;',
        'command -v "$1" >/dev/null || lacks=Python;',
        '[ -n "$lacks" ] || "$1" -P -c "import manyhosts" 2>/dev/null || lacks="manyhosts for Python 3.11 or newer";',
        '[ -n "$lacks" ] || exec "$@";',
        r'printf "manyhosts: the image %s on host %s has no %s: %s does not find it\n  where: host %s\n  fix:   %s\n"',
        '"$image" "$host" "$lacks" "$1" "$host"',
        '"use an image with Python, torch and the same manyhosts, or name the right Python in it: -o python=PATH" >&2;',
        f"exit {NO_RUNTIME}",
    )
)
"""For sh in the container: see that a Python is there that finds manyhosts, then become it."""


def script() -> str:
    """The script for a host's shell, on one line: a csh takes no line break in a word."""
    text = importlib.resources.files(__package__).joinpath(SCRIPT).read_text()
    lines = (line.strip() for line in text.splitlines())
    return " ".join(line for line in lines if line and not line.startswith("#"))


def files() -> dict[str, str]:
    """The script for a reader of a plan: its name, where it goes, and its text."""
    return {f"{SCRIPT}, sent to every host": importlib.resources.files(__package__).joinpath(SCRIPT).read_text()}


def known_as(facts: Mapping[str, Any]) -> frozenset[str]:
    """The words by which the image is known on a host, from the facts of the host; the runtime is not one of them."""
    return frozenset(facts.get("image", "").split()[1:])


# What goes wrong, in sentences.


def lacks(container: Container, host: str, package: str, python: str, manyhosts: str) -> LaunchError:
    """The error where the image has no `package` that `python` finds."""
    return LaunchError(
        f"the image {container.image} on host {host} has no {package}: {python} does not find it",
        where=f"host {host}",
        fix=f"{rebuilt(container, 'manyhosts', manyhosts)}; or name the right Python in it with -o python=PATH",
    )


def rebuilt(container: Container, package: str, version: str) -> str:
    """How an image comes to have `version` of `package`."""
    if package == "python":
        return f"use one image on all hosts, with Python {version}"
    base = "BASE" if container.is_file else container.image
    copied = f"`COPY {installable(package, version)} .`, " if package == "manyhosts" else ""
    install = f"`RUN python3 -m pip install {installable(package, version)}`"
    return f"build an image that has it: `FROM {base}`{', ' if copied else ' and '}{copied}{install}"


def installable(package: str, version: str) -> str:
    """What pip is given for `version` of `package`: ours is the wheel that `pip wheel` makes of its source."""
    return (
        f"manyhosts-{version}-py3-none-any.whl" if package == "manyhosts" else f"{package}=={version.partition('+')[0]}"
    )


def to_have_the_same(image: str) -> str:
    """How all hosts come to have one image."""
    if image.startswith("/"):
        return "copy the file from one of them to the others, or keep it in a folder that all share"
    return "pull it again on each of them, or name it by its digest: NAME@sha256:…"


_TROUBLES = (
    (
        r"exec format error|architecture .* could not run",
        "the image {image} is built for processors of another kind than host {host} has",
        "build or pull it for the kind that `uname -m` says there",
    ),
    (
        r"could not select device driver|nvidia\.com/gpu|nvidia-container-cli",
        "containers on host {host} cannot have its GPUs: {last}",
        "install the NVIDIA Container Toolkit there, and for Podman its list of devices (`nvidia-ctk cdi generate`); or"
        " do without GPUs: -o container-gpus=no",
    ),
)


def trouble(container: Container, host: str, code: int, said: str, pythons: Sequence[str]) -> LaunchError | None:
    """What it means that a container on `host` has ended with `code` and these words; None where ssh itself failed."""
    if found := re.search(r"manyhosts: (.*)\n *where: (.*)\n *fix: *(.*)", said):
        return LaunchError(found[1].strip(), where=found[2].strip(), fix=found[3].strip())
    if code == _SSH_FAILED:
        return None
    last = next((line for line in reversed(said.splitlines()) if line), f"exit code {code}")
    words = {"image": container.image, "host": host, "last": last}
    for pattern, what, fix in _TROUBLES:
        if re.search(pattern, said, re.IGNORECASE):
            return LaunchError(what.format(**words), where=f"host {host}", fix=fix.format(**words))
    if code in (_NOT_EXECUTABLE, _NOT_FOUND):
        return LaunchError(
            f"there is no Python in the image {container.image} on host {host}: neither {' nor '.join(pythons)}",
            where=f"host {host}",
            fix="use an image with Python, torch and manyhosts, or name the Python in it with -o python=PATH",
        )
    return LaunchError(
        f"no container of the image {container.image} starts on host {host}: {last}",
        where=f"host {host}",
        fix="see what the same runtime says there when you start one by hand",
    )
