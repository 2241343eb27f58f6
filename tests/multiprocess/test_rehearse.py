"""`run --rehearse`: a script for CUDA and NCCL trains on CPU and Gloo, and says what was mapped."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launching import run_words

pytestmark = pytest.mark.multiprocess
SCRIPT = Path(__file__).with_name("cuda_script.py")


def rehearse(script: Path, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "manyhosts.cli.main", "run", "--workers", "2", "--rehearse", str(script), *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_script_for_gpus_trains_its_workers_together(tmp_path: Path) -> None:
    done = rehearse(SCRIPT, str(tmp_path), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    said = [line.partition("] ")[2] for line in done.stdout.splitlines() if "weights" in line]
    assert len(said) == 2
    assert said[0] == said[1], "DDP keeps the workers equal"
    assert said[0].startswith("sum 2, time True")
    for mapping in ("nccl becomes gloo", "fp16 becomes bf16", "device_ids are left out", "pinned memory"):
        assert done.stderr.count(mapping) == 1, f"{mapping!r} is told once\n{done.stderr}"


THREADS = """
import threading
import torch
import torch.distributed.rpc as rpc
import os

def ones(count):
    return torch.ones(count, device="cuda:0").cuda()

found = []
thread = threading.Thread(target=lambda: found.append(ones(3)))
thread.start()
thread.join()
rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
found.append(rpc.rpc_sync(f"worker{1 - rank}", ones, (4,)))
rpc.shutdown()
print("sum", float(sum(each.sum() for each in found)))
"""


def test_threads_of_a_script_and_of_rpc_are_mapped_too(tmp_path: Path) -> None:
    (tmp_path / "threads.py").write_text(THREADS)
    done = rehearse(tmp_path / "threads.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 7.0") == 2, done.stdout


def test_what_no_cpu_has_is_refused_with_a_sentence(tmp_path: Path) -> None:
    script = tmp_path / "graphs.py"
    script.write_text("import torch\ntorch.cuda.CUDAGraph()\n")
    done = rehearse(script, folder=tmp_path)
    assert done.returncode == 2
    assert "torch.cuda.CUDAGraph cannot be rehearsed on a CPU" in done.stderr
    assert "Traceback" not in done.stderr


LIBRARY = """
import torch
from torch.utils.data import DataLoader, Dataset

class Runner:
    graph: torch.cuda.CUDAGraph | None = None
    pool: torch.cuda.MemPool | None = None

class OnGpu(Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return torch.full((1,), index, device="cuda", dtype=torch.float32)

def train(rank, count):
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=count, init_method="tcp://127.0.0.1:" + PORT)
    total = torch.full((1,), rank + 1.0).cuda()
    torch.distributed.all_reduce(total)
    print("rank", rank, "of", count, "sum", int(total), flush=True)

import os
PORT = os.environ["PORT"]
if __name__ == "__main__":
    for thing in (torch.ones(1), torch.cuda.Event(), torch.cuda.Stream()):
        asked = [isinstance(thing, kind) for kind in (torch.cuda.Event, torch.cuda.Stream, torch.cuda.CUDAGraph)]
        print(type(thing).__name__, asked.index(True) if any(asked) else None)
    assert not torch.accelerator.current_stream().is_capturing()  # torch 2.15's optimizers ask it
    assert not torch.cuda.is_current_stream_capturing()
    for method in ("spawn", "forkserver"):
        loader = DataLoader(OnGpu(), num_workers=1, multiprocessing_context=method)
        print(method, sum(float(each) for each in loader))
    count = torch.cuda.device_count()
    torch.multiprocessing.spawn(train, args=(count,), nprocs=count)
"""


def test_classes_stay_classes_and_processes_of_the_script_are_mapped_too(tmp_path: Path) -> None:
    script = tmp_path / "library.py"
    script.write_text(LIBRARY)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--workers", "1", "--rehearse", "--env", "CUDA_VISIBLE_DEVICES=0,1", "--env", f"PORT={port}"]
    done = run_words(tmp_path, *words, str(script))
    assert done.code == 0, done.err
    *first, one, two = done.out.splitlines()
    assert first == ["Tensor None", "Event 0", "Stream 1", "spawn 1.0", "forkserver 1.0"]
    assert sorted([one, two]) == ["rank 0 of 2 sum 3", "rank 1 of 2 sum 3"]


LEAVES = """
import atexit, os, torch, torch.distributed as dist
atexit.register(lambda: print(os.environ["RANK"], "has a group:", dist.is_initialized(), flush=True))
dist.init_process_group("nccl")
total = torch.ones(1).cuda()
dist.all_reduce(total)
if PENDING and dist.get_rank() == 0:
    pending = dist.all_reduce(total, async_op=True)
