"""`provenance/`: what a run has come from, kept when it begins: code, data files, versions, hardware, command.

Enough to do it again somewhere else, and to say what differs there. `state.json` holds all but the texts; `sources` the
script and the modules of its own that it has imported; `changes.diff` what the repository had not committed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from manyhosts.errors import ConfigError
from manyhosts.records import installed, opened_files
from manyhosts.records.atomic_file import read_json, write_atomically, write_json

NAME = "provenance"
DIFF = "changes.diff"
SCHEMA_VERSION = 1
_GIT_S = 20.0
_MOST_OF_A_FILE = 1 << 20
_MOST_OF_ALL = 16 << 20
_FULL_HASHES = 256 << 20
"""Bytes of data that are read to the end, a second's work at most; larger files are hashed in ranges."""
_BLOCK, _BLOCKS = 1 << 16, 64
_KEPT_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MANYHOSTS_SET", "CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED")


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """The user's own code."""

    root: str
    """The folder that `files` are below: that of the repository, or else of the script."""
    commit: str
    """Empty where the script is in no git repository."""
    changed: bool
    """Whether `changes.diff` belongs to it."""
    left_out: Sequence[str]
    """Changed or new files that were too large to keep."""
    files: Mapping[str, str]
    """sha256 of the script and of what it has imported of its own, by the path below `root`, or else the full path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """A file that the script has read."""

    size: int
    sha256: str
    whole: bool
    """Whether `sha256` is that of all of it; else it is that of 64 ranges all over it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """What `state.json` holds."""

    program: str
    kind: str
    """`script` or `module`."""
    arguments: Sequence[str]
    folder: str
    """The working directory."""
    search_path: Sequence[str]
    """Where modules are looked for, as far as that is below `root` of the code."""
    environment: Mapping[str, str]
    """The variables that change what a run computes."""
    code: Code
    data: Mapping[str, DataFile]
    """By path: below `root` of the code, or else the full path."""
    data_left_out: int
    """How many more files were read than are listed."""
    identity: Mapping[str, Any]
    """What the training set looks like: see `data.identity`."""
    packages: Mapping[str, str]
    """All installed ones, and `python`."""
    hardware: Mapping[str, str]
    described: Mapping[str, str]
    """`architecture`, `parameters`, `optimizer`, `schedule` and `data`, in PyTorch's words."""
    changed_on_resume: Sequence[str] = ()
    """What was another when the run was resumed."""
    schema_version: int = field(default=SCHEMA_VERSION)


def keep(
    run_dir: Path,
    script: Path,
    *,
    hardware: Mapping[str, str],
    identity: Mapping[str, Any],
    described: Mapping[str, str],
) -> Provenance:
    """Write down what the run of `script` in `run_dir` comes from, as this process sees it. Returns it.

    A run that is resumed keeps its first one, and says what has changed since.
    """
    folder = run_dir / NAME
    found = _look(run_dir, script, hardware=hardware, identity=identity, described=described)
    if (folder / "state.json").exists():
        with contextlib.suppress(ConfigError):
            before = read(run_dir)
            changed = [kind for kind in ("code", "data", "packages") if _differs(before, found, kind)]
            if new := [kind for kind in changed if kind not in before.changed_on_resume]:
                reported = {**asdict(before), "changed_on_resume": [*before.changed_on_resume, *new]}
                write_json(folder / "state.json", reported)
            return before
    diff, left_out = _changes(Path(found.code.root), found.code.commit, run_dir)
    found = replace(found, code=replace(found.code, changed=bool(diff), left_out=left_out))
    for name in found.code.files:
        with contextlib.suppress(OSError):
            source = Path(found.code.root, name)
            write_atomically(folder / "sources" / (name.lstrip("/")), source.read_bytes())
    if diff:
        write_atomically(folder / DIFF, diff)
    write_json(folder / "state.json", asdict(found))
    return found


def add_data(run_dir: Path) -> None:
    """Add the files that were read since: datasets open most of theirs while they train. And modules imported late."""
    with contextlib.suppress(ConfigError, OSError):
        before = read(run_dir)
        root = Path(before.code.root)
        data = {**_data(root, run_dir, known=before.data), **before.data}
        files = dict(before.code.files)
        for name, digest in _sources(root, Path(before.program)).items():
            if name not in files:
                files[name] = digest
                write_atomically(run_dir / NAME / "sources" / name.lstrip("/"), Path(root, name).read_bytes())
        reported = {**asdict(before), "data": {name: asdict(each) for name, each in data.items()}}
        reported["code"]["files"], reported["data_left_out"] = files, opened_files.left_out()
        write_json(run_dir / NAME / "state.json", reported)


