"""Modes that a script has set, what a step uses and does not keep, and rows of a loss over the whole batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.errors import ConfigError

INPUTS = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(24) % 2


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


def made(folder: Path, **changed: Any) -> mh.Run:
    arguments: dict[str, Any] = {
        "models": {"net": Normed, "teacher": lambda: Normed().eval().requires_grad_(False)},
        "optimizers": {"net": lambda params: torch.optim.SGD(params, 0.1)},
        "data": mh.Data(train=TensorDataset(INPUTS, LABELS), batch_size=8),
        "run_dir": folder,
    }
    return mh.Run(**{**arguments, **changed})


def taught(run: mh.Run) -> Callable[[Any], torch.Tensor]:
    return lambda batch: nn.functional.mse_loss(run.models["net"](batch[0]), run.models["teacher"](batch[0]))


def trained(run: mh.Run) -> None:
    run.backward(taught(run))
    run.update()


def notes(folder: Path) -> list[str]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["text"] for line in lines if line["event"] == "note"]


def test_model_that_no_optimizer_steps_stays_in_evaluation_mode(tmp_path: Path) -> None:
    run = made(tmp_path)
    before = {name: value.clone() for name, value in run.models["teacher"].state_dict().items()}
    run.fit(trained, "3 steps")
    assert not any(each.training for each in run.models["teacher"].modules())
    assert all(torch.equal(value, before[name]) for name, value in run.models["teacher"].state_dict().items())
    assert run.models["net"].training
    assert not any("evaluation mode" in note for note in notes(tmp_path))


def test_model_that_is_stepped_is_trained_in_training_mode_and_that_is_said(tmp_path: Path) -> None:
    run = made(tmp_path, models={"net": lambda: Normed().eval(), "teacher": Normed})
    run.fit(trained, "3 steps")
    assert all(each.training for each in run.models.modules())
    assert any("the model 'net' was in evaluation mode" in note for note in notes(tmp_path))


def test_parameters_of_a_stepped_model_that_no_optimizer_steps_are_named(tmp_path: Path) -> None:
    def optimizers(first: int) -> dict[str, Any]:
        return {"net": lambda params: torch.optim.SGD(list(params)[first:], 0.1)}

    made(tmp_path / "all", optimizers=optimizers(0)).fit(trained, "1 step")
    assert not any("no optimizer steps" in note for note in notes(tmp_path / "all"))
    made(tmp_path / "some", optimizers=optimizers(2)).fit(trained, "1 step")
    [note] = [note for note in notes(tmp_path / "some") if "no optimizer steps" in note]
    assert note.startswith("no optimizer steps 0.weight, 0.bias of the model 'net'")


def test_norm_alone_stays_in_evaluation_mode_on_both_faces(tmp_path: Path) -> None:
    def frozen() -> nn.Module:
        model = Normed()
        model[1].eval()
        return model

    run = made(tmp_path / "run", models={"net": frozen, "teacher": Normed})
    run.fit(trained, "3 steps")
    trainer = mh.Trainer(
        model=frozen(),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, 0.1),
        data=mh.Data(train=TensorDataset(INPUTS, LABELS), validation=TensorDataset(INPUTS, LABELS), batch_size=8),
        run_dir=tmp_path / "trainer",
    )
    trainer.fit("3 steps")
    for model in (run.models["net"], trainer.model):
        assert [each.training for each in model] == [True, False, True, True]
        assert int(model[1].num_batches_tracked) == 0


def test_model_that_comes_in_evaluation_mode_is_trained_in_training_mode(tmp_path: Path) -> None:
    trainer = mh.Trainer(
        model=Normed().eval(),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, 0.1),
        data=mh.Data(train=TensorDataset(INPUTS, LABELS), batch_size=8),
        run_dir=tmp_path,
    )
    trainer.fit("3 steps")
    trainer.model.eval()
    trainer.fit("6 steps")
    assert all(each.training for each in trainer.model.modules())
    assert int(trainer.model[1].num_batches_tracked) == 6


def test_mode_that_a_step_has_set_is_there_after_a_resume(tmp_path: Path) -> None:
    def step(run: mh.Run) -> None:
        if run.steps_done == 2:
            run.models["net"][1].eval()
        trained(run)

    entire = made(tmp_path / "entire").fit(step, "6 steps")
    made(tmp_path / "resumed", snapshots=mh.Snapshots(every="1 steps")).fit(step, "4 steps")
    resumed = made(tmp_path / "resumed", snapshots=mh.Snapshots(every="1 steps"))
    assert resumed.fit(step, "6 steps").weights_sha256 == entire.weights_sha256
    assert not resumed.models["net"][1].training


def test_batch_of_which_nothing_counts_steps_by_a_gradient_of_zero(tmp_path: Path) -> None:
    """As in plain PyTorch: momentum and weight decay go on. In the epoch's loss it counts nothing."""
    targets = torch.tensor([0, 1, 1, 0, -100, 0, -100, -100])
    inputs = INPUTS[:8]

    def loss(net: nn.Module, batch: Any) -> torch.Tensor:
        total = nn.functional.cross_entropy(net(batch[0]), batch[1], reduction="sum")
        return total / (batch[1] != -100).sum().clamp(min=1)

    def adamw(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.1, weight_decay=0.5)

    def plain_model() -> nn.Linear:
        torch.manual_seed(1)
        return nn.Linear(3, 2)

    plain = plain_model()
    optimizer, losses = adamw(plain.parameters()), []
    for begin in (0, 3, 6):
        batch = inputs[begin : begin + 3], targets[begin : begin + 3]
        optimizer.zero_grad()
        found = loss(plain, batch)
        found.backward()
        losses.append(found.item())
        optimizer.step()

    def step(run: mh.Run) -> None:
        counted = lambda batch: {"loss": loss(run.models["model"], batch), "count": (batch[1] != -100).sum()}  # noqa: E731
        run.backward(counted)
        run.update()

    data = mh.Data(train=TensorDataset(inputs, targets), batch_size=3, shuffle=False)
    run = mh.Run(models=plain_model, optimizers=adamw, data=data, run_dir=tmp_path, micro_batch_size=2)
    run.fit(step, "1 epoch")
    assert torch.allclose(run.models["model"].weight, plain.weight, atol=1e-6)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("weight") for line in lines if line["event"] == "step"] == [None, 2, 0]
    [epoch] = [line["train_loss"] for line in lines if line["event"] == "epoch"]
    assert epoch == pytest.approx((3 * losses[0] + 2 * losses[1]) / 5, rel=1e-5)


