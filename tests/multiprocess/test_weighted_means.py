"""Losses that are no plain mean over samples give the answer of a plain PyTorch loop, however a batch is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import events, step_lines
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset, default_collate

import manyhosts as mh

pytestmark = pytest.mark.multiprocess
SAMPLES, BATCH, LENGTH, CLASSES = 44, 16, 5, 6
CLASS_WEIGHTS = torch.tensor([0.1, 4.0, 1.0, 0.5, 2.0, 9.0])


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(*shape: int, left_out: float = 0.0) -> Tensor:
    """Class numbers, a share of them -100, and most of these among the first samples."""
    generator = torch.Generator().manual_seed(1)
    found = torch.randint(0, CLASSES, shape, generator=generator)
    rows = torch.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1)) % BATCH
    return found.masked_fill(torch.rand(shape, generator=generator) * (1 + rows) < 2 * left_out, -100)


class Plain(Dataset[Any]):
    """Tensors whose targets nobody can look through beforehand."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = TensorDataset(*tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, index: int) -> Any:
        return tuple(self.tensors[index])


class Named(Plain):
    def __getitem__(self, index: int) -> Any:
        inputs, labels = self.tensors[index]
        return {"inputs": inputs, "labels": labels}


def one_label() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, CLASSES))


class PerToken(nn.Module):
    """Inputs (N, L, 8), class scores (N, C, L)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = one_label()

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.inner(inputs).transpose(1, 2)
        return scores


def masked_step(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch["inputs"]), batch["labels"])


def causal_step(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """As the models of `transformers`: a token is predicted from those before it."""
    loss = functional.cross_entropy(model(batch["inputs"])[..., :-1], batch["labels"][:, 1:])
    return {"loss": loss, "perplexity": loss.exp()}


def by_hand(outputs: Tensor, targets: Tensor) -> Tensor:
    """Class weights that nobody can see from outside."""
    each = functional.cross_entropy(outputs, targets, reduction="none")
    return (each * CLASS_WEIGHTS[targets]).sum() / CLASS_WEIGHTS[targets].sum()


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over those targets that count; 0/0 where there are none."""
    counted = (targets >= 0).float()
    return ((outputs.mean(1) - targets).square() * counted).sum() / counted.sum()


@dataclass(frozen=True)
class Case:
    """One loss, and the data that shows whether it is weighed right."""

    loss: Callable[[Any, Any], Tensor] | None = None
    step: Any = None
    model: Callable[[], nn.Module] = one_label
    data: Callable[[], Dataset[Any]] = lambda: Plain(numbers(SAMPLES, 8), classes(SAMPLES))
    weight: Any = None
    more: dict[str, Any] = field(default_factory=dict)


def tokens(kind: type[Plain] = Plain, left_out: float = 0.3) -> Dataset[Any]:
    return kind(numbers(SAMPLES, LENGTH, 8), classes(SAMPLES, LENGTH, left_out=left_out))


CASES = {
    "class weights": Case(nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)),
    "class weights, tensors": Case(
        nn.CrossEntropyLoss(CLASS_WEIGHTS), data=lambda: TensorDataset(numbers(SAMPLES, 8), classes(SAMPLES))
    ),
    "ignored": Case(
        nn.CrossEntropyLoss(), data=lambda: TensorDataset(numbers(SAMPLES, 8), classes(SAMPLES, left_out=0.4))
    ),
    "ignored, smoothed, weighted": Case(
        nn.CrossEntropyLoss(CLASS_WEIGHTS, label_smoothing=0.2),
        data=lambda: Plain(numbers(SAMPLES, 8), classes(SAMPLES, left_out=0.4)),
    ),
    "other class ignored": Case(nn.CrossEntropyLoss(ignore_index=2)),
    "sequences": Case(nn.CrossEntropyLoss(), model=PerToken, data=tokens),
    "probabilities": Case(
        nn.CrossEntropyLoss(CLASS_WEIGHTS),
        data=lambda: Plain(numbers(SAMPLES, 8), numbers(SAMPLES, CLASSES, seed=2).softmax(1)),
    ),
    "likelihood": Case(nn.NLLLoss(CLASS_WEIGHTS), model=lambda: nn.Sequential(one_label(), nn.LogSoftmax(1))),
    "function": Case(functional.cross_entropy, data=lambda: Plain(numbers(SAMPLES, 8), classes(SAMPLES, left_out=0.4))),
    "partial": Case(partial(functional.cross_entropy, weight=CLASS_WEIGHTS, label_smoothing=0.1)),
    "masked tokens, by step": Case(step=masked_step, model=PerToken, data=lambda: tokens(Named)),
    "shifted tokens, by step": Case(step=causal_step, model=PerToken, data=lambda: tokens(Named)),
    "weight of one's own": Case(by_hand, weight=lambda batch: CLASS_WEIGHTS[batch[1]].sum()),
    "nothing counts in some pieces": Case(
        squares,
        data=lambda: Plain(numbers(SAMPLES, 8), (torch.arange(SAMPLES) % BATCH - 11).clamp(max=2)),
        weight=lambda batch: (batch[1] >= 0).sum(),
    ),
}
UNEVEN = ("class weights", "shifted tokens, by step", "weight of one's own", "nothing counts in some pieces")


