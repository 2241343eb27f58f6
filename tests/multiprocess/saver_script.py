"""A plain loop with `mh.Order` and `mh.Saver`. Words: `FOLDER OUTPUT [STEP]`; at that step all workers end."""

import os
import sys
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import manyhosts as mh

FOLDER, OUTPUT = sys.argv[1:3]
ENDS_AT = int(sys.argv[3]) if len(sys.argv) > 3 else -1
RANK = int(os.environ.get("RANK", "0"))

if "RANK" in os.environ:
    dist.init_process_group("gloo")
torch.manual_seed(0)
inputs = torch.randn(50, 4)
bare = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
model = nn.parallel.DistributedDataParallel(bare) if dist.is_initialized() else bare
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
torch.manual_seed(RANK)
order = mh.Order(50, batch_size=8, seed=3)
loader = DataLoader(TensorDataset(torch.arange(50), inputs), batch_sampler=order)
saver = mh.Saver(FOLDER, mh.Snapshots(every="3 steps"), model=model, optimizer=optimizer, order=order)
saver.resume()
seen = []
for epoch in range(order.epoch, 3):
    for indices, batch in loader:
        seen += [(epoch, int(index)) for index in indices]
        optimizer.zero_grad()
        (nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True)) * order.weight).backward()
        optimizer.step()
        saver.after_step()
        if saver.step == ENDS_AT:
            if saver.store is not None:
                saver.store.wait()
            torch.save(seen, f"{OUTPUT}-{RANK}-before")
            if dist.is_initialized():
                dist.barrier()  # once one has ended, the launcher ends the others, in the middle of a file as well
            sys.stdout.flush()
            os._exit(9)
saver.close()
torch.save(seen, f"{OUTPUT}-{RANK}")
if RANK == 0:
    torch.save(bare.state_dict(), Path(OUTPUT))
