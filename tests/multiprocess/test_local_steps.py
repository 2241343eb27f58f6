"""Workers that step alone and meet now and then: when they are data parallelism, and what is the same on all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import Recipe, images_and_labels, make_trainer, network, step_lines, trained
from torch.nn import functional

import manyhosts as mh

pytestmark = pytest.mark.multiprocess

PLAIN = Recipe(samples=122, batch=20)  # 122 = 6 x 20 + 2: in the last step of an epoch a third worker has no sample


def train_plainly(rank: int, recipe: Recipe, folder: Path) -> dict[str, torch.Tensor]:
    """The same with SGD without momentum, whose mean over the workers is that of their gradients."""
    trainer = make_trainer(recipe, folder)
    for group in trainer.components.optimizer.param_groups:
        group["momentum"] = 0.0
    trainer.fit("9 steps")
    return {name: value.detach() for name, value in trainer.model.state_dict().items()}


def weights_of(workers: int, strategy: Any, folder: Path) -> list[dict[str, Any]]:
    recipe = replace(PLAIN, trainer={"strategy": strategy})
    return run_ranks(workers, train_plainly, recipe, folder)


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, value in one.items():
        torch.testing.assert_close(
            other[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("strategy", [mh.LocalSGD(sync_every=1), mh.DiLoCo(sync_warmup=9)], ids=lambda one: one.name)
def test_workers_that_meet_in_every_step_equal_one_process(strategy: Any, tmp_path: Path) -> None:
    [alone] = weights_of(1, mh.DDP(), tmp_path / "alone")
    for found in weights_of(3, strategy, tmp_path / "together"):
        assert_equal(alone, found)


@pytest.mark.parametrize("kind", [mh.LocalSGD, mh.DiLoCo], ids=lambda kind: kind.name)
def test_exact_beginning_has_every_bit_of_data_parallelism(kind: Any, tmp_path: Path) -> None:
    """With an optimizer to which a worker's own part of the batch would look different. Of two the order is one."""
    hashes = {
        str(run_ranks(2, train_with_adam, replace(PLAIN, trainer={"strategy": strategy}), tmp_path / strategy.name))
        for strategy in (mh.DDP(), kind(sync_warmup=9))
    }
    assert len(hashes) == 1


