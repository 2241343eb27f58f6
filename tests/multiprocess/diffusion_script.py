"""A diffusion model's loop for tests: a U-Net, a noise schedule, time steps drawn in the step, an average of weights.

Words: `STEPS WHEN`; `WHEN`: the step in whose middle the worker of rank 1 is killed, once; `STEP:wait`: all wait there.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.cluster.membership import JOINS

STEPS, WHEN = sys.argv[1:3]
DIES = os.environ.get("RANK") == "1" and JOINS not in os.environ
TIMES, DECAY = 50, 0.9
KEPT = torch.cumprod(1 - torch.linspace(1e-4, 0.02, TIMES), 0)


class Block(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, channels)
        self.conv = nn.Conv2d(channels, out, 3, padding=1)
        self.of_time = nn.Linear(8, out)

    def forward(self, pixels: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
        return self.conv(nn.functional.silu(self.norm(pixels))) + self.of_time(moment)[:, :, None, None]


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.down, self.middle, self.up = Block(4, 8), Block(8, 8), Block(12, 4)
        self.dropout, self.last = nn.Dropout(0.1), nn.Conv2d(4, 1, 1)

    def forward(self, noisy: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        angles = times[:, None] * torch.exp(-torch.arange(4.0))
        moment = torch.cat([angles.sin(), angles.cos()], 1)
        fine = self.first(noisy)
        coarse = self.middle(nn.functional.avg_pool2d(self.down(fine, moment), 2), moment)
        both = torch.cat([fine, nn.functional.interpolate(self.dropout(coarse), scale_factor=2.0)], 1)
        return self.last(self.up(both, moment))


def denoised(batch):
    (pixels,) = batch
    times, noise = torch.randint(TIMES, (len(pixels),)), torch.randn_like(pixels)
    share = KEPT[times][:, None, None, None]
    found = run.models["net"](share.sqrt() * pixels + (1 - share).sqrt() * noise, times)
    return {"loss": nn.functional.mse_loss(found, noise), "time": times.double().mean()}


def step(run):
    found = run.backward(denoised, "net")
    if f"{run.steps_done}:wait" == WHEN:
        time.sleep(600)
    if DIES and str(run.steps_done) == WHEN:
        os.kill(os.getpid(), signal.SIGKILL)
    norm = run.update("net", clip=1.0)
    with torch.no_grad():
        for kept, new in zip(run.models["average"].parameters(), run.models["net"].parameters(), strict=True):
            kept.lerp_(new, 1 - DECAY if run.steps_done > 2 else 1.0)
    run.state["mean_loss"] = 0.5 * run.state.get("mean_loss", 0.0) + 0.5 * float(found["loss"])
    run.log(norm=norm, drawn=torch.rand(()))


run = mh.Run(
    models={"net": UNet, "average": lambda: UNet().requires_grad_(False)},
    optimizers={"net": lambda params: torch.optim.AdamW(params, 2e-3)},
    schedulers={"net": lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)},
    data=mh.Data(
        train=TensorDataset(torch.randn(44, 1, 8, 8, generator=torch.Generator().manual_seed(0))), batch_size=8
    ),
    virtual_workers=4,
    snapshots=mh.Snapshots(every="3 steps"),
)

if __name__ == "__main__":
    run.fit(step, STEPS)