def fitted(rank: int, run_dir: Path, names: tuple[str, ...], more: dict[str, Any]) -> dict[str, Any]:
    return {name: fit_case(CASES[name], run_dir / name.replace(" ", "-"), more) for name in names}


def fit_case(case: Case, run_dir: Path, more: dict[str, Any]) -> dict[str, Any]:
    trainer = mh.Trainer(
        model=case.model(),
        loss=case.loss,
        step=case.step,
        weight=case.weight,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.3),
        data=mh.Data(train=case.data(), validation=case.data(), batch_size=BATCH, shuffle=False),
        run_dir=run_dir,
        **{**case.more, **more},
    )
    result = trainer.fit("2 epochs")
    return {
        "weights": [parameter.tolist() for parameter in trainer.model.parameters()],
        "sha": result.weights_sha256,
        "validation": result.validation["loss"],
    }


def plain_loop(case: Case) -> tuple[list[Tensor], float]:
    """The parameters, and the loss over the whole set as one batch, in PyTorch alone."""
    model, data = case.model(), case.data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def loss_of(begin: int, end: int) -> Tensor:
        batch = default_collate([data[row] for row in range(begin, min(end, SAMPLES))])
        if case.step is not None:
            found = case.step(model, batch)
            return found if isinstance(found, Tensor) else found["loss"]
        assert case.loss is not None
        return case.loss(model(batch[0]), batch[1])

    for begin in [*range(0, SAMPLES, BATCH)] * 2:
        optimizer.zero_grad()
        loss_of(begin, begin + BATCH).backward()
        optimizer.step()
    with torch.no_grad():
        return [parameter.detach() for parameter in model.parameters()], loss_of(0, SAMPLES).item()