def test_callback_changes_the_optimizers_themselves(tmp_path: Path) -> None:
    class Acts(mh.Callback):
        def after_step(self, moment: Any) -> None:
            if moment.step == 2:
                assert (
                    moment.optimizer.state[next(iter(moment.model["net"].parameters()))]["momentum_buffer"].norm() > 0
                )
                moment.optimizer.state.clear()
            if moment.step == 4:
                moment.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})

    run = made(
        tmp_path, callbacks=[Acts()], optimizers={"net": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9)}
    )
    left: list[int] = []

    def step(run: mh.Run) -> None:
        left.append(len(run.components.optimizer.state))
        trained(run)

    with pytest.raises(ConfigError, match="is added to all optimizers of the run together"):
        run.fit(step, "6 steps")
    assert left == [0, 6, 0, 6]


# What a step computes before and twice.


def test_gradient_of_the_steps_own_that_would_be_lost_is_refused_and_after_the_pass_it_counts(tmp_path: Path) -> None:
    def decay(run: mh.Run) -> None:
        (0.1 * sum(each.square().sum() for each in run.models["net"].parameters())).backward()

    def lost(run: mh.Run) -> None:
        decay(run)
        trained(run)

    def counted(run: mh.Run) -> None:
        run.backward(taught(run))
        decay(run)
        run.update()

    def zeroed(run: mh.Run) -> None:
        for each in run.models["net"].parameters():
            if each.grad is not None:
                each.grad.zero_()
        trained(run)

    with pytest.raises(ConfigError, match=r"before run\.backward, which begins with none"):
        made(tmp_path / "lost").fit(lost, "2 steps")
    with_decay = made(tmp_path / "counted").fit(counted, "3 steps")
    assert with_decay.weights_sha256 != made(tmp_path / "plain").fit(trained, "3 steps").weights_sha256
    made(tmp_path / "zeroed").fit(zeroed, "4 steps")


def test_rows_that_are_others_the_second_time_are_refused(tmp_path: Path) -> None:
    own = torch.Generator().manual_seed(1)

    def drawn(batch: Any) -> torch.Tensor:
        return run.models["net"](batch[0] + torch.randn(batch[0].shape, generator=own))

    def by_address(batch: Any) -> torch.Tensor:
        return run.models["net"](batch[0] + torch.randn(batch[0].shape) + float(np.random.rand()))

    def step(rows: Callable[[Any], torch.Tensor]) -> Callable[[mh.Run], None]:
        def over(run: mh.Run) -> None:
            run.backward(rows, over_batch=lambda found: found.square().mean())
            run.update()

        return over

    run = made(tmp_path / "own")
    with pytest.raises(ConfigError, match="gives others when it is called again"):
        run.fit(step(drawn), "2 steps")
    run = made(tmp_path / "torch")
    run.fit(step(by_address), "4 steps")