"""


@pytest.mark.parametrize("pending", [False, True])
def test_script_that_leaves_its_group_as_nccl_lets_it_ends_well(pending: bool, tmp_path: Path) -> None:
    """Gloo's threads would at times abort it."""
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES.replace("PENDING", str(pending)))
    done = rehearse(script, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    reported = sorted(line.partition("] ")[2] for line in done.stdout.splitlines() if "group" in line)
    assert reported[pending:] == ["0 has a group: False", "1 has a group: False"][pending:]


def test_gpu_that_the_machine_would_not_have_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "seventh.py"
    script.write_text("import torch\ntorch.cuda.set_device(7)\n")
    done = rehearse(script, folder=tmp_path)
    assert done.returncode == 1
    assert "invalid device ordinal 7" in done.stderr


def test_factories_and_moves_by_any_name_of_a_device_stay_on_the_cpu(tmp_path: Path) -> None:
    script = tmp_path / "devices.py"
    script.write_text(
        "import torch\n"
        "made = [torch.zeros(1, device=device) for device in ('cuda', 'cuda:0', 0, torch.device('cuda', 0))]\n"
        "made += [torch.zeros(1).to(device) for device in ('cuda', 0, torch.device('cuda'))]\n"
        "with torch.device('cuda'):\n"
        "    made.append(torch.ones(3))\n"
        "made.append(torch.zeros(1, device=torch.accelerator.current_accelerator()))\n"
        "made.append(next(torch.nn.Linear(2, 2, device='cuda').cuda(0).parameters()))\n"
        "made.append(torch.zeros(2, pin_memory=True).pin_memory())\n"
        "print(sorted({str(tensor.device) for tensor in made}), torch.cuda.get_device_capability())\n"
    )
    done = rehearse(script, folder=tmp_path)
    assert done.stdout.splitlines()[0].endswith("['cpu'] (8, 0)"), done.stderr


def test_trainer_rehearses_as_it_runs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nfrom torch import nn\nfrom torch.utils.data import TensorDataset\nimport manyhosts as mh\n"
        "data = TensorDataset(torch.ones(16, 4), torch.arange(16) % 2)\n"
        "trainer = mh.Trainer(model=lambda: nn.Linear(4, 2), loss=nn.CrossEntropyLoss(), backend='nccl',\n"
        "    optimizer=lambda params: torch.optim.SGD(params, lr=0.1), data=mh.Data(train=data, batch_size=4))\n"
        "print(trainer.fit('1 epoch').status)\n"
    )
    done = rehearse(script, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("] completed") == 2


ACCELERATE = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(mixed_precision="fp16")
assert torch.cuda.is_available()
torch.manual_seed(0)
model = torch.nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8, pin_memory=True))
for inputs, targets in loader:
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
print("of", accelerator.num_processes, "weights", sum(float(each.detach().sum()) for each in model.parameters()))
"""
LIGHTNING = """
import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 3)

    def training_step(self, batch, _):
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

lightning.seed_everything(0)
model = Model()
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = lightning.Trainer(accelerator="gpu", devices=2, strategy="ddp", precision="16-mixed", max_epochs=1, **quiet)
trainer.fit(model, DataLoader(data, batch_size=8, pin_memory=True))
print("of", trainer.world_size, "weights", sum(float(each.detach().sum()) for each in model.parameters()))
"""


@pytest.mark.parametrize(
    "source", [pytest.param(ACCELERATE, marks=pytest.mark.slow), LIGHTNING], ids=["accelerate", "lightning"]
)
def test_script_of_a_library_for_gpus_trains_its_workers_together(source: str, tmp_path: Path) -> None:
    script = tmp_path / "for_gpus.py"
    script.write_text(source)
    done = rehearse(script, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    said = [line.partition("] ")[2] for line in done.stdout.splitlines() if "weights" in line]
    assert len(said) == 2, done.stdout
    assert said[0] == said[1], "the workers are equal"
    assert said[0].startswith("of 2 ")
    assert "GPUs become this machine's CPU" in done.stderr


SAVED_AND_NORMALISED = """
import os, torch
from torch import load, nn
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["RANK"])
path = f"weights-{rank}.pt"
torch.save(torch.ones(2), path)
places = ["cuda", "cuda:0", torch.device("cuda", rank), {"cuda:0": f"cuda:{rank}"}, lambda stored, _: stored.cuda(0)]
for location in places:
    assert load(path, map_location=location).sum() == torch.serialization.load(path, map_location=location).sum() == 2
torch.distributed.init_process_group("nccl")
torch.manual_seed(0)
layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double()
samples = torch.randn(8, 3, 6, 6).double()
alone, together = layers, nn.SyncBatchNorm.convert_sync_batchnorm(__import__("copy").deepcopy(layers)).cuda()
alone(samples).square().sum().backward()
model = DistributedDataParallel(together, device_ids=[rank])
model(samples[4 * rank : 4 * rank + 4].cuda()).square().sum().backward()
equal = torch.allclose(together[1].running_var, alone[1].running_var, rtol=1e-9)
equal &= torch.allclose(2 * together[0].weight.grad, alone[0].weight.grad, rtol=1e-6, atol=1e-9)
print("equal", bool(equal))
"""
FABRIC = """
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cuda", devices=2, strategy="ddp")
fabric.launch()
data = TensorDataset(torch.arange(64.0))
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8, pin_memory=True))
print("batches", len(loader), sorted({len(batch[0]) for batch in loader}))
"""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (SAVED_AND_NORMALISED, "equal True"),
        pytest.param(FABRIC, "batches 4 [8]", marks=pytest.mark.slow),  # the other source is the same files' quick one
    ],
    ids=["load and SyncBatchNorm", "Fabric"],
)
def test_what_scripts_for_gpus_do_beside_training_is_rehearsed(source: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(source)
    done = rehearse(tmp_path / "script.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(said) == 2, done.stdout
