"""Exports: each format answers as the trained model, or nothing is left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from small_run import make_run

import manyhosts as mh
from manyhosts.cli.export import export as command
from manyhosts.errors import ConfigError
from manyhosts.export import formats
from manyhosts.export.description import Description
from manyhosts.export.export import NotTheSame, Request, compare, export
from manyhosts.training.trained_script import open_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("small"))


def test_safetensors_has_the_best_weights_under_the_models_own_names(run_dir: Path) -> None:
    folder, described = export(Request(run_dir=str(run_dir), format="safetensors"))
    found, best = load_file(folder / "model.safetensors"), mh.load(run_dir)
    assert found.keys() == best.keys()
    assert all(torch.equal(found[name], best[name]) for name in best)
    assert described.verified["largest_difference"] == 0
    assert described.verified["samples"] >= 1 + 2 + 17
    assert [(each.name, each.shape) for each in described.inputs] == [("inputs", (1, 8, 8))]
    assert [(each.name, each.shape) for each in described.outputs] == [("output", (3,))]
    card = (folder / "README.md").read_text()
    assert "\nlicense: other\n" in card.split("---")[1]
    assert "| validation | loss |" in card
    assert Description.read(folder) == described


def test_torch_export_answers_in_a_process_without_manyhosts_and_without_the_script(run_dir: Path) -> None:
    request = Request(run_dir=str(run_dir), format="torch-export", preprocess="standardise", licence="apache-2.0")
    folder, described = export(request)
    assert described.verified["largest_difference"] <= 1e-5
    program = torch.export.load(folder / "model.pt2").module()
    with open_run(run_dir) as run:
        for size in (1, 2, 16, 17, 31):
            inputs = torch.randn(size, 1, 8, 8)
            with torch.no_grad():
                torch.testing.assert_close(program(inputs)[0], run.model(inputs), atol=1e-5, rtol=1e-5)
    assert described.preprocessing is not None
    assert described.preprocessing.function == "standardise"
    assert described.files.keys() == {"README.md", "model.pt2", "preprocess.py"}
    assert described.source["step"] == mh_step(run_dir)
    assert described.licence == "apache-2.0"


def mh_step(run_dir: Path) -> int:
    return int(json.loads((run_dir / "best" / "manifest.json").read_text())["step"])


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow), "int8"])
def test_onnx_answers_under_onnxruntime(run_dir: Path, precision: str) -> None:
    folder, described = export(Request(run_dir=str(run_dir), format="onnx", precision=precision))
    seen = described.verified
    assert seen["largest_difference"] <= {"fp32": 1e-5, "bf16": 1e-2, "int8": 5e-2}[precision]
    assert (folder / "model.onnx").exists()


@pytest.mark.slow  # in `make test` the unquantised ones, and int8 as ONNX
@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("kind", ["safetensors", "torch-export"])
def test_narrow_weights_answer_nearly_alike_in_fewer_bytes(run_dir: Path, kind: str, precision: str) -> None:
    folder, described = export(Request(run_dir=str(run_dir), format=kind, precision=precision))
    assert described.verified["largest_difference"] <= 2e-2
    assert folder.name == f"{kind}-{precision}"


def test_export_that_answers_otherwise_leaves_nothing_and_keeps_the_one_before(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(run_dir=str(run_dir), format="safetensors")
    folder, described = export(request)
    before = sorted(path.name for path in folder.parent.iterdir())
    write, read = formats.BY_NAME["safetensors"]

    def wrong(*words: object) -> formats.Answers:
        return [tuple(each + 1e-4 for each in row) for row in read(*words)]  # type: ignore[arg-type]

    monkeypatch.setitem(formats.BY_NAME, "safetensors", (write, wrong))  # type: ignore[arg-type]
    with pytest.raises(NotTheSame, match="difference of"):
        export(request)
    assert Description.read(folder).files == described.files
    assert sorted(path.name for path in folder.parent.iterdir()) == before


def test_file_that_was_changed_afterwards_is_found(run_dir: Path, tmp_path: Path) -> None:
    folder, _ = export(Request(run_dir=str(run_dir), format="safetensors", output=tmp_path / "mine"))
    weights = folder / "model.safetensors"
    flipped = bytearray(weights.read_bytes())
    flipped[-1] ^= 1
    weights.write_bytes(flipped)
    with pytest.raises(ConfigError, match=r"model\.safetensors is not the file that was exported"):
        Description.read(folder)


def test_wrong_words_are_refused_and_write_nothing(run_dir: Path, tmp_path: Path) -> None:
    for words, said in (
        ({"format": "hf"}, "not one of transformers"),
        ({"format": "safetensors", "preprocess": "nowhere"}, "no function 'nowhere'"),
        ({"format": "gguf"}, "there is no 'gguf'"),
    ):
        with pytest.raises(ConfigError, match=said):
            export(Request(run_dir=str(run_dir), output=tmp_path / "mine", **words))
        assert not list(tmp_path.iterdir())
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(ConfigError, match="something else in its place"):
        export(Request(run_dir=str(run_dir), format="safetensors", output=tmp_path / "taken"))


def test_dry_run_says_where_and_does_nothing(run_dir: Path, tmp_path: Path) -> None:
    words = [str(run_dir), "--format", "onnx", "--output", str(tmp_path / "mine"), "--dry-run"]
    done = CliRunner().invoke(command, words)
    assert str(tmp_path / "mine") in done.output
    assert "both --bf16 and --int8 are given" in str(
        CliRunner().invoke(command, [*words, "--bf16", "--int8"]).exception
    )
    assert not list(tmp_path.iterdir())


def test_int8_counts_first_answers() -> None:
    from manyhosts.export.description import TensorSpec

    spec = [TensorSpec(name="output", dtype="float32", shape=(4,))]
    wanted = torch.eye(4).repeat(50, 1)
    for wrong, fits in ((2, True), (3, False)):
        found = wanted.clone()
        found[:wrong] = found[:wrong].flip(1)
        if fits:
            seen = compare([(wanted,)], [(found,)], spec, precision="int8", where="")
            assert seen["same_first_answers"] == 0.99
        else:
            with pytest.raises(NotTheSame, match=r"98\.5%"):
                compare([(wanted,)], [(found,)], spec, precision="int8", where="")


TEXTS = """
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
import manyhosts as mh


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(9, 8), nn.Linear(8, 3)

    def forward(self, words):
        return self.out(self.words(words).mean(1))


