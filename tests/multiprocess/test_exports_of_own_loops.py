"""A run of `mh.Run` is exported and served by the name of a model, or refused in a sentence about `mh.Run`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from served import serving
from small_run import make_run

import manyhosts as mh
from manyhosts.errors import ConfigError
from manyhosts.export.export import Request, export
from manyhosts.training.trained_script import open_run

pytestmark = pytest.mark.multiprocess
INPUTS = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import manyhosts as mh

inputs = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))


def cost(models, batch):
    return (models["two"](models["one"](batch[0])) - batch[0].sum(1, keepdim=True)).square().mean()


def step(run):
    run.backward(lambda batch: cost(run.models, batch), "one+two")
    run.update("one+two")


run = mh.Run(
    models={"one": lambda: nn.Linear(3, 2), "two": lambda: nn.Linear(2, 1), "apart": lambda: nn.Linear(3, 3)},
    optimizers={"one+two": lambda params: torch.optim.SGD(params, 0.1)},
    data=mh.Data(train=TensorDataset(inputs), batch_size=8),
    EVALUATE
)
if __name__ == "__main__":
    run.fit(step, "6 steps")
"""


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    return make_run(folder, "--workers", "2", script=SCRIPT.replace("EVALUATE", "evaluate=cost"))


@pytest.mark.parametrize(("name", "size"), [("one", 3), ("two", 2)])
def test_named_model_is_exported_as_it_is_called_in_evaluate(evaluated: Path, name: str, size: int) -> None:
    folder, described = export(Request(run_dir=str(evaluated), format="torch-export", model=name))
    assert folder.name == f"{name}-torch-export"
    assert [each.shape for each in described.inputs] == [(size,)]
    assert described.source["model"] == name
    weights = {key.removeprefix(f"{name}."): each for key, each in mh.load(evaluated).items() if key.startswith(name)}
    inputs = INPUTS[:, :size]
    program = torch.export.load(folder / "model.pt2").module()
    torch.testing.assert_close(program(inputs)[0], inputs @ weights["weight"].T + weights["bias"])
    stored, _ = export(Request(run_dir=str(evaluated), format="safetensors", model=name))
    assert load_file(stored / "model.safetensors").keys() == {"weight", "bias"}


def test_named_model_is_served(evaluated: Path) -> None:
    with serving(evaluated, "--model", "one") as found:
        answer = torch.tensor(found.predict(INPUTS.tolist()))
    with open_run(evaluated) as run, torch.no_grad():
        torch.testing.assert_close(answer, run.with_model("one").model(INPUTS))


@pytest.mark.parametrize(
    ("name", "words", "fix"),
    [
        ("", "there are several models in this run", "name one of one, two, apart"),
        ("three", "there is no model 'three' in this run", "name one of one, two, apart"),
        ("apart", "how the model 'apart' is called is not known", "call models['apart']"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_words_of_mh_run(
    evaluated: Path, name: str, words: str, fix: str
) -> None:
    with pytest.raises(ConfigError, match=words) as found:
        export(Request(run_dir=str(evaluated), format="safetensors", model=name))
    assert fix in found.value.fix
    assert "mh.Trainer" not in str(found.value)


def test_run_without_evaluate_says_that_it_has_none(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, script=SCRIPT.replace("EVALUATE", ""))
    with pytest.raises(ConfigError, match="nothing says what the models make of a batch") as found:
        export(Request(run_dir=str(run_dir), format="safetensors", model="one"))
    assert found.value.where == "mh.Run(evaluate=…)"


def test_only_model_of_a_run_is_exported_without_a_name_and_without_evaluate(tmp_path: Path) -> None:
    script = SCRIPT.replace("EVALUATE", "").replace(
        '"two": lambda: nn.Linear(2, 1), "apart": lambda: nn.Linear(3, 3)', ""
    )
    script = script.replace('models["two"](models["one"](batch[0]))', 'models["one"](batch[0])').replace(
        "one+two", "one"
    )
    run_dir = make_run(tmp_path, script=script)
    _, described = export(Request(run_dir=str(run_dir), format="torch-export"))
    assert [(each.shape, each.dtype) for each in described.outputs] == [((2,), "float32")]
    with pytest.raises(ConfigError, match="there is no model 'two'"):
        export(Request(run_dir=str(run_dir), format="torch-export", model="two"))