@pytest.mark.parametrize("parts", [None, 2, 4])
def test_labels_and_frozen_parameters_go_with_a_loss_over_the_batch(tmp_path: Path, parts: int | None) -> None:
    """As in a plain loop; rows of a batch may be more in one tensor than in another where parts are always the same."""

    def plain() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    run = made(
        tmp_path,
        models={"net": plain},
        data=mh.Data(train=TensorDataset(INPUTS, LABELS), batch_size=8, shuffle=False),
        virtual_workers=parts,
    )
    several = parts is not None

    def over(rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
        outputs, labels, doubled = rows
        return nn.functional.cross_entropy(outputs, labels) + 0.1 * doubled.square().mean()

    def rows(model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
        outputs = model(batch[0])
        return outputs, batch[1], torch.cat([outputs, 2 * outputs[: len(outputs) // 2]]) if several else outputs

    def step(run: mh.Run) -> None:
        run.models["net"][0].requires_grad_(False)
        run.backward(lambda batch: rows(run.models["net"], batch), over_batch=over)
        run.update()

    expected = plain()
    expected.load_state_dict(run.models["net"].state_dict())
    optimizer = torch.optim.SGD(expected[2].parameters(), 0.1)
    run.fit(step, "3 steps")
    for begin in range(0, 24, 8):
        found = []
        for first in range(begin, begin + 8, 8 // (parts or 1)):
            last = first + 8 // (parts or 1)
            found.append(rows(expected, (INPUTS[first:last], LABELS[first:last])))
        optimizer.zero_grad()
        over(tuple(map(torch.cat, zip(*found, strict=True)))).backward()
        optimizer.step()
    torch.testing.assert_close(dict(run.models["net"].state_dict()), dict(expected.state_dict()))


# What a step uses, and no snapshot has.


class Config:
    beta = 1.0


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("iterator", "the step uses source, an iterator"),
        ("file", ""),
        ("attribute of the run", "changes run.baseline"),
        ("attribute of a class", "changes Config"),
        ("default", "changes remembers.seen"),
        ("random state", "changes state"),
    ],
)
def test_what_a_step_changes_and_no_snapshot_has_is_named(tmp_path: Path, kind: str, words: str) -> None:
    source, state = iter(range(1000)), np.random.RandomState(0)

    def remembers(seen: list[float] = []) -> None:  # noqa: B006  # what is looked for
        seen.append(1.0)

    def uses_iterator(run: mh.Run) -> None:
        next(source)

    def uses_file(run: mh.Run) -> None:
        log.write("a step\n")

    def sets_attribute(run: Any) -> None:
        run.baseline = getattr(run, "baseline", 0.0) + 1.0

    def sets_class(run: mh.Run) -> None:
        Config.beta *= 0.5

    def calls(run: mh.Run) -> None:
        remembers()

    def draws(run: mh.Run) -> None:
        state.rand()

    uses = {
        "iterator": uses_iterator, "file": uses_file, "attribute of the run": sets_attribute,
        "attribute of a class": sets_class, "default": calls, "random state": draws,
    }[kind]  # fmt: skip

    def step(run: mh.Run) -> None:
        uses(run)
        trained(run)

    with (tmp_path / "log").open("w") as log:
        made(tmp_path / "run").fit(step, "4 steps")
    found = [note for note in notes(tmp_path / "run") if "the step uses" in note or "the step changes" in note]
    assert any(words in note for note in found) if words else not found, found


def test_sparse_tensor_that_a_step_names_and_sparse_gradients_go_with_it(tmp_path: Path) -> None:
    adjacent = torch.eye(8).to_sparse()

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(24, 3, sparse=True)

        def forward(self, numbers: torch.Tensor) -> torch.Tensor:
            return self.table(numbers)

    def step(run: mh.Run) -> None:
        for _ in range(2):
            run.backward(lambda batch: (adjacent @ run.models["net"](batch[0])).square().mean())
            run.update()

    run = made(
        tmp_path,
        models={"net": Words},
        data=mh.Data(train=TensorDataset(torch.arange(24)), batch_size=8, shuffle=False),
    )
    run.fit(step, "4 steps")
    assert not [note for note in notes(tmp_path) if "the step changes" in note]
