"""A loss with parameters of its own, such as an ArcFace head, is trained, kept and resumed as the model is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import images_and_labels
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.errors import ConfigError, SnapshotError

pytestmark = pytest.mark.multiprocess
SAMPLES, BATCH, STEPS = 60, 25, 5


class CosineHead(nn.Module):
    """Class centres and a temperature, learned; a scale that is not."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.centres = nn.Parameter(torch.randn(10, 16, generator=generator))
        self.log_temperature = nn.Parameter(torch.zeros(()))
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor(4.0))
        self.dropout = nn.Dropout(0.5)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        checksum = nn.functional.normalize(features) @ nn.functional.normalize(self.centres).T
        extra = 0.0 * self.dropout(features).sum()
        return nn.functional.cross_entropy(self.scale * checksum * self.log_temperature.exp(), labels) + extra


def features() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh())


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5, momentum=0.9)


def fitted(rank: int, run_dir: Path, duration: str, more: dict[str, Any]) -> dict[str, Any]:
    head = CosineHead()
    if rank:
        with torch.no_grad():
            head.centres.add_(1.0)  # the leader's are everybody's
    trainer = mh.Trainer(
        model=features(),
        loss=head,
        optimizer=optimizer,
        data=mh.Data(
            train=TensorDataset(*images_and_labels(SAMPLES)),
            validation=TensorDataset(*images_and_labels(30, first=100)),
            test=TensorDataset(*images_and_labels(30, first=100)),
            batch_size=BATCH,
            shuffle=False,
        ),
        run_dir=run_dir,
        **{"clip_gradients": 1.0, **more},
    )
    result = trainer.fit(duration)
    assert head.training
    now = {name: value.tolist() for name, value in head.state_dict().items()}
    assert trainer.test()["loss"] == pytest.approx(result.best)
    assert {name: value.tolist() for name, value in head.state_dict().items()} == now
    return {
        "sha": result.weights_sha256,
        "validation": result.validation["loss"],
        "head": now,
        "model": {name: value.tolist() for name, value in trainer.model.state_dict().items()},
    }


def train(workers: int, run_dir: Path, *, duration: str = f"{STEPS} steps", **more: Any) -> dict[str, Any]:
    first, *others = run_ranks(workers, fitted, run_dir, duration, more)
    assert all(other == first for other in others), "workers hold the same"
    return first


def plain_loop() -> dict[str, Any]:
    """The same in PyTorch alone."""
    images, labels = images_and_labels(SAMPLES)
    model, head = features(), CosineHead()
    parameters = [*model.parameters(), *head.parameters()]
    stepper = optimizer(parameters)
    begins = [begin for _ in range(2) for begin in range(0, SAMPLES, BATCH)][:STEPS]
    for begin in begins:
        stepper.zero_grad()
        head(model(images[begin : begin + BATCH]), labels[begin : begin + BATCH]).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        stepper.step()
    return {
        kind: {name: value.tolist() for name, value in module.state_dict().items()}
        for kind, module in (("head", head), ("model", model))
    }


def assert_close(one: dict[str, Any], other: dict[str, Any]) -> None:
    for kind in ("model", "head"):
        for name, value in one[kind].items():
            torch.testing.assert_close(torch.tensor(other[kind][name]), torch.tensor(value), rtol=1e-5, atol=1e-6)


def test_loss_is_trained_as_a_plain_loop_trains_it_on_any_number_of_workers(tmp_path: Path) -> None:
    plain = plain_loop()
    assert plain["head"]["log_temperature"] != 0
    for workers in (1, 2, 3):
        assert_close(plain, train(workers, tmp_path / str(workers)))


def test_loss_has_the_same_bits_with_virtual_workers(tmp_path: Path) -> None:
    one = train(1, tmp_path / "1", virtual_workers=3)
    assert one == train(2, tmp_path / "2", virtual_workers=3) == train(3, tmp_path / "3", virtual_workers=3)


