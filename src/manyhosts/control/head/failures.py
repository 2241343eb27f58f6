"""What went wrong, in one sentence with host, rank and remedy; and which of several failures came first."""

from __future__ import annotations

import errno
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from manyhosts import errors
from manyhosts.control.head.diagnosis import EVERY_RANK, in_script, traced
from manyhosts.control.head.state import AgentProcess
from manyhosts.control.loop import Channel
from manyhosts.errors import CommunicationError, DataError, ManyhostsError, RankLost, ScriptError, TrainingError
from manyhosts.units import bytes_in_words

_CONSEQUENCE = re.compile(
    r"connection (was )?(reset|closed|refused|aborted|lost)|broken pipe|timed? ?out|socket.*closed|peer|"
    r"DistNetworkError|DistBackendError|DistStoreError|gloo|nccl|remote process",
    re.IGNORECASE,
)

_EXCHANGE = re.compile(r"Dist\w+Error|gloo|nccl", re.IGNORECASE)
"""In the words of an error that a collective of PyTorch raised."""
_MAY_PASS = re.compile(
    r"^([\w.]*\.)?(OSError|BlockingIOError|\w*Connection\w*|\w*Timeout\w*|HTTPError|URLError|\w*Memory\w*|RankLost|"
    r"CommunicationError|SnapshotError)\b"
)
"""Kinds of errors of which the same one may come twice by chance."""

_CAUSES = {
    "SIGKILL": "a person, a scheduler or the kernel for want of memory does that; see `dmesg` and the memory in use",
    "SIGSEGV": "C code touched memory that is not its own; the Python line is in the worker's log, and the native"
    " package that was installed or updated last is the first to suspect",
    "SIGBUS": "most often shared memory is full: see `df -h /dev/shm`, or use fewer DataLoader workers",
    "SIGABRT": "C code gave up on itself; its last words are in the worker's log",
    "SIGILL": "a package was built for another processor; install it for this one",
    "SIGFPE": "C code divided by zero; the worker's log has the Python line",
    "SIGTERM": "a person or a scheduler asked it to end; start the same command again to continue",
    "SIGINT": "somebody interrupted it; start the same command again to continue",
}
_OTHER_SIZE = "op.preamble.length"
"""In what Gloo says when it is sent more than it has room for."""
SAME_SHAPES = "the ranks gave one exchange tensors of different shapes or kinds: see the traceback, and compare by rank"
_UNLIKE = (
    "the ranks gave one exchange tensors of different shapes or kinds, or one made a call that another did not: see"
    " the traceback, and compare by rank"
)
_BELOW_WORKING_DIRECTORY = (
    "see the traceback above; a path that does not begin with / is looked for in the folder where the run was started"
)
_POLITE = ("SIGINT", "SIGTERM", "SIGHUP")
_LESS = (
    "use a smaller batch, or micro_batch_size; fewer workers or fewer DataLoader workers on that host; or give it more"
)
_OUT_OF_MEMORY = f"the kernel ended a process of this host for want of memory just then: {_LESS}"
_LOOK_AT_IT = "look at that machine before it is used again: its memory (memtest), its temperature, `dmesg`, `mcelog`"


