"""What a program imports, as far as its own files say so: the script and the modules next to it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_MOST_FILES = 200
"""A project has fewer, or is not looked through to its end."""


def imports_manyhosts(script: Path, root: Path) -> bool:
    """Whether `script`, or a module below `root` that it imports, imports manyhosts.

    What cannot be read or parsed imports nothing. An import inside a function counts, too.
    """
    for path, tree in _files_and_trees(script, root):
        for name, folder in _modules(tree, path, root):
            if folder is root and name.partition(".")[0] == "manyhosts":
                return True
    return False


def trees(script: Path, root: Path) -> Iterator[ast.AST]:
    """The source of `script` and of the modules below `root` that it imports, as far as they can be read."""
    return (tree for _, tree in _files_and_trees(script, root))


def _files_and_trees(script: Path, root: Path) -> Iterator[tuple[Path, ast.AST]]:
    waiting, seen = [script], {script}
    while waiting and len(seen) < _MOST_FILES:
        path = waiting.pop()
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, ValueError, SyntaxError, RecursionError):
            continue
        yield path, tree
        for name, folder in _modules(tree, path, root):
            for found in _files(name, folder):
                if found not in seen:
                    seen.add(found)
                    waiting.append(found)


def _modules(tree: ast.AST, path: Path, root: Path) -> Iterator[tuple[str, Path]]:
    """Every module that is imported, by its dotted name, and the folder that the name counts from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((each.name, root) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = root if node.level == 0 else path.parents[min(node.level, len(path.parents)) - 1]
            module = node.module or ""
            if module:
                yield module, folder
            # What is imported from a package may be one of its modules.
            yield from ((f"{module}.{each.name}".lstrip("."), folder) for each in node.names)


def _files(name: str, folder: Path) -> Iterator[Path]:
    """The files that an import of `name` runs, of those that are there."""
    place = folder
    for part in name.split("."):
        place = place / part
        for found in (place.with_name(f"{part}.py"), place / "__init__.py"):
            if found.is_file():
                yield found
