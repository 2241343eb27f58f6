"""Options that `run` does not have and people type: answered with the line that does what they mean.

An option of ours after the script is the script's own, if the script knows it. Otherwise it would be ignored, and
the run would have another size than was asked for: that is refused.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from manyhosts.config import overrides
from manyhosts.errors import ConfigError
from manyhosts.launchers import script_imports

_WORKERS = ("--gpus", "--gpu", "--num-gpus", "--ngpus", "--ngpu", "--nproc", "--np", "--num-processes", "--num-procs")
_OURS = {
    **dict.fromkeys((*_WORKERS, "--num-workers", "--devices", "--ntasks", "--processes"), "--workers"),
    **dict.fromkeys(("-n", "-np", "-g", "-w"), "--workers"),
    **dict.fromkeys(("--num-nodes", "--num-machines", "--machines", "-N"), "--nodes"),
    **dict.fromkeys(("--host", "--host-list", "-H"), "--hosts"),
    **dict.fromkeys(("--output", "--output-dir", "--out", "--dir", "--save-dir", "-d"), "--run-dir"),
}
_SETTINGS = {
    **dict.fromkeys(("--epochs", "--epoch", "--max-epochs", "--num-epochs", "-e"), ("duration", "{} epochs")),
    **dict.fromkeys(("--steps", "--max-steps", "--iterations"), ("duration", "{} steps")),
    **dict.fromkeys(("--batch", "--bs", "-b"), ("batch_size", "{}")),
    **dict.fromkeys(("--learning-rate",), ("lr", "{}")),
}


def check(ours: Sequence[str], rest: Sequence[str], known: Collection[str]) -> None:
    """See that `run` has every option that was typed before the script. `rest`: the script and its arguments.

    Raises:
        ConfigError: it has not, and what was meant is known.
    """
    if ours[-2:-1] == ["--set"] and ours[-1] in overrides.known_keys() and rest and not Path(rest[0]).exists():
        value, *after = rest[1:] if rest[0] == "=" and len(rest) > 1 else rest
        raise ConfigError(
            f"the value of {ours[-1]} is a separate word",
            where=shlex.join([*ours[-2:], rest[0]]),
            fix=f"type: {shlex.join(['manyhosts', 'run', *ours[:-1], f'{ours[-1]}={value}', *after])}",
        )
    for place, word in enumerate(ours):
        name, sign, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if not word.startswith("-") or name in known:
            continue
        # What follows an unknown option was read as the script, or as its arguments.
        after = [*ours[place + 1 :], *rest]
        takes = not sign and bool(after) and not after[0].startswith("-")
        value = value if sign else after[0] if takes else ""
        if (meant := _meant(name, value)) is None:
            continue
        others = [*ours[:place], *meant, *(after[1:] if takes else after)]
        fix = f"type: {shlex.join(['manyhosts', 'run', *others])}"
        raise ConfigError(f"`run` has no option {name}", where=shlex.join([name, value] if value else [name]), fix=fix)


def _meant(name: str, value: str) -> list[str] | None:
    """Our words for option `name`; None where it is not known what was meant."""
    if name in _OURS:
        return [_OURS[name], value or "N"]
    key, form = _SETTINGS.get(name, (name.removeprefix("--").replace("-", "_"), "{}"))
    if not name.startswith("-") or key not in overrides.known_keys():
        return None
    return ["--set", f"{key}={form.format(value or 'VALUE')}"]


_READERS = (
    *("argparse", "optparse", "getopt", "click", "typer", "fire", "absl", "hydra", "docopt", "tyro", "jsonargparse"),
    *("simple_parsing", "tap", "omegaconf", "lightning", "pytorch_lightning", "transformers", "accelerate", "runpy"),
)


def reads_arguments(script: Path, root: Path) -> bool:
    """Whether `script`, or a module of its own, may read the arguments after it on the command line."""
    any_tree = False
    for tree in script_imports.trees(script, root):
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
    for tree in script_imports.trees(script, root):
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named |= {word.strip("\"',;:.()[]`=").partition("=")[0] for word in node.value.split()}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                named.add(f"--{node.target.id}")  # a field of arguments that are a dataclass
            elif isinstance(node, ast.arg):
                named.add(f"--{node.arg}")  # click, typer and fire make options of a function's arguments
    named |= {name.replace("_", "-") for name in named}
    return [name for name in found if name not in named]