@dataclass(kw_only=True, slots=True)
class Failure:
    """How one worker failed."""

    rank: int
    host: str
    code: int = 0
    signal: int = 0
    error: Mapping[str, Any] | None = None
    """What the worker said about it: `summary`, `text` (the traceback), `words` (of an error raised on purpose), and
    the last `step` that it had done."""
    out_of_memory: bool = False
    memory: Mapping[str, int] = field(default_factory=dict)
    """What is known of want of memory: `killed` (the kernel ended a process of its cgroup), `peak` and `limit` in bytes
    (what it had, and what there was to have), `of_cgroup` (the limit is that of a cgroup)."""
    last_words: str = ""
    """What C++ has said before it gave up."""
    log: str = ""
    lost: str = ""
    """Why nothing is known of its end, where its host is the reason."""
    hang: str = ""
    """The complete sentence, where it hung; `remedy` and `stack` go with it."""
    wrong: str = ""
    """What the others have found wrong with what it computed."""
    remedy: str = ""
    stack: str = ""
    note: str = ""
    """What else belongs to the sentence."""

    @property
    def is_loss(self) -> bool:
        """Whether the worker was taken away, rather than failed or was asked to go."""
        return bool(self.lost or self.hang or self.wrong) or (
            self.signal != 0 and signal_name(self.signal) not in _POLITE
        )

    @property
    def may_be_consequence(self) -> bool:
        """Whether another worker's end would explain this one."""
        if self.error is None or self.error.get("words"):
            return False
        return _CONSEQUENCE.search(str(self.error.get("summary", ""))) is not None

    @property
    def may_be_shared(self) -> bool:
        """Whether the others may be about to end with the same error: workers raise most of ours together.

        What they do on their way out, such as saving and printing, is not to be cut short.
        """
        return self.error is not None and bool(self.error.get("words"))

    @property
    def recurring(self) -> tuple[str, int | None] | None:
        """What it says and after which step: if that comes twice in a row, it will come again. None for a failure that
        may pass, such as one of the network or for want of memory."""
        summary = str((self.error or {}).get("summary", ""))
        if not summary or _MAY_PASS.search(summary) or self.may_be_consequence:
            return None
        return summary, (self.error or {}).get("step")

    def caused_by_end_of(self, who: str, exchanges: int | None = None) -> Failure:
        """The same, where it failed because another one had left, which had begun so many exchanges.

        Where that is as many as this one had begun, the last was the same, and they differed in what they gave it.
        """
        place = in_script(traced(str((self.error or {}).get("text", ""))))
        at = f" at {place}" if place is not None and place.is_the_scripts else ""
        # Without the advice that Gloo adds.
        summary = str((self.error or {}).get("summary", "an error")).partition(" This is typically caused")[0]
        what = f"{who} came to its end while others still waited for it: rank {self.rank} on host {self.host} then"
        same = exchanges is not None and exchanges == (self.error or {}).get("exchanges")
        fix = SAME_SHAPES if same else EVERY_RANK
        words = {"type": "ScriptError", "what": f"{what} failed{at} with {summary}", "where": self.log, "fix": fix}
        return replace(self, error={**words, "words": words})

    @property
    def traceback(self) -> str:
        """The worker's traceback; empty where there is none to show."""
        if self.hang:
            return self.stack
        if self.error is None or self.error.get("words"):
            return ""
        text = str(self.error.get("brief") or self.error.get("text", ""))
        if text and _EXCHANGE.search(str(self.error.get("summary", ""))):
            place = f"rank {self.rank} on host {self.host}"
            return f"manyhosts: an exchange between the workers failed; what PyTorch said of it in {place}:\n{text}"
        return text

    def reported(self, others_ended: int) -> ManyhostsError:
        """The error that ends the run, or that a restart mends."""
        who = f"rank {self.rank} on host {self.host}"
        rest = self.note
        if others_ended:
            rest += f"; {others_ended} other worker{'s were' if others_ended > 1 else ' was'} ended"
        if self.hang:
            return CommunicationError(f"{self.hang}{rest}", where=self.log, fix=self.remedy)
        if self.wrong:
            return TrainingError(f"{who} {self.wrong}{rest}", where=self.log, fix=_LOOK_AT_IT)
        if self.lost:
            return RankLost(
                f"{who} was lost: {self.lost}{rest}",
                where=self.log,
                fix="see whether that host is up, reachable and has memory left; then start the same command again",
            )
        if self.error is not None and (words := self.error.get("words")):
            return self._with_place(rebuilt(words))
        if self.error is not None:
            summary = str(self.error.get("summary", "an error"))
            if self.memory.get("killed"):
                rest = f"; the kernel has ended a process there for want of memory{rest}"
            fix = _UNLIKE if _OTHER_SIZE in summary else "see the traceback above"
            if summary.startswith("FileNotFoundError"):
                fix = _BELOW_WORKING_DIRECTORY
            return ScriptError(f"{who} failed with {summary}{rest}", where=self.log, fix=fix)
        if self.signal:
            return self._told_of_signal(who, rest)
        return ScriptError(
            f"{who} ended with exit code {self.code}{rest}", where=self.log, fix="the last lines of its log may say why"
        )

    def _told_of_signal(self, who: str, rest: str) -> ManyhostsError:
        name = signal_name(self.signal)
        if name == "SIGKILL" and self.memory.get("killed"):
            what = f"{who} was killed by the kernel for want of memory{self._had_memory()}{rest}"
            return ScriptError(what, where=self.log, fix=_LESS)
        cause = _OUT_OF_MEMORY if self.out_of_memory and name == "SIGKILL" else _CAUSES.get(name, "")
        if name == "SIGABRT" and _OTHER_SIZE in self.last_words:
            cause = _UNLIKE
        return ScriptError(f"{who} was killed by {name}{rest}", where=self.log, fix=cause)

    def _had_memory(self) -> str:
        """How much memory it had, and how much there was to have, as far as it is known."""
        peak, limit = self.memory.get("peak", 0), self.memory.get("limit", 0)
        whose = "all of its cgroup may have" if self.memory.get("of_cgroup") else "that machine has"
        parts = [f"it had {bytes_in_words(peak)}"] if peak else []
        parts += [f"{whose} {bytes_in_words(limit)}"] if limit else []
        return f" ({', and '.join(parts)})" if parts else ""

    def _with_place(self, error: ManyhostsError) -> ManyhostsError:
        """The same, with host and rank where the reason may lie in that host alone, as with what it reads."""
        if not isinstance(error, DataError) or self.host in error.where:
            return error
        place = f"rank {self.rank} on host {self.host}"
        return type(error)(error.what, where=f"{error.where}, {place}" if error.where else place, fix=error.fix)


