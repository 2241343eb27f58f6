"""Runs in parts: resumed by others and on other numbers of workers, killed, failed by a script, refused."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sharded
import torch
from commands import summary
from launching import run
from ranks import run_ranks
from sharded import Case, Model, assert_same, fit, make_trainer, outcome, samples, trained
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.config.sharded_layers import ShardedLayers
from manyhosts.errors import ConfigError
from manyhosts.records.run_directory import SEPARATE_DISKS

pytestmark = pytest.mark.multiprocess
CASE = Case(optimizer="AdamW", trainer={"micro_batch_size": 4})
STAGES: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"options": {"zero": 3}}),
    (3, {"options": {"zero": 2}}),
    (2, {"strategy": "ddp"}),
    (4, {"options": {"shard": 2}}),
    (1, {}),
]
"""Workers and strategy of one after the other, each two steps on from where the one before it ended."""


def test_one_run_passes_through_all_strategies_and_numbers_of_workers(tmp_path: Path) -> None:
    steps = 2 * len(STAGES)
    whole = trained(1, {"whole": replace(CASE, steps=steps)}, tmp_path)["whole"]
    before = ""
    for number, (workers, changes) in enumerate(STAGES, start=1):
        case = replace(CASE, **changes)
        stood = {"run": replace(case, steps=2 * number - 2)} if before else {}
        found = run_ranks(workers, both, stood, {"run": replace(case, steps=2 * number)}, tmp_path)
        assert all(each == found[0] for each in found)
        assert found[0][0] == before, "what was taken up is not what was left, bit for bit"
        before = found[0][1]
    parts = trained(1, {"run": replace(CASE, steps=steps)}, tmp_path)["run"]
    assert parts.sha == before
    assert_same(whole, parts)


def in_two_runs(_rank: int, strategy: Any, folder: Path) -> None:
    """Train for six steps at once, and for three and three."""
    inputs = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    for name, durations in {"once": ["6 steps"], "resumed": ["3 steps", "6 steps"]}.items():
        for duration in durations:
            trainer = mh.Trainer(
                model=lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)),
                loss=nn.MSELoss(),
                optimizer=lambda params: torch.optim.AdamW(params, 0.1),
                data=mh.Data(train=TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4),
                strategy=strategy,
                run_dir=folder / name,
            )
            trainer.fit(duration)


@pytest.mark.parametrize(
    "strategy", [mh.FSDP(zero=3), mh.FSDP(zero=1), ShardedLayers(shard=1, size=2)], ids=["3", "1", "one along shard"]
)
def test_what_one_worker_holds_all_of_resumes_to_the_same_bits(tmp_path: Path, strategy: Any) -> None:
    """A bias of one number, or every tensor where there is one worker along the axis that cuts them."""
    run_ranks(2, in_two_runs, strategy, tmp_path)
    once, resumed = (summary(tmp_path / name)["weights_sha256"] for name in ("once", "resumed"))
    assert once == resumed


def compiled(rank: int, cases: dict[str, Case], folder: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """What came of each case, and what was warned of meanwhile."""
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        answers = fit(rank, cases, folder)
    return answers, [str(each.message) for each in reported if "ynamo" in str(each.message)]


@pytest.mark.slow
def test_compiled_blocks_in_parts_learn_what_others_do(tmp_path: Path) -> None:
    cases = {"plain": CASE, "compiled": replace(CASE, trainer={**CASE.trainer, "compile": True})}
    [(answers, reported), *_] = run_ranks(2, compiled, cases, tmp_path, timeout_s=400)
    found = {name: outcome(tmp_path / name, answer) for name, answer in answers.items()}
    assert_same(found["plain"], found["compiled"])
    assert reported == []


def both(rank: int, stood: dict[str, Case], goes_on: dict[str, Case], folder: Path) -> list[str]:
    """The hash of the weights where a run is taken up, and after it has continued."""
    return [
        make_trainer(case, folder / name).fit(f"{case.steps} steps").weights_sha256 if cases else ""
        for cases in (stood, goes_on)
        for name, case in (cases or goes_on).items()
    ]


SCRIPT = """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    import manyhosts as mh
    from sharded import Case, make_trainer

    class Trouble:
        def __init__(self):
            self.seen = 0

        def __call__(self, module, inputs):
            self.seen += module.training
            if os.environ["RANK"] == "1" and self.seen == 6:
                {trouble}

    every = mh.Snapshots(every="2 steps")
    case = Case(strategy={strategy!r}, optimizer="AdamW", trainer={{"snapshots": every}})
    trainer = make_trainer(case, None)
    trainer.model.register_forward_pre_hook(Trouble())
    trainer.fit("9 steps")
