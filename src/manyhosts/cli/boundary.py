"""Errors at the border of the command line: what, where and fix on stderr, and an exit code."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from pathlib import Path

import click
from click.types import IntParamType

from manyhosts.control.screen import say_last
from manyhosts.errors import ManyhostsError
from manyhosts.records import plain_text

_HELP: type[click.ClickException] | tuple[()] = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""What click 8.2 and newer raise for `manyhosts snapshots`, which lacks its verb; older ones print the help."""


def exit_code_of(error: BaseException, *, trace: bool = False, verb: str = "") -> int:
    """Print `error` for a person and return the exit code that it stands for. `trace` shows where it was raised.

    `verb`: what was asked for, where the error does not say it itself.

    Raises:
        BaseException: `error` itself, where it is none that was raised on purpose: a fault of ours, to be seen whole.
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
        _print("manyhosts", what or error.format_message(), _fix(error, verb))
        return 2
    if not isinstance(error, ManyhostsError):
        raise error
    if trace:
        traceback.print_exception(error)
    say_last(
        sys.stderr, f"manyhosts: {plain_text.lines(str(error))}\n"
    )  # a terminal that is stopped cannot hold the end up
    return error.exit_code


def let_go_of_closed_streams() -> None:
    """Keep Python from failing at its end for words that nobody reads any more, as after `| head`."""
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


def _fix(error: click.ClickException, verb: str) -> str:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else f"manyhosts {verb}".strip()
    lists = f"`{path} --help` lists what it takes"
    if isinstance(error, click.NoSuchOption):
        from manyhosts.table import nearest

        return nearest(error.option_name, error.possibilities or ()) + lists
    parameter = getattr(error, "param", None)
    if isinstance(error, click.MissingParameter) and isinstance(parameter, click.Argument):
        if parameter.name == "script":
            here = ", ".join(sorted(each.name for each in Path().glob("*.py"))[:5])
            found = f"in this folder: {here}" if here else "`manyhosts init` writes one that runs"
            return f"name the script, as in `{path} train.py`; {found}"
        if (parameter.metavar or "").startswith("RUN"):
            return f"name a run: `{path} last` takes the one begun last, and `manyhosts runs` lists them"
    if isinstance(error, click.BadParameter) and isinstance(getattr(parameter, "type", None), IntParamType):
        return f"give a whole number, such as 2; {lists}"
    return lists
