"""Which expressions of the product are about GPUs, and which of them a process has executed.

About GPUs is what names CUDA or one of its libraries, and what asks `manyhosts.device`, where what differs between
devices is. What is read when a file is imported is executed by every test; the rest is what functions hold.
"""

from __future__ import annotations

import ast
import builtins
import gc
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

import manyhosts

SOURCE = Path(manyhosts.__file__).parent
APART = ("doctor", "rehearsal")
"""The one looks at GPUs without torch, the other is about scripts that are not ours; both have tests of their own."""
_NAMES = re.compile(r"cuda|cudnn|cublas|nccl", re.IGNORECASE)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)

Place = tuple[str, int, int]
"""Of an expression: the path of its file below the package, its line and its column."""


def expressions() -> dict[Place, str]:
    """All of them, and their text."""
    return {
        (name, node.lineno, node.col_offset): ast.unparse(node) for name, tree in _files() for node in _found_in(tree)
    }


def watch() -> set[Place]:
    """Have each of them note when it is executed, in this process and on every thread. Returns where they do so."""
    executed: set[Place] = set()
    instead: dict[tuple[str, str, int], CodeType] = {}
    for name, tree in _files():
        wanted = {id(node): (name, node.lineno, node.col_offset) for node in _found_in(tree)}
        if not wanted:
            continue
        importlib.import_module(".".join(["manyhosts", *Path(name).with_suffix("").parts]))
        noting = ast.fix_missing_locations(_Noting(wanted).visit(tree))
        for code in _codes(compile(noting, str(SOURCE / name), "exec")):
            instead[code.co_filename, code.co_qualname, code.co_firstlineno] = code
    setattr(builtins, _NOTE, lambda place, value: (executed.add(place), value)[1])
    for function in gc.get_objects():
        if type(function) is FunctionType:  # others may answer for something else
            code = function.__code__
            function.__code__ = instead.get((code.co_filename, code.co_qualname, code.co_firstlineno), code)
    return executed


_NOTE = "_note_expression"


class _Noting(ast.NodeTransformer):
    """In place of each expression a call, which notes its place and gives its value."""

    def __init__(self, wanted: dict[int, Place]) -> None:
        self.wanted = wanted

    def generic_visit(self, node: ast.AST) -> ast.AST:
        place = self.wanted.get(id(node))
        super().generic_visit(node)
        if place is None or not isinstance(node, ast.expr):
            return node
        call = ast.Call(ast.Name(_NOTE, ast.Load()), [ast.Constant(place), node], [])
        return ast.copy_location(call, node)


def _codes(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes(each)


def _files() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        if not name.startswith(APART):
            yield name, ast.parse(path.read_text())


def _found_in(tree: ast.Module) -> list[ast.expr]:
    return list(_in_functions(tree, _of_device(tree), inside=False))


def _of_device(tree: ast.Module) -> set[str]:
    """What a file calls `manyhosts.device`, or what it takes from there."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    pairs = [(node.module, alias) for node in imports for alias in node.names]
    return {
        alias.asname or alias.name
        for module, alias in pairs
        if module == "manyhosts.device" or (module, alias.name) == ("manyhosts", "device")
    }


def _in_functions(node: ast.AST, of_device: set[str], *, inside: bool) -> Iterator[ast.expr]:
    if inside and isinstance(node, ast.expr) and _is_about_gpus(node, of_device):
        yield node
    if isinstance(node, _FUNCTIONS):
        own = {each.arg for each in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]}
        own |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
        of_device = of_device - own  # what a function itself calls so is something else
    for field, value in ast.iter_fields(node):
        is_body = isinstance(node, _FUNCTIONS) and field == "body"
        if field in ("returns", "annotation"):
            continue  # nobody executes them
        for each in value if isinstance(value, list) else [value]:
            is_text = isinstance(node, ast.JoinedStr) and isinstance(each, ast.Constant)
            if isinstance(each, ast.AST) and not is_text and not _is_docstring(each):
                yield from _in_functions(each, of_device, inside=inside or is_body)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_about_gpus(node: ast.expr, of_device: set[str]) -> bool:
    if not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
        return False
    if isinstance(node, ast.Constant):  # with a space in it, it is what a user reads
        return isinstance(node.value, str) and " " not in node.value and _NAMES.search(node.value) is not None
    if isinstance(node, ast.Attribute):
        return _NAMES.search(node.attr) is not None
    return isinstance(node, ast.Name) and (node.id in of_device or _NAMES.search(node.id) is not None)