def padded(samples):
    words, labels = zip(*samples)
    return pad_sequence(words, batch_first=True), torch.tensor(labels)


texts = [(torch.arange(4 if number < 20 else 6), number % 3) for number in range(60)]
if __name__ == "__main__":
    mh.Trainer(
        model=Mean(),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=mh.Data(train=texts, validation=texts, batch_size=8, collate=padded),
        weight="samples",
    ).fit("4 steps")
"""


def test_texts_of_several_lengths_make_a_program_for_any(tmp_path: Path) -> None:
    """The first batches are all of one length."""
    run_dir = make_run(tmp_path, script=TEXTS)
    for kind in ("torch-export", "onnx"):
        _, described = export(Request(run_dir=str(run_dir), format=kind))
        assert [(each.name, each.shape) for each in described.inputs] == [("inputs", (None,))]
        assert [(each.name, each.shape) for each in described.outputs] == [("output", (3,))]
    program = torch.export.load(run_dir / "exports" / "torch-export" / "model.pt2").module()
    assert program(torch.ones(3, 11, dtype=torch.int64))[0].shape == (3, 3)


NAN = TEXTS.replace(
    "return self.out(self.words(words).mean(1))",
    "return self.out(self.words(words).mean(1)) + (0.0 if self.training else torch.nan)",
)


def test_run_whose_validation_is_nan_is_exported(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, script=NAN)
    folder, _ = export(Request(run_dir=str(run_dir), format="safetensors"))
    assert json.loads((folder / "export.json").read_text())["metrics"]["validation"]["loss"] == "NaN"
