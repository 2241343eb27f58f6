"""What is said of losses that are no mean over samples, before the first step; and of those that are, nothing."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import events, images_and_labels, network, step_lines
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

import manyhosts as mh
from manyhosts.errors import ConfigError, TrainingError

CUT = {"micro_batch_size": 4}


def trainer(run_dir: Path, **more: Any) -> mh.Trainer:
    arguments: dict[str, Any] = {
        "model": lambda: network(batch_norm=True, dropout=0.2),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.05),
        "data": mh.Data(train=TensorDataset(*images_and_labels(40)), batch_size=10),
        "run_dir": run_dir,
    }
    return mh.Trainer(**{**arguments, **more})


def notes(run_dir: Path) -> list[str]:
    """Those about the mean; others, such as on BatchNorm, are not this test's."""
    found = [line["text"] for line in events(run_dir, "note")]
    return [text for text in found if "the loss" in text or "the mean over" in text]


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    """Each sample against all others of its batch (InfoNCE)."""
    found = functional.normalize(outputs)
    return functional.cross_entropy(found @ found.T / 0.1, torch.arange(len(found)))


def by_hand(outputs: Tensor, targets: Tensor) -> Tensor:
    weights = torch.arange(1.0, 11.0)[targets]
    return (functional.cross_entropy(outputs, targets, reduction="none") * weights).sum() / weights.sum()


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="sum")


