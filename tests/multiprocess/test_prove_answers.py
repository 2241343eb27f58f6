"""`manyhosts prove` on sixty scripts: never false on whether workers matter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import stages
from prove_answers_scripts import ANSWERS, KINDS, apart, is_false

from manyhosts.prove.prove import prove
from manyhosts.prove.trials import Asked, make_stage
from manyhosts.trials.forked import LocalTrialRunner

pytestmark = pytest.mark.multiprocess
FAST = [
    "right: attention",
    "right: two losses by name",
    "wrong: a mean of the last losses",
    "wrong: padding that counts",
    "unknown: losses kept in a list",
    "unknown: a number in a file",
]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTrialRunner]:
    with stages.loaded(lambda *place: make_stage(Asked(script=place[0], folder=place[1])), tmp_path_factory) as made:
        yield made


def check(names: list[str], folder: Path, stage: LocalTrialRunner) -> None:
    distances = apart(names, folder, timeout_s=400)
    said, path = {}, folder / "script.py"
    for name in names:
        path.write_text(ANSWERS[name].code)
        asked = Asked(script=str(path), folder=folder, workers=(1, 2), steps=12, promises=("workers",))
        [verdict] = prove(asked, lambda _: None, stage).verdicts
        said[name] = (verdict.status, distances[name])
    assert not {name: each for name, each in said.items() if is_false(*each)}, said


def test_what_is_said_of_some_scripts_is_so(tmp_path: Path, stage: LocalTrialRunner) -> None:
    assert all(len(scripts) == 20 for scripts in KINDS.values())
    check(FAST, tmp_path, stage)


@pytest.mark.slow
def test_what_is_said_of_all_scripts_is_so(tmp_path: Path, stage: LocalTrialRunner) -> None:
    check([name for name in ANSWERS if name not in FAST], tmp_path, stage)
