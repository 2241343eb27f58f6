"""Who is to blame when no worker makes progress: what is seen of all of them goes in, a sentence comes out.

What is seen is their Python stacks: is a worker waiting for the others, and where in the script? Workers in a
collective wait for others. A worker that does not is the culprit, above all one that is stopped. Where all of
them wait, but not in the same exchange, they wait for one another: a dead-lock.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_FRAME = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_THREAD = re.compile(r"^(?P<current>Current thread|Thread) 0x")
_LIBRARIES = re.compile(r"/lib/python3\.\d+/|/(site|dist)-packages/|/manyhosts/(\w+/)+\w+\.py$|^<")
"""Files that are not of the user, wherever a host has them."""

_TRACED = re.compile(r'^ *File "(.*)", line (\d+), in (.*)$', re.MULTILINE)
_EXCHANGES = (
    "/torch/distributed/",
    "/torch/nn/parallel/distributed.py",
    "/manyhosts/communication/",
    "/manyhosts/cluster/membership.py",
)
"""A worker in one of these waits for other workers."""
_AROUND = ("/torch/distributed/elastic/", "/torch/distributed/checkpoint/")
"""Of these, which may be around all of a script, the exchanges themselves are further in."""
_LOADERS = ("/torch/utils/data/", "/manyhosts/data/")
_BACKWARD = ("_engine_run_backward", "backward_from")
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
    """Whether the frame that starts the script is this one; that of the code that watches it is further in."""
    return _FOUNDATION in frame.file and frame.function in ("be", "run_main")


def traced(text: str) -> tuple[Frame, ...]:
    """The frames of a traceback as Python prints it; innermost first."""
    return tuple(Frame(found[1], int(found[2]), found[3]) for found in reversed(list(_TRACED.finditer(text))))


def in_script(stack: Sequence[Frame]) -> Frame | None:
    """The innermost line of the user's own code; of any code where there is none of theirs."""
    return next((frame for frame in stack if frame.is_the_scripts), stack[0] if stack else None)


def exchange(stack: Sequence[Frame]) -> str:
    """The collective in which a stack is, by its name; empty where it is in none."""
    among = [frame for frame in stack if not any(part in frame.file for part in _AROUND)]
    inner = [frame for frame in among if any(part in frame.file for part in _EXCHANGES)]
    if not inner:
        return ""
    return next((frame.function for frame in inner if frame.function not in _WRAPPERS), inner[0].function)


def is_backward(stack: Sequence[Frame]) -> bool:
    """Whether it is in a backward pass, where gradients may be exchanged."""
    return any(frame.function in _BACKWARD for frame in stack[:2])


def is_loading(stack: Sequence[Frame]) -> bool:
    """Whether it waits for its data, or reads them itself."""
    return any(part in frame.file for frame in stack for part in _LOADERS)


def reported(stack: Sequence[Frame]) -> str:
    """The stack as Python prints one, outermost first."""
    lines = ["Stack (most recent call last):"] if stack else []
    lines += [f'  File "{frame.file}", line {frame.line}, in {frame.function}' for frame in reversed(stack)]
    return "\n".join(lines)


