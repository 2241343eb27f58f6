"""`manyhosts`: the verbs, each loaded when used. Errors become what, where and fix on stderr, and an exit code."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import click
from click.types import IntParamType

from manyhosts import __version__
from manyhosts.control.screen import say_last
from manyhosts.errors import ManyhostsError
from manyhosts.records import plain_text

_HELP: type[click.ClickException] | tuple[()] = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""What click 8.2 and newer raise for `manyhosts snapshots`, which lacks its verb; older ones print the help."""


def exit_code_of(error: BaseException, *, trace: bool = False, verb: str = "") -> int:
    """Print `error` for a person and return its exit code. `trace` shows where it was raised.

    `verb`: what was asked for, where the error does not say it itself.

    Raises:
        BaseException: `error` itself, if it was not raised on purpose: a bug of ours, shown with its traceback.
    """
    if isinstance(error, click.exceptions.Exit):
        return int(error.exit_code)
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return 130
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, _HELP):
        print(error.format_message(), file=sys.stderr, flush=True)
        return 2
    if isinstance(error, click.ClickException):
        what = f"No such option '{error.option_name}'." if isinstance(error, click.NoSuchOption) else ""
        # Click lists choices with a line for each
        _print("manyhosts", what or " ".join(error.format_message().split()), _fix(error, verb))
        return 2
    if isinstance(error, OSError) and error.errno in _OF_A_PLACE and error.filename and not trace:
        what = f"{_short(str(error.filename))} cannot be used: {error.strerror}"
        _print(
            "manyhosts", what, "see who may read and write there, or name another place; --trace shows what was done"
        )
        return 2
    if not isinstance(error, ManyhostsError):
        raise error
    if trace:
        traceback.print_exception(error)
    # A terminal that is stopped cannot hold the end up
    say_last(sys.stderr, f"manyhosts: {plain_text.lines(str(error))}\n")
    return error.exit_code


_OF_A_PLACE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOSPC, errno.EDQUOT),
    *(errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
)
"""What the system says of a file that somebody has named, or of the disk that it is on."""


def _short(path: str) -> str:
    return path if len(path) <= 200 else f"{path[:90]}…{path[-90:]}"


