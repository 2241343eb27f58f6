"""The user's script before it is started: is it there, does it fit its run directory, what does it need loaded.

Workers are forked from a process that has torch loaded. A script that sets variables which torch reads only when it is
loaded must be started without that. Whether it does is read from its source, and from the modules next to it that it
imports before torch; nothing of it is run.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shlex
import shutil
import stat
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from manyhosts.control.job import Job
from manyhosts.errors import ConfigError
from manyhosts.launchers.script_imports import imports_manyhosts
from manyhosts.records import run_directory, run_lock
from manyhosts.records.json_text import parsed
from manyhosts.records.run_directory import has_content
from manyhosts.records.summary import Summary
from manyhosts.table import nearest

_READ = ("run.json", "metrics.jsonl", "summary.json", run_directory.HEAD, run_lock.NAME)
"""What commands read of a run directory, in addition to the snapshots."""
_OF_A_RUN = ("snapshots", "best", "logs")
"""Folders in which no other run belongs."""
Kind = Literal["script", "module", "executable"]

_OF_SETTINGS = "name the script; a .yaml file of settings goes before it, as --set FILE"
_NO_SCRIPTS = {
    ".sh": "`manyhosts run --no-python ./FILE.sh` starts it as it is, where `chmod +x` has let it be started",
    ".yaml": _OF_SETTINGS,
    ".yml": _OF_SETTINGS,
    ".ipynb": "in a notebook call mh.launch.run(function), or save its code as a .py file",
    **dict.fromkeys((".json", ".jsonl", ".toml", ".txt", ".md", ".csv", ".pt", ".safetensors"), "name the script"),
}
"""Endings of files that are often named by mistake, and what to do instead."""

TORCH = ("torch", "torch.distributed", "torch.utils.data", "torch.nn.parallel", "torch.optim")
"""What a first training step needs."""
COMPILER = "torch._dynamo"
"""Half a second more, for what is compiled, and for optimizers of a script that does not use manyhosts."""
IN_PARTS = (COMPILER, "torch.distributed.tensor")
"""A second more, for a model that is compiled or kept in parts."""
_CHOICES = re.compile(r"\b(compile|mesh|strategy)\b")
"""The settings by which a script asks for that."""


def kind_of(*, module: bool, no_python: bool) -> Kind:
    """What the word on the command line is.

    Raises:
        ConfigError: it cannot be both.
    """
    if module and no_python:
        raise ConfigError("--module and --no-python exclude each other", where="--no-python", fix="give one of them")
    return "module" if module else "executable" if no_python else "script"


def check(program: str, kind: Kind) -> None:
    """See that `program` can be started on this machine.

    Raises:
        ConfigError: there is no such script or executable.
    """
    if kind == "executable" and shutil.which(program) is None:
        fix = f"write ./{program}, and see that `chmod +x` lets it be started" if Path(program).is_file() else ""
        fix = fix or "see that it is installed and may be executed"
        raise ConfigError(f"there is no executable {program!r}", where="PATH", fix=fix)
    if kind == "module" and (program.endswith(".py") or "/" in program):
        name = program.removesuffix(".py").strip("./").replace("/", ".")
        raise ConfigError(f"{program!r} is a file, and no module", where="-m", fix=f"write -m {name}, or leave -m out")
    if kind != "script":
        return
    path = Path(program)
    if not path.exists():
        raise ConfigError(f"there is no script {program!r}", where=str(path.absolute().parent), fix=_instead_of(path))
    if path.is_file() and path.suffix in _NO_SCRIPTS:
        raise ConfigError(f"{program!r} is no Python script", where=str(path.absolute()), fix=_NO_SCRIPTS[path.suffix])
    if path.is_dir() and not (path / "__main__.py").exists():
        raise ConfigError(f"{program!r} is a folder", where=str(path.absolute()), fix="name the script inside it")


def _instead_of(path: Path) -> str:
    """What to start where there is no script at `path`."""
    if re.fullmatch(r"python[\d.]*", path.name):
        return f"leave {path.name} out: `manyhosts run SCRIPT` starts SCRIPT with the Python that manyhosts runs in"
    if path.name in ("epoch", "epochs", "step", "steps"):
        return f"put a duration between quotes, as in --set duration='2 {path.name}'"
    if re.fullmatch(r"\w+(\.\w+)+", path.name) and Path(f"{path.name.replace('.', '/')}.py").exists():
        return f"it is the name of a module: manyhosts run -m {path.name}"
    if not path.parent.exists() and Path(path.name).exists():
        return (
            f"there is no folder {str(path.parent)!r}, and here is {path.name}: manyhosts run {shlex.quote(path.name)}"
        )
    names = sorted(other.name for other in path.absolute().parent.glob("*.py"))
    if spaced := [name for name in names if name.startswith(f"{path.name} ")]:
        return f"put a name with spaces between quotes: {shlex.quote(str(path.with_name(spaced[0])))}"
    if not names:
        return f"`manyhosts init {shlex.quote(str(path.parent))}` writes one that runs"
    return f"{nearest(path.name, names) or nearest(f'{path.name}.py', names)}in that folder: {', '.join(names[:5])}"


def check_run_dir(job: Job) -> None:
    """See that the run directory is new, or belongs to this script.

    Raises:
        ConfigError: it holds the run of another script, or its record cannot be read.
    """
    try:
        is_file = job.run_dir.exists() and not job.run_dir.is_dir()
    except OSError as cause:  # a name that is too long, a folder that may not be looked into
        raise ConfigError(
            f"the run directory cannot be read: {cause.strerror}",
            where=str(job.run_dir),
            fix="give another --run-dir",
        ) from cause
    inside = [each for each in job.run_dir.parents if (each / "run.json").exists()]
    if inside and job.run_dir.relative_to(inside[0]).parts[0] in _OF_A_RUN:
        raise ConfigError(
            "the run directory is in a folder of another run, which keeps its own things there",
            where=str(job.run_dir),
            fix=f"name the run to continue it: --run-dir {inside[0]}",
        )
    if is_file:
        raise ConfigError("the run directory is a file", where=str(job.run_dir), fix="give another --run-dir")
    _see_files(job.run_dir)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        try:
            record = parsed((job.run_dir / "run.json").read_bytes())
            recorded = str(record["script"])
        except (ValueError, KeyError, TypeError) as cause:
            raise ConfigError(
                "the record of this run cannot be read",
                where=str(job.run_dir / "run.json"),
                fix="give another --run-dir, or move that file away to begin again",
            ) from cause
        if job.kind == "script" and not _same_script(record, job.folder / job.program):
            raise ConfigError(
                f"this is the run directory of {recorded}, not of {job.program}, which has other content",
                where=str(job.run_dir),
                fix="give another --run-dir, or leave it out; a script that was renamed resumes its run before it is "
                "changed",
            )


def _see_files(run_dir: Path) -> None:
    """Refuse what is read of a run unless it is a file: a reader of a pipe without a writer waits for ever.

    Raises:
        ConfigError: one is none, or what leads to it leads nowhere.
    """
    if run_dir.is_symlink() and not run_dir.exists():
        raise ConfigError(
            f"the run directory is a link to {os.readlink(run_dir)}, which leads nowhere",
            where=str(run_dir),
            fix="make that folder, or give another --run-dir",
        )
    for path in (run_dir / name for name in _READ):
        try:
            is_file = stat.S_ISREG(path.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:  # links in a circle, or a place that this user may not see
            is_file = False
        if not is_file:
            raise ConfigError(
                f"{path.name} in the run directory is no file",
                where=str(path),
                fix="give another --run-dir, or move it away",
            )


def last_run_dir(program: str, kind: Kind, *, elsewhere: bool = False) -> Path:
    """The run directory below `runs` in which a run of `program` was begun last. `elsewhere`: on other machines.

    Raises:
        ConfigError: there is none, or which one it is cannot be known here.
    """
    runs = Path.cwd() / "runs"
    begun: list[tuple[float, Path]] = []
    for record in runs.glob("*/run.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = parsed(record.read_bytes())
            if _is_of(found, record.parent, program, kind):
                begun.append((float(found["started"]), record.parent))
    newest = max(begun, default=(0.0, None))
    if elsewhere and (unknown := _newest_without_record(runs, program)) and unknown[0] > newest[0]:
        name = unknown[1].relative_to(Path.cwd())
        raise ConfigError(
            f"the run of {program} that was started last has no record here: it never began, or other hosts have it",
            where=str(unknown[1]),
            fix=f"name the directory of the run to continue with, as in --run-dir {name}",
        )
    if newest[1] is None:
        started = _newest_without_record(runs, program)
        raise ConfigError(
            f"there is no run of {program} to continue with"
            + (f": {started[1].name} ended before its training began" if started else ""),
            where=str(runs),
            fix="leave --resume out to begin one, or name its directory with --run-dir",
        )
    return newest[1]


def unfinished(program: str, kind: Kind) -> Path | None:
    """The newest run directory of `program` here, where that run has snapshots and was not finished."""
    try:
        newest = last_run_dir(program, kind)
    except ConfigError:
        return None
    status = ""
    with contextlib.suppress(ConfigError, OSError):
        status = Summary.of_last_start(newest).status
    goes_on = status in ("completed", "stopped early") or run_lock.goes_on(newest)
    return None if goes_on or not any((newest / "snapshots").glob("step-*")) else newest


def _is_of(record: Mapping[str, Any], run_dir: Path, program: str, kind: Kind) -> bool:
    """Whether the run in `run_dir` is one of `program`; an executable is known by the name of its directory."""
    if kind == "script":
        return _same_script(record, Path.cwd() / program)
    if kind == "module":
        names, parts = program.split("."), list(Path(str(record["script"])).with_suffix("").parts)
        return names in (parts[-len(names) :], parts[-len(names) - 1 : -1] if parts[-1:] == ["__main__"] else [])
    return _started(run_dir, program) is not None


def _newest_without_record(runs: Path, program: str) -> tuple[float, Path] | None:
    """When a run of `program` was started last of which only the directory is here, and the directory."""
    paths = [path for path in runs.glob("*") if os.access(path, os.X_OK) and path.is_dir()]
    paths = [path for path in paths if not (path / "run.json").exists()]
    started = [(begin, path) for path in paths if (begin := _started(path, program)) is not None]
    return max(started, default=None)


def _started(run_dir: Path, program: str) -> float | None:
    """When the run of `program` was started whose directory was named by us; None for another directory."""
    stem = Path(program).stem.rpartition(".")[2] or "run"
    found = re.fullmatch(rf"{re.escape(stem)}-(\d{{8}}-\d{{6}})(-\d+)?", run_dir.name)
    if found is None:
        return None
    with contextlib.suppress(ValueError):
        return time.mktime(time.strptime(found[1], "%Y%m%d-%H%M%S"))
    return None


def _same_script(record: Mapping[str, Any], asked: Path) -> bool:
    """Whether the run of `record` is one of the script `asked`: by its path, or else by its content.

    A project may have moved, so another path with the same name counts unless both files are there.
    """
    recorded = Path(str(record["script"]))
    if has_content(record, asked):
        return True
    if recorded.name != asked.name:
        return False
    there = recorded if recorded.is_absolute() else asked.parent / recorded.name
    return not there.exists() or there.samefile(asked)


def preload(program: str, kind: Kind, own: Sequence[str] = (), *, settings: Collection[str] = ()) -> tuple[str, ...]:
    """The modules that a host should load once for all workers of `program`: torch, and `own` if it uses manyhosts.

    `settings`: those that the command line changes, by name.

    Nothing for an executable, for a script that imports the standard library alone, and for one that sets variables
    which torch reads when it is loaded: each worker then loads it by itself.
    """
    if kind == "executable" or set_before_torch(file_of(program, kind)):
        return ()
    try:
        source = Path(program).read_text() if kind == "script" else ""
        imported = _imports(source) if kind == "script" else {program.partition(".")[0]}
    except (OSError, ValueError, SyntaxError):
        return ()
    if imported <= sys.stdlib_module_names:
        return ()
    metrics = ["torchmetrics"] if "torchmetrics" in imported else []  # a second, for everybody at once
    if "manyhosts" not in imported:
        return (*TORCH, COMPILER, *metrics)
    return (*TORCH, *(IN_PARTS if _CHOICES.search(" ".join([source, *settings])) else ()), *metrics, *own)


def uses_manyhosts(program: str, kind: Kind) -> bool:
    """Whether `program` is known to import manyhosts, by itself or in a module of its own project."""
    if kind == "executable":
        return False
    path = file_of(program, kind)
    root = path if Path(program).is_dir() else path.parent
    return imports_manyhosts(path, Path() if kind == "module" else root)


def file_of(program: str, kind: Kind) -> Path:
    """Where the source of `program` is, if it is in the working directory; a path that is not there, if not."""
    path = Path(*program.split(".")) if kind == "module" else Path(program)
    if path.is_dir():
        return path / "__main__.py"
    return path.with_suffix(".py") if kind == "module" else path


def _imports(source: str) -> set[str]:
    """The top-level names of all packages that `source` imports somewhere."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or ".").partition(".")[0])
    return found


