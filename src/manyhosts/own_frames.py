"""Tracebacks in which the calls in manyhosts take one line: what the script did is read first."""

from __future__ import annotations

import os
import re
import traceback
from itertools import groupby

from manyhosts.errors import TRACE

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_DECORATORS = os.path.join("torch", "utils", "_contextlib.py")
"""Of PyTorch: what stands around functions of ours that run without gradients."""
_FOLDED = "<manyhosts>"
_LINE = re.compile(rf'^(.*)File "{_FOLDED}", line (\d+), in (.*)$', re.MULTILINE)


def brief(reported: traceback.TracebackException, *, others: str) -> str:
    """`reported` as Python prints it, with one line for the calls in manyhosts between two lines of other code.

    The calls in which an error was raised are shown, and all where `MANYHOSTS_TRACE` is set. `others`: what shows the
    rest. Changes `reported`.
    """
    if not os.environ.get(TRACE):
        _fold(reported)
    text = "".join(reported.format()).rstrip()
    return _LINE.sub(lambda found: f"{found[1]}… {found[2]} calls in manyhosts; {others}", text)


def of_script(error: BaseException) -> str:
    """The brief traceback of an error that ends a script which was not launched."""
    return brief(traceback.TracebackException.from_exception(error), others=f"{TRACE}=1 shows them")


def _fold(reported: traceback.TracebackException | None) -> None:
    if reported is None:
        return
    shown: list[traceback.FrameSummary] = []
    rows = [(ours, list(row)) for ours, row in groupby(reported.stack, key=_is_ours)]
    for number, (ours, row) in enumerate(rows, 1):
        is_between = ours and number < len(rows) and len(row) > 1
        shown += [traceback.FrameSummary(_FOLDED, len(row), "", lookup_line=False, line="")] if is_between else row
    reported.stack[:] = shown
    for other in (reported.__cause__, reported.__context__, *(getattr(reported, "exceptions", None) or ())):
        _fold(other)


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_PACKAGE) or frame.filename.endswith(_DECORATORS)
