"""Reads the Python stack of a worker that does not answer: is it waiting for the others, and where in the script?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_FRAME = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_THREAD = re.compile(r"^(?P<current>Current thread|Thread) 0x")
_LIBRARIES = re.compile(r"/lib/python3\.\d+/|/(site|dist)-packages/|/manyhosts/(\w+/)+\w+\.py$|^<")
"""Files that are not of the user, wherever a host has them."""

_EXCHANGES = (
    "/torch/distributed/",
    "/torch/nn/parallel/distributed.py",
    "/manyhosts/communication/",
    "/manyhosts/cluster/membership.py",
)
"""Whoever stands in one of these waits for other workers."""
_LOADERS = ("/torch/utils/data/", "/manyhosts/data/")
_BACKWARD = "_engine_run_backward"
"""The last Python frame of a backward pass: DistributedDataParallel exchanges gradients below it."""
_FOUNDATION = "/manyhosts/control/"
"""What starts the script and watches it: its frames are of no interest to anybody."""
_WRAPPERS = ("wrapper", "<lambda>", "wait")


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    @property
    def is_the_scripts(self) -> bool:
        """Whether it is neither ours nor of an installed package."""
        return _LIBRARIES.search(self.file) is None

    def __str__(self) -> str:
        where = f"{Path(self.file).name}:{self.line}"
        return where if self.function == "<module>" else f"{where} in {self.function}"


def parse(text: str) -> tuple[Frame, ...]:
    """What `faulthandler` has written of the thread that heard the signal, which is the main one; innermost first."""
    frames: list[Frame] = []
    listening = False
    for line in text.splitlines():
        if found := _THREAD.match(line):
            listening = found["current"] == "Current thread"
            if listening:
                frames = []
        elif listening and (found := _FRAME.match(line)):
            frames.append(Frame(found["file"], int(found["line"]), found["function"]))
    started = next((number for number, frame in enumerate(frames) if _starts_script(frame)), None)
    return tuple(frame for frame in frames[:started] if _FOUNDATION not in frame.file)


def _starts_script(frame: Frame) -> bool:
    """Whether what starts the script begins here; what watches it stands in the middle of the stack."""
    return _FOUNDATION in frame.file and frame.function in ("be", "_run_main")


def in_script(stack: Sequence[Frame]) -> Frame | None:
    """The innermost line of the user's own code; of any code where there is none of theirs."""
    return next((frame for frame in stack if frame.is_the_scripts), stack[0] if stack else None)


def exchange(stack: Sequence[Frame]) -> str:
    """In which exchange with the other workers a stack stands, by its name; empty where it stands in none."""
    inner = [frame for frame in stack if any(part in frame.file for part in _EXCHANGES)]
    if not inner:
        return ""
    return next((frame.function for frame in inner if frame.function not in _WRAPPERS), inner[0].function)


def is_backward(stack: Sequence[Frame]) -> bool:
    """Whether it stands in a backward pass, where gradients may be exchanged."""
    return any(frame.function == _BACKWARD for frame in stack[:2])


def is_loading(stack: Sequence[Frame]) -> bool:
    """Whether it waits for its data, or reads them itself."""
    return any(part in frame.file for frame in stack for part in _LOADERS)


def told(stack: Sequence[Frame]) -> str:
    """The stack as Python prints one, outermost first."""
    lines = ["Stack (most recent call last):"] if stack else []
    lines += [f'  File "{frame.file}", line {frame.line}, in {frame.function}' for frame in reversed(stack)]
    return "\n".join(lines)
