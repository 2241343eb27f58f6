"""A mean over the tokens of texts of any length is that of one process by hand, however a batch is accumulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import step_lines
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import manyhosts as mh

pytestmark = pytest.mark.multiprocess
WORDS, BATCH, STEPS = 20, 8, 8
TEXTS = [
    torch.randint(0, WORDS, (2 + 7 * number % 12,), generator=torch.Generator().manual_seed(number))
    for number in range(26)  # the last batch of an epoch has two texts, and three workers
]


def padded(texts: list[Tensor]) -> tuple[Tensor, Tensor]:
    read = pad_sequence([text[:-1] for text in texts], batch_first=True)
    return read, pad_sequence([text[1:] for text in texts], batch_first=True, padding_value=-100)


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS))


def mean(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).transpose(1, 2), batch[1])


def tokens(batch: Any) -> Tensor:
    return (batch[1] != -100).sum()


def step(run: mh.Run) -> None:
    run.backward(lambda batch: {"loss": mean(run.models["model"], batch), "count": tokens(batch)})
    run.update()


def fitted(rank: int, folder: Path) -> dict[str, tuple[list[float], list[Tensor]]]:
    """The losses of all steps and the weights, on both faces and with accumulation over 1, 3 and all texts."""
    found = {}
    for face in ("Trainer", "Run"):
        for texts in (1, 3, None):
            given: dict[str, Any] = {
                "data": mh.Data(TEXTS, batch_size=BATCH, shuffle=False, collate=padded),  # type: ignore[arg-type]
                "micro_batch_size": texts,
                "run_dir": folder / f"{face}-{texts}",
            }
            optimizer = lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9)  # noqa: E731
            if face == "Run":
                run: Any = mh.Run(models=model, optimizers=optimizer, **given)
                run.fit(step, f"{STEPS} steps")
            else:
                run = mh.Trainer(model=model, step=mean, weight=tokens, optimizer=optimizer, **given)
                run.fit(f"{STEPS} steps")
            losses = [line["loss"] for line in step_lines(given["run_dir"])]
            found[f"{face}, {texts}"] = losses, [each.detach().clone() for each in run.model.parameters()]
    return found


def by_hand(first: list[Tensor]) -> tuple[list[float], list[Tensor]]:
    """One process, whole batches, from the weights `first`."""
    made, losses = model(), []
    with torch.no_grad():
        for own, value in zip(made.parameters(), first, strict=True):
            own.copy_(value)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.5, momentum=0.9)
    for number in range(STEPS):
        begin = number * BATCH % (len(TEXTS) + (-len(TEXTS)) % BATCH)
        optimizer.zero_grad()
        loss = mean(made, padded(TEXTS[begin : begin + BATCH]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [each.detach() for each in made.parameters()]


@pytest.mark.parametrize("workers", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_losses_and_weights_are_those_of_one_process_by_hand(workers: int, tmp_path: Path) -> None:
    trainer = mh.Trainer(
        model=model, step=mean, weight=tokens, optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        data=mh.Data(TEXTS, batch_size=BATCH, collate=padded), run_dir=tmp_path / "first",  # type: ignore[arg-type]
    )  # fmt: skip
    losses, weights = by_hand([each.detach().clone() for each in trainer.model.parameters()])
    assert len({round(loss, 3) for loss in losses}) == STEPS, "they do change"
    for found in run_ranks(workers, fitted, tmp_path):
        for name, (own_losses, own_weights) in found.items():
            assert own_losses == pytest.approx(losses, abs=1e-6), name
            for own, wanted in zip(own_weights, weights, strict=True):
                torch.testing.assert_close(
                    own, wanted, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
                )