def read(run_dir: Path) -> Provenance:
    """What the run in `run_dir` came from.

    Raises:
        ConfigError: nothing of it is on record, or not in a way that is understood here.
    """
    path = run_dir / NAME / "state.json"
    if not path.exists():
        raise ConfigError(
            "this run has no record of its code", where=str(run_dir), fix="it is kept by runs of this version and later"
        )
    kept = read_json(path, version=SCHEMA_VERSION, written_by="")
    try:
        kept["code"] = Code(**kept["code"])
        kept["data"] = {name: DataFile(**each) for name, each in kept["data"].items()}
        return Provenance(**kept)
    except (KeyError, TypeError, AttributeError) as cause:
        fix = "restore the file: it says what the run came from"
        raise ConfigError(f"the record of the code is damaged: {cause}", where=str(path), fix=fix) from cause


def module_of(run_dir: Path) -> tuple[str, str]:
    """The name of the module that the run in `run_dir` was started as, by `-m`, and where; nothing of a script."""
    with contextlib.suppress(ConfigError):
        found = read(run_dir)
        if found.kind == "module":
            return found.program, found.folder
    return "", ""


def changed(
    found: Provenance,
    *,
    root: Path,
    files: Mapping[str, str],
    data: Mapping[str, DataFile],
    hardware: Mapping[str, str],
) -> Provenance:
    """`found` with other code, data and hardware, and the versions of now."""
    code = replace(found.code, root=str(root), files=files)
    return replace(found, code=code, data=data, hardware=hardware, packages=versions_here())


