"""The training of `multiprocess/own_loop_script.py` as a plain loop of PyTorch, without noise and parts."""

from __future__ import annotations

import torch
from torch import nn

from manyhosts.data import randomness
from manyhosts.data.order import Order, Position


def _rows(index: int) -> torch.Tensor:
    return torch.randn(1 + index % 7, 5, generator=torch.Generator().manual_seed(index))


def reference(steps: int, batch: int) -> dict[str, torch.Tensor]:
    """The weights after so many steps, by the names that a snapshot has."""
    with randomness.kept():
        randomness.seed_all(0, randomness.MODEL)
        coder = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        decoder = nn.Sequential(nn.Dropout(0.0), nn.Linear(3, 5))
    fast = torch.optim.AdamW(coder.parameters(), 1e-2)
    slow = torch.optim.SGD(decoder.parameters(), 0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(fast, 0.97)
    order, position = Order(53, batch=batch, seed=0, shuffle=True, drop_last=False), Position()

    def error(rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return ((decoder(coder(rows)) - rows).square().mean(-1) * mask).sum() / mask.sum()

    for _ in range(steps):
        found = [_rows(index) for index in order.at(position).tolist()]
        position = order.after(position)
        rows = nn.utils.rnn.pad_sequence(found, batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones(len(each)) for each in found], batch_first=True)
        slow.zero_grad()
        error(rows, mask).backward()
        slow.step()
        fast.zero_grad()
        (error(rows, mask) + _sparse(coder, rows, found)).backward()
        nn.utils.clip_grad_norm_(coder.parameters(), 1.0)
        fast.step()
        schedule.step()
    named = {"coder": coder, "decoder": decoder}
    return {f"{name}.{key}": value for name, each in named.items() for key, value in each.state_dict().items()}


def _sparse(coder: nn.Module, rows: torch.Tensor, found: list[torch.Tensor]) -> torch.Tensor:
    """Each sample alone: a mean over its own rows, so that padding of other lengths changes nothing."""
    return torch.stack([coder(each).abs().mean() for each in found]).mean()