_READ_AT_IMPORT = re.compile(
    r"(OMP|MKL|KMP|GOMP|OPENBLAS|BLIS|VECLIB|NUMEXPR|DNNL|ONEDNN|ATEN|TORCH|PYTORCH|TORCHDYNAMO|TORCHINDUCTOR|CUDA|CUBLAS"
    r"|NVIDIA|TRITON|MALLOC|LRU)_\w+|TORCHINDUCTOR\w*|TORCHDYNAMO\w*"
)
_ALWAYS_IN_TIME = re.compile(r"TORCHELASTIC_\w+|TORCH_(HOME|EXTENSIONS_DIR|NCCL_\w+)")
_LOADED = ("torch", "torchmetrics", "torchvision", "lightning", "accelerate", "transformers", "manyhosts")
"""A module imported from here has torch loaded."""
_SETTERS = ("setdefault", "update", "putenv")
_MOST_FILES = 50


def set_before_torch(path: Path) -> tuple[str, ...]:
    """The names of such variables that the script at `path` sets, in order; none where it cannot be read."""
    return tuple(dict.fromkeys(_Reading(path.parent).of(path)))


class _Reading:
    """Follows a script through its statements as Python would, up to where it imports torch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: set[Path] = set()
        self._is_over = False

    def of(self, path: Path) -> Iterator[str]:
        """The names that `path` sets, and the modules that it imports."""
        if path in self._seen or len(self._seen) == _MOST_FILES:
            return
        self._seen.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, ValueError, SyntaxError):
            return
        yield from self._statements(tree.body)

    def _statements(self, statements: list[ast.stmt]) -> Iterator[str]:
        for statement in statements:
            if self._is_over:
                return
            if isinstance(statement, ast.Import | ast.ImportFrom):
                yield from self._import(statement)
            elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue  # what a function does, it does when torch is there
            else:
                yield from _names_set_by(statement)
                for part in ("body", "orelse", "finalbody"):
                    yield from self._statements(getattr(statement, part, []))

    def _import(self, statement: ast.Import | ast.ImportFrom) -> Iterator[str]:
        base = statement.module or "" if isinstance(statement, ast.ImportFrom) else ""
        names = [base] if base else [name.name for name in statement.names]
        for name in names:
            if name.partition(".")[0] in _LOADED:
                self._is_over = True
                return
            candidate = self._folder / Path(*name.split("."))
            for path in (candidate.with_suffix(".py"), candidate / "__init__.py"):
                if path.is_file():
                    yield from self.of(path)


def _names_set_by(statement: ast.stmt) -> Iterator[str]:
    """The variables that a simple statement, or the head of another one, sets in `os.environ`."""
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        words = [
            target.slice for target in targets if isinstance(target, ast.Subscript) and _is_environment(target.value)
        ]
    elif isinstance(statement, ast.Expr) and isinstance(call := statement.value, ast.Call):
        words = _words_of_call(call)
    else:
        words = []
    for word in words:
        name = word.value if isinstance(word, ast.Constant) else None
        if isinstance(name, str) and _READ_AT_IMPORT.fullmatch(name) and not _ALWAYS_IN_TIME.fullmatch(name):
            yield name


def _words_of_call(call: ast.Call) -> list[ast.expr]:
    """Where the names are in `os.environ.setdefault(name, …)`, `os.environ.update(…)` and `os.putenv(name, …)`."""
    function = call.func
    if not isinstance(function, ast.Attribute) or function.attr not in _SETTERS:
        return []
    if function.attr == "putenv":
        return call.args[:1]
    if not _is_environment(function.value):
        return []
    if function.attr == "setdefault":
        return call.args[:1]
    keys = [key for argument in call.args if isinstance(argument, ast.Dict) for key in argument.keys if key is not None]
    return [*keys, *(ast.Constant(word.arg) for word in call.keywords if word.arg)]


def _is_environment(thing: ast.expr) -> bool:
    return (isinstance(thing, ast.Attribute) and thing.attr == "environ") or (
        isinstance(thing, ast.Name) and thing.id == "environ"
    )