"""


def script(trouble: str, strategy: str = "fsdp") -> str:
    return SCRIPT.format(tests=str(Path(__file__).parents[1]), trouble=trouble, strategy=strategy)


def test_a_killed_worker_is_replaced_and_the_run_goes_on_from_its_parts_to_the_same_bits(tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = run(tmp_path / "whole", script("pass"), "--workers", "2")
    assert whole.code == 0, whole.err
    once = "if not os.path.exists('killed'): open('killed', 'w').close(); os.kill(os.getpid(), signal.SIGKILL)"
    killed = run(tmp_path / "killed", script(once), "--workers", "2", "--restarts", "1")
    assert killed.code == 0, killed.err
    assert summary(killed.run_dir)["restarts"] == 1
    assert summary(killed.run_dir)["weights_sha256"] == summary(whole.run_dir)["weights_sha256"]
    assert summary(whole.run_dir)["strategy"] == "fsdp"
    reported = "if a worker is lost, all end (there is one copy of the model); --restarts N continues"
    assert reported in sharded.said(whole.run_dir)


def test_an_error_of_one_worker_is_shown_once_and_ends_the_run(tmp_path: Path) -> None:
    ended = run(tmp_path, script("raise ValueError('not this one')"), "--workers", "2")
    assert ended.code == 1
    assert ended.err.count("Traceback (most recent call last)") == 1, ended.err
    assert "ValueError: not this one" in ended.err
    assert "failed with ValueError: not this one" in ended.err


def test_the_best_model_and_the_file_of_weights_are_whole(tmp_path: Path) -> None:
    run_ranks(2, save, tmp_path)
    last, best = mh.load(tmp_path / "run", weights="last"), mh.load(tmp_path / "run")
    saved = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert {name: each.shape for name, each in best.items()} == {
        name: each.shape for name, each in Model().state_dict().items()
    }
    assert last.keys() == saved.keys()
    for name, each in last.items():
        assert torch.equal(each, saved[name]), name


def save(rank: int, folder: Path) -> None:
    trainer = make_trainer(Case(), folder / "run")
    trainer.fit("3 steps")
    trainer.save(folder / "weights.pt", weights="last")


def calls(rank: int, folder: Path) -> tuple[str, list[list[float]]]:
    """What the leader is answered that calls the model alone, and what all are told together afterwards."""
    trainer, words = make_trainer(Case(), folder / "run"), samples(7, 3).tensors[0]
    trainer.fit("2 steps")
    said = ""
    try:
        if trainer.is_main:
            trainer.model(words)
    except ConfigError as error:
        said = error.what
    together = trainer.predict(TensorDataset(words), forward=lambda model, batch: model(batch[0]), weights="last")
    return said, together.tolist()


def test_a_worker_that_calls_the_model_alone_is_told_so_and_all_may_predict(tmp_path: Path) -> None:
    (said, found), (nothing, other) = run_ranks(2, calls, tmp_path)
    assert "the model is called by the script itself" in said
    assert nothing == ""
    model = Model()
    model.load_state_dict(dict(mh.load(tmp_path / "run", weights="last")))
    expected = model.eval()(samples(7, 3).tensors[0])
    for each in (found, other):
        torch.testing.assert_close(torch.tensor(each), expected, rtol=1e-5, atol=1e-6)


def on_own_disk(rank: int, folder: Path) -> tuple[str, bool]:
    """What a worker is answered whose run directory the other does not see; and whether it has made a step."""
    os.environ.update({SEPARATE_DISKS: "1", "GROUP_RANK": str(rank), "LOCAL_RANK": "0"})
    seen: list[Any] = []
    trainer = make_trainer(Case(trainer={"listeners": [seen.append]}), folder / f"disk{rank}")
    trainer.model.register_forward_pre_hook(lambda *_: seen.append("computed"))
    try:
        trainer.fit("2 steps")
    except ConfigError as error:
        return error.what, bool(seen)
    return "", True


def test_hosts_without_a_common_disk_are_refused_before_the_first_step(tmp_path: Path) -> None:
    for said, has_begun in run_ranks(2, on_own_disk, tmp_path):
        assert said == "with strategy 'fsdp' each worker writes its part of a snapshot, and these hosts share no disk"
        assert not has_begun


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "virtual workers": ({"virtual_workers": 2}, "which virtual workers never do"),
    "shares that leave a rest": ({"strategy": mh.FSDP(shard=3)}, "there are 2 workers, which a mesh with shard=3"),
    "no such unit": ({"strategy": mh.FSDP(units="Layer")}, "'Layer' names no module of the model"),
    "fp32 in bf16": ({"strategy": mh.FSDP(gather="bf16")}, "parameters are gathered in bf16, and precision is 'fp32'"),
    "batch norm in bf16": (
        {
            "strategy": mh.FSDP(gather="bf16"),
            "precision": "bf16",
            "model": nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 11)),
        },
        "the BatchNorm layer '1' computes in fp32 only",
    ),
    "a kernel for whole tensors": (
        {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1, fused=True)},
        "PyTorch's fused kernel for it cannot step a model in parts",
    ),
}


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def answers(rank: int, folder: Path) -> list[str]:
    found = []
    for changes, _ in REFUSED.values():
        given: dict[str, Any] = {"model": Model, "strategy": "fsdp", "optimizer": plain_sgd, **changes}
        try:
            mh.Trainer(
                loss=nn.CrossEntropyLoss(),
                data=mh.Data(train=samples(8, 1), batch_size=4),
                run_dir=folder,
                **given,
            )
        except ConfigError as error:
            found.append(error.what)
        else:
            found.append("")
    return found


def test_what_cannot_be_is_refused_before_the_first_step(tmp_path: Path) -> None:
    for found in run_ranks(2, answers, tmp_path):
        for (name, (_, sentence)), said in zip(REFUSED.items(), found, strict=True):
            assert sentence in said, name


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"zero": 4}, "zero is 4"),
        ({"shard": 0}, "shard is 0"),
        ({"shard": "node"}, "shard is 'node'"),
        ({"gather": "int8"}, "gather is 'int8'"),
    ],
)
def test_values_that_mean_nothing_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        mh.FSDP(**options)
