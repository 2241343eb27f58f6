"""What the user hears of the workers while they run: their lines, with host and rank, and what they report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from manyhosts.control.head.agents import Node
from manyhosts.control.head.beginning import Beginning
from manyhosts.control.head.course import Course
from manyhosts.control.head.notices import Notices
from manyhosts.control.head.script_faults import ScriptFaults
from manyhosts.control.tracebacks import is_idle_notice, is_native_frame, may_hold_noise, without_native_frames


class News:
    """Passes on to the display what workers say."""

    def __init__(self, course: Course, nodes: int) -> None:
        """`nodes` is the number of hosts: a prefix names the host only where there are several."""
        self._course, self._nodes = course, nodes
        self._notices = Notices(course.display.warn)
        self._faults = ScriptFaults(course.display.warn)
        self.beginning = Beginning(course.display, course.loop.after)

    def show(self, node: Node, rank: int, lines: list[str], *, is_error: bool) -> None:
        """Lines that a worker has printed."""
        self.beginning.end()
        if self._course.job.show and rank not in self._course.job.show:
            return
        text = "\n".join(lines)
        if may_hold_noise(text):
            lines = [line for line in lines if not is_native_frame(line) and not is_idle_notice(line)]
            text = "\n".join(lines)
        if lines:
            self._course.display.line(text, self._prefix(node, rank), is_error)

    def _prefix(self, node: Node, rank: int) -> str:
        job = self._course.job
        if job.workers == 1 or not job.prefix:
            return ""
        return f"[{rank}] " if self._nodes == 1 else f"[{node.name} {rank}] "

    def take_report(self, rank: int, kind: str, fields: dict[str, Any]) -> None:
        """What a worker has said through `cluster.reports`."""
        if kind in ("progress", "say"):
            self.beginning.end()
        if kind == "progress" and rank == 0:
            self._course.display.progress(fields)
        elif kind == "say":
            self._course.display.say(str(fields.get("text", "")))
        elif kind == "trainer":
            self._course.trainer_seen = True
        elif kind == "directory":
            self._course.directories.add(Path(str(fields["path"])))
        elif kind == "fault":
            self._faults.hear(self._course.generation, rank, fields)
        elif kind == "script_probe":
            self._notices.hear(self._course.generation, rank, fields)

    def tell_end(self) -> None:
        """The run has ended well: what is to be told of it?"""
        self._notices.tell_end()
        if self._course.job.overrides and not self._course.trainer_seen:
            self._course.display.warn("manyhosts: --set had no effect, because the script made no mh.Trainer")

    def tell_of_gaps(self, node: Node, rank: int, why: str) -> None:
        """The log of a worker cannot be written. What it prints is shown all the same."""
        self._course.display.warn(f"manyhosts: the log of rank {rank} on host {node.name} is not whole: {why}")

    def tell_of_unshown(self, node: Node, rank: int, lines: int) -> None:
        """A worker has printed more than is passed on."""
        which = f"{lines} line{'s' if lines > 1 else ''} of rank {rank} on host {node.name}"
        why = "printed faster than they could be passed on; its log has them"
        self._course.display.warn(f"manyhosts: {which} are not shown here: {why}")

    def show_traceback(self, text: str) -> None:
        """The traceback of the worker that failed first."""
        for line in without_native_frames(text).splitlines():
            self._course.display.line(line, "", is_error=True)
