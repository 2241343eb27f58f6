"""Copies in parts that step alone: two copies by hand in one process; fsdp, diloco and one process at the ends."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import summary
from launching import run
from ranks import run_ranks
from runs import Recipe, step_lines
from runs import make_trainer as make_digits_trainer
from sharded import Case, Model, Outcome, assert_passed_on, assert_same, make_trainer, said, samples, script, trained
from torch import Tensor, nn

import manyhosts as mh
from manyhosts.data import randomness
from manyhosts.data.order import Order, Position, bounds
from manyhosts.errors import ConfigError

pytestmark = pytest.mark.multiprocess

PLAIN = {"outer_compression": "none", "fragments": 1, "overlap_steps": 0, "local_lr_scaling": None}
OUTER = {**PLAIN, "sync_every": 3, "outer_lr": 0.6}
CASES = {
    "clipped, an uneven rest": Case(samples=29, steps=8, trainer={"clip_gradients": 0.3, "micro_batch_size": 2}),
    "AdamW": Case(optimizer="AdamW", steps=7, samples=31),
    "a rest of one": Case(samples=13, steps=7),
}


def by_hand(case: Case, config: mh.DiLoCo, copies: int = 2, workers: int = 4) -> Outcome:
    """The training of so many copies in one process, by plain PyTorch."""
    with randomness.kept():
        randomness.seed_all(0, randomness.MODEL)
        first = Model(**case.block)
    models = [copy.deepcopy(first) for _ in range(copies)]
    further = {"momentum": 0.9} if case.optimizer == "SGD" else {}
    kind = getattr(torch.optim, case.optimizer)
    optimizers = [kind(model.parameters(), lr=0.05, **further) for model in models]
    trained_names = [name for name, each in first.named_parameters() if each.requires_grad]
    shared = {name: first.get_parameter(name).detach().clone() for name in trained_names}
    momentum = {name: torch.zeros_like(each) for name, each in shared.items()}
    words, targets = samples(case.samples, 1).tensors
    order, position = Order(case.samples, batch=case.batch, seed=0), Position()
    norms, losses = [], []
    for step in range(1, case.steps + 1):
        taken = torch.tensor(order.at(position))
        position = order.after(position)
        loss_of_all = 0.0
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            each = workers // copies
            begin, end = (bounds(len(taken), workers, part)[side] for part, side in _ends(number, each))
            own = taken[begin:end]
            if len(own) == 0:
                if number == 0:
                    norms.append(0.0)
                continue
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(words[own]), targets[own])
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), case.trainer.get("clip_gradients", 1e9))
            if number == 0:
                norms.append(norm.item())  # what the leader writes
            optimizer.step()
            loss_of_all += loss.item() * len(own) / len(taken)
        losses.append(loss_of_all)
        if step % config.sync_every == 0:
            _outer_step(models, shared, momentum, config)
    mean = _mean(models)
    held = samples(23, 2).tensors
    with torch.no_grad():
        validation = {"loss": float(nn.functional.cross_entropy(mean(held[0]), held[1]))}
    return Outcome(norms, losses, dict(mean.state_dict()), validation, "", [])


def _ends(number: int, each: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The first part of a copy, of which the begin counts, and its last one, of which the end does."""
    return (number * each, 0), ((number + 1) * each - 1, 1)


@torch.no_grad()
def _outer_step(models: list[Model], shared: dict[str, Tensor], momentum: dict[str, Tensor], config: mh.DiLoCo) -> None:
    for name, before in shared.items():
        moved = before - torch.stack([model.get_parameter(name) for model in models]).mean(0)
        momentum[name].mul_(config.outer_momentum).add_(moved)
        before.sub_(config.outer_lr * (moved + config.outer_momentum * momentum[name]))
        for model in models:
            model.get_parameter(name).copy_(before)


def _mean(models: list[Model]) -> Model:
    mean = copy.deepcopy(models[0])
    with torch.no_grad():
        for name, parameter in mean.named_parameters():
            parameter.copy_(torch.stack([model.get_parameter(name) for model in models]).mean(0))
    return mean


def test_two_copies_in_parts_train_as_two_by_hand_with_an_outer_step(tmp_path: Path) -> None:
    cases = {name: replace(case, strategy="diloco", options={**OUTER, "shard": 2}) for name, case in CASES.items()}
    for name, found in trained(4, cases, tmp_path / "parts").items():
        assert_same(by_hand(CASES[name], mh.DiLoCo(**OUTER)), found)


DIGITS = Recipe(samples=123, batch=20, duration="9 steps", accuracy=False)  # a rest of three: two and one, both times
FRAGMENTS = {"sync_every": 4, "fragments": 2, "overlap_steps": 1, "sync_warmup": 2, "outer_compression": "none"}


def validated(rank: int, recipe: Recipe, folder: Path) -> dict[str, float]:
    return dict(make_digits_trainer(recipe, folder).fit(recipe.duration).validation)


def test_two_copies_in_parts_are_two_workers_that_step_alone(tmp_path: Path) -> None:
    """With fragments that take turns and travel meanwhile, after an exact beginning; on a model without scalars."""
    recipes = {
        shard: replace(DIGITS, trainer={"strategy": mh.DiLoCo(**FRAGMENTS, shard=shard), "clip_gradients": 1.0})
        for shard in (1, 2)
    }
    [alone, *_] = run_ranks(2, validated, recipes[1], tmp_path / "alone")
    for found in run_ranks(4, validated, recipes[2], tmp_path / "parts"):
        assert found == pytest.approx(alone, rel=1e-5)
    lines = [step_lines(tmp_path / name) for name in ("alone", "parts")]
    for one, other in zip(*lines, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-5)


