"""What PyTorch refuses because this machine or this build has no GPU, in a sentence with the script's own line."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import NamedTuple

from manyhosts.errors import ManyhostsError, ScriptError, first_line

_REHEARSE = "manyhosts run --rehearse tries the script here as it is"
_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_OTHERS = re.compile(r"[/\\](site|dist)-packages[/\\]|^<")
_LONGEST_LINE = 80


class _Refusal(NamedTuple):
    pattern: str
    """Of what PyTorch says."""
    lacks: str
    """What is missing; {host} and {said}, PyTorch's own words, are filled in."""
    asks: str
    """What the line of the script asks for."""
    fix: str
    fix_with_trainer: str = ""
    """What to do where the script has made a Trainer, which moves things to devices by itself."""


_DEVICE = "write device = 'cuda' if torch.cuda.is_available() else 'cpu', and .to(device)"
_NO_GPU = "{host} has no GPU that PyTorch can use ({said})"
_REFUSALS = (
    _Refusal(
        r"Attempting to deserialize object on a CUDA device",
        "{host} has no GPU that PyTorch can use",
        "loads tensors that were saved on one",
        "write torch.load(…, map_location='cpu')",
    ),
    _Refusal(
        r"doesn't have NCCL built in|nccl2? requires at least one CUDA device|ProcessGroupNCCL .*no GPUs found",
        _NO_GPU,
        "asks for NCCL, which needs one",
        "write init_process_group() without a backend: it takes NCCL where there are GPUs, and Gloo elsewhere",
        "leave it out: the trainer forms the group of workers, with NCCL where there are GPUs and Gloo elsewhere",
    ),
    _Refusal(
        r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available"
        r"|module 'torch\._C' has no attribute '_cuda_|Cannot access accelerator device when none is available",
        _NO_GPU,
        "asks for one",
        _DEVICE,
        "leave that out: the trainer moves the model and its batches to each worker's device",
    ),
)


def explained(error: BaseException) -> ManyhostsError | None:
    """`error` as what / where / fix, if PyTorch has raised it for want of a GPU; else None."""
    if isinstance(error, ManyhostsError) or not isinstance(error, Exception):
        return None
    said = str(error)
    refusal = next((each for each in _REFUSALS if re.search(each.pattern, said)), None)
    if refusal is None or _has_gpu():
        return None
    frame, line = _frame_of_script(error)
    asks = f"{refusal.asks}: {line}" if line else refusal.asks
    lacks = refusal.lacks.format(host=f"host {os.uname().nodename}", said=_few_words(error))
    fix = (refusal.fix_with_trainer if _has_trainer() else "") or refusal.fix
    return ScriptError(f"{lacks}, and the script {asks}", where=frame, fix=f"{fix}; {_REHEARSE}")


def _has_trainer() -> bool:
    """Whether the script imports us by name: it has made a trainer, or is about to."""
    names = list(vars(sys.modules["__main__"]).values()) if "__main__" in sys.modules else []
    package = __name__.partition(".")[0]
    return any(each is sys.modules[package] or _is_of(package, each) for each in names)


def _is_of(package: str, thing: object) -> bool:
    return str(getattr(thing, "__module__", "")).startswith(f"{package}.")


def place_in_script(error: BaseException) -> str:
    """`train.py, line 12`: the innermost line of the user's own code that led to `error`; empty where there is none."""
    return _frame_of_script(error)[0]


def line_of_script() -> str:
    """`train.py:12`: where the user's code has called what is running; empty where it is not among the callers."""
    frame = sys._getframe(1)
    while frame is not None and not _is_of_user(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]  # None at the end
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _has_gpu() -> bool:
    """Whether CUDA is there after all, or answers in a rehearsal: then it is something else that is refused."""
    torch = sys.modules.get("torch")
    return torch is None or bool(torch.cuda.is_available())


def _few_words(error: Exception) -> str:
    """What PyTorch says, without the advice that follows; of a name that its build lacks, that it does."""
    if isinstance(error, AttributeError):
        return "Torch not compiled with CUDA enabled"
    return first_line(error).partition(". ")[0].rstrip(".")


def _frame_of_script(error: BaseException) -> tuple[str, str]:
    """Where the user's code was, and the text of that line; empty where none of it is in the traceback."""
    found = ("", "")
    for frame, number in _frames(error.__traceback__):
        name = frame.f_code.co_filename
        if _is_of_user(name):
            import linecache  # only needed when something has gone wrong

            text = linecache.getline(name, number, frame.f_globals).strip()
            found = (f"{name}, line {number}", text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]}…")
    return found


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _is_of_user(name: str) -> bool:
    standard = sysconfig.get_path("stdlib") + os.sep
    return not (_OTHERS.search(name) or name.startswith((_OWN, standard)))
