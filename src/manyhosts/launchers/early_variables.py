"""Variables that a script sets before it imports torch, and that torch reads only when it is loaded.

Workers are forked from a process that has torch loaded already, so such a script must be started without that. What it
does is read from its source, and from the modules next to it that it imports before torch; nothing of it is run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

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
    """Where the names stand in `os.environ.setdefault(name, …)`, `os.environ.update(…)` and `os.putenv(name, …)`."""
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
