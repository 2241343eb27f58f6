"""Servers that keep the parameters: when they are data parallelism, and what holds of updates by micro-batch."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import Recipe, make_trainer, samples_by_step, step_lines

import manyhosts as mh
from manyhosts.communication.side_group import SideGroup
from manyhosts.errors import ConfigError
from manyhosts.strategies.asynchronous.parameter_server import Servers

pytestmark = pytest.mark.multiprocess

PLAIN = Recipe(samples=122, batch=20)  # 122 = 6 x 20 + 2: in the last step of an epoch a third worker has no sample
HANDED_OUT = Recipe(samples=122, batch=40, trainer={"micro_batch_size": 8}, duration="3 epochs")


def weights_of(rank: int, recipe: Recipe, folder: Path, kind: str = "AdamW") -> dict[str, torch.Tensor]:
    more = {"momentum": 0.9} if kind == "SGD" else {}
    trainer = make_trainer(recipe, folder, optimizer=lambda params: getattr(torch.optim, kind)(params, lr=0.01, **more))
    trainer.fit("9 steps")
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def fit(rank: int, recipe: Recipe, folder: Path) -> dict[str, Any]:
    result = make_trainer(recipe, folder).fit(recipe.duration)
    return {"sha": result.weights_sha256, "loss": result.validation["loss"], "steps": result.steps}


def with_strategy(recipe: Recipe, strategy: Any, **more: Any) -> Recipe:
    return replace(recipe, trainer={**recipe.trainer, "strategy": strategy, **more})


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_synchronous_servers_are_data_parallelism(kind: str, tmp_path: Path) -> None:
    recipe = replace(
        PLAIN, batch_norm=True, trainer={"clip_gradients": 0.5, "micro_batch_size": 7, "warmup": "3 steps"}
    )
    together = with_strategy(recipe, mh.ParameterServer(staleness=0))
    expected = run_ranks(2, weights_of, with_strategy(recipe, mh.DDP()), tmp_path / "ddp", kind)
    for found in run_ranks(2, weights_of, together, tmp_path / "servers", kind):
        for name, value in expected[0].items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7, msg=name)


def test_one_worker_that_serves_itself_is_a_plain_loop(tmp_path: Path) -> None:
    """Bit for bit: an update for each micro-batch is a plain loop over batches of that size."""
    plain = replace(PLAIN, samples=120)
    servers = replace(plain, batch=40, trainer={"strategy": mh.ParameterServer(), "micro_batch_size": 20})
    [alone] = run_ranks(1, fit, replace(plain, trainer={"strategy": mh.ParameterServer(staleness=0)}), tmp_path / "1")
    [found] = run_ranks(1, fit, servers, tmp_path / "2")
    assert found["sha"] == alone["sha"]
    assert found["steps"] * 2 == alone["steps"]


def assert_each_once(run_dir: Path, epochs: int) -> None:
    taken = list(samples_by_step(run_dir).values())
    for epoch in range(epochs):  # of four steps each
        assert sorted(sample for step in taken[4 * epoch : 4 * epoch + 4] for sample in step) == list(range(122))


STRATEGIES = {"asynchronous": mh.ParameterServer(), "bounded": mh.ParameterServer(staleness=1, servers=1)}


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_sample_is_trained_on_once_an_epoch_and_all_workers_end_alike(name: str, tmp_path: Path) -> None:
    answers = run_ranks(3, fit, with_strategy(HANDED_OUT, STRATEGIES[name]), tmp_path)
    assert all(answer == answers[0] for answer in answers), answers
    assert_each_once(tmp_path, epochs=3)
    lines = [line["values"] for line in step_lines(tmp_path)]
    assert [sum(line[f"pieces/rank{rank}"] for rank in range(3)) for line in lines] == [5, 5, 5, 1] * 3
    assert all(line["staleness_max"] >= line["staleness"] >= 0 for line in lines)


def test_run_continues_with_other_workers_and_servers(tmp_path: Path) -> None:
    first = with_strategy(replace(HANDED_OUT, duration="1 epoch"), mh.ParameterServer(servers=3))
    run_ranks(3, fit, first, tmp_path)
    answers = run_ranks(2, fit, with_strategy(HANDED_OUT, mh.ParameterServer(servers=1)), tmp_path)
    assert answers[0] == answers[1]
    assert_each_once(tmp_path, epochs=3)


def noted(rank: int, recipe: Recipe, folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    """What compression has kept back as this worker begins, and as it ends; and what `fit` gives."""
    begins: list[dict[str, torch.Tensor]] = []
    ends: list[dict[str, torch.Tensor]] = []
    load, update = Servers.load_state_dict, Servers.update

    def loaded(self: Servers, states: Any) -> None:
        load(self, states)
        begins.append({name: each.clone() for name, each in self.dropped.items()})

    def updated(self: Servers, *given: Any) -> None:
        update(self, *given)
        ends.append({name: each.clone() for name, each in self.dropped.items()})

    Servers.load_state_dict, Servers.update = loaded, updated  # type: ignore[method-assign]
    found = fit(rank, recipe, folder)
    return begins, ends[-1], found


def total(kept: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    names = {name for each in kept for name in each}
    return {name: sum((each[name] for each in kept if name in each), torch.zeros(())) for name in names}


def test_what_compression_keeps_back_is_taken_up_by_other_workers_and_servers(tmp_path: Path) -> None:
    pushed = {"compression": "int8", "compress_above": 1}
    first = with_strategy(replace(HANDED_OUT, duration="1 epoch"), mh.ParameterServer(servers=3, **pushed))
    before = total([ends for _, ends, _ in run_ranks(3, noted, first, tmp_path)])
    assert all(each.abs().max() > 0 for each in before.values()), before
    assert before, "or nothing below says anything"
    answers = run_ranks(2, noted, with_strategy(HANDED_OUT, mh.ParameterServer(servers=1, **pushed)), tmp_path)
    after = total([begins[-1] for begins, _, _ in answers])
    assert before.keys() == after.keys()
    for name, each in before.items():
        torch.testing.assert_close(after[name], each, rtol=0, atol=1e-7)
    assert answers[0][2] == answers[1][2]
    assert answers[0][2]["loss"] < 2.2
    assert_each_once(tmp_path, epochs=3)


def test_servers_of_their_own_compute_nothing(tmp_path: Path) -> None:
    recipe = with_strategy(HANDED_OUT, mh.ParameterServer(staleness=1, servers=1, dedicated=True))
    answers = run_ranks(3, fit, recipe, tmp_path)
    assert all(answer == answers[0] for answer in answers), answers
    assert_each_once(tmp_path, epochs=3)
    lines = [line["values"] for line in step_lines(tmp_path)]
    assert all(line["pieces/rank0"] == 0 and line["ahead_max"] <= 1 for line in lines)
    assert all(sum(line[f"pieces/rank{rank}"] for line in lines) > 0 for rank in (1, 2))


def test_updates_out_of_order_reach_the_loss_of_one_process(tmp_path: Path) -> None:
    """Within 2 %, in as many samples. The schedule has taken the learning rate to zero where both end."""
    recipe = Recipe(samples=600, batch=160, duration="90 steps", schedule=True, trainer={"micro_batch_size": 20})
    recipe = with_strategy(recipe, mh.ParameterServer())
    [alone] = run_ranks(1, losses, recipe, tmp_path / "alone")
    together = run_ranks(2, losses, recipe, tmp_path / "together")
    assert together[0] == together[1]
    assert together[0] <= 1.02 * alone


def losses(rank: int, recipe: Recipe, folder: Path) -> float:
    trainer = make_trainer(recipe, folder, optimizer=lambda params: torch.optim.SGD(params, lr=0.05))
    return float(trainer.fit(recipe.duration).validation["loss"])


def test_hogwild_trains_one_model_in_shared_memory(tmp_path: Path) -> None:
    recipe = with_strategy(HANDED_OUT, mh.Hogwild())
    found = run_ranks(2, losses, recipe, tmp_path)
    assert found[0] == found[1]
    assert found[0] < 2.2
    assert_each_once(tmp_path, epochs=3)


def begin_on_two_hosts(rank: int, recipe: Recipe, folder: Path) -> tuple[str, str]:
    os.environ.update(GROUP_RANK=str(rank), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    with pytest.raises(ConfigError) as refused:
        make_trainer(recipe, folder)
    return refused.value.what, refused.value.fix


def test_hogwild_over_hosts_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    for what, fix in run_ranks(2, begin_on_two_hosts, with_strategy(HANDED_OUT, mh.Hogwild()), tmp_path):
        assert what == "strategy 'hogwild' shares the memory of one host, and the 2 workers are on several"
        assert fix == 'choose strategy="parameter-server", or run on one host'
    assert not (tmp_path / "metrics.jsonl").exists()


WORDS = 20_000


def train_embedding(rank: int, strategy: mh.ParameterServer, folder: Path) -> dict[str, Any]:
    """Returns the weights, and the bytes that this worker has pushed."""
    sent, send = [0], SideGroup.send

    def counted(self: SideGroup, tensor: torch.Tensor, to: int, tag: int = 0) -> None:
        sent[0] += tensor.nbytes * (tag != 2)  # replies are what others pull
        send(self, tensor, to, tag)

    SideGroup.send = counted  # type: ignore[method-assign]
    draw = torch.Generator().manual_seed(0)
    words, labels = torch.randint(WORDS, (64, 5), generator=draw), torch.randint(4, (64,), generator=draw)
    trainer = mh.Trainer(
        model=lambda: torch.nn.EmbeddingBag(WORDS, 4, sparse=True),
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SparseAdam(params, lr=0.01),
        data=mh.Data(train=torch.utils.data.TensorDataset(words, labels), batch_size=16),
        micro_batch_size=4,
        strategy=strategy,
        run_dir=folder,
    )
    trainer.fit("4 steps")
    return {"weight": trainer.model.state_dict()["weight"].clone(), "pushed": sent[0]}


@pytest.mark.parametrize("staleness", [0, None])
def test_of_a_sparse_embedding_the_touched_rows_alone_are_pushed(staleness: int | None, tmp_path: Path) -> None:
    strategy = mh.ParameterServer(staleness=staleness)
    found = run_ranks(2, train_embedding, strategy, tmp_path / "two")
    assert torch.equal(found[0]["weight"], found[1]["weight"])
    rows = 64 * 5  # that all micro-batches touch at most, of one worker that pushes all to the other
    assert 0 < found[1]["pushed"] < rows * (8 + 4 * 4) + 16 * 200
    if staleness == 0:
        [alone] = run_ranks(1, train_embedding, strategy, tmp_path / "one")
        torch.testing.assert_close(found[0]["weight"], alone["weight"], rtol=1e-5, atol=1e-7)
