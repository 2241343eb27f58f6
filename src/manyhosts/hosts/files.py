"""Which files of the working directory go to hosts: code and data, no caches, no secrets, nothing that git ignores."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from manyhosts.errors import ConfigError, LaunchError
from manyhosts.hosts import data_receiver, disks
from manyhosts.units import bytes_in_words

IGNORE_FILE = ".manyhostsignore"
MUCH_BYTES = 200_000_000
"""From here on it is said that little of it may be needed."""
_CACHES = (
    *(disks.MARKS, data_receiver.FOLDER, ".git", "runs", ".venv", "venv", "__pycache__", "*.pyc"),
    *(".mypy_cache", ".ruff_cache", ".pytest_cache"),
)
_SECRETS = (".env", ".env.*", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.pem", "*.key")
_MOST_BYTES = 2 << 30
_DECIDING = (".py", ".so", ".json", ".toml", ".yaml", ".yml", ".ini", ".cfg", ".sh")
"""Code and settings. What else changes in a working directory is what programs write there while they run."""
_NAMED = 5
_IGNORED, _NOT_IGNORED = 0, 1
"""What `git check-ignore` ends with; 128 outside a checkout."""
_OTHERS = ("ls-files", "-z", "--others", "--ignored", "--directory")


@dataclass(frozen=True, slots=True)
class Files:
    """What is brought to hosts, and how it was when the first ones got it."""

    folder: Path
    sizes: Mapping[str, int]
    """Path below `folder` → bytes, sorted."""
    stamps: Mapping[str, tuple[int, int]]
    """Of those that say what a worker does: path → size, time of the last change in ns."""
    left_out: Sequence[str] = field(default=())
    """What stays although the user may expect it there: secrets, and what git ignores."""

    @classmethod
    def to_bring(
        cls, folder: Path, *, leave_out: Sequence[Path] = (), needed: str = "", most: float = _MOST_BYTES
    ) -> Files:
        """What every host needs of `folder`. `leave_out` are paths that it does not; `needed` is one that it does.

        Raises:
            ConfigError: it is more than `most`, 2 GiB.
        """
        choice = _Choice.of(folder, frozenset(leave_out), needed)
        sizes: dict[str, int] = {}
        stamps: dict[str, tuple[int, int]] = {}
        total = 0
        for path in choice.walk():
            with contextlib.suppress(FileNotFoundError):  # it was removed while this was listed
                state = (folder / path).lstat()
                sizes[path] = state.st_size
                total += state.st_size
                if path.endswith(_DECIDING):
                    stamps[path] = (state.st_size, state.st_mtime_ns)
            if total > most:
                raise ConfigError(
                    "the working directory has more than 2 GiB to be brought to every host",
                    where=str(folder),
                    fix=f"name what is not needed there in {IGNORE_FILE}, or use --no-sync where the hosts share a"
                    " disk",
                )
        return cls(folder, dict(sorted(sizes.items())), stamps, sorted(choice.left_out))

    @property
    def paths(self) -> list[str]:
        """Below `folder`, sorted."""
        return list(self.sizes)

    @property
    def size(self) -> int:
        """Bytes of all."""
        return sum(self.sizes.values())

    def notes(self) -> list[str]:
        """What the user should know before they are brought, each a sentence."""
        found = []
        if self.left_out:
            names = ", ".join(self.left_out[:_NAMED]) + (", …" if len(self.left_out) > _NAMED else "")
            found.append(
                f"not brought to hosts, as git ignores it or it looks like a secret: {names};"
                f" a line !NAME in {IGNORE_FILE} brings it"
            )
        if self.size > MUCH_BYTES:
            largest = sorted(self.sizes, key=lambda path: -self.sizes[path])[:3]
            named = ", ".join(f"{path} ({bytes_in_words(self.sizes[path])})" for path in largest)
            found.append(
                f"{bytes_in_words(self.size)} are to be brought to hosts; the largest are {named};"
                f" name what is not needed there in {IGNORE_FILE}"
            )
        return found

    def see_that_none_has_changed(self) -> None:
        """See that a host that gets them now gets what the others have.

        Raises:
            LaunchError: one is another now.
        """
        for path, before in self.stamps.items():
            with contextlib.suppress(FileNotFoundError):
                state = (self.folder / path).lstat()
                if (state.st_size, state.st_mtime_ns) == before:
                    continue
            raise LaunchError(
                f"{path} is not what it was when the run began, so a host that comes now would run something else",
                where=str(self.folder / path),
                fix="put it back, or start the run again: it continues from its newest snapshot",
            )


@dataclass(slots=True)
class _Choice:
    """What of a folder is chosen."""

    folder: Path
    leave_out: frozenset[Path]
    unneeded: re.Pattern[str]
    """What stays."""
    wanted: Sequence[str]
    """What is brought although something else says that it stays."""
    ignored: frozenset[str]
    """What git ignores."""
    left_out: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, folder: Path, leave_out: frozenset[Path], needed: str) -> _Choice:
        own = folder / IGNORE_FILE
        lines = own.read_text().splitlines() if own.exists() else []
        lines = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        patterns = [line.strip("/") for line in lines if not line.startswith("!")]
        wanted = [line[1:].strip("/") for line in lines if line.startswith("!")]
        inside = os.path.relpath(folder / needed, folder) if needed else ""
        if inside and not inside.startswith(".."):
            wanted.append(inside)
        return cls(folder, leave_out, _one_of([*_CACHES, *patterns]), wanted, ignored_by_git(folder))

    def walk(self) -> Iterator[str]:
        """Paths below the folder that every host needs. What is linked to is not followed."""
        for place, folders, names in os.walk(self.folder):
            here = os.path.relpath(place, self.folder)
            folders[:] = [name for name in folders if self._may_hold(os.path.normpath(os.path.join(here, name)))]
            links = [name for name in folders if Path(place, name).is_symlink()]
            for name in [*names, *links]:
                path = os.path.normpath(os.path.join(here, name))
                if self.folder / path not in self.leave_out and not self._stays(path):
                    yield path

    def _may_hold(self, path: str) -> bool:
        """Whether something in the folder `path` may be needed."""
        if self.folder / path in self.leave_out:
            return False
        begun = any(pattern.startswith(path + "/") for pattern in self.wanted)
        return begun or not self._stays(path)

    def _stays(self, path: str) -> bool:
        parts = _with_parents(path)
        if self.wanted and any(_fits(part, _one_of(self.wanted)) for part in parts):
            return False
        if any(_fits(part, self.unneeded) for part in parts):
            return True
        stays = _fits(path, _one_of(_SECRETS)) or any(part in self.ignored for part in parts)
        if stays:
            self.left_out.append(path)
        return stays


def ignored_by_git(folder: Path) -> frozenset[str]:
    """Paths below `folder` that git ignores: files, and entire folders.

    Outside a checkout, which may be a copy of one, what the files `.gitignore` there say.
    """
    git = ["git", "-C", str(folder)]
    try:
        seen = subprocess.run([*git, "check-ignore", "-q", "."], capture_output=True).returncode
        if seen == _IGNORED:  # somebody's place to try things in, and not empty on purpose
            return frozenset()
        if seen == _NOT_IGNORED:
            return _listed([*git, *_OTHERS, "--exclude-standard"])
        with tempfile.TemporaryDirectory(prefix="manyhosts-") as nothing:
            subprocess.run(["git", "init", "-q", "--bare", nothing], capture_output=True)
            words = [*git, "--git-dir", nothing, "--work-tree", ".", *_OTHERS, "--exclude-per-directory=.gitignore"]
            return _listed(words)
    except OSError:  # there is no git
        return frozenset()


def _listed(words: Sequence[str]) -> frozenset[str]:
    names = subprocess.run(words, capture_output=True).stdout.split(b"\0")
    return frozenset(os.fsdecode(name).rstrip("/") for name in names if name)


def _with_parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[: end + 1]) for end in range(len(parts))]


@functools.cache
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns))


def _one_of(patterns: Sequence[str]) -> re.Pattern[str]:
    """Names, or paths below the folder, with * and ? as in a shell."""
    return _compiled(tuple(patterns))


def _fits(path: str, patterns: re.Pattern[str]) -> bool:
    return bool(patterns.match(path.rpartition("/")[2]) or patterns.match(path))
