"""transformers on sets of `datasets`, in both faces, and TRL under the launcher: one worker's answer on two."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from launching import environment, run_words
from ranks import run_ranks
from torch import Tensor

import manyhosts as mh

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]  # the example itself is in `make test`: tests/docs
HERE = Path(__file__).parent


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "transformers_text", HERE.parents[1] / "examples" / "transformers_text.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cost(models: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = models["bert"](**batch).loss
    return loss


def step(run: mh.Run) -> None:
    run.backward(lambda batch: cost(run.models, batch))
    run.update()


def without_dropout(text: ModuleType) -> torch.nn.Module:
    model: torch.nn.Module = text.network()
    for each in model.modules():
        if isinstance(each, torch.nn.Dropout):
            each.p = 0.0
    return model.eval()


def train(rank: int, folder: Path) -> dict[str, dict[str, Tensor]]:
    """The weights that both faces end with, on a set with an index, and the first one on a stream."""
    text = example()
    common: dict[str, Any] = {"optimizer": lambda params: torch.optim.AdamW(params, lr=1e-3)}
    streamed = text.parts["train"].to_iterable_dataset(num_shards=4)
    found = {}
    for name, data in (("set", text.parts["train"]), ("stream", streamed)):
        trainer = mh.Trainer(
            model=lambda: without_dropout(text),
            step=lambda model, batch: model(**batch).loss,
            weight="samples",
            data=mh.Data(train=data, batch_size=16),
            run_dir=folder / name,
            **common,
        )
        trainer.fit("6 steps")
        found[name] = {key: each.clone() for key, each in trainer.model.state_dict().items()}
    run = mh.Run(
        models={"bert": lambda: without_dropout(text)},
        optimizers=common["optimizer"],
        data=mh.Data(train=text.parts["train"], batch_size=16),
        run_dir=folder / "own",
    )
    run.fit(step, "6 steps")
    found["own"] = {key: each.clone() for key, each in run.models["bert"].state_dict().items()}
    return found


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_model_of_transformers_on_datasets_ends_alike_on_one_and_two_workers_in_both_faces(tmp_path: Path) -> None:
    [alone] = run_ranks(1, train, tmp_path / "one", timeout_s=200)
    for found in run_ranks(2, train, tmp_path / "two", timeout_s=200):
        for name in ("set", "own"):
            for key, value in alone[name].items():
                torch.testing.assert_close(found[name][key], value, rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")
    for key, value in alone["set"].items():
        torch.testing.assert_close(alone["own"][key], value, rtol=1e-4, atol=1e-5)
    assert not torch.equal(alone["stream"]["classifier.weight"], alone["set"]["classifier.weight"])


@pytest.mark.timeout(600)
def test_script_of_trl_trains_under_the_launcher_as_in_one_process(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    script = shutil.copy(HERE / "trl_script.py", tmp_path)
    done = run_words(tmp_path, "--workers", "2", "--run-dir", "run", script, "two", "4")
    assert done.code == 0, done.err
    assert set(re.findall(r"worker (\d) of 2 made 6 steps", done.out)) == {"0", "1"}
    alone = [sys.executable, script, "one", "8"]
    ended = subprocess.run(alone, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    one, *two = (torch.load(tmp_path / f"{name}.pt") for name in ("one-0", "two-0", "two-1"))
    assert all(torch.equal(two[0][name], two[1][name]) for name in one)
    for name, value in one.items():
        torch.testing.assert_close(two[0][name], value, rtol=1e-3, atol=1e-4, msg=name)
