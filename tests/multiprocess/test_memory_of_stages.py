"""The tensors of a worker of a pipeline, and of one that has parts of layers, take the memory that theory says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from held_memory import HeldMemory
from ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh

pytestmark = [pytest.mark.multiprocess]
WIDTH, LAYERS, SAMPLES, MICRO_BATCHES = 128, 8, 16, 4
WEIGHT, VALUES = 4 * WIDTH * WIDTH, 4 * WIDTH * SAMPLES
"""Bytes of a layer's weight, and of what one layer gives for a micro-batch."""
KEPT = 2 * 2 * MICRO_BATCHES * VALUES + (1 << 18)
"""Inputs and targets of two steps; and the factors that weights are compared with, which every process has once."""


def held(rank: int, folder: Path) -> dict[str, int]:
    """The most that this worker holds at once in two steps of each way, by SGD with momentum."""
    ways: dict[str, mh.Pipeline | mh.Tensor] = {
        "gpipe": mh.Pipeline(cuts="layers", schedule="gpipe"),
        "1f1b": mh.Pipeline(cuts="layers"),
        "tensor": mh.Tensor(),
    }
    found = {}
    for name, strategy in ways.items():
        memory, marks = HeldMemory(), list[int]()

        def optimizer(
            parameters: list[nn.Parameter], memory: HeldMemory = memory, marks: list[int] = marks
        ) -> torch.optim.Optimizer:
            """From one update to the next: before the first and behind the last weights are compared."""
            made = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
            made.register_step_post_hook(lambda *_: (marks.append(memory.most), memory.begin()))
            return made

        samples = torch.randn(2 * MICRO_BATCHES * SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
        trainer = mh.Trainer(
            model=lambda: nn.Sequential(
                *(each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()))
            ),
            loss=nn.MSELoss(), optimizer=optimizer,
            data=mh.Data(train=TensorDataset(samples, samples.clone()), batch_size=MICRO_BATCHES * SAMPLES),
            micro_batch_size=SAMPLES, strategy=strategy, snapshots=mh.Snapshots(every="9 epochs"),
            run_dir=folder / name,
        )  # fmt: skip
        with memory:
            trainer.fit("2 steps")
        found[name] = marks[1]
    return found


def of_stage(in_flight: int) -> int:
    """Parameters, gradients and momentum of half of the layers; one more gradient, that is being added; what was given
    and what each layer gave for each micro-batch in flight; and what was sent, which stays until the step is over."""
    layers = LAYERS // 2
    sent = MICRO_BATCHES * VALUES
    return 3 * layers * WEIGHT + WEIGHT + in_flight * (layers + 1) * VALUES + sent + KEPT


def test_worker_holds_what_theory_says(tmp_path: Path) -> None:
    first, last = run_ranks(2, held, tmp_path)
    assert first["gpipe"] == pytest.approx(of_stage(MICRO_BATCHES), rel=0.05)
    assert first["1f1b"] == pytest.approx(of_stage(2), rel=0.05)
    assert last["1f1b"] == pytest.approx(of_stage(1), rel=0.05)
    # Of each weight a half; a layer that is cut alone is put together, so that its outputs are there for all features.
    tensor = 3 * LAYERS * WEIGHT // 2 + WEIGHT // 2 + (LAYERS + 1) * VALUES + KEPT
    assert first["tensor"] == pytest.approx(tensor, rel=0.05)
