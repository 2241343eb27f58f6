"""A strategy that comes next: what it has to answer, and that a run asks it for nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.communication.holding import UNCUT
from manyhosts.communication.mesh import Mesh
from manyhosts.communication.world import World
from manyhosts.config.strategy_settings import StrategySettings
from manyhosts.strategies.strategy import Compute, Piece, Scale, StepOutcome, Steppable, Strategy
from manyhosts.strategies.table import STRATEGIES
from manyhosts.strategies.tally import Agreed, StepMetrics
from manyhosts.strategies.traits import Traits


@dataclass(frozen=True, kw_only=True, slots=True)
class OneMore(StrategySettings):
    """Its settings: a name, and that it is for one worker, too."""

    name: ClassVar[str] = "one-more"
    many_updates: ClassVar[bool] = True


class OneMoreStrategy(Strategy):
    """It answers what each has its own answer to, and nothing that has a usual one."""

    traits = Traits()

    def __init__(self, config: OneMore, world: World) -> None:
        super().__init__(Mesh(world), UNCUT)
        self.agreed = Agreed()

    def place(self, model: nn.Module) -> nn.Module:
        return model

    def forward_backward(
        self, model: nn.Module, pieces: Sequence[Piece], compute: Compute, scale: Scale, control_flags: Sequence[float]
    ) -> StepOutcome:
        model.zero_grad()
        tally = StepMetrics(control_flags, self.agreed, self.world)
        for piece in pieces:
            scale(tally.add(compute(model, piece), piece.weight)).backward()
        return tally.outcome()

    def norm(self, model: nn.Module) -> Tensor:
        return nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])

    def clip_gradients(self, model: nn.Module, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def update(self, model: nn.Module, optimizer: Steppable) -> None:
        optimizer.step()


def trained(run_dir: Path, steps: int, **more: Any) -> mh.Result:
    torch.manual_seed(0)
    inputs, labels = torch.randn(40, 6), torch.randint(3, (40,))
    trainer = mh.Trainer(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        data=mh.Data(train=TensorDataset(inputs, labels), validation=TensorDataset(inputs, labels), batch_size=8),
        clip_gradients=1.0,
        snapshots=mh.Snapshots(every="2 steps"),
        micro_batch_size=4,
        run_dir=run_dir,
        **more,
    )
    return trainer.fit(f"{steps} steps")


def test_a_strategy_that_answers_five_calls_trains_validates_saves_and_resumes_as_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STRATEGIES.own, "one-more", f"{__name__}:OneMoreStrategy")
    plain = trained(tmp_path / "plain", 6)
    trained(tmp_path / "own", 3, strategy=OneMore())
    resumed = trained(tmp_path / "own", 6, strategy=OneMore())
    assert resumed.weights_sha256 == plain.weights_sha256
    assert resumed.validation == plain.validation


def test_what_a_strategy_must_answer_are_these_calls() -> None:
    calls = {"place", "forward_backward", "norm", "clip_gradients", "update"}
    assert calls == Strategy.__abstractmethods__, "each one more is to be written by everybody who brings a strategy"