MEANS = {  # copies have equally many samples in every step: momenta count as their gradients do
    "batch norm": Case(samples=24, block={"norm": nn.BatchNorm1d}),
    "loss with parameters": Case(samples=24, centred=True, trainer={"micro_batch_size": 4}),
}


def test_copies_that_meet_in_every_step_train_as_one_process(tmp_path: Path) -> None:
    alone = trained(1, MEANS, tmp_path / "alone")
    cases = {
        name: replace(case, strategy="local-sgd", options={"sync_every": 1, "shard": 2}) for name, case in MEANS.items()
    }
    for name, found in trained(4, cases, tmp_path / "parts").items():
        assert found.losses == pytest.approx(alone[name].losses, rel=1e-5)
        assert_same(replace(alone[name], norms=[]), replace(found, norms=[]))


def test_one_copy_that_steps_alone_has_the_bits_of_fsdp_and_so_has_an_exact_beginning(tmp_path: Path) -> None:
    case = Case(optimizer="AdamW", trainer={"clip_gradients": 0.3})
    cases = {
        "fsdp": replace(case, options={"shard": 2}),
        "exact": replace(case, strategy="diloco", options={"shard": 2, "sync_warmup": 9}),
    }
    found = trained(4, cases, tmp_path / "four")
    assert found["fsdp"].sha == found["exact"].sha
    one = {
        "fsdp": case,
        "one copy": replace(case, strategy="local-sgd", options={"shard": 2}),
    }
    found = trained(2, one, tmp_path / "two")
    assert found["fsdp"].sha == found["one copy"].sha
    assert found["fsdp"].norms == found["one copy"].norms


def hashes(rank: int, case: Case, steps: int, folder: Path) -> str:
    return str(make_trainer(case, folder).fit(f"{steps} steps").weights_sha256)


ROUNDS = {"sync_every": 4, "fragments": 2, "overlap_steps": 1, "shard": 2}


@pytest.mark.parametrize("strategy", ["diloco", pytest.param("local-sgd", marks=pytest.mark.slow)])
def test_a_run_that_is_taken_up_within_a_round_ends_with_the_same_bits(strategy: str, tmp_path: Path) -> None:
    """With what int8 has dropped, an outer gradient on its way, and an optimizer of each copy's own."""
    options = ROUNDS if strategy == "diloco" else {"sync_every": 4, "shard": 2}
    case = Case(strategy=strategy, options=options, optimizer="AdamW", trainer={"micro_batch_size": 4})
    undisturbed = run_ranks(4, hashes, case, 9, tmp_path / "undisturbed")
    run_ranks(4, hashes, case, 6, tmp_path / "taken up")
    assert run_ranks(4, hashes, case, 9, tmp_path / "taken up") == undisturbed
    assert len(set(undisturbed)) == 1


@pytest.mark.slow
def test_a_snapshot_passes_between_this_and_other_layouts(tmp_path: Path) -> None:
    case = Case(strategy="diloco", options=ROUNDS, optimizer="AdamW", trainer={"micro_batch_size": 4})
    alone = replace(case, options={**ROUNDS, "shard": 1})
    layouts = [(2, case), (4, case), (2, alone), (4, replace(case, strategy="fsdp", options={"shard": 2})), (4, case)]
    assert_passed_on(layouts, tmp_path / "run")


def test_what_travels_between_copies_is_counted(tmp_path: Path) -> None:
    """A worker sends its part alone: half the bytes of a worker that holds all, when copies meet."""
    plain = {"sync_every": 3, "local_lr_scaling": None}
    cases = {
        "mean": Case(strategy="local-sgd", options={**plain, "shard": 2}, steps=6),
        "never": Case(strategy="local-sgd", options={**plain, "sync_every": 9, "shard": 2}, steps=6),
    }
    found = trained(4, cases, tmp_path)
    more = [one - other for one, other in zip(found["mean"].bytes_sent, found["never"].bytes_sent, strict=True)]
    assert [bool(each) for each in more] == [False, False, True, False, False, True]
    numbers = sum(each.numel() for each in Model().parameters() if each.requires_grad and each.dim())
    assert more[2] == pytest.approx(4 * numbers / 2, rel=0.1)  # of two: each sends what it has once


@pytest.mark.slow
def test_a_killed_worker_costs_no_bit(tmp_path: Path) -> None:
    once = "if not os.path.exists('killed'): open('killed', 'w').close(); os.kill(os.getpid(), signal.SIGKILL)"
    found = set()
    for name, trouble in {"undisturbed": "pass", "killed": once}.items():
        (tmp_path / name).mkdir()
        words = ("strategy=fsdp+diloco", "mesh.replicate=2", "mesh.shard=2", "sync_every=4", "threads=1")
        options = [word for each in words for word in ("--set", each)]
        ended = run(tmp_path / name, script(trouble, "ddp"), "--workers", "4", "--restarts", "1", *options)
        assert ended.code == 0, ended.err
        assert summary(ended.run_dir)["restarts"] == int(name == "killed")
        assert summary(ended.run_dir)["strategy"] == "fsdp+diloco"
        assert "no worker holds the entire model" in said(ended.run_dir)
        found.add(summary(ended.run_dir)["weights_sha256"])
    assert len(found) == 1


def refused(rank: int, case: Case, folder: Path) -> str:
    with pytest.raises(ConfigError) as found:
        make_trainer(case, folder).fit("2 steps")
    return found.value.what


def test_a_batch_of_which_a_copy_has_nothing_is_refused_in_the_first_step(tmp_path: Path) -> None:
    case = Case(strategy="local-sgd", options={"shard": 2}, batch=1)
    whats = run_ranks(4, refused, case, tmp_path)
    assert all("a copy of the model has no sample of it" in what for what in whats)