def train_with_adam(rank: int, recipe: Recipe, folder: Path, steps: int = 9) -> str:
    trainer = make_trainer(recipe, folder, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
    return trainer.fit(f"{steps} steps").weights_sha256


def test_first_round_begins_from_where_the_warm_up_ended(tmp_path: Path) -> None:
    """With an outer step of one, without momentum, the mean of the models is taken after the round."""
    warm = {"sync_warmup": 3, "sync_every": 6}
    outer = mh.DiLoCo(
        **warm, outer_lr=1.0, outer_momentum=0.0, fragments=1, overlap_steps=0, outer_compression="none"
    )  # fmt: skip
    local = weights_of(2, mh.LocalSGD(**warm), tmp_path / "local")
    assert_equal(local[0], weights_of(2, outer, tmp_path / "outer")[0])


def test_outer_step_of_one_without_momentum_is_the_mean_of_the_models(tmp_path: Path) -> None:
    mean = weights_of(2, mh.LocalSGD(sync_every=3), tmp_path / "mean")
    outer = mh.DiLoCo(
        sync_every=3, outer_lr=1.0, outer_momentum=0.0, fragments=1, overlap_steps=0, outer_compression="none"
    )
    found = weights_of(2, outer, tmp_path / "outer")
    assert_equal(mean[0], found[0])
    [alone] = weights_of(1, mh.DDP(), tmp_path / "alone")
    with pytest.raises(AssertionError):
        assert_equal(alone, found[0])


def test_the_first_outer_step_is_away_from_the_weights_that_a_run_is_given(tmp_path: Path) -> None:
    """An outer step of no length leaves what all share as it was."""
    given = {name: value * 2 for name, value in network().state_dict().items()}
    torch.save(given, tmp_path / "given.pt")
    outer = mh.DiLoCo(sync_every=3, outer_lr=0.0, fragments=1, overlap_steps=0, outer_compression="none")
    recipe = replace(PLAIN, trainer={"strategy": outer, "init_from": tmp_path / "given.pt"})
    assert_equal(given, run_ranks(2, train_plainly, recipe, tmp_path / "run")[0])


LOCAL = {
    "local-sgd": mh.LocalSGD(sync_every=5, sync_warmup=2),
    "diloco": mh.DiLoCo(sync_every=4, fragments=2, overlap_steps=1),
    "diloco, warmed up": mh.DiLoCo(sync_every=4, fragments=2, sync_warmup=6),
    "diloco at once": mh.DiLoCo(sync_every=4, fragments=1, overlap_steps=0),
    "local-sgd, ever more rarely": mh.LocalSGD(sync_every=3, sync_rule="quadratic", sync_at_most=5),
    "diloco, ever more rarely": mh.DiLoCo(sync_every=4, fragments=2, sync_rule="quadratic", sync_at_most=6),
}


@pytest.mark.parametrize("name", LOCAL)
def test_run_that_goes_on_from_a_snapshot_between_two_meetings_ends_with_the_same_bits(
    name: str, tmp_path: Path
) -> None:
    recipe = replace(PLAIN, trainer={"strategy": LOCAL[name]}, schedule="rarely" in name)
    whole = trained(2, recipe, tmp_path / "whole")
    trained(2, replace(recipe, duration="9 steps"), tmp_path / "parts")
    parts = trained(2, recipe, tmp_path / "parts")
    hashes = {answer["result"]["weights_sha256"] for answer in [*whole, *parts]}
    assert len(hashes) == 1, "and all workers end with one model"


def test_run_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    recipe = replace(PLAIN, trainer={"strategy": LOCAL["diloco"]})
    trained(3, replace(recipe, duration="9 steps"), tmp_path)
    answers = trained(2, recipe, tmp_path)
    assert len({answer["result"]["weights_sha256"] for answer in answers}) == 1
    assert answers[0]["result"]["validation"]["loss"] < 2.3


@pytest.mark.parametrize("ended", [3, 5], ids=["in the exact beginning", "behind it"])
def test_run_with_adam_goes_on_with_the_same_bits_from_where_it_ended(ended: int, tmp_path: Path) -> None:
    """What Adam remembers is of all workers' gradients up to the fourth step, and of one's own after that."""
    recipe = replace(PLAIN, trainer={"strategy": mh.LocalSGD(sync_every=3, sync_warmup=4)})
    whole = run_ranks(2, train_with_adam, recipe, tmp_path / "whole")
    run_ranks(2, train_with_adam, recipe, tmp_path / "parts", ended)
    assert run_ranks(2, train_with_adam, recipe, tmp_path / "parts") == whole


def validate_in_between(_rank: int, folder: Path) -> tuple[float, float, bool]:
    """What the trainer reports after a step between two meetings, and what the mean of the models gives."""
    recipe = replace(PLAIN, trainer={"strategy": mh.LocalSGD(sync_every=100), "validate_every": "4 steps"})
    trainer = make_trainer(recipe, folder)
    result = trainer.fit("4 steps")  # the run ends with the mean
    images, labels = images_and_labels(101, first=1000)
    with torch.no_grad():
        loss = functional.cross_entropy(trainer.model(images), labels)
    return result.validation["loss"], float(loss), trainer.model.training


def test_validation_between_two_meetings_is_that_of_the_mean(tmp_path: Path) -> None:
    for reported, expected, _ in run_ranks(2, validate_in_between, tmp_path):
        assert reported == pytest.approx(expected, rel=1e-5)


def test_bytes_are_sent_when_the_workers_meet(tmp_path: Path) -> None:
    trained(2, replace(PLAIN, trainer={"strategy": mh.LocalSGD(sync_every=4)}, duration="6 steps"), tmp_path)
    sent = [line["bytes_sent"] for line in step_lines(tmp_path)]
    assert sent[3] > 5000 > 1000 > sent[0], "in the first step they tell each other what a look at the loss has shown"
    assert max(sent[1], sent[2], sent[4]) < 100


def train_with_falling_rate(rank: int, strategy: Any, folder: Path) -> None:
    """The learning rate halves after the fourth step, and again after the twelfth."""
    trainer = make_trainer(replace(PLAIN, trainer={"strategy": strategy}), folder)
    trainer.components.schedule = torch.optim.lr_scheduler.MultiStepLR(trainer.components.optimizer, [4, 12], gamma=0.5)
    trainer.fit("24 steps")


def test_rounds_grow_with_the_square_of_what_the_learning_rate_has_fallen_by(tmp_path: Path) -> None:
    run_ranks(2, train_with_falling_rate, mh.LocalSGD(sync_every=2, sync_rule="quadratic", sync_at_most=9), tmp_path)
    met = [line["step"] for line in step_lines(tmp_path) if line["bytes_sent"] > 5000]
    # Fixed when a round begins: 2 steps at the full rate, 8 at a half, and 9 at most where 32 would be due.
    assert met == [2, 4, 6, 14, 23]


def test_fragments_take_their_turns_in_a_round_that_has_grown(tmp_path: Path) -> None:
    strategy = mh.DiLoCo(sync_every=2, fragments=2, overlap_steps=1, sync_rule="quadratic", sync_at_most=9)
    run_ranks(2, train_with_falling_rate, strategy, tmp_path)
    # In the first step they tell each other what a look at the loss has shown.
    sent = [line["step"] for line in step_lines(tmp_path)[1:] if line["bytes_sent"] > 560]
    # Counted when it has arrived, a step after it was sent: at the middle and the end of each round.
    assert sent == [2, 3, 4, 5, 6, 7, 10, 11, 15, 19, 24], "and in the tenth"
