"""The code of a run as it was, in a fresh folder: its commit with the changes that were not committed."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from manyhosts.errors import ConfigError
from manyhosts.records import provenance
from manyhosts.records.provenance import DIFF, NAME, Provenance, git

_NEVER = {".git", "__pycache__", ".venv", "runs"}


def make(run_dir: Path, found: Provenance, place: Path) -> None:
    """Put the code that `found` tells of into the folder `place`, which is not there yet.

    What the record has no copy of (data, mostly) is linked from where it was.

    Raises:
        ConfigError: the repository, its commit or the changes cannot be had.
    """
    root = Path(found.code.root)
    if found.code.commit:
        _clone(root, found.code.commit, place)
        if found.code.changed:
            _apply(run_dir / NAME / DIFF, place)
    else:
        place.mkdir(parents=True)
    for name in found.code.files:
        kept = run_dir / NAME / "sources" / name
        if not Path(name).is_absolute() and kept.exists() and not found.code.commit:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(kept, place / name)
    for path in _not_kept(root, run_dir, git_knows=bool(found.code.commit)):
        link = place / path
        if not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(root / path)


def _clone(root: Path, commit: str, place: Path) -> None:
    what, fix = f"commit {commit[:12]} cannot be had", "bring the repository of the run back to that path, or fetch it"
    _asked(root.parent, ["clone", "--quiet", "--shared", "--no-checkout", str(root), str(place)], root, what, fix)
    _asked(place, ["-c", "advice.detachedHead=false", "checkout", "--quiet", commit], root, what, fix)


def _apply(diff: Path, place: Path) -> None:
    what, fix = "the changes that were not committed cannot be applied", "restore that file of the run directory"
    _asked(place, ["apply", "--binary", "--whitespace=nowarn", str(diff)], diff, what, fix)


def _asked(folder: Path, words: Sequence[str], where: Path, what: str, fix: str) -> None:
    """Have git do it in `folder`; what it says where it cannot is reported of `where`."""
    try:
        git(folder, *words)
    except FileNotFoundError as cause:
        raise ConfigError("there is no git on this machine", where="PATH", fix="install git") from cause
    except (OSError, subprocess.SubprocessError) as cause:
        said = (getattr(cause, "stderr", b"") or b"").decode(errors="replace").strip()
        raise ConfigError(f"{what}: {said or cause}", where=str(where), fix=fix) from cause


def _not_kept(root: Path, run_dir: Path, *, git_knows: bool) -> Iterator[Path]:
    """Below `root`: what the record does not have. Runs are none of it, nor is what Python makes by itself."""
    if not git_knows:
        yield from _all_but_sources(root, Path(), run_dir)
        return
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        for which in (["--ignored"], []):
            words = ["ls-files", "--others", *which, "--exclude-standard", "--directory", "-z"]
            for name in filter(None, git(root, *words).decode().split("\0")):
                if not _is_left_alone(root / name, run_dir):
                    yield Path(name)


def _all_but_sources(root: Path, below: Path, run_dir: Path) -> Iterator[Path]:
    for path in sorted((root / below).iterdir()) if (root / below).is_dir() else []:
        short = below / path.name
        if _is_left_alone(path, run_dir) or path.suffix == ".py":
            continue
        if path.is_dir() and next(path.rglob("*.py"), None) is not None:
            yield from _all_but_sources(root, short, run_dir)
        else:
            yield short


def _is_left_alone(path: Path, run_dir: Path) -> bool:
    return path.name in _NEVER or run_dir.resolve().is_relative_to(path.resolve())


def now(found: Provenance, root: Path) -> Provenance:
    """What `found` would be, were the run to begin now with the code below `root`, as far as files tell."""
    files, data = {}, {}
    for name in found.code.files:
        with contextlib.suppress(OSError):
            files[name] = provenance.sha256_of(root / name)
    for name, before in found.data.items():
        for folder in (root, Path(found.code.root)):
            with contextlib.suppress(OSError):
                data[name] = provenance.digest_of(folder / name, whole=before.whole)
                break
    hardware = {**found.hardware, **provenance.hardware_here()}
    return provenance.changed(found, root=root, files=files, data=data, hardware=hardware)
