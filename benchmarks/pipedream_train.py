"""What `pipedream.py` trains: blocks that sleep, large blocks, digits, and a small GPT on characters.

The one argument says as JSON which of them, under which strategy and seed, in which batches. Each worker prints one
line of what it found.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.callbacks.callback import Callback, Moment
from manyhosts.events import Event, StepDone, ValidationDone

ASKED: dict[str, Any] = json.loads(sys.argv[1])
PASS_S = 0.1
"""What a pass of a sleeping block takes, forward and backward alike."""
EXAMPLE = Path(__file__).parents[1] / "examples" / "char_lm.py"


class Sleep(torch.autograd.Function):
    """The identity, which takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        time.sleep(PASS_S * _is_training)
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(PASS_S)
        return gradients[0]


_is_training = 1


class Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, given: Tensor) -> Tensor:
        slept: Tensor = Sleep.apply(self.layer(given))  # type: ignore[no-untyped-call]
        return torch.tanh(slept)


def sleeping() -> tuple[nn.Module, TensorDataset, TensorDataset | None, nn.Module, Callable[..., Any]]:
    made = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(4096, 16, generator=made), torch.randn(4096, 16, generator=made))
    blocks = nn.Sequential(*[Sleeper() for _ in range(ASKED["blocks"])])
    return blocks, data, None, nn.MSELoss(), lambda params: torch.optim.SGD(params, lr=0.01)


def large() -> tuple[nn.Module, TensorDataset, TensorDataset | None, nn.Module, Callable[..., Any]]:
    """Blocks of 64 MB: too large for an allocator to keep what is let go of."""
    data = TensorDataset(torch.randn(64, 4096), torch.randn(64, 4096))
    blocks = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(ASKED["blocks"])])
    return blocks, data, None, nn.MSELoss(), lambda params: torch.optim.SGD(params, lr=1e-4, momentum=0.9)


def digits() -> tuple[nn.Module, TensorDataset, TensorDataset | None, nn.Module, Callable[..., Any]]:
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, validation = (TensorDataset(images[part], labels[part]) for part in order.split([1437, 360]))
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.GELU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.GELU()),
        *(nn.Flatten(), nn.Linear(512, 64), nn.GELU(), nn.Linear(64, 10)),
    )
    return model, train, validation, nn.CrossEntropyLoss(), lambda params: torch.optim.AdamW(params, lr=5e-4)


def characters() -> tuple[nn.Module, TensorDataset, TensorDataset | None, nn.Module, Callable[..., Any]]:
    """The model and the text of the example, narrower and with a block for each of four stages."""
    source = EXAMPLE.read_text().split("\ntrainer = ")[0].replace("= 64, 96, 4, 3", "= 64, 48, 4, 4")
    names: dict[str, Any] = {"__name__": "example"}
    exec(source, names)
    model = names["GPT"](len(names["alphabet"]))
    return model, names["train"], names["validation"], nn.CrossEntropyLoss(), lambda p: torch.optim.AdamW(p, lr=1e-3)


def strategy() -> Any:
    if ASKED["way"] == "one process":
        return "auto"
    cuts: dict[str, Any] = {"cuts": "layers"}
    if ASKED["way"] == "1f1b":
        return mh.Pipeline(**cuts)
    return mh.PipeDream(versions=ASKED["way"], accumulate=ASKED["accumulate"], **cuts)


class Peak(Callback):
    """Of the memory of this process, from the end of the first step to that of the last."""

    megabytes = 0.0

    def after_step(self, moment: Moment) -> None:
        if moment.step == 1:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text().splitlines()
        self.megabytes = next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(ASKED["seed"])
    made = {"sleeping": sleeping, "large": large, "digits": digits, "characters": characters}
    model, train, validation, loss, optimizer = made[ASKED["task"]]()
    ends: list[float] = []
    losses: list[float] = []
    peak = Peak()

    def listen(event: Event) -> None:
        if isinstance(event, StepDone):
            ends.append(time.perf_counter())
        elif isinstance(event, ValidationDone):
            losses.append(event.values["loss"])

    trainer = mh.Trainer(
        model=model,
        loss=loss,
        optimizer=optimizer,
        data=mh.Data(train=train, validation=validation, batch_size=ASKED["batch"]),
        micro_batch_size=ASKED["piece"],
        strategy=strategy(),
        seed=ASKED["seed"],
        listeners=[listen],
        callbacks=[peak],
        **({} if validation is None else {"validate_every": f"{ASKED['every']} steps"}),
    )
    trainer.fit(f"{ASKED['steps']} steps")
    rate = (len(ends) - 1) * ASKED["batch"] / (ends[-1] - ends[0]) if ends else None  # one worker hears of steps
    found = {"rank": int(os.environ.get("RANK", "0")), "rate": rate, "peak_mb": peak.megabytes, "losses": losses}
    print("FOUND " + json.dumps(found), flush=True)


main()
