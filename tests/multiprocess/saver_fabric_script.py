"""A loop of Fabric with `mh.Order` and `mh.Saver`. Words: `FOLDER OUTPUT [STEP]`; at that step all workers end."""

import os
import sys

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import manyhosts as mh

FOLDER, OUTPUT, ENDS_AT = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else -1

workers = int(os.environ.get("WORLD_SIZE", "1"))
fabric = Fabric(accelerator="cpu", devices=workers, strategy="ddp" if workers > 1 else "auto")
fabric.launch()
torch.manual_seed(0)
inputs = torch.randn(50, 4)
bare = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
adam = torch.optim.AdamW(bare.parameters(), 1e-2)
model, optimizer = fabric.setup(bare, adam)
torch.manual_seed(fabric.global_rank)
order = mh.Order(50, batch_size=8, seed=3)
loader = DataLoader(TensorDataset(torch.arange(50), inputs), batch_sampler=order)
loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)
saver = mh.Saver(FOLDER, mh.Snapshots(every="3 steps"), model=bare, optimizer=adam, order=order)
saver.resume()
seen = []
for epoch in range(order.epoch, 3):
    for indices, batch in loader:
        seen += [(epoch, int(index)) for index in indices]
        optimizer.zero_grad()
        fabric.backward(nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True)) * order.weight)
        optimizer.step()
        saver.after_step()
        if saver.step == ENDS_AT:
            if saver.store is not None:
                saver.store.wait()
            torch.save(seen, f"{OUTPUT}-{fabric.global_rank}-before")
            fabric.barrier()
            os._exit(9)
saver.close()
torch.save(seen, f"{OUTPUT}-{fabric.global_rank}")
if fabric.is_global_zero:
    torch.save(bare.state_dict(), OUTPUT)