def first(failures: list[Failure]) -> Failure:
    """The one that explains the others: the earliest that is not itself explained by another."""
    return next((failure for failure in failures if not failure.may_be_consequence), failures[0])


def signal_name(number: int) -> str:
    """`SIGKILL` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _of_a_failure(code: Any) -> int:
    """An exit code that a shell takes for a failure, whatever a worker says."""
    return code if isinstance(code, int) and 0 < code < 256 else 1


def rebuilt(words: Mapping[str, Any]) -> ManyhostsError:
    """An error that a worker raised on purpose, as it was, with its own exit code."""
    kind = getattr(errors, str(words["type"]), None)
    if not (isinstance(kind, type) and issubclass(kind, ManyhostsError)):
        kind = type(str(words["type"]), (ScriptError,), {"exit_code": _of_a_failure(words["exit_code"])})
    error: ManyhostsError = kind(str(words["what"]), where=str(words["where"]), fix=str(words["fix"]))
    return error


GONE = "its agent is gone"
_NO_ANSWER = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
_ENDED_THERE = (errno.ECONNRESET, errno.EPIPE)
"""The other side has closed, perhaps before it had read everything."""
_LOST_BY_SSH = 255
_TO_END_S = 0.2
"""A connection ends a moment before its process does."""
_ANSWERS_S = 6.0
"""A system that is asked every 2 s whether it is there has answered within that time, if it is."""


def why_connection_ended(agent: AgentProcess, trouble: OSError | None) -> str:
    """Why a connection may have ended that was not closed here. `trouble` is the error of the system."""
    if trouble is not None and trouble.errno in _NO_ANSWER:
        return "there is no answer from its host: it is switched off, or cut off"
    code = agent.poll()
    until = time.monotonic() + _TO_END_S
    ended_there = trouble is None or trouble.errno in _ENDED_THERE
    while code is None and ended_there and time.monotonic() < until:
        time.sleep(0.01)
        code = agent.poll()
    if code is None:
        return f"{GONE}: {trouble.strerror}" if trouble is not None and trouble.strerror else GONE
    if code == _LOST_BY_SSH:
        return f"{GONE}: it was killed, or ssh has lost the host (exit code {code})"
    return f"{GONE}: " + (f"killed by {signal_name(-code)}" if code < 0 else f"it ended with exit code {code}")


def why_silent(seconds: float, channel: Channel | None, held_s: float = 0.0) -> str:
    """What is known of a host whose agent says nothing; `channel` is None where its connection has broken.

    `held_s`: it has shown that it lives, and that it waits for something of its own system for so long.
    """
    if held_s:
        return f"its agent lives, and has waited for a disk or the like for {held_s:.0f} s"
    what = f"the host has given no sign of life for {seconds:.0f} s"
    if channel is None:
        return f"{what}, and does not call again: it is switched off, or cut off"
    unanswered_s = channel.unanswered_s
    if unanswered_s is None:
        return f"{what}, and the connection to its agent is open still"
    if unanswered_s < _ANSWERS_S:
        return f"{what}, but its system still answers: the agent is frozen, or the host overloaded"
    return f"{what}, and its system does not answer: it is switched off, or cut off"
