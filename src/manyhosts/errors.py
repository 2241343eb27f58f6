"""The errors that manyhosts raises on purpose.

ManyhostsError                exit code 1
├── ConfigError           2   a setting is missing, unknown or contradicts another
├── DataError             2   a dataset cannot be read, or is not the one that the run began with
├── SnapshotError         2   a snapshot is incomplete, damaged, too new, or of another model
├── TrainingError         1   the numbers went wrong: a loss that is NaN or infinite
├── ScriptError           1   the user's script failed on some worker
├── LaunchError           3   a host or a scheduler could not be reached, or refused
└── CommunicationError    4   a collective failed or ran past its time
    └── RankLost          4   a worker or its host went away
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, ClassVar

TRACE = "MANYHOSTS_TRACE"
"""If set in the environment, a traceback has all calls in manyhosts, also that of an error raised on purpose."""


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_IN_CPP = re.compile(r"\[/\S*\.(?:cc|cpp|cu|h|hpp):\d+\]")
"""Where in its source a library below PyTorch was, as Gloo and NCCL begin their messages with."""


class ManyhostsError(Exception):
    """Base of every error raised on purpose.

    `what` states the fact with its values, `where` names the key, file, host or rank,
    `fix` is the next thing the reader can do, `go_on` the command that resumes a run. Each has a line of its own.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.fix = what, where, fix
        self.go_on = ""
        """The command that resumes the run that this has ended, where there is one."""

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        if self.go_on:
            lines.append(f"  resume: {self.go_on}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process borders by pickle, and pickle drops keyword-only arguments.
        return (_rebuild, (type(self), self.what, self.where, self.fix))


def _rebuild(kind: type[ManyhostsError], what: str, where: str, fix: str) -> ManyhostsError:
    return kind(what, where=where, fix=fix)


class ConfigError(ManyhostsError):
    """A setting is missing, unknown or contradicts another."""

    exit_code = 2


class DataError(ManyhostsError):
    """A dataset cannot be read, or is not the one that the run began with."""

    exit_code = 2


class SnapshotError(ManyhostsError):
    """A snapshot is incomplete, damaged, too new, or of another model."""

    exit_code = 2


class TrainingError(ManyhostsError):
    """The numbers went wrong: a loss that is NaN or infinite."""


class ScriptError(ManyhostsError):
    """The user's script failed on some worker."""


class LaunchError(ManyhostsError):
    """A host or a scheduler could not be reached, or refused."""

    exit_code = 3


class CommunicationError(ManyhostsError):
    """A collective failed or ran past its time."""

    exit_code = 4


class RankLost(CommunicationError):
    """A worker or its host went away."""


def check_run(found: object, *, what: str, where: str) -> None:
    """See that a function of the script's was run: one with `yield` or `async` in it, when called, gives what would.

    `found`: what it gave.

    Raises:
        ConfigError: not one line of it was run.
    """
    if isinstance(found, Generator | Coroutine | AsyncGenerator):
        if isinstance(found, Coroutine):
            found.close()  # Python would warn of it, too
        raise ConfigError(
            f"{what} gives a {type(found).__name__} when it is called, and not one line of it is run",
            where=where,
            fix="leave out yield, async and await: it is called as a plain function",
        )


def first_line(error: BaseException) -> str:
    """What an error says, in one line, without the C++ frames and file names of the libraries below PyTorch."""
    return next(iter(plain_lines(str(error))), type(error).__name__)


def plain_lines(said: str) -> list[str]:
    """The lines of what an error says that are not empty, without the file names of libraries below PyTorch."""
    lines = (_IN_CPP.sub("", _COLOURS.sub("", line)).strip() for line in said.splitlines())
    return [line for line in lines if line]


def speak_plainly(
    explain: Callable[[BaseException], ManyhostsError | None] | None = None,
    traceback_of: Callable[[BaseException], str] | None = None,
) -> None:
    """Have a script that was not launched end with an error of ours as `manyhosts run` would: sentence, exit code.

    `explain` gives the sentence for an error of somebody else's, or None. Errors without one are shown as
    `traceback_of` writes them, and all of them as before where `MANYHOSTS_TRACE` is set or somebody types line by line.
    Safe to call twice.
    """
    before = sys.excepthook
    if getattr(before, "__module__", "") == __name__ or hasattr(sys, "ps1") or sys.flags.interactive:
        return

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        reported = error if isinstance(error, ManyhostsError) or explain is None else explain(error)
        if os.environ.get(TRACE):
            before(kind, error, trace)
            return
        if not isinstance(reported, ManyhostsError):
            if traceback_of is None or before is not sys.__excepthook__:
                before(kind, error, trace)
            else:
                sys.stderr.write(f"{traceback_of(error)}\n")
            return
        sys.stderr.write(f"manyhosts: {reported}\n")
        raise SystemExit(reported.exit_code)  # the one way to an exit code from here

    sys.excepthook = show
