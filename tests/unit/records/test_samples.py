"""The record of samples: each step once, also after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhosts.records import samples
from manyhosts.records.samples import SamplesFile


def test_each_step_has_its_indices(tmp_path: Path) -> None:
    file = SamplesFile(tmp_path / "logs" / "samples-0.jsonl")
    file.add(1, [5, 3])
    file.add(2, [])
    file.close()
    assert samples.read(tmp_path / "logs" / "samples-0.jsonl") == [
        {"step": 1, "indices": [5, 3]},
        {"step": 2, "indices": []},
    ]


@pytest.mark.parametrize("resumed", [0, 1, 3, 5])
def test_resumed_run_has_no_step_twice_and_none_missing(tmp_path: Path, resumed: int) -> None:
    path = tmp_path / "samples-1.jsonl"
    first = SamplesFile(path)
    for step in range(1, 6):
        first.add(step, [step])
    first.close()
    with path.open("a") as torn:
        torn.write('{"step": 6, "ind')
    second = SamplesFile(path)
    second.resume_at(resumed)
    for step in range(resumed + 1, 9):
        second.add(step, [step])
    second.close()
    assert samples.read(path) == [{"step": step, "indices": [step]} for step in range(1, 9)]


def test_step_that_was_begun_twice_counts_as_it_was_finished(tmp_path: Path) -> None:
    gone, stayed = SamplesFile(tmp_path / "samples-1.jsonl"), SamplesFile(tmp_path / "samples-0.jsonl")
    gone.add(1, [2, 3])
    stayed.add(1, [0, 1])
    gone.add(2, [6, 7])
    stayed.add(2, [4, 5])
    stayed.add(2, [4, 5, 6, 7], group=1)
    for file in (gone, stayed):
        file.close()
    assert samples.counted(tmp_path) == {1: [0, 1, 2, 3], 2: [4, 5, 6, 7]}


def test_line_is_in_the_file_before_the_step_is_computed(tmp_path: Path) -> None:
    file = SamplesFile(tmp_path / "samples-0.jsonl")
    file.add(1, [5])
    assert samples.counted(tmp_path) == {1: [5]}
    file.close()
