"""Scripts with faults that published ones have are told of them in one line each; those without hear nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import Ended, run, run_words, write_script

pytestmark = pytest.mark.multiprocess

SCRIPT = """
    import os, sys
    import torch, torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    faulty = sys.argv[1] == "faulty"
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    train = TensorDataset(torch.randn(48, 4), torch.arange(48) % 3)
    held_out = TensorDataset(torch.randn(30, 4), torch.arange(30) % 3)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=4, sampler=sampler)
    own = None if faulty else DistributedSampler(held_out)  # shuffles by default, and nobody minds
    validation = DataLoader(held_out, batch_size=5, sampler=own)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def evaluate():
        if not faulty:
            model.eval()
        with torch.no_grad():
            for inputs, _ in validation:
                model(inputs)
        model.train()

    for epoch in range(3):
        if not faulty:
            sampler.set_epoch(epoch)
        for step, (inputs, targets) in enumerate(loader):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            if step % 4 == 3:
                evaluate()  # in the middle of an epoch, too
        if faulty or rank == 0:
            torch.save(model.state_dict(), "model.pt")
        torch.save({}, f"state-{rank}.pt")
    print("trained")
"""


def reported(ended: Ended) -> list[str]:
    """What the launcher has said; the script has done its work all the same."""
    assert ended.code == 0, ended.err
    return sorted(line for line in ended.err.splitlines() if line.startswith("manyhosts: "))


@pytest.mark.parametrize("workers", [2, 3])
def test_faults_of_a_script_are_told_once_each(workers: int, tmp_path: Path) -> None:
    said = reported(run(tmp_path, SCRIPT, "--workers", str(workers), arguments=["faulty"]))
    begins = [
        "manyhosts: each epoch has its samples in the same order, because sampler.set_epoch is not called",
        f"manyhosts: each of the {workers} workers goes through the same 30 samples",
        "manyhosts: ranks ",
        "manyhosts: the model was in train mode while it went through 30 samples",
    ]
    assert len(said) == len(begins), said
    assert [line.startswith(begin) for line, begin in zip(said, begins, strict=True)] == [True] * 4, said


def test_script_without_them_hears_nothing(tmp_path: Path) -> None:
    for workers in ("1", "2"):
        assert reported(run(tmp_path, SCRIPT, "--workers", workers, arguments=["right"])) == []


RESUMES = """
    import os, sys, torch, torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    add = int(sys.argv[1])
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(16, 4))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = 0
    if os.path.exists("snapshot.pt"):
        first = torch.load("snapshot.pt")["epoch"]
    for epoch in range(first, 4):
        sampler.set_epoch(epoch)
        for inputs, in loader:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save({"epoch": epoch + add}, "snapshot.pt")
        dist.barrier()
        if epoch == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise RuntimeError("broken")
"""


@pytest.mark.parametrize("add", [0, 1])
def test_epoch_that_a_restart_trains_again_is_told(add: int, tmp_path: Path) -> None:
    said = reported(run(tmp_path, RESUMES, "--workers", "2", "--restarts", "1", arguments=[str(add)]))
    again = [line for line in said if "it is trained again" in line]
    assert len(again) == 1 - add, said
    assert all(
        "epoch 1 was over when snapshot.pt was saved, and the script continues with epoch 1" in line for line in again
    )


ON_GPUS = """
    import os, torch, torch.distributed as dist
    if CHOOSES:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3).to("cuda"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(2, 4, device="cuda")).square().mean().backward()
        optimizer.step()
"""


def test_rehearsal_tells_that_all_workers_would_be_on_one_gpu(tmp_path: Path) -> None:
    for chooses in (False, True):
        script = str(write_script(tmp_path, ON_GPUS.replace("CHOOSES", str(chooses))))
        said = reported(run_words(tmp_path, "--workers", "2", "--rehearse", "--run-dir", f"run-{chooses}", script))
        assert ["are on GPU 0, one of 2" in line for line in said] == [True] * (not chooses), said
