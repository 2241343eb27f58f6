"""What a program imports and reads, as far as its own files say so: the script and the modules next to it."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

_MOST_FILES = 200
"""A project has fewer, or is not looked through to its end."""
_READERS = (
    *("argparse", "optparse", "getopt", "click", "typer", "fire", "absl", "hydra", "docopt", "tyro", "jsonargparse"),
    *("simple_parsing", "tap", "omegaconf", "lightning", "pytorch_lightning", "transformers", "accelerate", "runpy"),
)
"""Whoever imports one of these may read the command line."""


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


def reads_arguments(script: Path, root: Path) -> bool:
    """Whether `script`, or a module of its own, may read the arguments after it on the command line."""
    any_tree = False
    for tree in trees(script, root):
        any_tree = True
        for node in ast.walk(tree):
            names = [each.name for each in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names.append(node.module or "")
            if any(name.partition(".")[0] in _READERS for name in names):
                return True
            if (isinstance(node, ast.Attribute) and node.attr in ("argv", "orig_argv")) or "argv" in names:
                return True
    return not any_tree


def unread(arguments: Sequence[str], ours: Collection[str], script: Path, root: Path) -> list[str]:
    """The options of ours among the script's arguments that neither the script nor its own modules name."""
    found = [name for word in arguments if (name := word.partition("=")[0]) in ours]
    if not found:
        return []
    named: set[str] = set()
    for tree in trees(script, root):
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named |= {word.strip("\"',;:.()[]`=").partition("=")[0] for word in node.value.split()}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                named.add(f"--{node.target.id}")  # a field of arguments that are a dataclass
            elif isinstance(node, ast.arg):
                named.add(f"--{node.arg}")  # click, typer and fire make options of a function's arguments
    named |= {name.replace("_", "-") for name in named}
    return [name for name in found if name not in named]


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
