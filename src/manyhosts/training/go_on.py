"""How a run that nobody launched is gone on with: the command for it, said at an end that is no success."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from manyhosts.errors import ManyhostsError
from manyhosts.records.run_directory import VARIABLE


def command(run_dir: Path | None) -> str:
    """What the user types to go on. `run_dir`: None where the script names its own."""
    words = shlex.join(sys.orig_argv)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        words = "(the command that has started this)"
    if run_dir is None:
        return words
    here = Path.cwd()
    short = run_dir.relative_to(here) if run_dir.is_relative_to(here) else run_dir
    return f"{VARIABLE}={shlex.quote(str(short))} {words}"


def add_to(error: BaseException, text: str) -> None:
    """Have `error` tell the command, wherever it is printed."""
    if not text or (isinstance(error, ManyhostsError) and error.exit_code == 2):
        return
    if isinstance(error, ManyhostsError):
        error.go_on = text
    else:
        error.add_note(f"manyhosts: go on with: {text}")
