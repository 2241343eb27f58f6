"""A profile of some steps: what it holds, and what it says where there is less than was asked for."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.config.profile import VARIABLE, ProfileRequest
from manyhosts.errors import ConfigError
from manyhosts.events import Event, Note


def train(run_dir: Path, asked: str, duration: str) -> list[str]:
    """What was noted in a small training."""
    found: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, Note):
            found.append(event.text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, asked)
        trainer = mh.Trainer(
            model=nn.Linear(4, 1),
            loss=nn.MSELoss(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            data=mh.Data(train=TensorDataset(torch.ones(64, 4), torch.ones(64, 1)), batch_size=8),
            run_dir=run_dir,
            listeners=[listen],
        )
        trainer.fit(duration)
    return [text for text in found if "profile" in text]


def events_of(folder: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]


def shares(summary: str) -> list[float]:
    """Of where the time went."""
    return [float(share) for share in re.findall(r"([\d.]+) %", summary.split("operators on")[0])]


def test_profile_has_the_steps_that_were_asked_for_and_its_page_says_where_their_time_went(tmp_path: Path) -> None:
    [said] = train(tmp_path, "7 steps", "20 steps")
    folder = tmp_path / "profile" / "rank-0"
    assert said.startswith(f"profile of steps 6 to 12: {folder}/summary.txt to read")
    steps = [event for event in events_of(folder) if str(event.get("name")).startswith("Optimizer.step")]
    assert len({event["ts"] for event in steps}) == 7
    summary = (folder / "summary.txt").read_text()
    assert summary.startswith("Steps 6 to 12 of rank 0 of 1 on host ")
    assert sum(shares(summary)) == pytest.approx(100, abs=0.5)
    assert re.search(r"aten::addmm .* 1\.0\n", summary), "one for each step"
    assert "on the GPU" not in summary


@pytest.mark.parametrize(
    ("duration", "said", "kept"),
    [
        ("5 steps", "no profile was made: this training had no step after the first 5, which warm up", False),
        ("9 steps", "profile of steps 6 to 9; the run ended after 4 of the 20 steps that were asked for: ", True),
    ],
)
def test_training_that_is_too_short_says_so(duration: str, said: str, kept: bool, tmp_path: Path) -> None:
    [found] = train(tmp_path, "20 steps", duration)
    assert found.startswith(said)
    assert (tmp_path / "profile" / "rank-0" / "summary.txt").exists() == kept


def of_two(rank: int, run_dir: Path, asked: str) -> list[str] | str:
    try:
        return train(run_dir, asked, "12 steps")
    except ConfigError as refused:
        return str(refused)


@pytest.mark.multiprocess
def test_each_chosen_rank_has_a_profile_and_the_others_have_none(tmp_path: Path) -> None:
    [said], none = run_ranks(2, of_two, tmp_path, "5 steps@1")
    assert f": {tmp_path}/profile/rank-1/summary.txt (each on its worker's host) to read, " in said
    assert none == [], "listeners are on the leader"
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["rank-1"]
    summary = (tmp_path / "profile" / "rank-1" / "summary.txt").read_text()
    assert "of rank 1 of 2" in summary
    assert "allreduce" in summary


@pytest.mark.multiprocess
def test_rank_that_is_not_there_is_refused_on_every_worker(tmp_path: Path) -> None:
    for said in run_ranks(2, of_two, tmp_path, "5 steps@0,2"):
        assert "there is no rank 2 among 2 workers" in said


@pytest.mark.parametrize(
    ("text", "request_"),
    [
        ("20 steps", ProfileRequest(20, (0,))),
        ("1 step@3, 0", ProfileRequest(1, (0, 3))),
        ("20 steps@all", ProfileRequest(20, None)),
    ],
)
def test_words_of_a_profile(text: str, request_: ProfileRequest) -> None:
    assert ProfileRequest.parse(text) == request_
    assert ProfileRequest.parse(next(iter(request_.to_environment().values()))) == request_


@pytest.mark.parametrize("text", ["20", "2 epochs", "20 steps or 2 h", "20 steps@", "20 steps@one", "0 steps", "@0"])
def test_what_is_no_profile_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ProfileRequest.parse(text)
    assert refused.value.where == "--profile"
