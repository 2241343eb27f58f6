"""Exports of what several workers trained, and of digits, language models and models of transformers in each format."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sklearn  # noqa: F401  # sets variables when it is first loaded, which the script of the digits does
import torch
from held_memory import HeldMemory
from safetensors.torch import load_file
from served import serving
from small_run import SCRIPT, make_run

import manyhosts as mh
from manyhosts.errors import ConfigError
from manyhosts.export.export import Request, export

ROOT = Path(__file__).parents[2]
DEEP = SCRIPT.replace("nn.Linear(144, 3)", "*(nn.Linear(144, 144) for _ in range(60)), nn.Linear(144, 3)")


def test_parts_of_four_workers_are_exported_on_one_with_memory_for_one_model(tmp_path: Path) -> None:
    run = make_run(tmp_path, "--workers", "4", "--set", "strategy=fsdp", "--set", "duration=2 steps", script=DEEP)
    assert len(list((run / "best").glob("tensors-*"))) == 4
    weights = mh.load(run)
    size = sum(each.nbytes for each in weights.values())
    with HeldMemory() as held:
        folder, _ = export(Request(run_dir=str(run), format="safetensors"))
    found = load_file(folder / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert size < held.most < 1.1 * size


TRANSFORMERS = """
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

import manyhosts as mh


def model():
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    return BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=3, **sizes))


class Texts(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, number):
        words = torch.arange(12) * (number + 1) % 50
        mask = (torch.arange(12) < 6 + number % 7).long()
        return {"input_ids": words, "attention_mask": mask, "labels": words[1] % 3}


if __name__ == "__main__":
    trainer = mh.Trainer(
        model=model,
        step=lambda model, batch: model(**batch).loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        data=mh.Data(train=Texts(), validation=Texts(), batch_size=8),
    )
    trainer.fit("1 epoch")
"""


def digits(folder: Path) -> Path:
    script = (ROOT / "examples" / "digits.py").read_text()
    return make_run(folder, "--workers", "2", "--set", "duration=1 epoch", script=script, name="digits.py")


def characters(folder: Path) -> Path:
    script = (ROOT / "examples" / "char_lm.py").read_text()
    return make_run(folder, "--workers", "2", "--set", "duration=12 steps", script=script, name="char_lm.py")


def of_transformers(folder: Path) -> Path:
    return make_run(folder, script=TRANSFORMERS)


@pytest.mark.slow  # of each format one small network is in `make test`: tests/unit/export
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("make", [digits, characters, of_transformers])
def test_every_format_and_precision_answers_as_the_trained_model(make: Callable[[Path], Path], tmp_path: Path) -> None:
    run = make(tmp_path)
    for kind in ("safetensors", "torch-export", "onnx", "hf"):
        for precision in ("fp32", "bf16", "int8"):
            request = Request(run_dir=str(run), format=kind, precision=precision)
            if kind == "hf" and (make is not of_transformers or precision == "int8"):
                with pytest.raises(ConfigError, match=r"not one of transformers|int8 weights have no form"):
                    export(request)
                assert not request.folder.exists()
                continue
            _, described = export(request)
            seen = described.verified
            assert seen["samples"] >= 1 + 2 + 17
            if precision == "int8":
                assert seen["same_first_answers"] >= 0.99, (kind, seen)
            else:
                assert seen["largest_difference"] <= {"fp32": 1e-5, "bf16": 1e-2}[precision], (kind, precision)


@pytest.mark.slow  # as above
@pytest.mark.timeout(600)
def test_model_of_transformers_is_served_with_its_inputs_by_name(tmp_path: Path) -> None:
    folder, described = export(Request(run_dir=str(of_transformers(tmp_path)), format="onnx"))
    assert [each.name for each in described.inputs] == ["input_ids", "attention_mask"]
    assert [each.name for each in described.outputs] == ["logits"]
    with serving(folder) as served:
        sample = {"input_ids": list(range(12)), "attention_mask": [1] * 12}
        [answer] = served.predict([sample])
        assert len(answer) == 3
        status, said = served.ask("/predict", {"inputs": [{**sample, "input_ids": [50] * 12}]})
        assert status == 422, said
        status, said = served.ask("/predict", {"inputs": [{**sample, "input_ids": [0.5] * 12}]})
        assert (status, said["error"]) == (422, "input_ids: fractions were sent, and the model takes int64")


WIDE = SCRIPT.replace(
    "nn.Linear(144, 3)", "nn.Linear(144, 1024), *(nn.Linear(1024, 1024) for _ in range(64)), nn.Linear(1024, 3)"
)
MEASURED = """
import sys, threading, time
from manyhosts.export.export import Request, export

def anonymous():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

def watch():
    global most
    while True:
        most = max(most, anonymous())
        time.sleep(0.001)

export(Request(run_dir=sys.argv[1], format="safetensors"))  # loads every library
before = most = anonymous()
threading.Thread(target=watch, daemon=True).start()
export(Request(run_dir=sys.argv[2], format="safetensors"))
print(most - before)
"""


@pytest.mark.slow  # what tensors hold is counted in `make test`, above
@pytest.mark.timeout(600)
def test_process_that_exports_parts_of_four_workers_grows_by_one_model_and_a_tenth(tmp_path: Path) -> None:
    """All memory of the process, whatever holds it."""
    small, large = tmp_path / "small", tmp_path / "large"
    small.mkdir()
    large.mkdir()
    parts = ("--workers", "4", "--set", "strategy=fsdp", "--set", "duration=2 steps")
    words = [str(make_run(small)), str(make_run(large, *parts, script=WIDE))]
    done = subprocess.run([sys.executable, "-c", MEASURED, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    size = (large / "run" / "exports" / "safetensors" / "model.safetensors").stat().st_size
    assert int(done.stdout) < 1.1 * size
