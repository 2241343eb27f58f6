"""Fine-tuning on several workers: equal weights, and each worker reads of a checkpoint what it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh

WIDTH = 32


def network(classes: int = 4) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.ReLU(), nn.Linear(WIDTH, classes))


def checkpoint(folder: Path) -> Path:
    """Four files and their index, as Hugging Face writes them."""
    torch.manual_seed(3)
    weights = network(9).state_dict()
    files = {name: f"model-{number % 4 + 1:05d}-of-00004.safetensors" for number, name in enumerate(weights)}
    for file in set(files.values()):
        save_file({name: each for name, each in weights.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def tune(rank: int, folder: str, strategy: str) -> tuple[dict[str, Any], int]:
    """The weights after some steps, and how many bytes of the checkpoint were read."""
    from manyhosts.training.state import weights

    read = 0
    block, whole = weights._Readable.block, weights._Readable.full

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal read
        read += tensor.nbytes
        return tensor

    weights._Readable.block = lambda self, box: counted(block(self, box))  # type: ignore[method-assign]
    weights._Readable.full = lambda self: counted(whole(self))  # type: ignore[method-assign]
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, WIDTH, generator=generator), torch.arange(64) % 4)
    trainer = mh.Trainer(
        model=network,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.AdamW(mh.groups(params, {"5": {"lr": 1e-2}}), lr=1e-3),
        data=mh.Data(data, batch_size=16),
        init_from=mh.InitFrom(Path(folder) / "shards", missing=["5.*"], freeze=["0.*"]),
        strategy=strategy,
        run_dir=Path(folder) / f"run-{strategy}",
    )
    trainer.fit("4 steps")
    trainer.save(Path(folder) / f"{strategy}.pt", weights="last")
    return {}, read


def test_new_head_and_frozen_layers_give_equal_weights_and_each_worker_reads_its_part(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    shards = checkpoint(tmp_path / "shards")
    total = sum(path.stat().st_size for path in shards.glob("*.safetensors"))
    tune(0, str(tmp_path), "single")
    alone = torch.load(tmp_path / "single.pt")
    torch.manual_seed(3)
    assert torch.equal(alone["0.weight"], network(9).state_dict()["0.weight"])
    for strategy in ("ddp", "fsdp"):
        reported = run_ranks(2, tune, str(tmp_path), strategy)
        found = torch.load(tmp_path / f"{strategy}.pt")
        for name, tensor in alone.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-5)
        if strategy == "fsdp":
            assert all(0 < read <= 0.6 * total for _, read in reported), (reported, total)


def adapt(rank: int, folder: str, name: str) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    data = TensorDataset(torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 4)
    config = peft.LoraConfig(r=2, target_modules=["0", "2"], lora_dropout=0.0)
    trainer = mh.Trainer(
        model=lambda: peft.get_peft_model(network(), config),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        data=mh.Data(data, batch_size=16),
        run_dir=Path(folder) / f"run-{name}",
    )
    trainer.fit("4 steps")
    trainer.save(Path(folder) / f"{name}.pt", weights="last")


@pytest.mark.filterwarnings("ignore")
def test_lora_gives_equal_weights_on_one_and_two_workers_and_trains_the_adapters_alone(tmp_path: Path) -> None:
    adapt(0, str(tmp_path), "one")
    run_ranks(2, adapt, str(tmp_path), "two")
    one, two = (torch.load(tmp_path / f"{name}.pt") for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=1e-6, rtol=1e-5)
    assert any("lora_B" in name and bool(tensor.any()) for name, tensor in one.items())
