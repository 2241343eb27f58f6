"""The copy of a snapshot from a GPU: beside training, and of the right moment."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from manyhosts.snapshot.copy import CopySpace
from manyhosts.snapshot.store import Facts, Store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def test_copies_are_those_of_the_moment_although_the_gpu_is_busy() -> None:
    device = torch.device("cuda", 0)
    weight, running = torch.zeros(1 << 24, device=device), torch.zeros(1 << 20, device=device)
    work = torch.randn(4096, 4096, device=device)
    space = CopySpace(device)
    for moment in range(1, 4):
        for _ in range(20):
            work = torch.tanh(work @ work)  # the stream is busy: what follows is only asked for
        weight.fill_(moment)
        running.fill_(moment)
        copying = space.begin({"weight": weight, "running": running}, [weight])
        running.add_(1)  # the forward pass, in the stream's order
        copying.finish()
        assert copying.done.is_set()
        assert (copying.copies["weight"] == moment).all()
        assert (copying.copies["running"] == moment).all()
        assert copying.copies["weight"].is_pinned()


def test_store_keeps_what_is_on_the_gpu(tmp_path: Path) -> None:
    model = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    store = Store(tmp_path, keep=1)
    for step in range(1, 6):
        model(torch.randn(8, 64, device="cuda")).square().sum().backward()
        store.before_update()
        optimizer.step()
        then = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        store.save(
            {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()},
            Facts(step=step, epoch=0, position={}, strategy="single", model={}),
            unchanged_until_update=model.parameters(),
        )
    loaded = store.latest()
    assert loaded is not None
    assert all(torch.equal(loaded.state["model"][name], value) for name, value in then.items())
