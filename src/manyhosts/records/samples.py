"""`logs/samples-<rank>.jsonl`: which samples a worker took in each step, by their index in the dataset.

A line is with the operating system before the step is computed, so that no kill loses it. A step that broke off is
begun again by another group of workers, whose number is higher; of a step's lines those of the highest group count.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from manyhosts.records.line_file import Line, LineFile, read_lines

Taken = tuple[int, int, Sequence[int]]


class SamplesFile:
    """Adds one line per try on every worker: `{"step": …, "indices": […]}`, with the `group` where it is not the first.

    A ghost is no sample and has no index.
    """

    def __init__(self, path: Path) -> None:
        self._lines: LineFile[Taken] = LineFile(path, _text_of)

    def add(self, step: int, indices: Sequence[int], *, group: int = 0) -> None:
        """Note that `step` is to take the samples `indices`."""
        self._lines.add((step, group, indices))
        self._lines.hand_over()

    def resume_at(self, step: int) -> None:
        """Take away the lines of steps after `step`, which will be taken again."""
        tail = self._lines.tail(lambda line: line["step"] <= step)
        left = [line for _, line in tail if line["step"] <= step]
        if len(left) < len(tail):
            self._lines.replace_tail(tail[0][0], left)

    def flush(self) -> None:
        """Have every line on the disk before this returns."""
        self._lines.flush()

    def close(self) -> None:
        """Write what is left. Safe to call twice."""
        self._lines.close()


def read(path: Path) -> list[Line]:
    """Every line of a samples file; none where there is no file, and a half-written last one left out."""
    return list(read_lines(path))


def counted(logs: Path) -> dict[int, list[int]]:
    """Which samples each step took, over all workers, sorted; of a step that was begun more than once the last try."""
    tries: dict[int, dict[int, list[int]]] = {}
    for path in sorted(logs.glob("samples-*.jsonl")):
        for line in read_lines(path):
            tries.setdefault(line["step"], {}).setdefault(line.get("group", 0), []).extend(line["indices"])
    return {step: sorted(found[max(found)]) for step, found in sorted(tries.items())}


def _text_of(taken: Taken) -> str:
    step, group, indices = taken
    later = {"group": group} if group else {}
    return json.dumps({"step": step, **later, "indices": [int(index) for index in indices]}) + "\n"
