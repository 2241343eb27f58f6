"""Options of `manyhosts run` that are not its own: torchrun's, and others that people type.

torchrun's are read as ours where they mean the same. Those that say how processes find each other are left out; those
that make sense only where a command is typed on every host are answered with the line to type once.

An option of ours after the script is the script's own, if the script knows it. Otherwise it would be ignored, and
the run would have another size than was asked for: that is refused.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from manyhosts.config import metrics_port, overrides, profile
from manyhosts.config.metrics_port import MetricsPort
from manyhosts.config.profile import ProfileRequest
from manyhosts.errors import ConfigError
from manyhosts.launchers import script_imports, scripts

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
    own, used = _in_our_words(theirs, ours, rest, elsewhere=elsewhere)
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


def _in_our_words(
    theirs: dict[str, str], ours: Sequence[str], rest: Sequence[str], *, elsewhere: bool
) -> tuple[list[str], list[str]]:
    """Our options for those of torchrun's that ask for something, and the names of these."""
    words: list[str] = []
    each = theirs.get("--nproc-per-node", "")
    count = str(os.cpu_count() or 1) if each == "cpu" else "" if each in ("gpu", "auto") else each
    nodes = theirs.get("--nnodes", "1")
    for name, own in (("--max-restarts", "--restarts"), ("--local-ranks-filter", "--show")):
        words += [own, theirs[name]] if name in theirs else []
    if not elsewhere and (nodes not in ("1", "1:1") or theirs.get("--node-rank", "0") != "0"):
        most = nodes.rpartition(":")[2]
        hosts = ",".join(f"HOST{number}" for number in range(1, 1 + (int(most) if most.isdecimal() else 2)))
        line = ["manyhosts", "run", "--hosts", hosts, *(["--workers-per-node", count] if count else [])]
        line += [*words, *ours, *rest]
        raise ConfigError(
            "torchrun is started on every host, and manyhosts once, by one who can reach them all",
            where=f"--nnodes {nodes}",
            fix=f"type on one machine: {shlex.join(line)}; `--on slurm` and other targets: `manyhosts run --help`",
        )
    if elsewhere and "--nnodes" in theirs:
        words += ["--nodes", nodes]
    if count:
        words += ["--workers-per-node" if elsewhere else "--workers", count]
    return words, ["--nproc-per-node", "--nnodes", "--node-rank", "--max-restarts", "--local-ranks-filter"]


