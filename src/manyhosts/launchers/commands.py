"""Asks an engine's own programs, and makes sentences of what they refuse."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence

from manyhosts.errors import LaunchError

Run = Callable[[Sequence[str]], str]
"""Runs a command and returns what it printed."""

_LIMIT_S = 60


def run_command(words: Sequence[str]) -> str:
    """Run `words` and return what they print.

    Raises:
        LaunchError: there is no such program, it refused, or it said nothing for a minute.
    """
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches this process alone, which knows what was asked
        )
    except FileNotFoundError as cause:
        raise LaunchError(
            f"there is no {words[0]} on this machine",
            where="PATH",
            fix="start this where that engine's programs are: on its login node, say",
        ) from cause
    except subprocess.TimeoutExpired as cause:
        raise LaunchError(
            f"{words[0]} did not answer within {_LIMIT_S} s", where=" ".join(words), fix="see whether the engine is up"
        ) from cause
    if done.returncode != 0:
        said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise LaunchError(
            f"{words[0]} refused: {said[-1] if said else f'exit code {done.returncode}'}",
            where=" ".join(words),
            fix=f"{words[0]} itself explains what it takes; what a run gives with -o goes to it",
        )
    return done.stdout
