"""Tracebacks as their reader needs them: the user's frames, without ours and without C++."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from manyhosts import own_frames
from manyhosts.errors import plain_lines

_OURS = (str(Path(__file__).parent), "<frozen runpy>", "<frozen importlib._bootstrap>")
_NOTICES = re.compile(r"^\[W\S* .*\] \[c10d\] The hostname of the client socket cannot be retrieved\.")
"""Notices of torch about its own state that need no action: hosts need no names that can be looked up in reverse."""
_TRACEBACK = "Traceback (most recent call last):"
_PYTHON_BELOW_CPP = re.compile(r"\n\s*At:(\n {2}.*)+\s*\Z")
"""What pybind11 adds to an error that it passes on: where Python was, again."""
_LONGEST_SUMMARY = 400
_GAP = " … "
_NATIVE = re.compile(
    r"^\s*(frame #\d+: .*|Exception raised from .*\(most recent call first\):|C\+\+ CapturedTraceback:"
    r"|#\d+ .* from .*:\d+"
    r'|Extension modules: .*|File ".*/manyhosts/control/.*", line \d+ in .*|File "<string>", line 1 in <module>)$'
)
"""Of C++, and of what Python writes when C++ has ended it: there no frame has a comma after its line."""
_GAVE_UP = "terminate called after throwing an instance of "
_EXCHANGES = ("gloo", "c10d", "nccl")


def text(error: BaseException) -> str:
    """The traceback of `error` and of the errors that caused it, as Python prints them."""
    reported = traceback.TracebackException.from_exception(error)
    _strip(reported)
    return without_native_frames("".join(reported.format()).rstrip())


def brief(error: BaseException) -> str:
    """As `text`, with one line for the calls in manyhosts: what the terminal shows."""
    reported = traceback.TracebackException.from_exception(error)
    _strip(reported)
    return without_native_frames(own_frames.brief(reported, others="this worker's log has them"))


def summary(error: BaseException) -> str:
    """`ValueError: what it says`, in one line of at most some hundred characters.

    Of an error that quotes the traceback of another process, the first words and those of that process's error.
    """
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    said = " ".join(plain_lines(without_native_frames(_without_frames(str(error)))))
    if len(said) > _LONGEST_SUMMARY:
        half = (_LONGEST_SUMMARY - len(_GAP)) // 2
        said = f"{said[:half]}{_GAP}{said[-half:]}"
    return f"{name}: {said}" if said else name


def _without_frames(said: str) -> str:
    """What an error says without the frames of a traceback that it quotes: the words before, and the last error's."""
    begin, mark, quoted = _PYTHON_BELOW_CPP.sub("", said).partition(_TRACEBACK)
    if not mark:
        return said
    rest = quoted.rpartition(_TRACEBACK)[2] or quoted
    lines = rest.splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  ")]
    error = lines[frames[-1] + 1 :] if frames else lines
    return "\n".join([begin.rstrip().removesuffix("Original").rstrip(), *error])


def without_native_frames(text: str) -> str:
    """`text` without the lines in which C++ says where it was."""
    return "\n".join(line for line in text.splitlines() if not is_native_frame(line))


def may_hold_noise(text: str) -> bool:
    """Whether lines of `text` may be native frames or idle notices: at once for many lines."""
    signs = ("#", "[W", "raised from", "CapturedTraceback", ", line ", "Extension modules")
    return any(sign in text for sign in signs)


def what_gave_up(text: str) -> str:
    """What C++ gave up on, where `text` begins to say so: a sentence to put before its own words; else empty."""
    if _GAVE_UP not in text:
        return ""
    kind = text.partition(_GAVE_UP)[2].partition("\n")[0].lower()
    what = "an exchange between the workers failed" if any(word in kind for word in _EXCHANGES) else "C++ code failed"
    return f"{what}, and ended the process; its own words come next, and at the end what helps"


def is_native_frame(line: str) -> bool:
    """Whether `line` is one of a C++ backtrace."""
    return _NATIVE.match(line) is not None


def is_idle_notice(line: str) -> bool:
    """Whether `line` reports nothing that needs action."""
    return _NOTICES.match(line) is not None


def _strip(reported: traceback.TracebackException | None) -> None:
    if reported is None:
        return
    reported.stack[:] = [frame for frame in reported.stack if not frame.filename.startswith(_OURS)]
    _strip(reported.__cause__)
    _strip(reported.__context__)
    for inner in getattr(reported, "exceptions", None) or ():
        _strip(inner)