BUSY = 0.3
"""From this share of a core on, a worker computes and does not wait."""
_MOST_NAMED = 4
EVERY_RANK = (
    "have every rank come here: train, test, predict and compute metrics outside of `if rank == 0` and is_main, "
    "and leave a loop after the same number of steps on all"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """What is seen of one worker that has not got on."""

    member: int
    rank: int
    host: str
    still_s: float
    """For how long it has reported nothing new."""
    step: int | None = None
    """The last that it reported."""
    state: str = ""
    """As in /proc: R runs, S waits, D waits for a disk, T is stopped, Z has ended. Empty where it is not known."""
    busy: float = 0.0
    """Which share of a core it uses."""
    stack: tuple[Frame, ...] = ()
    """Innermost first; empty where it cannot be had."""
    loader: tuple[Frame, ...] = ()
    """That of a process that loads its data."""

    @property
    def name(self) -> str:
        """What the user calls it."""
        return f"rank {self.rank} on host {self.host}"

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        return self.state in ("T", "t")

    @property
    def exchange(self) -> str:
        """The exchange that it waits in; empty where it does not wait for other workers."""
        if self.is_stopped or self.busy > BUSY:
            return ""
        if found := exchange(self.stack):
            return found
        return "backward" if is_backward(self.stack) else ""

    @property
    def place(self) -> str:
        """Where it is in the script."""
        frame = in_script(self.stack)
        return "" if frame is None else str(frame)


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What is said, and about whom."""

    guilty: tuple[int, ...]
    """Members without which the others could continue; empty where they wait for one another."""
    what: str
    fix: str
    stack: str = ""
    """Of the first that is named, as Python prints it."""


def diagnose(sights: Sequence[Sight], limit_s: float, gone: Sequence[str] = ()) -> Diagnosis:
    """Who keeps the others from getting on. `sights` has at least one worker.

    `gone` are the names of those that have come to their end, as far as anybody may still wait for them.
    """
    by_rank = sorted(sights, key=lambda sight: sight.rank)
    stopped = [sight for sight in by_rank if sight.is_stopped]
    if stopped:
        return _blame(stopped, by_rank, limit_s)
    outside = [sight for sight in by_rank if not sight.exchange]
    if outside:
        return _blame(outside, by_rank, limit_s)
    return _dead_lock(by_rank, limit_s, gone)


def doing(sight: Sight) -> tuple[str, str]:
    """What a worker is doing, as the end of a sentence that begins with its name; and what may help."""
    place = f" at {sight.place}" if sight.place else ""
    if sight.is_stopped:
        how = "by a debugger" if sight.state == "t" else "by a signal"
        return f"is stopped {how} (process state {sight.state})", "kill -CONT lets it continue; find out who stopped it"
    if sight.exchange:
        return f"waits for the others in {sight.exchange}{place}", "see why the others do not come"
    if sight.state == "D":
        return f"waits for a disk or a network file system{place}", "see `dmesg` and the file system on that host"
    if is_loading(sight.stack):
        own = in_script(sight.loader) if sight.loader else None
        loader = f", whose loader process is at {own}" if own else ""
        return (
            f"waits for its data{place}{loader}",
            "see what the dataset does there: an endless loop, a lock, a file or server that does not answer",
        )
    if sight.state == "R" or sight.busy > BUSY:
        return f"computes without end{place}", "if that is no endless loop, but takes so long, raise --hang-timeout"
    if sight.stack:
        return f"is idle{place}", "see what that line waits for; if it takes so long, raise --hang-timeout"
    return "does not say what it does", "if it takes so long, raise --hang-timeout"


def _blame(guilty: Sequence[Sight], all_of_them: Sequence[Sight], limit_s: float) -> Diagnosis:
    one = guilty[0]
    words, fix = doing(one)
    alike = [sight for sight in guilty[1:] if doing(sight)[0] == words]
    others = [f"rank {sight.rank} {doing(sight)[0]}" for sight in guilty[1:] if sight not in alike]
    names = f"{one.name}{_and_more(alike)}"
    rest = "; ".join(["", *others[:_MOST_NAMED]]) + ("; …" if len(others) > _MOST_NAMED else "")
    waiting = len(all_of_them) - len(guilty)
    if waiting:
        rest += f"; {waiting} other{'s wait' if waiting > 1 else ' waits'} for {'it' if len(guilty) == 1 else 'them'}"
    what = f"{names} {words}, and has got no further for {_seconds(one, limit_s)} s{_step(one)}{rest}"
    return Diagnosis(
        guilty=tuple(sight.member for sight in guilty), what=what, fix=fix, stack=reported(one.stack or one.loader)
    )


def _dead_lock(waiting: Sequence[Sight], limit_s: float, gone: Sequence[str]) -> Diagnosis:
    groups: dict[tuple[str, str], list[Sight]] = {}
    for sight in waiting:
        groups.setdefault((sight.exchange, sight.place), []).append(sight)
    by_size = sorted(groups.items(), key=lambda entry: (len(entry[1]), entry[1][0].rank))
    one = by_size[0][1][0]
    since = f"no worker has got further for {_seconds(one, limit_s)} s{_step(one)}"
    if len(by_size) == 1:
        (exchange, place), members = by_size[0]
        who = f"all {len(members)} workers wait" if len(members) > 1 else f"{members[0].name} waits"
        if gone:
            return Diagnosis(
                guilty=(),
                what=f"{gone[0]} has come to its end, but {who} for it in {exchange} at {place}, and {since}",
                fix=EVERY_RANK,
                stack=reported(one.stack),
            )
        return Diagnosis(
            guilty=(),
            what=f"{who} in {exchange} at {place}, and {since}",
            fix="see that every worker makes the same exchanges in the same order, and that all hosts reach each other",
            stack=reported(one.stack),
        )
    sides: list[str] = []
    for (exchange, place), members in by_size[:_MOST_NAMED]:
        last = len(sides) == len(by_size) - 1 and len(members) > 1
        who = "the others wait" if last else f"{members[0].name}{_and_more(members[1:])} waits"
        sides.append(f"{who} in {exchange} at {place}")
    return Diagnosis(
        guilty=(),
        what=f"dead-lock: {', '.join(sides)}, and {since}",
        fix="have every worker make the same exchanges in the same order; see what that script does by rank",
        stack=reported(one.stack),
    )


def _and_more(others: Sequence[Sight]) -> str:
    if not others:
        return ""
    return f" (so {'do' if len(others) > 1 else 'does'} rank {', '.join(str(each.rank) for each in others)})"


def _seconds(sight: Sight, limit_s: float) -> str:
    return f"{max(sight.still_s, limit_s):.0f}"


def _step(sight: Sight) -> str:
    return "" if sight.step is None else f" (after step {sight.step})"
