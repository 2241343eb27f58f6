"""Knows torchrun's variables and nothing of manyhosts."""

import os
import socket

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([float(os.environ["RANK"])])
dist.all_reduce(total)
ours = [name for name in os.environ if name.startswith(("OMPI_", "PMIX_", "SLURM_PROCID", "MANYHOSTS_TOKEN"))]
print(f"sum {total.item():.0f} of {dist.get_world_size()} on {socket.gethostname()} sees {ours}", flush=True)
dist.destroy_process_group()