_WORKERS = ("--gpus", "--gpu", "--num-gpus", "--ngpus", "--ngpu", "--nproc", "--np", "--num-processes", "--num-procs")
_OURS = {
    **dict.fromkeys((*_WORKERS, "--num-workers", "--devices", "--ntasks", "--processes"), "--workers"),
    **dict.fromkeys(("-n", "-np", "-g", "-w"), "--workers"),
    **dict.fromkeys(("--num-nodes", "--num-machines", "--machines", "-N"), "--nodes"),
    **dict.fromkeys(("--host", "--host-list", "-H"), "--hosts"),
    **dict.fromkeys(("--output", "--output-dir", "--out", "--dir", "--save-dir", "-d"), "--run-dir"),
}
_GPUS = ("--gpus", "--gpu", "--gpu-ids", "--devices", "-g")
_LISTED = re.compile(r"\d+(,\d+)+,?")
"""GPUs by their numbers."""
_SETTINGS_FILE = ("--config", "--config-file", "--config-name", "-c")
_RESUMED = ("--resume-from-checkpoint", "--resume-from", "--ckpt-path", "--ckpt", "--checkpoint", "--load")
"""Elsewhere they name a file; here a run directory that holds snapshots is resumed."""
_SETTINGS = {
    **dict.fromkeys(("--epochs", "--epoch", "--max-epochs", "--num-epochs", "-e"), ("duration", "{} epochs")),
    **dict.fromkeys(("--steps", "--max-steps", "--iterations"), ("duration", "{} steps")),
    **dict.fromkeys(("--batch", "--bs", "-b"), ("batch_size", "{}")),
    **dict.fromkeys(("--learning-rate",), ("lr", "{}")),
    **dict.fromkeys(("--mixed-precision", "--amp", "--dtype"), ("precision", "{}")),
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
        if name == "--resume" and (named := value or "".join(ours[place + 1 : place + 2])) not in ("", "last"):
            is_run = not named.startswith("-") and (os.sep in named or Path(named).is_dir())
            last = ["--resume", "last", *([named] if named.endswith(".py") or named.startswith("-") else [])]
            others = [
                *ours[:place],
                *(["--run-dir", named] if is_run else last),
                *ours[place + (1 if sign else 2) :],
                *rest,
            ]
            raise ConfigError(
                f"--resume takes `last`, and {named!r} comes after it",
                where=f"--resume {named}",
                fix=f"type: {shlex.join(['manyhosts', 'run', *others])}",
            )
        name = name.replace("_", "-") if name.startswith("--") else name
        if not word.startswith("-") or name in known:
            continue
        # What follows an unknown option was read as the script, or as its arguments.
        after = [*ours[place + 1 :], *rest]
        takes = not sign and bool(after) and not after[0].startswith("-") and not after[0].endswith(".py")
        value = value if sign else after[0] if takes else ""
        if (meant := _meant(name, value)) is None:
            continue
        left = after[1:] if takes else after
        elsewhere = any(each.partition("=")[0] in _SEVERAL_HOSTS for each in [*ours, *left])
        meant = ["--workers-per-node", meant[1]] if elsewhere and meant[0] == "--workers" else meant
        given = _given(meant, [*ours[:place], *left])
        others = [*ours[:place], *([] if given else meant), *left]
        own = name in _GPUS and not elsewhere and _LISTED.fullmatch(value)
        chosen = f"CUDA_VISIBLE_DEVICES={value.strip(',')} " if own else ""
        fix = (
            f"{f'{given} is given already; ' if given else ''}type: {chosen}{shlex.join(['manyhosts', 'run', *others])}"
        )
        raise ConfigError(f"`run` has no option {name}", where=shlex.join([name, value] if value else [name]), fix=fix)


def _given(meant: Sequence[str], words: Sequence[str]) -> str:
    """What was typed for the option or setting of `meant`, among the other `words`; empty where nothing was."""
    option, key = meant[0], f"{meant[1].partition('=')[0]}="
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word.partition("=")[0] == option and (option != "--set" or after.startswith(key)):
            return shlex.join([word] if "=" in word else [word, after])
    return ""


def _meant(name: str, value: str) -> list[str] | None:
    """Our words for option `name`; None where it is not known what was meant."""
    if name in _GPUS and _LISTED.fullmatch(value):
        return ["--workers", str(len(value.strip(",").split(",")))]
    number = {"--workers": r"[1-9]\d*", "--nodes": r"[1-9]\d*(:\d+)?"}.get(_OURS.get(name, ""), "")
    if number and not re.fullmatch(number, value):
        return [_OURS[name], "N"]
    if name in _OURS:
        return [_OURS[name], value or "N"]
    if name in _RESUMED:
        return ["--run-dir", "RUN"]
    if name in _SETTINGS_FILE and value.endswith((".yaml", ".yml")):
        if workers := _of_accelerate(Path(value)):
            return ["--workers", workers]
        return ["--set", value]
    key, form = _SETTINGS.get(name, (name.removeprefix("--").replace("-", "_"), "{}"))
    if not name.startswith("-") or key not in overrides.known_keys():
        return None
    alone = "true" if dict(overrides.table()).get(key) in ("true", "false") else "VALUE"
    return ["--set", f"{key}={form.format(overrides.in_our_words(key, value) or alone)}"]


def _of_accelerate(path: Path) -> str:
    """How many processes a configuration of Accelerate asks for; empty for another file."""
    try:
        text = path.read_text()
    except (OSError, ValueError):
        return ""
    found = re.search(r"^num_processes: *(\d+)", text, re.MULTILINE)
    return (found[1] if found else "1") if "compute_environment:" in text else ""


def see_arguments(script: str, arguments: Sequence[str], kind: scripts.Kind = "script") -> None:
    """Warn of what comes after the script, and so is the script's, where it reads none or the verb has such options.

    Raises:
        ConfigError: one is an option of the verb, and the script does not know it.
    """
    context = click.get_current_context()
    typed, verb = context.find_object(list) or [], str(context.info_name)
    if not arguments or (script in typed and "--" in typed[: typed.index(script)]):
        return  # what comes after `--` is the script's, says who types it
    options_of = [each for each in context.command.params if isinstance(each, click.Option)]
    ours = {word for option in options_of for word in option.opts if len(word) > 2} - {"--trace"}
    found = [word for argument in arguments if (word := argument.partition("=")[0]) in ours]
    path = scripts.file_of(script, kind)
    root = Path() if kind == "module" else path.parent
    is_readable = kind != "executable" and path.is_file()
    if found and is_readable and (unread := script_imports.unread(found, ours, path, root)):
        place = len(typed) - len(arguments) - 1
        before = typed[1:place] if typed[place : place + 1] == [script] else []
        before += ["-m"] if kind == "module" and not {"-m", "--module"} & set(before) else []
        moved, stay = _parted(arguments, unread, {word for each in options_of if each.is_flag for word in each.opts})
        raise ConfigError(
            f"{unread[0]} comes after {script}, which does not know it; options of `{verb}` belong before it",
            where=shlex.join([script, *arguments]),
            fix=f"type: {shlex.join(['manyhosts', verb, *before, *moved, script, *stay])}; if it is for the script: "
            f"{shlex.join(['manyhosts', verb, *before, '--', script, *arguments])}",
        )
    text = ""
    if found:
        come, go = ("comes", "goes") if len(found) == 1 else ("come", "go")
        text = f"{', '.join(found)} {come} after {script} and so {go} to it; options of `{verb}` belong before it"
    elif is_readable and scripts.uses_manyhosts(script, kind) and not script_imports.reads_arguments(path, root):
        text = f"{script} does not read its arguments, so {shlex.join(arguments)} has no effect; settings are changed "
        text += "before the script, as in --set lr=0.01 (manyhosts run --set help lists them)"
    if text:
        print(f"manyhosts: {text}", file=sys.stderr, flush=True)


def _parted(arguments: Sequence[str], names: Collection[str], flags: Collection[str]) -> tuple[list[str], list[str]]:
    """Of a script's arguments the options with these names, each with its value, and the others."""
    moved: list[str] = []
    stay: list[str] = []
    left = list(arguments)
    while left:
        word = left.pop(0)
        (moved if word.partition("=")[0] in names else stay).append(word)
        if word in names and word not in flags and left:
            moved.append(left.pop(0))
    return moved, stay


OPTION_OF = {profile.VARIABLE: "--profile", metrics_port.VARIABLE: "--metrics-port"}
"""The option for each variable."""
_OPTIONS = (
    click.option(
        "--profile",
        metavar='"N steps"',
        help="Keep a trace of so many steps of rank 0, and what it says, in DIR/profile; 20 steps@0,3: of these ranks.",
    ),
    click.option(
        "--metrics-port",
        metavar="PORT",
        help="Serve metrics for Prometheus on rank 0's host, to that host alone; 0.0.0.0:PORT: to every host.",
    ),
)


def measuring_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add them to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def environment(steps: str | None, port: str | None) -> dict[str, str]:
    """The variables that carry them to the workers: the words of `--profile` and `--metrics-port`, None if not given.

    Raises:
        ConfigError: one cannot be read.
    """
    return {
        **({} if steps is None else ProfileRequest.parse(steps).to_environment()),
        **({} if port is None else MetricsPort.parse(port).to_environment()),
    }