def sha256_of(path: Path) -> str:
    """Of a file of code.

    Raises:
        OSError: it cannot be read.
    """
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digest_of(path: Path, *, whole: bool = True) -> DataFile:
    """Size and hash of a file: of all of it, or of 64 ranges all over it.

    Raises:
        OSError: it cannot be read.
    """
    size, digest = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        if whole or size <= _BLOCK * _BLOCKS:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        else:
            for number in range(_BLOCKS):
                file.seek((size - _BLOCK) * number // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return DataFile(size=size, sha256=digest.hexdigest(), whole=whole)


def hardware_here() -> dict[str, str]:
    """This machine's processor and cores, as far as they are known without torch."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {"processor": model, "architecture": platform.machine(), "cores": str(os.cpu_count() or 1)}


def versions_here() -> dict[str, str]:
    """Python and all packages."""
    return {"python": platform.python_version(), **installed.packages()}


def git(folder: Path, *words: str, environment: Mapping[str, str] | None = None) -> bytes:
    """What git says in `folder`.

    Raises:
        OSError, subprocess.SubprocessError: there is none, or it refuses.
    """
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", **(environment or {})}
    return subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, timeout=_GIT_S, check=True, env=quiet
    ).stdout


def _look(
    run_dir: Path,
    script: Path,
    *,
    hardware: Mapping[str, str],
    identity: Mapping[str, Any],
    described: Mapping[str, str],
) -> Provenance:
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    root, commit = _root(script)
    return Provenance(
        program=spec.name if spec is not None else str(script.absolute()),
        kind="script" if spec is None else "module",
        arguments=sys.argv[1:],
        folder=os.getcwd(),
        search_path=[
            path
            for path in sys.path
            if path and Path(path).resolve().is_relative_to(root) and "site-packages" not in path
        ],
        environment={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
        code=Code(root=str(root), commit=commit, changed=False, left_out=(), files=_sources(root, script)),
        data=_data(root, run_dir, known={}),
        data_left_out=opened_files.left_out(),
        identity=identity,
        packages=versions_here(),
        hardware={**hardware_here(), **hardware},
        described=described,
    )


def _root(script: Path) -> tuple[Path, str]:
    folder = script.resolve().parent
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        top = Path(git(folder, "rev-parse", "--show-toplevel").decode().strip())
        commit = git(folder, "rev-parse", "--verify", "--quiet", "HEAD").decode().strip()
        return top, commit
    return folder, ""


def _sources(root: Path, script: Path) -> dict[str, str]:
    """sha256 of each file of the user's own code that this process has loaded."""
    named = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    paths = {str(name) for name in [script, *filter(None, named)] if str(name).endswith(".py")}
    found = {}
    for path in sorted({os.path.realpath(path) for path in paths if _has_own_code(_top_folder(path))}):
        if not _is_installed(path):
            with contextlib.suppress(OSError):
                found[below(root, path)] = sha256_of(Path(path))
    return found


def _top_folder(path: str) -> str:
    """The folder of a file; of an installed package its top one, which may be a link to code of the user's own."""
    before, installed, package = path.rpartition("/site-packages/")
    top, below_it, _ = package.partition(os.sep)
    return f"{before}{installed}{top}" if installed and below_it else os.path.dirname(path)


_real = functools.cache(os.path.realpath)


@functools.cache  # thousands of files are in some hundred such folders
def _has_own_code(folder: str) -> bool:
    parent, name = os.path.split(folder)
    found = os.path.join(_real(parent), name)  # most have one of a few parents, and are no links themselves
    return not _is_installed(_real(folder) if os.path.islink(found) else found)


def _is_installed(path: str) -> bool:
    """Whether it is a file or a folder of Python, of an installed package, or of manyhosts."""
    return opened_files.is_installed(f"{path}{os.sep}") or path.startswith(_real(sys.base_prefix) + os.sep)


def _data(root: Path, run_dir: Path, *, known: Mapping[str, DataFile]) -> dict[str, DataFile]:
    """Of each file that was read and is not `known` yet, what it holds now; the run's own files are none."""
    found, left = {}, _FULL_HASHES
    for name in opened_files.names():
        path, short = Path(os.path.realpath(name)), below(root, name)
        if short not in known and not path.is_relative_to(run_dir.resolve()) and ".git" not in path.parts:
            with contextlib.suppress(OSError):
                found[short] = digest_of(path, whole=path.stat().st_size <= left)
                left -= found[short].size if found[short].whole else 0
    return found


def _changes(root: Path, commit: str, run_dir: Path) -> tuple[bytes, list[str]]:
    """What differs from `commit`, new files included, as a diff that git applies; and what was too large for it."""
    if not commit:
        return b"", []
    try:
        new: list[str] = []
        left_out: list[str] = []
        for name in filter(None, git(root, "ls-files", "--others", "--exclude-standard", "-z").decode().split("\0")):
            path = root / name
            if _is_of_a_run(path, run_dir, root) or any(part.startswith(".") for part in Path(name).parts):
                continue  # what runs have left, and what may be a secret
            (new if path.is_file() and path.stat().st_size <= _MOST_OF_A_FILE else left_out).append(name)
        with _index_with(root, new) as environment:
            diff = git(root, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv", environment=environment)
    except (OSError, subprocess.SubprocessError):
        return b"", ["(git did not answer)"]
    if len(diff) > _MOST_OF_ALL:
        return b"", [*left_out, f"(all changes: {len(diff) >> 20} MiB)"]
    return diff, left_out


def _is_of_a_run(path: Path, run_dir: Path, root: Path) -> bool:
    if path.is_relative_to(run_dir.resolve()) or path.is_relative_to(root / "runs"):
        return True
    return any((folder / "run.json").exists() for folder in path.parents if folder != root and root in folder.parents)


@contextlib.contextmanager
def _index_with(root: Path, new: Sequence[str]) -> Iterator[dict[str, str]]:
    """Within, an environment in which git takes the files `new` for its own; its real index is left alone."""
    if not new:
        yield {}
        return
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch, "index")
        index = git(root, "rev-parse", "--git-path", "index").decode().strip()
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(root / index, place)
        environment = {"GIT_INDEX_FILE": str(place)}
        git(root, "add", "--intent-to-add", "--", *new, environment=environment)
        yield environment


def below(root: Path, path: str) -> str:
    """`path` as it is called below `root`, links in it left as they are; where it is not there, as it is."""
    for name, base in ((path, root), (path, root.resolve()), (os.path.realpath(path), root.resolve())):
        if Path(name).is_relative_to(base):
            return str(Path(name).relative_to(base))
    return path


def _differs(before: Provenance, now: Provenance, kind: str) -> bool:
    """Whether anything that both know is another; of files each may know more."""
    of: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
        "code": (before.code.files, now.code.files),
        "data": (before.data, now.data),
        "packages": (before.packages, now.packages),
    }
    old, new = of[kind]
    return any(old[name] != new[name] for name in old.keys() & new.keys())
