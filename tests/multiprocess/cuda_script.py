"""A script as people write them for GPUs: CUDA, NCCL, mixed precision, pinned memory. Knows nothing of manyhosts."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    assert torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    torch.manual_seed(0)
    torch.cuda.manual_seed_all(0)
    device = torch.device(f"cuda:{torch.cuda.current_device()}")
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, pin_memory=True)
    layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).to(local_rank)
    model = DistributedDataParallel(layers, device_ids=[local_rank], output_device=local_rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            inputs, targets = inputs.to(device, non_blocking=True), targets.cuda(local_rank, non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    end.record()
    torch.cuda.synchronize()
    path = os.path.join(sys.argv[1], f"{local_rank}.pt")
    torch.save(model.module.state_dict(), path)
    dist.barrier(device_ids=[local_rank])
    state = torch.load(path, {"cuda:0": f"cuda:{local_rank}"}, weights_only=True)
    total = torch.ones(1, device=local_rank)
    dist.all_reduce(total)
    weights = sum(float(value.sum()) for value in state.values())
    sys.stdout.write(f"sum {total.item():.0f}, time {start.elapsed_time(end) > 0}, weights {weights:.6f}\n")
    dist.destroy_process_group()


main()