def hardest(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of a micro-batch, or a worker's part, these are all."""
    return functional.cross_entropy(outputs, targets, reduction="none").topk(min(6, len(targets))).values.mean()


@pytest.mark.parametrize("loss", [contrastive, by_hand, summed, hardest])
@pytest.mark.parametrize("cut", [CUT, {"virtual_workers": 2}])
def test_loss_that_is_no_mean_is_refused_where_a_batch_is_cut(
    loss: Callable[..., Tensor], cut: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"the loss is no mean over the samples: .* over ") as error:
        trainer(tmp_path, loss=loss, **cut).fit("2 steps")
    assert "weight=function(batch)" in (error.value.fix or "")
    assert not step_lines(tmp_path), "before the first step"


def test_in_one_piece_it_is_that_of_pytorch_and_a_note_says_where_it_would_not_be(tmp_path: Path) -> None:
    trainer(tmp_path, loss=contrastive).fit("2 steps")
    assert any("no mean over the samples" in note and "would be refused" in note for note in notes(tmp_path))
    with pytest.raises(ConfigError, match="no mean over the samples"):
        trainer(tmp_path, loss=contrastive, **CUT).fit("3 steps")


def centred(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    images, labels = batch
    if model.training:
        images = images - images.mean(0)
    return {"loss": functional.cross_entropy(model(images), labels)}


seen: list[float] = []


def counted(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    loss = functional.cross_entropy(model(batch[0]), batch[1])
    if model.training:
        seen.append(loss.item())
    return {"loss": loss}


GAIN = 0.5


def rolled(images: Tensor, share: float) -> Tensor:
    """Each sample with something of its neighbour in the batch."""
    return share * images + (1 - share) * images.roll(1, 0)


half_rolled = functools.partial(rolled, share=0.5)


def mixed_by_helpers(model: nn.Module, batch: Any) -> Tensor:
    images = half_rolled(batch[0]) if model.training else batch[0]
    return functional.cross_entropy(model(images), batch[1])


def mixed_where_a_helper_asks(model: nn.Module, batch: Any) -> Tensor:
    def prepared(images: Tensor) -> Tensor:
        return rolled(images, GAIN) if model.training else images

    return functional.cross_entropy(model(prepared(batch[0])), batch[1])


def dimmed(images: Tensor) -> Tensor:
    return images * math.sqrt(GAIN) - images.mean((1, 2, 3), keepdim=True)


def changed_alone(model: nn.Module, batch: Any) -> Tensor:
    """By itself each sample."""
    images = dimmed(batch[0]) if model.training else batch[0]
    return functional.cross_entropy(model(images), batch[1])


class Counts:
    """A helper whose code is read, and changes something."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, images: Tensor) -> Tensor:
        self.calls += 1
        return images


def test_step_that_mixes_samples_in_training_mode_is_refused_and_what_one_counts_there_is_put_back(
    tmp_path: Path,
) -> None:
    for number, step in enumerate([centred, mixed_by_helpers, mixed_where_a_helper_asks]):
        with pytest.raises(ConfigError, match="the loss is no mean over the samples"):
            trainer(tmp_path / f"mixes-{number}", step=step, **CUT).fit("2 steps")
    trainer(tmp_path / "whole", step=mixed_by_helpers).fit("2 steps")
    assert any("no mean over the samples" in note for note in notes(tmp_path / "whole"))
    trainer(tmp_path / "alone", step=changed_alone, **CUT).fit("2 steps")
    assert not notes(tmp_path / "alone")
    trainer(tmp_path / "counts", step=counted).fit("2 steps")
    assert len(seen) == 2
    assert not notes(tmp_path / "counts"), "in one piece nothing can go wrong"


def test_what_a_helper_counts_is_put_back_and_said_where_a_batch_is_cut(tmp_path: Path) -> None:
    counts = Counts()

    def by_a_helper(model: nn.Module, batch: Any) -> Tensor:
        images = counts(batch[0]) if model.training else batch[0]
        return functional.cross_entropy(model(images), batch[1])

    trainer(tmp_path, step=by_a_helper, **CUT).fit("2 steps")
    said = "could not be tried, because 'counts' is kept from one batch to the next"
    assert any(said in line["text"] for line in events(tmp_path, "note"))
    assert counts.calls == 2 * 3, "not once more than there are pieces"


def test_step_that_writes_into_another_tensor_is_not_let_do_so_and_that_is_said(tmp_path: Path) -> None:
    teacher = network()
    before = [each.clone() for each in teacher.parameters()]

    def averaging(model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            for own, other in zip(teacher.parameters(), model.parameters(), strict=False):
                own.data.lerp_(other.data, 0.0)
                own.data.add_(1.0)
        return functional.cross_entropy(model(batch[0]), batch[1])

    trainer(tmp_path, step=averaging, model=network, **CUT).fit("1 step")
    said = "could not be tried, because a forward pass would change what is to be kept: torch.lerp_"
    assert any(said in line["text"] for line in events(tmp_path, "note"))
    for own, other in zip(teacher.parameters(), before, strict=True):
        torch.testing.assert_close(own, other + 3, msg="not once more than there are pieces")


def test_who_knows_better_says_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer(tmp_path / "said", loss=contrastive, weight="samples", **CUT).fit("2 steps")
    assert not notes(tmp_path / "said")
    monkeypatch.setenv("MANYHOSTS_SET", '{"weight": "samples"}')
    trainer(tmp_path / "set", loss=contrastive, **CUT).fit("2 steps")


def test_weight_that_does_not_make_it_a_mean_is_noted(tmp_path: Path) -> None:
    trainer(tmp_path / "wrong", loss=by_hand, weight=lambda batch: len(batch[1]) ** 2, **CUT).fit("2 steps")
    assert any("with this weight the loss is no mean" in note for note in notes(tmp_path / "wrong"))
    right = lambda batch: (batch[1] + 1).sum()  # noqa: E731
    trainer(tmp_path / "right", loss=by_hand, weight=right, **CUT).fit("2 steps")
    assert not notes(tmp_path / "right")


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(reduction="sum"), nn.MSELoss(reduction="sum")])
def test_sum_over_samples_is_refused(loss: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="adds up what its samples cost"):
        trainer(tmp_path, loss=loss)


def test_weight_that_step_returns_is_refused(tmp_path: Path) -> None:
    def step(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": functional.cross_entropy(model(batch[0]), batch[1]), "weight": 3}

    with pytest.raises(ConfigError, match="must be known before it is computed"):
        trainer(tmp_path, step=step, **CUT).fit("1 step")


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (lambda batch: batch["labels"], "cannot be found: TypeError"),
        (lambda batch: -1, "the weight of a piece is -1.0"),
        (lambda batch: float("nan"), "the weight of a piece is nan"),
    ],
)
def test_weight_that_is_no_number_ends_the_run(weight: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=said):
        trainer(tmp_path, loss=by_hand, weight=weight).fit("2 steps")


def test_weight_must_be_a_function(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="weight is 3"):
        trainer(tmp_path, loss=by_hand, weight=3)


def test_batch_of_which_nothing_counts_changes_nothing_and_is_told(tmp_path: Path) -> None:
    images, labels = images_and_labels(40)
    labels[10:20] = -100
    data = mh.Data(train=TensorDataset(images, labels), batch_size=10, shuffle=False)
    found: list[list[Tensor]] = []
    made = trainer(tmp_path, loss=nn.CrossEntropyLoss(), data=data, snapshots=mh.Snapshots(every="1 step", keep=9))
    made.fit("1 epoch")
    for step in (1, 2):
        kept = mh.snapshot.load.load(tmp_path / "snapshots" / f"step-0000000{step}").state
        found.append(list(kept["model"].values()))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert any("step 2 was left out: none of its samples counts in the loss" in note for note in notes(tmp_path))
    [epoch] = events(tmp_path, "epoch")
    others = [line["loss"] for line in step_lines(tmp_path) if line["step"] != 2]
    assert epoch["train_loss"] == pytest.approx(sum(others) / 3)


class OneByOne(Dataset[Any]):
    """Tensors that nobody can look through beforehand."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return self.images[index], self.labels[index]


def test_class_that_is_ignored_only_later_is_said_when_it_comes(tmp_path: Path) -> None:
    images, labels = images_and_labels(40)
    labels[25] = -100
    data = mh.Data(train=OneByOne(images, labels), batch_size=10, shuffle=False)
    with pytest.raises(ConfigError, match="a target of step 3 does not count in the loss"):
        trainer(tmp_path, loss=nn.CrossEntropyLoss(), data=data, **CUT).fit("1 epoch")


# No false alarm.


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(64, 8), nn.Linear(4, 64)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encode(images.flatten(1)).chunk(2, 1)
        return self.decode(mean + spread.exp() * torch.randn_like(spread)), mean, spread


def vae_step(model: nn.Module, batch: Any) -> Tensor:
    found, mean, _ = model(batch[0])
    return functional.mse_loss(found, batch[0].flatten(1)) + mean.square().mean()


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 64))
        self.judge = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def gan_step(model: Any, batch: Any) -> dict[str, Tensor]:
    real = batch[0].flatten(1)
    fake = model.made(torch.randn(len(real), 4))
    ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
    score = functional.binary_cross_entropy_with_logits
    judged = score(model.judge(real), ones) + score(model.judge(fake.detach()), zeros)
    return {"loss": judged + score(model.judge(fake), ones)}


def penalty_step(model: Any, batch: Any) -> Tensor:
    """Computes gradients of its own, which an evaluation cannot."""
    inputs = batch[0].requires_grad_()
    outputs = model(inputs)
    [slope] = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return functional.cross_entropy(outputs, batch[1]) + slope.square().mean()


def ragged(samples: list[Any]) -> dict[str, Any]:
    return {
        "images": torch.stack([image for image, _ in samples]),
        "labels": torch.stack([label for _, label in samples]),
        "names": [str(int(label)) for _, label in samples],
    }


def odd_step(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch["images"]), batch["labels"]) * (1 + 0 * len(batch["names"]))


