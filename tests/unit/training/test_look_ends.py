"""Where a look ends: what cannot be tried is named, in the words of its cause, and nothing of it is left behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from runs import images_and_labels, network
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.data import randomness
from manyhosts.data.steps import LoadedPiece, PiecePlan
from manyhosts.errors import ConfigError
from manyhosts.loss.comparison import CHANGES_GRADIENTS, KEEPS, KEEPS_STATE, Look, Seen, look_at
from manyhosts.loss.compute import ForwardPass
from manyhosts.loss.weighing import TargetMean
from manyhosts.training.loop import counting
from manyhosts.training.loop.counting import find_mean, not_tried

COUNT = 12


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def seen_of(model: nn.Module, step: Any = None, *, count: int = COUNT, **more: Any) -> Seen:
    made = torch.Generator().manual_seed(3)
    batch = [torch.randn(count, 8, generator=made), torch.randint(0, 4, (count,), generator=made)]
    loss = None if step else functional.cross_entropy
    look = Look(ForwardPass(loss, step, seed=0, context=nullcontext), model.train(), torch.device("cpu"), **more)
    return look_at(look, LoadedPiece(PiecePlan(0, 0, range(count), 1.0), batch), None)  # type: ignore[arg-type]


class MakesHead(nn.Module):
    """Its head is made in the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh())
        self.head: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        if self.head is None:
            self.head = nn.Linear(16, 10)
        out: Tensor = self.head(hidden)
        return out


def trainer(run_dir: Path, **more: Any) -> mh.Trainer:
    arguments: dict[str, Any] = {
        "model": network,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.05),
        "data": mh.Data(train=TensorDataset(*images_and_labels(40)), batch_size=10, shuffle=False),
        "micro_batch_size": 5,
        "run_dir": run_dir,
    }
    return mh.Trainer(**{**arguments, **more})


def test_head_that_a_forward_pass_makes_is_blamed_and_not_a_gradient(tmp_path: Path) -> None:
    """Made of one value for all that is drawn, it gives a gradient of nothing but rounding."""
    with pytest.raises(ConfigError, match=r"has made the parameter 'head.weight' in its forward pass"):
        trainer(tmp_path, model=MakesHead).fit("2 steps")


