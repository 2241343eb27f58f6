"""The options of torchrun, as they are typed in thousands of scripts: read as ours where they mean the same.

Those that say how processes find each other are left out, since nothing needs to be said. Those that make sense only
where a command is typed on every host are answered with the line to type once.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from manyhosts.errors import ConfigError

_WITH_VALUE = (
    *("--nnodes", "--nproc-per-node", "--node-rank", "--max-restarts", "--local-ranks-filter"),
    *(
        "--rdzv-backend",
        "--rdzv-endpoint",
        "--rdzv-id",
        "--rdzv-conf",
        "--master-addr",
        "--master-port",
        "--local-addr",
    ),
    *("--monitor-interval", "--start-method", "--role", "--log-dir", "--redirects", "-r", "--tee", "-t"),
    *("--logs-specs", "--numa-binding", "--event-log-handler", "--shutdown-timeout", "--signals-to-handle"),
)
_WITHOUT_VALUE = ("--standalone", "--run-path", "--use-env", "--virtual-local-rank")
_SEVERAL_HOSTS = ("--hosts", "--hostfile", "--nodes", "--on", "--cluster")
"""With one of ours among the words, the run is not of this machine alone."""


@dataclass(frozen=True, slots=True)
class Translation:
    """What was typed, in our words."""

    words: list[str]
    left_out: list[str] = field(default_factory=list)
    """torchrun's options that need not be said."""
    is_other: bool = False
    """Whether it differs from what was typed."""


def translate(typed: Sequence[str], flags: Collection[str], with_value: Collection[str]) -> Translation:
    """Read the words after `manyhosts run`; `flags` and `with_value` are the options that it has itself.

    Raises:
        ConfigError: they are meant to be typed on every host, or two of them are glued together.
    """
    ours, theirs, rest = _sorted_out(typed, flags, with_value)
    if not theirs:
        return Translation([*ours, *rest], is_other=[*ours, *rest] != list(typed))
    for name, value in theirs.items():
        if "--" in value:
            what = f"{value!r} holds a value and the next option, without a space between them"
            raise ConfigError(what, where=name, fix=f"write {name}={value.replace('--', ' --', 1)}")
    elsewhere = any(word.partition("=")[0] in _SEVERAL_HOSTS for word in ours)
    own, used = _in_our_words(theirs, rest, elsewhere=elsewhere)
    return Translation([*ours, *own, *rest], [name for name in theirs if name not in used], is_other=True)


def split(words: Sequence[str], with_value: Collection[str]) -> tuple[list[str], list[str]]:
    """The options before the script, with their values, and the script with the words after it."""
    left, ours = list(words), []
    while left and left[0].startswith("-") and left[0] not in ("-", "--"):
        ours.append(left.pop(0))
        if ours[-1] in with_value and left:
            ours.append(left.pop(0))
    return ours, left


def _sorted_out(
    typed: Sequence[str], flags: Collection[str], with_value: Collection[str]
) -> tuple[list[str], dict[str, str], list[str]]:
    """Our options, torchrun's with their values, and the script with the words after it."""
    ours: list[str] = []
    theirs: dict[str, str] = {}
    left = list(typed)
    while left and left[0].startswith("-") and left[0] != "--":
        word = left.pop(0)
        name, sign, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if name in with_value or name in flags:
            ours.append(f"{name}{sign}{value}")
            if name in with_value and not sign:
                ours += [left.pop(0)] if left else []
        elif name in _WITHOUT_VALUE:
            theirs[name] = ""
        elif name in _WITH_VALUE:
            theirs[name] = value if sign else left.pop(0) if left else ""
        else:
            ours.append(word)  # the parser says that there is no such option
    return ours, theirs, left


def _in_our_words(theirs: dict[str, str], rest: Sequence[str], *, elsewhere: bool) -> tuple[list[str], list[str]]:
    """Our options for those of torchrun's that ask for something, and the names of these."""
    words: list[str] = []
    each = theirs.get("--nproc-per-node", "")
    count = str(os.cpu_count() or 1) if each == "cpu" else "" if each in ("gpu", "auto") else each
    nodes = theirs.get("--nnodes", "1")
    if not elsewhere and (nodes not in ("1", "1:1") or theirs.get("--node-rank", "0") != "0"):
        most = nodes.rpartition(":")[2]
        hosts = ",".join(f"HOST{number}" for number in range(1, 1 + (int(most) if most.isdecimal() else 2)))
        line = ["manyhosts", "run", "--hosts", hosts, *(["--workers-per-node", count] if count else []), *rest]
        raise ConfigError(
            "torchrun is started on every host, and manyhosts once, by one who can reach them all",
            where=f"--nnodes {nodes}",
            fix=f"type on one machine: {shlex.join(line)}; `--on slurm` and other targets: `manyhosts run --help`",
        )
    if elsewhere and "--nnodes" in theirs:
        words += ["--nodes", nodes]
    if count:
        words += ["--workers-per-node" if elsewhere else "--workers", count]
    if "--max-restarts" in theirs:
        words += ["--restarts", theirs["--max-restarts"]]
    if "--local-ranks-filter" in theirs:
        words += ["--show", theirs["--local-ranks-filter"]]
    return words, ["--nproc-per-node", "--nnodes", "--node-rank", "--max-restarts", "--local-ranks-filter"]