@pytest.mark.parametrize(
    "given",
    [
        {"step": vae_step, "model": Vae},
        {"step": gan_step, "model": Gan},
        {"step": penalty_step},
        {"step": odd_step, "data": {"collate": ragged}},
        {"loss": lambda outputs, targets: functional.cross_entropy(outputs, targets)},
        {"loss": lambda outputs, targets: functional.cross_entropy(outputs, targets), "precision": "bf16"},
        {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
        {"loss": nn.MultiMarginLoss()},
    ],
)
def test_right_ones_are_not_suspected(given: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = mh.Data(train=TensorDataset(*images_and_labels(40)), batch_size=10, **given.get("data", {}))
    made = trainer(tmp_path, **{**given, **CUT, "data": data})
    random.seed(4)
    made.fit("2 steps")
    assert not notes(tmp_path)


def test_running_values_of_instance_norm_that_micro_batches_change_are_told(tmp_path: Path) -> None:
    images, labels = images_and_labels(40)
    norm = nn.InstanceNorm1d(1, track_running_stats=True)
    made = trainer(
        tmp_path,
        model=lambda: nn.Sequential(nn.Flatten(), nn.Unflatten(1, (1, -1)), norm, nn.Flatten(), nn.LazyLinear(10)),
        loss=nn.CrossEntropyLoss(),
        data=mh.Data(train=TensorDataset(images, labels), batch_size=10),
        **CUT,
    )
    made.fit("2 steps")
    assert any("the step changes the buffer 2.running_mean" in line["text"] for line in events(tmp_path, "note"))


def test_look_changes_neither_buffers_nor_random_numbers_nor_the_mode(tmp_path: Path) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets)

    looked = trainer(tmp_path / "looked", loss=loss, **CUT).fit("3 steps")
    known = trainer(tmp_path / "known", loss=loss, weight="samples", **CUT).fit("3 steps")
    assert looked.weights_sha256 == known.weights_sha256


class LanguageModel(nn.Module):
    """As those of `transformers`: it returns the loss. `kind`: what that is a mean over."""

    def __init__(self, kind: str, *, zeros: bool) -> None:
        super().__init__()
        self.kind, self.words, self.inner, self.out = kind, nn.Embedding(20, 8), nn.GRU(8, 8), nn.Linear(8, 20)
        if zeros:  # as the last layer often begins: every word is as likely, in every text
            nn.init.zeros_(self.out.weight)
            nn.init.zeros_(self.out.bias)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        if self.kind != "labels":
            words, labels = words[:, :-1], labels[:, 1:]
        logits = self.out(self.inner(self.words(words).transpose(0, 1))[0]).permute(1, 2, 0)
        each, counts = functional.cross_entropy(logits, labels, reduction="none"), labels != -100
        return each.sum() / counts.sum() if self.kind != "texts" else (each.sum(1) / counts.sum(1)).mean()


def padded(texts: list[Tensor]) -> dict[str, Tensor]:
    pad = functools.partial(nn.utils.rnn.pad_sequence, texts, batch_first=True)
    return {"words": pad(padding_value=0), "labels": pad(padding_value=-100)}


@pytest.mark.parametrize("pieces", [{}, {"micro_batch_size": 4}, {"virtual_workers": 2}], ids=str)
@pytest.mark.parametrize("zeros", [False, True], ids=["", "zeros"])
@pytest.mark.parametrize("kind", ["labels", "shifted labels", "texts"])
def test_of_rules_that_all_fit_at_the_start_the_right_one_is_found(
    kind: str, zeros: bool, pieces: dict[str, int], tmp_path: Path
) -> None:
    """Before training the losses of all texts are nearly the logarithm of the number of words."""
    texts = [torch.arange(3 + (i * 7) % 9) * (i + 3) % 17 + 1 for i in range(60)]

    def make() -> nn.Module:
        torch.manual_seed(1)
        return LanguageModel(kind, zeros=zeros)

    trainer = mh.Trainer(
        model=make,
        step=lambda model, batch: model(**batch),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        data=mh.Data(texts[:48], validation=texts, batch_size=16, shuffle=False, collate=padded),  # type: ignore[arg-type]
        run_dir=tmp_path,
        **pieces,  # type: ignore[arg-type]
    )
    found = trainer.fit("3 steps").validation["loss"]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for begin in range(0, 48, 16):
        optimizer.zero_grad()
        model(**padded(texts[begin : begin + 16])).backward()
        optimizer.step()
    for own, plain in zip(trainer.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(own, plain, atol=1e-6)
    with torch.no_grad():
        assert found == pytest.approx(float(model(**padded(texts))), rel=1e-6)


class Labelled(Dataset[Any]):
    """Of which no one knows the labels before they are read; some count nothing."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(8, generator=torch.Generator().manual_seed(index)), -100 if index in (2, 50) else index % 3


def test_what_targets_count_by_outlives_a_resume_in_a_step_that_would_not_show_it(tmp_path: Path) -> None:
    more: dict[str, Any] = {"model": lambda: nn.Linear(8, 3), "loss": nn.CrossEntropyLoss(), "micro_batch_size": 8}
    for steps in (2, 4):  # samples 32 to 47, of which all count, are the first after the resume
        data = mh.Data(train=Labelled(), batch_size=16, shuffle=False)
        trainer(tmp_path, data=data, **more).fit(f"{steps} steps")
    assert len(step_lines(tmp_path)) == 4