def assert_plain(found: dict[str, Any]) -> None:
    for name, one in found.items():
        parameters, loss = plain_loop(CASES[name])
        for wanted, given in zip(parameters, one["weights"], strict=True):
            torch.testing.assert_close(
                torch.tensor(given), wanted, rtol=2e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
        assert one["validation"] == pytest.approx(loss, rel=1e-5), name


@pytest.mark.parametrize(
    ("workers", "more"),
    [(1, {"micro_batch_size": 3}), pytest.param(2, {}, marks=pytest.mark.slow), (3, {"micro_batch_size": 2})],
    ids=["1", "2", "3"],
)
def test_every_loss_is_that_of_a_plain_loop(workers: int, more: dict[str, Any], tmp_path: Path) -> None:
    for found in run_ranks(workers, fitted, tmp_path, tuple(CASES), more):
        assert_plain(found)


@pytest.mark.parametrize(
    ("workers", "audit"),
    [pytest.param(2, {}, marks=pytest.mark.slow), (3, {"audit": 1.0})],
    ids=["2", "3"],
)
def test_every_loss_has_the_same_bits_with_virtual_workers(workers: int, audit: dict[str, Any], tmp_path: Path) -> None:
    """An audit computes the parts of others with their weights."""
    more = {"virtual_workers": 3, "micro_batch_size": 3}
    [one] = run_ranks(1, fitted, tmp_path / "1", tuple(CASES), more)
    assert_plain(one)
    for found in run_ranks(workers, fitted, tmp_path / str(workers), tuple(CASES), {**more, **audit}):
        assert found == one


ONE_ROUND_A_STEP = {"fragments": 1, "overlap_steps": 0, "outer_lr": 1.0, "outer_momentum": 0.0}
WAYS = {
    # A mean after each plain step of SGD is the plain loop again; so is what is sent whole.
    "local-sgd": (mh.LocalSGD(sync_every=1), 1e-5),
    "powersgd": (mh.DDP(compression="powersgd", compress_above=0, powersgd_rank=8), 1e-3),
    "topk": (mh.DDP(compression="topk", compress_above=0, topk_fraction=1.0), 1e-5),
    "fp16": (mh.DDP(compression="fp16", compress_above=0), 1e-3),
    "bf16": (mh.DDP(compression="bf16", compress_above=0), 1e-2),
    "int8": (mh.DDP(compression="int8", compress_above=0), 2e-2),
}
ROUND = 3


def fitted_otherwise(rank: int, run_dir: Path) -> dict[str, Any]:
    rounds = {"local-sgd, rounds": mh.LocalSGD(sync_every=ROUND)}
    rounds["diloco, rounds"] = mh.DiLoCo(sync_every=ROUND, outer_compression="none", **ONE_ROUND_A_STEP)
    ways = {way: strategy for way, (strategy, _) in WAYS.items()} | rounds
    return {way: fitted(rank, run_dir / way, UNEVEN, {"strategy": strategy}) for way, strategy in ways.items()}


def averaged_every_round(case: Case, workers: int, *, alike: bool) -> list[Tensor]:
    """Each worker steps by the mean over its own part; models count by what the samples count that each has seen.

    `alike`: they count the same, as in DiLoCo.
    """
    models, data = [case.model() for _ in range(workers)], case.data()
    assert case.loss is not None
    assert case.weight is not None
    seen = [0.0] * workers
    for step, begin in enumerate([*range(0, SAMPLES, BATCH)] * 2, 1):
        rows = range(begin, min(begin + BATCH, SAMPLES))
        parts = torch.tensor(rows).tensor_split(workers)
        batches = [default_collate([data[row] for row in part.tolist()]) for part in parts]
        counts = [float(case.weight(batch)) for batch in batches]
        for worker, (model, batch, count) in enumerate(zip(models, batches, counts, strict=True)):
            seen[worker] += (1 / workers if alike else count / sum(counts)) / ROUND
            if count:
                own = list(model.parameters())
                gradients = torch.autograd.grad(case.loss(model(batch[0]), batch[1]), own)
                with torch.no_grad():
                    for parameter, gradient in zip(own, gradients, strict=True):
                        parameter.sub_(0.3 * gradient)
        if step % ROUND == 0:
            with torch.no_grad():
                for parameters in zip(*(model.parameters() for model in models), strict=True):
                    mean = sum(share * parameter for share, parameter in zip(seen, parameters, strict=True))
                    for parameter in parameters:
                        parameter.copy_(mean)
            seen = [0.0] * workers
    return [parameter.detach() for parameter in models[0].parameters()]


@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_what_a_piece_counts_is_kept_by_compressions_and_by_workers_that_step_alone(
    workers: int, tmp_path: Path
) -> None:
    first, *others = run_ranks(workers, fitted_otherwise, tmp_path)
    assert all(other == first for other in others)
    for way, (_, tolerance) in WAYS.items():
        for name, one in first[way].items():
            assert_near(one["weights"], plain_loop(CASES[name])[0], tolerance, f"{way}: {name}")
    for way, alike in (("local-sgd, rounds", False), ("diloco, rounds", True)):
        for name in UNEVEN:
            if CASES[name].weight is not None:
                rounds = averaged_every_round(CASES[name], workers, alike=alike)
                assert_near(first[way][name]["weights"], rounds, 1e-5, f"{way}: {name}")
            reported = [event["text"] for event in events(tmp_path / way / name.replace(" ", "-"), "note")]
            assert sum("workers alike" in text for text in reported) == (alike and workers > 1), reported


def assert_near(given: list[Any], wanted: list[Tensor], tolerance: float, about: str) -> None:
    for one, other in zip(given, wanted, strict=True):
        away = (torch.tensor(one) - other).abs().max() / other.abs().max()
        assert away < tolerance, f"{about}: {away:.2g}"


def test_loss_of_an_epoch_counts_as_the_batches_do(tmp_path: Path) -> None:
    run_ranks(2, fitted, tmp_path, ("class weights",), {})
    run_dir = tmp_path / "class-weights"
    lines = step_lines(run_dir)[:3]
    first = events(run_dir, "epoch")[0]
    total = sum(line["weight"] for line in lines)
    assert total == pytest.approx(CLASS_WEIGHTS[classes(SAMPLES)].sum().item())
    assert first["train_loss"] == pytest.approx(sum(line["weight"] * line["loss"] for line in lines) / total)


def two_losses(model: nn.Module, batch: Any) -> dict[str, Any]:
    errors, positive = (model(batch[0]).mean(1) - batch[1]).square(), batch[1] > 1
    return {"loss": {"all": errors.mean(), "positive": 0.5 * (errors * positive).sum() / positive.sum()}}


def fitted_by_two_losses(rank: int, run_dir: Path) -> float:
    case = Case(
        step=two_losses,
        data=lambda: Plain(numbers(SAMPLES, 8), torch.arange(SAMPLES) % BATCH // 3),
        weight=lambda batch: {"all": len(batch[1]), "positive": (batch[1] > 1).sum()},
    )
    return float(fit_case(case, run_dir, {"micro_batch_size": 2})["validation"])


@pytest.mark.parametrize("workers", [1, 3])
def test_each_of_several_losses_is_recorded(workers: int, tmp_path: Path) -> None:
    """As its own mean over the global batch: some pieces have nothing of one."""
    run_ranks(workers, fitted_by_two_losses, tmp_path)
    case = Case(data=lambda: Plain(numbers(SAMPLES, 8), torch.arange(SAMPLES) % BATCH // 3))
    batch = default_collate([case.data()[row] for row in range(BATCH)])
    wanted = two_losses(case.model(), batch)["loss"]
    line = step_lines(tmp_path)[0]
    first = {"loss": line["loss"], **line["values"]}
    assert first["loss/all"] == pytest.approx(wanted["all"].item(), rel=1e-5)
    assert first["loss/positive"] == pytest.approx(wanted["positive"].item(), rel=1e-5)
    assert first["loss"] == pytest.approx(first["loss/all"] + first["loss/positive"], rel=1e-5)
    validation = events(tmp_path, "validation")[-1]["values"]
    assert validation["loss"] == pytest.approx(validation["loss/all"] + validation["loss/positive"], rel=1e-5)