def let_go_of_closed_streams() -> None:
    """Keep Python from failing at its end when its output is closed, as after `| head`."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


def _print(name: str, what: str, fix: str) -> None:
    print(f"{name}: {what}\n  fix:   {fix}", file=sys.stderr, flush=True)


_PLACES = {
    "manyhosts": "; options go after the verb, as in `manyhosts run --workers 2 train.py`",
    "manyhosts run": "; options of the script itself go after it",
}
"""Where an option belongs that a command does not know."""


def _fix(error: click.ClickException, verb: str) -> str:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else f"manyhosts {verb}".strip()
    lists = f"`{path} --help` lists what it takes"
    if isinstance(error, click.NoSuchOption):
        from manyhosts.table import nearest

        # Two dashes make any two short words alike.
        typed = error.option_name.strip("-")
        near = [each for each in error.possibilities or () if nearest(each.strip("-"), [typed])]
        return f"{_with_two_dashes(error) or nearest(error.option_name, near)}{lists}{_PLACES.get(path, '')}"
    parameter = getattr(error, "param", None)
    if isinstance(error, click.MissingParameter) and isinstance(parameter, click.Argument):
        if parameter.name == "script":
            here = ", ".join(sorted(each.name for each in Path().glob("*.py"))[:5])
            found = f"in this folder: {here}" if here else "`manyhosts init` writes one that runs"
            return f"name the script, as in `{path} train.py`; {found}"
        if (parameter.metavar or "").startswith("RUN"):
            return f"name a run: `{path} last` takes the one begun last, and `manyhosts runs` lists them"
    kind = getattr(parameter, "type", None)
    if isinstance(error, click.BadParameter) and isinstance(kind, click.IntRange | click.FloatRange):
        ends = (f"from {kind.min}" if kind.min is not None else "", f"to {kind.max}" if kind.max is not None else "")
        return f"give a number {' '.join(filter(None, ends))}; {lists}"
    if isinstance(error, click.BadParameter) and isinstance(kind, IntParamType):
        return f"give an integer, such as 2; {lists}"
    return lists


def _with_two_dashes(error: click.NoSuchOption) -> str:
    """For `-workers`, of which click has read `-w`: the option that is meant; empty where there is none."""
    context = error.ctx
    words = context.find_object(list) if context is not None else None
    known = {name for each in context.command.params for name in each.opts} if context is not None else set()
    meant = (f"-{word}" for word in words or () if word.startswith(error.option_name))
    return next((f"did you mean {word.partition('=')[0]!r}? " for word in meant if word.partition("=")[0] in known), "")


VERBS = {
    "run": ("manyhosts.cli.run:run", "Start a script on one or many workers: any script that runs under torchrun."),
    "join": ("manyhosts.cli.join:join", "Add this machine to a run that was started on another one."),
    "prove": ("manyhosts.cli.prove:prove", "Try the promises on a script: which hold, and why one does not."),
    "plan": (
        "manyhosts.cli.plan:plan",
        "What a script would take on more workers or other machines, before it is run.",
    ),
    "study": ("manyhosts.cli.study:study", "Run a script at several sizes: what each gained, and why no more."),
    "runs": ("manyhosts.cli.runs:runs", "What runs there are: state, time spent, best value."),
    "tune": ("manyhosts.cli.tune:tune", "Search settings and flags of a script, within a budget."),
    "report": ("manyhosts.cli.report:report", "One HTML page of a run, a study or several runs, for any browser."),
    "watch": ("manyhosts.cli.watch:watch", "A run or a study while it continues, in the terminal or as a page."),
    "analyse": ("manyhosts.cli.analyse:analyse", "The best model on held-out data, with intervals; two runs compared."),
    "reproduce": (
        "manyhosts.cli.reproduce:reproduce",
        "A run again from its record: the same weights, or what differs.",
    ),
    "doctor": ("manyhosts.cli.doctor:doctor", "What is wrong with hosts and between them, and what mends it."),
    "env": ("manyhosts.cli.doctor:env", "What hosts have installed, recorded and compared; recipes of containers."),
    "status": ("manyhosts.cli.jobs:status", "The state of a run."),
    "logs": ("manyhosts.cli.jobs:logs", "What a run has printed."),
    "cancel": ("manyhosts.cli.jobs:cancel", "End a run as Ctrl-C does, from any terminal."),
    "snapshots": ("manyhosts.cli.snapshots:snapshots", "What a run can be resumed from, and whether it is complete."),
    "export": ("manyhosts.cli.export:export", "A trained model in a format to use elsewhere, verified."),
    "serve": ("manyhosts.cli.serve:serve", "Serve a trained model over HTTP."),
    "deploy": ("manyhosts.cli.deploy:deploy", "Write what serves an export in a container or on a cluster."),
    "lab": ("manyhosts.cli.lab:lab", "A practice cluster on this Linux machine: real hosts, cables to cut."),
    "init": ("manyhosts.cli.init:init", "Write a train.py that runs."),
}
"""Verb → where its command is, and its line in the overview: `--help` loads none of them."""


_ELSEWHERE = {
    **dict.fromkeys(("train", "launch", "start", "torchrun", "exec"), "manyhosts run train.py"),
    **dict.fromkeys(("resume", "continue"), "manyhosts run --resume last SCRIPT, or --run-dir RUN"),
    **dict.fromkeys(("stop", "kill", "abort"), "manyhosts cancel RUN"),
    **dict.fromkeys(("ls", "list", "ps", "history"), "manyhosts runs"),
    **dict.fromkeys(("compare", "test", "eval", "evaluate"), "manyhosts analyse RUN"),
    **dict.fromkeys(("bench", "benchmark", "scale", "profile"), "manyhosts study train.py"),
    **dict.fromkeys(("dashboard", "ui", "board"), "manyhosts watch --web RUN"),
    **dict.fromkeys(("finetune", "fine-tune"), 'mh.Trainer(init_from="runs/first") in a script'),
}
"""What is no verb here, and what does it."""


class _Verbs(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module, _, attribute = VERBS[cmd_name][0].partition(":")
        return cast(click.Command, getattr(importlib.import_module(module), attribute))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS:
            from manyhosts.errors import ConfigError
            from manyhosts.table import nearest

            if args[0].endswith(".py"):
                raise ConfigError(f"{args[0]} is a script, and no verb", fix=f"write manyhosts run {shlex.join(args)}")
            script = next((word for word in args[1:] if word.endswith(".py")), None)
            does = _ELSEWHERE.get(args[0], "")
            if does and not (script and does.startswith("manyhosts run")):
                raise ConfigError(f"there is no verb {args[0]!r}", fix=f"{does}; all verbs: manyhosts --help")
            if script:
                what = f"there is no verb {args[0]!r}"
                fix = f"to train {script}: manyhosts run {shlex.quote(script)}; all verbs: manyhosts --help"
                raise ConfigError(what, fix=fix)
            raise click.UsageError(f"there is no verb {args[0]!r}. {nearest(args[0], VERBS)}known: {', '.join(VERBS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, line) for verb, (_, line) in VERBS.items()])


@click.group(
    cls=_Verbs,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="manyhosts")
@click.pass_context
def cli(context: click.Context) -> None:
    """Train a PyTorch model on as many ordinary machines as there are.

    Exit codes: 0 done, 1 the script failed, 2 the request was wrong, 3 a host or scheduler refused,
    4 communication failed or hung, 130 interrupted.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(words: Sequence[str] | None = None) -> int:
    """Run one verb. Returns the exit code; errors have been printed."""
    words = list(sys.argv[1:] if words is None else words)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if words[1:] == ["help"] and words[0] in VERBS:
        words = [words[0], "--help"]
    if words == ["version"]:
        words = ["--version"]
    try:
        result = cli.main(words, prog_name="manyhosts", standalone_mode=False, obj=words)
    except BaseException as error:
        return exit_code_of(error, trace="--trace" in words, verb=next((word for word in words if word in VERBS), ""))
    finally:
        let_go_of_closed_streams()
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main())
