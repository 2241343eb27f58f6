"""The trainer of a finished run, without its training."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from small_run import make_run

import manyhosts as mh
from manyhosts.errors import ConfigError, SnapshotError
from manyhosts.records.summary import Summary
from manyhosts.training.trained_script import open_run, snapshot_of


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("small"))


def test_model_has_the_weights_of_the_run_and_answers_as_its_validation_did(run_dir: Path) -> None:
    main, variables = sys.modules["__main__"], dict(os.environ)
    before = sorted(path for path in run_dir.rglob("*"))
    with open_run(run_dir) as run:
        best = mh.load(run_dir)
        assert all(torch.equal(run.model.state_dict()[name], tensor) for name, tensor in best.items())
        assert not run.model.training
        assert run.trainer.validate()["loss"] == Summary.read(run_dir / "summary.json").best["value"]
        assert run.names["names"] == ["one", "two", "three"]
        assert len(run.data.train) == 60
    assert sys.modules["__main__"] is main
    assert not {name for name in os.environ if name.startswith("MANYHOSTS")} - variables.keys()
    assert sorted(path for path in run_dir.rglob("*")) == before


def test_two_runs_are_opened_one_after_the_other_and_a_snapshot_is_taken_in_place(run_dir: Path) -> None:
    for _ in range(2):
        with open_run(run_dir, snapshot="last") as run:
            weight = next(run.model.parameters())
            assert run.facts.step == 8
            older = snapshot_of(run.directory, str(4))
            assert run.take(older).step == 4
            assert torch.equal(weight, mh.load(older)["0.weight"])


def test_what_cannot_be_opened_is_said(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run\.json"), open_run(tmp_path):
        pass
    with pytest.raises(ConfigError, match="no snapshot '3'"), open_run(run_dir, snapshot="3"):
        pass
    script = run_dir.parent / "train.py"
    text = script.read_text()
    try:
        script.write_text(text.replace("trainer.fit", "str"))
        with pytest.raises(ConfigError, match=r"without calling Trainer\.fit"), open_run(run_dir):
            pass
        script.write_text(text.replace("144, 3", "144, 4"))
        with pytest.raises(SnapshotError, match="5"), open_run(run_dir):
            pass
    finally:
        script.write_text(text)
