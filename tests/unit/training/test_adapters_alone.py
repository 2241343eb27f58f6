"""Snapshots of a model with adapters of PEFT: without the frozen weights, and only for those they belong to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.errors import SnapshotError

peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
    )


def adapted(make: Callable[[], nn.Module] = network) -> nn.Module:
    made = peft.get_peft_model(make(), peft.LoraConfig(r=2, target_modules=["0", "3"], modules_to_save=["5"]))
    assert isinstance(made, nn.Module)
    return made


def trainer(run_dir: Path, model: Callable[[], nn.Module] = adapted, **more: Any) -> mh.Trainer:
    inputs = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, torch.arange(48) % 3)
    return mh.Trainer(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        data=mh.Data(data, validation=data, batch_size=12),
        run_dir=run_dir,
        **{"snapshots": mh.Snapshots(every="2 steps"), "validate_every": "2 steps", **more},
    )


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(each, other[name]) for name, each in one.items())


@pytest.fixture
def undisturbed(tmp_path: Path) -> dict[str, torch.Tensor]:
    whole = trainer(tmp_path / "undisturbed")
    whole.fit("8 steps")
    return {name: each.clone() for name, each in whole.model.state_dict().items()}


def test_snapshots_hold_what_is_trained_and_buffers_and_a_resume_has_the_same_bits(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    trainer(tmp_path / "run").fit("4 steps")
    for kept in (mh.load(tmp_path / "run"), mh.load(tmp_path / "run", weights="last")):
        assert any(name.endswith("running_mean") for name in kept)
        assert all("lora_" in name or "modules_to_save" in name or "2" in name.split(".") for name in kept), list(kept)
        assert any("lora_B" in name for name in kept)
    resumed = trainer(tmp_path / "run")
    resumed.fit("8 steps")
    assert equal(resumed.model.state_dict(), undisturbed)


def test_a_file_of_the_best_weights_is_of_the_whole_model(tmp_path: Path) -> None:
    one = trainer(tmp_path / "run", early_stopping=mh.EarlyStopping("loss", patience=99))
    one.fit("4 steps")
    one.save(tmp_path / "best.pt")
    saved = torch.load(tmp_path / "best.pt")
    assert saved.keys() == one.model.state_dict().keys()
    frozen = next(name for name in saved if name.endswith("0.base_layer.weight"))
    assert torch.equal(saved[frozen], one.model.state_dict()[frozen])
    assert torch.equal(
        saved["base_model.model.2.running_mean"], mh.load(tmp_path / "run")["base_model.model.2.running_mean"]
    )


def test_other_frozen_weights_are_refused(tmp_path: Path) -> None:
    trainer(tmp_path / "run").fit("2 steps")

    def other() -> nn.Module:
        made = adapted()
        with torch.no_grad():
            dict(made.named_parameters())["base_model.model.3.base_layer.weight"].mul_(1.001)
        return made

    with pytest.raises(SnapshotError, match="frozen weights below them are not those that the script makes now"):
        trainer(tmp_path / "run", other).fit("4 steps")
    trainer(tmp_path / "run").fit("4 steps")  # nothing is lost by it


def test_frozen_weights_that_change_after_all_are_kept(tmp_path: Path) -> None:
    def drifting(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            dict(model.named_parameters())["base_model.model.3.base_layer.weight"].data.mul_(0.999)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def drifts(run_dir: Path) -> mh.Trainer:
        return mh.Trainer(
            model=adapted,
            step=drifting,
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
            data=mh.Data(trainer(run_dir).data.train, batch_size=12),
            run_dir=run_dir,
            snapshots=mh.Snapshots(every="2 steps"),
        )

    whole = drifts(tmp_path / "undisturbed")
    whole.fit("6 steps")
    drifts(tmp_path / "run").fit("4 steps")
    assert "base_model.model.3.base_layer.weight" in mh.load(tmp_path / "run", weights="last")
    resumed = drifts(tmp_path / "run")
    resumed.fit("6 steps")
    assert equal(resumed.model.state_dict(), whole.model.state_dict())


def fit_on(rank: int, folder: str, strategy: str, duration: str) -> dict[str, torch.Tensor]:
    made = trainer(Path(folder) / "run", strategy=strategy)
    made.fit(duration)
    made.save(Path(folder) / f"{strategy}.pt", weights="last")
    return {}


@pytest.mark.multiprocess
@pytest.mark.parametrize(("first", "then"), [("ddp", "fsdp"), ("fsdp", "ddp")])
def test_two_workers_continue_with_adapters_alone(
    first: str, then: str, tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    run_ranks(2, fit_on, str(tmp_path), first, "4 steps")
    assert not any("0.base_layer.weight" in name for name in mh.load(tmp_path / "run", weights="last"))
    run_ranks(2, fit_on, str(tmp_path), then, "8 steps")
    found = torch.load(tmp_path / f"{then}.pt")
    for name, each in undisturbed.items():
        torch.testing.assert_close(found[name], each, atol=1e-5, rtol=1e-5)
