"""`logs/samples-<rank>.jsonl`: which samples a worker took in each step, by their index in the dataset."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from manyhands.records.line_file import Line, LineFile, read_lines

Taken = tuple[int, Sequence[int]]


class SamplesFile:
    """Adds one line per step, `{"step": …, "indices": […]}`, on every worker; a ghost is no sample and has no index."""

    def __init__(self, path: Path) -> None:
        self._lines: LineFile[Taken] = LineFile(path, _text_of)

    def add(self, step: int, indices: Sequence[int]) -> None:
        """Note that `step` took the samples `indices`. The sequence is kept, so it must not be changed afterwards."""
        self._lines.add((step, indices))

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
    """Every line of a samples file; none where there is no file, and a torn last one left out."""
    return list(read_lines(path))


def _text_of(taken: Taken) -> str:
    step, indices = taken
    return json.dumps({"step": step, "indices": [int(index) for index in indices]}) + "\n"
