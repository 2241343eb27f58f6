"""`mh.Saver` in one process: what a resumed loop has is what the loop had, and what would not be is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

import manyhosts as mh
from manyhosts.errors import ConfigError

DATA = TensorDataset(torch.randn(20, 3, generator=torch.Generator().manual_seed(0)))


class Loop:
    """A plain loop with a scheduler that steps after each epoch."""

    def __init__(self, folder: Path, *, every: str = "1 epoch", **more: Any) -> None:
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.scheduler = StepLR(self.optimizer, 1, 0.5)
        self.order = mh.Order(len(DATA), batch_size=5)
        objects: dict[str, Any] = {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "order": self.order
        }  # fmt: skip
        self.saver = mh.Saver(folder, mh.Snapshots(every=every), **{**objects, **more})
        self.drawn: list[float] = []

    def run(self, epochs: int, *, stop_after: int = 1000) -> Loop:
        self.saver.resume()
        loader, left = DataLoader(DATA, batch_sampler=self.order), stop_after
        for _ in range(self.order.epoch, epochs):
            for [batch] in loader:
                self.optimizer.zero_grad()
                self.model(batch).square().mean().backward()
                self.drawn += [np.random.randn(), random.gauss(0, 1), float(torch.rand(()))]
                self.optimizer.step()
                self.saver.after_step()
                left -= 1
                if not left:
                    self.saver.store.wait()  # type: ignore[union-attr]  # and then it is killed
                    return self
            self.scheduler.step()
        self.saver.close()
        return self


@pytest.mark.parametrize(
    ("every", "stop"), [("1 epoch", 6), ("1 epoch", 5), ("1 epoch", 4), ("1 step", 3), ("1 step", 4), ("3 steps", 7)]
)
def test_loop_that_is_killed_goes_on_as_if_nothing_had_been(every: str, stop: int, tmp_path: Path) -> None:
    whole = Loop(tmp_path / "whole", every=every).run(3)
    Loop(tmp_path / "killed", every=every).run(3, stop_after=stop)
    rest = Loop(tmp_path / "killed", every=every).run(3)
    assert torch.equal(whole.model.weight, rest.model.weight)
    assert whole.scheduler.state_dict() == rest.scheduler.state_dict()
    assert whole.drawn[-len(rest.drawn) :] == rest.drawn


def test_snapshots_by_epochs_need_an_order_that_counts_them(tmp_path: Path) -> None:
    model, order = nn.Linear(3, 1), mh.Order(20, batch_size=5)
    with pytest.raises(ConfigError, match="no order counts them"):
        mh.Saver(tmp_path, mh.Snapshots(every="1 epoch"), model=model)
    with pytest.raises(ConfigError, match=r"sampler is an mh\.Order"):
        mh.Saver(tmp_path, mh.Snapshots(every="1 step"), model=model, sampler=order)
    mh.Saver(tmp_path, mh.Snapshots(every="1 epoch"), model=model, order=order, unlabelled=mh.Order(9, batch_size=3))


def test_what_a_snapshot_has_is_not_left_out_in_silence(tmp_path: Path) -> None:
    Loop(tmp_path).run(1)
    loop = Loop(tmp_path)
    with pytest.raises(ConfigError, match="has scheduler, which the saver was not given"):
        mh.Saver(tmp_path, mh.Snapshots(), model=loop.model, optimizer=loop.optimizer, order=loop.order).resume()


def test_run_that_was_not_resumed_does_not_write_next_to_another(tmp_path: Path) -> None:
    Loop(tmp_path).run(2)
    loop = Loop(tmp_path)
    with pytest.raises(ConfigError, match="has a snapshot of step 8, and this is step 0"):
        loop.saver.save()


def test_weights_of_a_loop_are_read_like_those_of_a_run(tmp_path: Path) -> None:
    loop = Loop(tmp_path).run(1)
    for folder in (tmp_path, tmp_path / "step-00000004"):
        assert torch.equal(mh.load(folder)["weight"], loop.model.weight)
    other = mh.Saver(tmp_path / "other", mh.Snapshots(), net=nn.Linear(2, 1))
    other.after_step()
    other.close()
    with pytest.raises(ConfigError, match="nothing in this snapshot is called model; it has net"):
        mh.load(tmp_path / "other")


def test_schedule_of_schedules_is_resumed_with_counts_that_are_counts(tmp_path: Path) -> None:
    def made() -> tuple[Any, Any, Any]:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedules = [LinearLR(optimizer, 0.1, total_iters=4), MultiStepLR(optimizer, [3, 3])]
        return model, optimizer, SequentialLR(optimizer, schedules, milestones=[4])

    def rates(model: Any, optimizer: Any, schedule: Any, saver: mh.Saver, *, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            optimizer.step()
            schedule.step()
            saver.after_step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    def saver(parts: tuple[Any, Any, Any], folder: str) -> mh.Saver:
        names = ("model", "optimizer", "schedule")
        return mh.Saver(tmp_path / folder, mh.Snapshots(every="1 step"), **dict(zip(names, parts, strict=True)))

    one, two, again = made(), made(), made()
    undisturbed = rates(*one, saver(one, "one"), steps=10)
    first = saver(two, "two")
    rates(*two, first, steps=2)
    first.close()
    second = saver(again, "two")
    assert second.resume() == 2
    assert rates(*again, second, steps=8) == undisturbed[2:]
