"""Training whose blocks are computed again in the backward pass is that of the same run without, bit for bit."""

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
from manyhosts.data import randomness
from manyhosts.errors import ConfigError
from manyhosts.model.activation_checkpointing import checkpoint_blocks, compile_model

pytestmark = pytest.mark.multiprocess


class Block(nn.Module):
    """Dropout and BatchNorm around a residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(), nn.Dropout(0.2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def network() -> nn.Module:
    blocks = nn.Sequential(*(Block(4) for _ in range(3)))
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), blocks, nn.Flatten(), nn.Linear(4 * 64, 10))


def trainer(run_dir: Path, **settings: Any) -> mh.Trainer:
    return mh.Trainer(
        model=settings.pop("model", network),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        data=mh.Data(
            train=TensorDataset(*images_and_labels(83)),
            validation=TensorDataset(*images_and_labels(30, first=1000)),
            batch_size=20,  # the last one has 3 samples: a worker's second piece is a ghost
        ),
        micro_batch_size=5,
        run_dir=run_dir,
        **settings,
    )


def hashes(rank: int, run_dir: Path, settings: dict[str, Any], asked: list[Any]) -> list[tuple[str, float | None]]:
    """The hash of the weights and buffers and the last loss, for each of `asked`."""
    found = []
    for number, each in enumerate(asked):
        made = trainer(run_dir / str(number), **settings, activation_checkpointing=each)
        result = made.fit("2 epochs")
        found.append((result.weights_sha256, result.validation["loss"]))
    return found


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "single in bf16": (1, {"precision": "bf16"}),
    "ddp": (2, {}),
    "ddp, each its own BatchNorm": (2, {"batch_norm": "local"}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "virtual workers": (2, {"virtual_workers": 3}),
    "local steps": (2, {"strategy": "local-sgd"}),
}


QUICK = ("single in bf16", "ddp", "fsdp", "virtual workers")


@pytest.mark.parametrize("way", [way if way in QUICK else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def test_no_bit_differs(way: str, tmp_path: Path) -> None:
    workers, settings = WAYS[way]
    for found in run_ranks(workers, hashes, tmp_path, settings, [None, "blocks", 0.5]):
        plain, *others = found
        assert others == [plain, plain]


def compiled(rank: int) -> list[list[Tensor]]:
    """Gradients, and buffers, of compiled blocks: as they are, and computed again."""
    found = []
    for asked in (None, "blocks"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(*(Block(2) for _ in range(2))), nn.Flatten(), nn.Linear(32, 2))
        checkpoint_blocks(model, asked, compiled=True)
        compile_model(model)
        for step in range(3):
            randomness.seed_compute(3, step)
            model(torch.randn(6, 2, 4, 4, generator=torch.Generator().manual_seed(1))).square().mean().backward()
        found.append([*(each.grad for each in model.parameters() if each.grad is not None), *model.buffers()])
    return found


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_compiled_blocks_that_are_computed_again_give_the_same_bits() -> None:
    [[plain, again]] = run_ranks(1, compiled, timeout_s=400)
    assert len(plain) == len(again) == 16
    assert all(map(torch.equal, plain, again))


def test_run_says_what_is_computed_again(tmp_path: Path) -> None:
    run_ranks(1, hashes, tmp_path, {}, [0.5])
    said = (tmp_path / "0" / "metrics.jsonl").read_text()
    assert "computed again in the backward pass are 2 of 3 blocks, 1.0 to 1.1" in said


class Forgetful(Block):
    """Draws from a generator of its own."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand(1, generator=self.generator)


def forgetful() -> nn.Module:
    return nn.Sequential(nn.Sequential(*(Forgetful(1) for _ in range(2))), nn.Flatten(), nn.Linear(64, 10))


def refusal(rank: int, run_dir: Path) -> tuple[str, bool]:
    """What a worker says of a block that cannot be computed again; whether the weights are those of the beginning."""
    made = trainer(run_dir, model=forgetful, activation_checkpointing="blocks")
    before = [each.detach().clone() for each in made.model.parameters()]
    try:
        made.fit("2 steps")
    except ConfigError as error:
        return str(error), all(map(torch.equal, before, made.model.parameters()))
    return "", False


def test_block_that_cannot_be_computed_again_is_refused_before_the_first_update(tmp_path: Path) -> None:
    for said, unchanged in run_ranks(2, refusal, tmp_path):
        assert "the block 0.1 (Forgetful) computes something else" in said
        assert unchanged


class Passed(nn.Module):
    """Calls what is inside its blocks, and not these."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(1) for _ in range(2)), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block.layers(x)  # type: ignore[operator]
        out: Tensor = self.head(x.flatten(1))
        return out


def nested() -> nn.Module:
    class Nested(Passed):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.ModuleList([Block(1), Block(1)]) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for pair in self.blocks:
                for block in pair:  # type: ignore[attr-defined]
                    x = block(x)
            out: Tensor = self.head(x.flatten(1))
            return out

    return Nested()


def test_blocks_in_lists_of_lists_are_computed_again_and_those_never_called_are_said(tmp_path: Path) -> None:
    for name, model in (("nested", nested), ("passed", Passed)):
        trainer(tmp_path / name, model=model, activation_checkpointing="blocks").fit("4 steps")
    said = (tmp_path / "nested" / "metrics.jsonl").read_text()
    assert "computed again in the backward pass are 4 of 4 blocks, blocks.0.0 to blocks.1.1" in said
    assert "were not called" not in said
    assert "2 blocks were not called in 3 steps (blocks.0" in (tmp_path / "passed" / "metrics.jsonl").read_text()