class MakesMask(nn.Module):
    """Registers a buffer in the first forward pass."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        self.persistent = persistent

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(10), persistent=self.persistent)
        out: Tensor = self.body(x) * self.mask
        return out


def test_buffer_that_a_forward_pass_makes_is_refused_before_a_snapshot_holds_it(tmp_path: Path) -> None:
    """No run could be resumed from it: the script makes the model without the buffer."""
    with pytest.raises(ConfigError, match=r"has made the buffer 'mask' in its forward pass"):
        trainer(tmp_path, model=lambda: MakesMask(persistent=True)).fit("2 steps")
    assert not list(tmp_path.glob("snapshots/step-*"))


class Widens(nn.Module):
    """A buffer of it has another shape after the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        self.register_buffer("mask", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mask = torch.ones(10)
        out: Tensor = self.body(x)
        return out


def test_buffer_that_a_forward_pass_gives_another_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has changed the shape of the buffer 'mask' in its forward pass"):
        trainer(tmp_path, model=Widens).fit("2 steps")


def test_buffer_that_no_snapshot_holds_may_be_made_in_a_forward_pass(tmp_path: Path) -> None:
    for steps in (2, 4):
        assert trainer(tmp_path, model=lambda: MakesMask(persistent=False)).fit(f"{steps} steps").steps == steps


class Asks(nn.Module):
    """Draws by NumPy in training, where `forward` does not show it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.with_noise(x))

    def with_noise(self, x: Tensor) -> Tensor:
        return x + torch.from_numpy(np.random.randn(*x.shape)).to(x) if self.training else x


def asking(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0].flip(0) if model.training else batch[0]), batch[1])


@pytest.mark.parametrize(("model", "step"), [(Asks, None), (small, asking)])
def test_what_asks_for_training_is_not_tried_in_evaluation_mode(model: Callable[[], nn.Module], step: Any) -> None:
    """As where workers exchange something in a forward pass."""
    assert "the model asks for it" in seen_of(model(), step, copies=False).because
    assert not seen_of(small(), copies=False).because


class Noise(nn.Module):
    def __init__(self, shape: Callable[[Tensor], tuple[int, ...]]) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.from_numpy(np.random.randn(*self.shape(x))).to(x)


class Chosen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x[torch.randperm(len(x))]


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("layer", [Noise(lambda x: tuple(x.shape)), Chosen()])
def test_what_draws_for_each_sample_is_not_tried_with_copies_or_without(layer: nn.Module, copies: bool) -> None:
    seen = seen_of(nn.Sequential(layer, small()), copies=copies)
    assert "the forward pass draws" in seen.because
    assert not seen.samples
    assert seen_of(nn.Sequential(Noise(lambda x: (1, 8)), small()), copies=copies).holds


def test_what_one_of_those_that_compute_together_cannot_try_none_has_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, other = Seen(samples=4, holds=["samples"]), Seen(because="the forward pass draws torch.randperm")
    monkeypatch.setattr(counting, "gather_plain", lambda world, mine: [[asdict(tried)], [asdict(other)]])
    world: Any = None
    together: Any = SimpleNamespace(copies=False)
    found = find_mean(together, [], world, None, [])
    assert not found.samples
    assert "could not be tried, because the forward pass draws torch.randperm" in not_tried(found)
    alone: Any = SimpleNamespace(copies=True)
    assert find_mean(alone, [], world, None, []).holds == ["samples"]


def test_normal_number_that_is_kept_from_the_last_draw_is_one_that_is_drawn() -> None:
    with randomness.kept():
        np.random.seed(0)
        np.random.standard_normal()
        before = randomness.states()
        np.random.standard_normal()
        assert randomness.drawn_since(before)


class Follows(nn.Module):
    """A frozen part that is averaged in training, as a teacher is."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.inner, self.teacher, self.writes = small(), small().requires_grad_(False), writes

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.writes:
            with torch.no_grad():
                self.teacher[0].weight.lerp_(self.inner[0].weight, 0.5)
        return self.inner(x) + self.teacher(x)


def test_frozen_part_is_looked_at_without_a_copy_of_it_and_never_written() -> None:
    assert seen_of(Follows(writes=False), gradients=True).holds == ["samples", "labels"]
    model = Follows(writes=True)
    before = model.teacher[0].weight.clone()
    assert "would change what is to be kept: torch.lerp_" in seen_of(model).because
    assert torch.equal(model.teacher[0].weight, before)


def test_what_cannot_be_put_back_is_looked_at_once(tmp_path: Path) -> None:
    read: list[int] = []
    numbers = (read.append(each) or 1.0 + each for each in range(10_000))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets) * next(numbers) ** 0.01

    trainer(tmp_path, loss=loss).fit("12 steps")
    of_one_look = 3
    assert len(read) == 2 * 12 + 2 * of_one_look, "of a piece and of a batch, before the first step alone"


class Counts(nn.Module):
    """Its output grows with each call, and with the samples that it has seen where it `counts` these."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.inner, self.seen, self.counts = small(), 0, counts

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x) if self.counts else 1
        return self.inner(x) * (1 + 0.1 * self.seen)


@pytest.mark.parametrize(("counts", "accumulates"), [(True, False), (False, True), (False, False)])
def test_what_is_kept_is_wrong_where_it_is_of_samples_or_one_worker_has_several_pieces(
    counts: bool, accumulates: bool
) -> None:
    model = Counts(counts=counts)
    findings = seen_of(model, accumulates=accumulates).findings
    assert findings[KEEPS] == "seen"
    assert bool(findings[KEEPS_STATE]) == (counts or accumulates)
    assert model.seen == 0, "put back"


def hooked(register: str, hook: Callable[[Tensor], Any]) -> nn.Module:
    model = small()
    getattr(model[0].weight, register)(hook)
    return model


def halved(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 0.5


@pytest.mark.parametrize(
    ("register", "hook", "accumulates", "wrong"),
    [
        ("register_hook", lambda gradient: gradient / gradient.norm(), False, True),
        ("register_hook", lambda gradient: gradient * 0.5, True, False),
        ("register_post_accumulate_grad_hook", halved, False, False),
        ("register_post_accumulate_grad_hook", halved, True, True),
    ],
)
def test_hooks_are_those_of_the_copy_too(register: str, hook: Any, accumulates: bool, wrong: bool) -> None:
    findings = seen_of(hooked(register, hook), gradients=True, accumulates=accumulates).findings
    assert findings[CHANGES_GRADIENTS] == "0.weight" * wrong


def left_out_later(samples: list[Any]) -> Any:
    """Of the third batch, one sample is damaged."""
    images, labels = torch.utils.data.default_collate([each for each in samples if float(each[0].max()) < 50])
    return images, labels.float()


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs[:, 0], targets)


def test_rows_that_are_fewer_than_the_planned_samples_later_are_refused(tmp_path: Path) -> None:
    images, labels = images_and_labels(40)
    images[27] = 99.0
    data = mh.Data(train=TensorDataset(images, labels), batch_size=10, shuffle=False, collate=left_out_later)
    with pytest.raises(ConfigError, match="the batch of a piece of 5 samples has 4 rows, and the first had 1 for each"):
        trainer(tmp_path / "mean", loss=squares, data=data).fit("1 epoch")
    trainer(tmp_path / "said", loss=squares, data=data, weight="samples").fit("1 epoch")


def test_mean_over_labels_says_of_a_batch_without_labels_what_to_do() -> None:
    with pytest.raises(ConfigError, match="this batch has none") as error:
        TargetMean()({"inputs": torch.ones(2)})
    assert "weight=function(batch)" in (error.value.fix or "")


class RunningNorm(nn.Module):
    """Over the samples of a batch, with running values in a buffer, which it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x - self.mean
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return x - x.mean(0)