def test_loss_is_resumed_from_a_snapshot(tmp_path: Path) -> None:
    whole = train(2, tmp_path / "whole")
    train(2, tmp_path / "cut", duration="2 steps")
    assert train(2, tmp_path / "cut") == whole


def test_workers_that_step_alone_end_with_one_loss(tmp_path: Path) -> None:
    train(2, tmp_path, strategy="local-sgd")


def trainer(run_dir: Path, **more: Any) -> mh.Trainer:
    arguments: dict[str, Any] = {
        "model": features(),
        "optimizer": optimizer,
        "data": mh.Data(train=TensorDataset(*images_and_labels(SAMPLES)), batch_size=BATCH),
        "run_dir": run_dir,
    }
    return mh.Trainer(**{**arguments, **more})


def test_what_a_new_worker_is_given_has_the_loss(tmp_path: Path) -> None:
    giver, taker = (trainer(tmp_path / name, loss=CosineHead()) for name in ("giver", "taker"))
    giver.fit("3 steps")
    taker._provider.take_up(giver._provider.everything() | {"run": None})
    for one, other in zip(giver.components.trained.parameters(), taker.components.trained.parameters(), strict=True):
        assert torch.equal(one, other)


def test_snapshot_without_the_state_of_the_loss_is_refused(tmp_path: Path) -> None:
    def by_head(head: nn.Module) -> Any:
        return lambda outputs, labels: head(outputs, labels)

    class Bare(CosineHead):
        """The same model and optimizer, and a loss whose state is another."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("more", torch.zeros(3))

    trainer(tmp_path, loss=CosineHead()).fit("2 steps")
    with pytest.raises(SnapshotError, match=r"another loss: there more is missing, here it is of shape \(3,\)"):
        trainer(tmp_path, loss=Bare()).fit("4 steps")
    with pytest.raises(ConfigError, match=r"group 0 of the optimizer has 2 parameters, and the run began with 4"):
        trainer(tmp_path, loss=by_head(CosineHead())).fit("4 steps")


def test_class_weights_of_a_loss_of_pytorch_are_the_scripts(tmp_path: Path) -> None:
    """They are no state to continue from: a changed weight counts after a resume."""
    classes = nn.Linear(16, 10)
    made = trainer(tmp_path, model=nn.Sequential(features(), classes), loss=nn.CrossEntropyLoss(torch.ones(10)))
    made.fit("2 steps")
    assert "loss" not in mh.snapshot.load.load(made._run.directory.snapshots / "step-00000002").state


@pytest.mark.parametrize("by_step", [False, True])
def test_parameter_of_neither_model_nor_loss_is_refused(by_step: bool, tmp_path: Path) -> None:
    head = CosineHead()
    loss = {"step": lambda model, batch: head(model(batch[0]), batch[1])}
    if not by_step:
        loss = {"loss": lambda outputs, labels: head(outputs, labels)}
    remedy = "let step reach it through the model" if by_step else "an nn.Module that is given as loss"
    with pytest.raises(ConfigError, match=r"group 1 of the optimizer has a parameter of shape \(10, 16\)") as error:
        trainer(
            tmp_path,
            optimizer=lambda params: optimizer([{"params": params}, {"params": list(head.parameters())}]),
            **loss,
        )
    assert remedy in (error.value.fix or "")


@pytest.mark.parametrize("in_a_group", [False, True])
def test_parameter_that_is_given_twice_is_refused(in_a_group: bool, tmp_path: Path) -> None:
    head = CosineHead()

    def twice(params: Any) -> torch.optim.Optimizer:
        own = list(head.parameters())
        return optimizer([{"params": params}, {"params": own}] if in_a_group else [*params, *own])

    with pytest.raises(ConfigError, match=r"more than one parameter group|in the optimizer twice"):
        trainer(tmp_path, loss=head, optimizer=twice)
