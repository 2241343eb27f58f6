"""A loop of Accelerate with `mh.Order` and `mh.Saver`. Words: `FOLDER OUTPUT [STEP]`; at that step all workers end."""

import os
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import manyhosts as mh

FOLDER, OUTPUT, ENDS_AT = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else -1

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
inputs = torch.randn(50, 4)
bare = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), 1e-2))
torch.manual_seed(accelerator.process_index)
order = mh.Order(50, batch_size=8, seed=3)
loader = DataLoader(TensorDataset(torch.arange(50), inputs), batch_sampler=order)
saver = mh.Saver(FOLDER, mh.Snapshots(every="3 steps"), model=bare, optimizer=optimizer.optimizer, order=order)
saver.resume()
seen = []
for epoch in range(order.epoch, 3):
    for indices, batch in loader:
        seen += [(epoch, int(index)) for index in indices]
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True)) * order.weight)
        optimizer.step()
        saver.after_step()
        if saver.step == ENDS_AT:
            if saver.store is not None:
                saver.store.wait()
            torch.save(seen, f"{OUTPUT}-{accelerator.process_index}-before")
            accelerator.wait_for_everyone()
            os._exit(9)
saver.close()
torch.save(seen, f"{OUTPUT}-{accelerator.process_index}")
if accelerator.is_main_process:
    torch.save(bare.state_dict(), OUTPUT)