def test_model_that_mixes_samples_is_refused_though_it_writes_a_buffer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the model looks at the other samples of a batch"):
        trainer(tmp_path, model=lambda: nn.Sequential(RunningNorm(), network())).fit("2 steps")


class Standardised(RunningNorm):
    """Has what BatchNorm has beside it, by the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_batches_tracked", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked += 1
        return super().forward(x)


@pytest.mark.parametrize("norm", [RunningNorm, Standardised])
def test_buffer_that_changes_is_named_whatever_changes_after_it(norm: type[nn.Module], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"and a forward pass changes the buffer '0\.mean'"):
        trainer(tmp_path, model=lambda: nn.Sequential(norm(), network())).fit("2 steps")


class Ages(nn.Module):
    """Its output grows with its calls, which it counts in a buffer, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()
        self.register_buffer("age", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.age += 1
        return self.inner(x) * (1 + 0.1 * self.age)


@pytest.mark.parametrize("copies", [True, False])
def test_buffers_are_as_they_were_before_each_pass_and_after_the_last(copies: bool) -> None:
    model = Ages()
    assert seen_of(model, copies=copies).holds == ["samples", "labels"]
    assert model.age == 0


def test_padding_that_counts_in_the_loss_is_named(tmp_path: Path) -> None:
    """A part of a batch whose samples are all short is padded to less."""
    texts = [torch.ones(1 + number % 5) for number in range(40)]

    def padded(chosen: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(chosen, batch_first=True)

    made = trainer(
        tmp_path,
        model=lambda: nn.Linear(1, 4),
        loss=None,
        step=lambda model, batch: model(batch[..., None]).square().mean(),
        data=mh.Data(texts, batch_size=10, shuffle=False, collate=padded),  # type: ignore[arg-type]
        micro_batch_size=3,
    )
    with pytest.raises(ConfigError, match=r"Collate pads the parts of a batch to other lengths") as caught:
        made.fit("2 steps")
    assert caught.value.where == "mh.Data(collate=…)"
    assert "leave padding out of the loss" in caught.value.fix


def test_a_mean_over_labels_of_padded_parts_is_told_of_weight(tmp_path: Path) -> None:
    """Padding is left out already: what is refused is the mean over labels, and the weight named makes it right."""
    texts = [torch.full((1 + number % 5,), float(number % 7)) for number in range(40)]

    def padded(chosen: list[Tensor]) -> dict[str, Tensor]:
        tags = nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=-100.0)
        return {"text": tags.clamp(min=0), "tags": tags}

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        is_label = batch["tags"] != -100
        return (model(batch["text"][..., None]).squeeze(-1) - 2).square()[is_label].mean()

    def made(**given: object) -> mh.Trainer:
        data = mh.Data(texts, batch_size=10, shuffle=False, collate=padded)  # type: ignore[arg-type]
        folder = tmp_path / "-".join(f"{name}-{value is None}" for name, value in given.items())
        return trainer(folder, model=lambda: nn.Linear(1, 1), loss=None, step=step, data=data, **given)

    with pytest.raises(ConfigError, match="the loss is a mean over labels") as caught:
        made(micro_batch_size=3).fit("2 steps")
    assert 'weight=lambda batch: (batch["labels"] != -100).sum()' in caught.value.fix
    whole = made(micro_batch_size=None)
    cut = made(micro_batch_size=3, weight=lambda batch: (batch["tags"] != -100).sum())
    for each in (whole, cut):
        each.fit("2 steps")
    torch.testing.assert_close(cut.model.state_dict(), whole.model.state_dict())
