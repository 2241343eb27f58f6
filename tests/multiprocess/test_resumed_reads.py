"""What workers that resume read of a snapshot, all together: each byte once, whatever they hold of the model."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.events import Event, SnapshotSkipped
from manyhosts.snapshot import tensors

pytestmark = pytest.mark.multiprocess
STRATEGIES = ["ddp", "fsdp", "tensor", "pipeline"]
WIDTH = 192


def trainer(run_dir: Path, strategy: str, heard: list[Event]) -> mh.Trainer:
    """Of a model with 7 MB of weights and state."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 3))
    return mh.Trainer(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        data=mh.Data(train=TensorDataset(torch.randn(48, WIDTH), torch.arange(48) % 3), batch_size=12),
        strategy=strategy,
        snapshots=mh.Snapshots(every="1 step"),
        run_dir=run_dir,
        listeners=[heard.append],
    )


@contextmanager
def counted(folder: Path) -> Iterator[list[int]]:
    """Within, the bytes that this process reads from files below `folder` are added to what is given."""
    read = [0]

    class Counted(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:
            count = super().readinto(buffer)
            read[0] += count or 0
            return count

        def readall(self) -> bytes:
            content = super().readall()
            read[0] += len(content)
            return content

        def read(self, size: int | None = -1) -> bytes:
            content = super().read(size) or b""
            read[0] += len(content)
            return content

    def opened(path: Any, mode: str = "r", buffering: int = -1, *more: Any, **named: Any) -> Any:
        if not str(path).startswith(str(folder)) or any(each in mode for each in "wax+"):
            return original(path, mode, buffering, *more, **named)
        raw = Counted(str(path), "r")
        if buffering == 0:
            return raw
        return io.BufferedReader(raw) if "b" in mode else io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8")

    def tensor_read(self: Any, name: str, place: Any = None) -> torch.Tensor:
        found = original_read(self, name, place)
        read[0] += found.nbytes
        return found

    original, original_read = io.open, tensors.TensorFile.read
    with (
        patch("io.open", opened),
        patch("pathlib.io.open", opened),
        patch.object(tensors.TensorFile, "read", tensor_read),
    ):
        yield read


def resumed(rank: int, folder: Path) -> dict[str, tuple[str, str, int]]:
    """By strategy: the hash of the weights that were left, and of those taken up, and how much was read for it."""
    found = {}
    for strategy in STRATEGIES:
        path = folder / strategy
        left = trainer(path, strategy, []).fit("1 step").weights_sha256
        with counted(path / "snapshots") as read:
            found[strategy] = left, trainer(path, strategy, []).fit("1 step").weights_sha256, read[0]
    return found


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_workers_that_resume_read_each_byte_once(workers: int, tmp_path: Path) -> None:
    found = run_ranks(workers, resumed, tmp_path)
    for strategy in STRATEGIES:
        size = sum(path.stat().st_size for path in (tmp_path / strategy / "snapshots" / "step-00000001").iterdir())
        assert all(left == taken for left, taken, _ in (each[strategy] for each in found))
        read = sum(each[strategy][2] for each in found)
        assert size > 6e6, size
        assert size <= read <= 1.2 * size, (strategy, read / size)


def passed_over(rank: int, folder: Path) -> list[str]:
    """Why each worker has passed over the newest of two snapshots, in which one file has another byte."""
    found = []
    for strategy in ("ddp", "fsdp"):
        trainer(folder / strategy, strategy, []).fit("2 steps")
        newest = folder / strategy / "snapshots" / "step-00000002"
        if rank == 0:
            path = max(newest.glob("tensors-*"))
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        heard: list[Event] = []
        made = trainer(folder / strategy, strategy, heard)
        made.world.barrier()
        made.fit("1 step")
        found += [event.reason for event in heard if isinstance(event, SnapshotSkipped)]
    return found


def test_what_one_reader_finds_damaged_no_worker_uses(tmp_path: Path) -> None:
    reasons, _ = run_ranks(2, passed_over, tmp_path)  # rank 0 reports for all
    assert len(reasons) == 2
    for reason in reasons:
        assert reason.startswith("tensors-00001-of-00002.safetensors is damaged: its sha256 is")
        assert reason.endswith("(found by worker 1)")
