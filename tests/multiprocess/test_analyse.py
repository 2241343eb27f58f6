"""A model on held-out data: scikit-learn's numbers, the same on 1, 2 and 3 workers, and a paired test of two models."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launching import MANYHOSTS, environment
from sklearn import metrics
from torch import nn

from manyhosts.analysis import analyse, in_worker, statistics
from manyhosts.errors import ConfigError

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("analyse")]

SCRIPT = """
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import manyhosts as mh

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
train, test = (TensorDataset(images[part], labels[part]) for part in order.split([1200, 597]))


def ink(sample):
    return float(sample[0].mean())


trainer = mh.Trainer(
    model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda params: torch.optim.AdamW(params, lr=float(sys.argv[1])),
    data=mh.Data(train=train, test=test, batch_size=32),
    metrics={"accuracy": MulticlassAccuracy(num_classes=10, average="micro")},
    seed=int(sys.argv[2]),
)
trainer.fit("12 epochs")
trainer.test()
"""


OF_TWO_CLASSES = """
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import BinaryAccuracy

import manyhosts as mh

cells = load_breast_cancer()
inputs = torch.tensor(cells.data, dtype=torch.float32)
inputs = (inputs - inputs.mean(0)) / inputs.std(0)
labels = torch.tensor(cells.target, dtype=torch.float32).unsqueeze(1)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
train, test = (TensorDataset(inputs[part], labels[part]) for part in order.split([400, 169]))

trainer = mh.Trainer(
    model=lambda: nn.Linear(30, 1),
    loss=nn.BCEWithLogitsLoss(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    data=mh.Data(train=train, test=test, batch_size=32),
    metrics={"share right": BinaryAccuracy()},
)
trainer.fit("3 epochs")
trainer.test()
"""


def manyhosts(folder: Path, *words: str) -> Any:
    return subprocess.run(
        [*MANYHOSTS, *words], cwd=folder, env=environment(), capture_output=True, text=True, timeout=200
    )


def analysed(folder: Path, *words: str) -> dict[str, Any]:
    done = manyhosts(folder, "analyse", "--json", "--resamples", "200", *words)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    found.pop("time")
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good model, the same with another seed, and one that has hardly learned."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "train.py").write_text(SCRIPT)
    for name, rate, seed in (("good", "0.003", "0"), ("again", "0.003", "1"), ("crippled", "0.00003", "0")):
        done = manyhosts(folder, "run", "--workers", "1", "--run-dir", name, "train.py", rate, seed)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def good(runs: Path) -> dict[str, Any]:
    return analysed(runs, "--slice", "ink", "good")


def test_numbers_are_those_of_scikit_learn_on_the_same_predictions(runs: Path, good: dict[str, Any]) -> None:
    with np.load(runs / "good" / "analysis.npz") as kept:
        targets, predicted, confidence = kept["targets"], kept["predicted"], kept["confidence"]
    precision, recall, f1, count = metrics.precision_recall_fscore_support(targets, predicted)
    for name, column in (("precision", precision), ("recall", recall), ("f1", f1), ("samples", count)):
        assert [each[name] for each in good["classes"]] == column.tolist(), name
    assert good["confusion"] == metrics.confusion_matrix(targets, predicted).tolist()
    accuracy = good["values"]["accuracy"]
    assert accuracy["value"] == pytest.approx(metrics.accuracy_score(targets, predicted), abs=1e-7)
    assert accuracy["low"] < accuracy["value"] < accuracy["high"]
    bins = good["calibration"]["bins"]
    assert sum(each["samples"] for each in bins) == len(targets)
    error = sum(each["samples"] * abs(each["accuracy"] - each["confidence"]) for each in bins) / len(targets)
    assert good["calibration"]["expected_error"] == pytest.approx(error)
    assert confidence.mean() == pytest.approx(sum(e["samples"] * e["confidence"] for e in bins) / len(targets))


def test_loss_and_metrics_are_those_of_the_trainers_own_test(runs: Path, good: dict[str, Any]) -> None:
    reported = json.loads((runs / "good" / "summary.json").read_text())["test"]
    assert {name: each["value"] for name, each in good["values"].items()} == pytest.approx(reported, rel=1e-6)


def test_logits_of_a_binary_loss_are_those_of_two_classes(tmp_path: Path) -> None:
    """Not of a regression, whose errors would be those of logits against zeros and ones."""
    (tmp_path / "train.py").write_text(OF_TWO_CLASSES)
    done = manyhosts(tmp_path, "run", "--workers", "1", "--run-dir", "two", "train.py")
    assert done.returncode == 0, done.stderr
    found, reported = analysed(tmp_path, "two"), json.loads((tmp_path / "two" / "summary.json").read_text())["test"]
    with np.load(tmp_path / "two" / "analysis.npz") as kept:
        targets, predicted = kept["targets"], kept["predicted"]
    assert found["kind"] == "classes"
    assert found["confusion"] == metrics.confusion_matrix(targets, predicted).tolist()
    values = {name: each["value"] for name, each in found["values"].items()}
    assert values.pop("accuracy") == pytest.approx(reported["share right"])
    assert values == pytest.approx(reported, rel=1e-6)


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_number_is_the_same_on_several_workers(workers: int, runs: Path, good: dict[str, Any]) -> None:
    """On three slow; two show it in `make test`."""
    assert analysed(runs, "--workers", str(workers), "--slice", "ink", "good") == good


def test_worst_samples_are_those_of_the_highest_loss_and_shown_as_pictures(runs: Path, good: dict[str, Any]) -> None:
    with np.load(runs / "good" / "analysis.npz") as kept:
        order = np.argsort(-kept["losses"], kind="stable")[:16]
    assert [each["index"] for each in good["worst"]] == order.tolist()
    page = Path(manyhosts(runs, "report", "good").stdout.strip()).read_text()
    assert "On held-out data" in page
    assert page.count("data:image/png;base64") >= 16
    first = good["worst"][0]
    assert f"{first['index']}: {first['predicted']} for {first['target']}" in page


def test_card_has_results_with_intervals_data_architecture_and_how_to_have_it_again(
    runs: Path, good: dict[str, Any]
) -> None:
    card = Path(manyhosts(runs, "report", "--markdown", "good").stdout.strip()).read_text()
    accuracy = good["values"]["accuracy"]
    assert f"| accuracy | {accuracy['value']:.4f} | {accuracy['low']:.4f} | {accuracy['high']:.4f} |" in card
    assert "TensorDataset, 1,200 samples" in card
    assert "(1): Linear(in_features=64, out_features=32, bias=True)" in card
    assert "AdamW; 4 parameters with" in card
    assert "manyhosts reproduce good" in card
    assert f"| train.py | {hashlib.sha256((runs / 'train.py').read_bytes()).hexdigest()} |" in card
    assert "| batch_size | 32 |" in card


def test_slices_share_out_all_samples(good: dict[str, Any]) -> None:
    rows = good["slices"]["ink"]
    assert len(rows) == 4
    assert sum(row["samples"] for row in rows) == good["samples"] == 597
    assert all(row["low"] <= row["accuracy"] <= row["high"] for row in rows)


def test_no_difference_is_found_between_two_seeds_and_one_to_a_crippled_model(runs: Path) -> None:
    same = analysed(runs, "good", "again")["comparison"]
    assert not same["differ"], same
    assert "no difference is shown" in same["verdict"]
    other = analysed(runs, "good", "crippled")["comparison"]
    assert other["differ"], other
    assert other["p"] < 1e-6
    assert other["verdict"].startswith("crippled is worse: accuracy departs by -0.")


def test_folder_that_is_not_there_or_holds_no_run_is_refused_before_any_worker_starts(tmp_path: Path) -> None:
    (tmp_path / "search").mkdir()
    for words, said in ((["none"], "there is no such folder"), (["search"], "there is no run.json in this folder")):
        done = manyhosts(tmp_path, "analyse", *words)
        assert done.returncode == 2
        assert said in done.stderr
        assert "workers" not in done.stderr


def test_data_that_the_script_does_not_have_is_refused(runs: Path) -> None:
    done = manyhosts(runs, "analyse", "--data", "validation", "good")
    assert done.returncode == 2
    assert "the script gives no validation data" in done.stderr
    assert "--data takes what the script has: test, train" in done.stderr


def test_losses_of_two_kinds_are_made_alike_or_not_compared() -> None:
    gaps = np.array([3.0, -1.0, 0.5])
    one = {"losses": np.abs(gaps), "predicted": gaps, "targets": np.zeros(3), "loss": "L1Loss()"}
    two = {"losses": np.square(gaps), "predicted": gaps, "targets": np.zeros(3), "loss": "MSELoss()"}
    analyse._make_alike(one, two, where="")
    assert one["losses"].tolist() == two["losses"].tolist() == np.square(gaps).tolist()
    with pytest.raises(ConfigError, match="different losses"):
        analyse._make_alike({"losses": gaps}, where="a, b")


def test_loss_is_known_by_what_it_was_made_with() -> None:
    named = [
        in_worker._name_of(each)
        for each in (
            nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=torch.ones(2)), nn.CrossEntropyLoss(label_smoothing=0.1),
            lambda outputs, targets: outputs - targets, lambda outputs, targets: targets - outputs,
            functools.partial(nn.functional.cross_entropy, label_smoothing=0.1), nn.functional.cross_entropy,
        )
    ]  # fmt: skip
    assert len(set(named)) == len(named)
    assert "" not in named
    assert named[0] == in_worker._name_of(nn.CrossEntropyLoss())


def test_mean_that_says_the_opposite_of_most_samples_is_no_verdict() -> None:
    generator = np.random.default_rng(0)
    one = {"losses": generator.random(200) + 1.0}
    gaps = np.where(np.arange(200) < 190, -0.1, 30.0)
    two = {"losses": one["losses"] + gaps}
    draws = statistics.resamples(200, 200)
    found = statistics.paired(one, two, draws, names=("one", "two"))
    assert found["p"] < 0.05
    assert found["verdict"].startswith("no verdict: two has the lower loss on most samples")
    plain = statistics.paired(one, {"losses": one["losses"] - 0.1}, draws, names=("one", "two"))
    assert plain["verdict"].startswith("two is better")


OF_LABELS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh

generator = torch.Generator().manual_seed(0)
inputs, labels = torch.randn(60, 4, 6, generator=generator), torch.randint(1, 3, (60, 6), generator=generator)
for index in range(60):
    labels[index, 1 + index % 6 :] = 0
data = TensorDataset(inputs, labels)
trainer = mh.Trainer(
    model=lambda: nn.Conv1d(4, 3, 1),
    loss=nn.CrossEntropyLoss(ignore_index=0, weight=torch.tensor([1.0, 2.0, 0.5])),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    data=mh.Data(train=data, test=data, batch_size=12),
    callbacks=[mh.EMA(0.5)],
)
trainer.fit("2 epochs")
trainer.test()
"""


def test_loss_over_labels_is_that_of_the_trainers_own_test_by_the_averaged_weights(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OF_LABELS)
    done = manyhosts(tmp_path, "run", "--workers", "1", "--run-dir", "one", "train.py")
    assert done.returncode == 0, done.stderr
    reported = json.loads((tmp_path / "one" / "summary.json").read_text())["test"]
    found = analysed(tmp_path, "one")
    assert {name: each["value"] for name, each in found["values"].items()} == pytest.approx(reported, rel=1e-6)


@pytest.mark.parametrize(
    ("outputs", "targets", "losses"),
    [
        (torch.tensor([1.0, 3.0]), torch.tensor([0.0, 1.0]), [1.0, 4.0]),
        (torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 1.0]), [1.0, 4.0]),
        (torch.tensor([[0.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]), [math.log(2)] * 2),
        (torch.zeros(2, 5, 3), torch.zeros(2, 3, dtype=torch.int64), [math.log(5)] * 2),
        (torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64), [math.log(5)] * 2),
    ],
)
def test_loss_of_a_sample_is_what_outputs_and_targets_say(outputs: Any, targets: Any, losses: list[float]) -> None:
    assert in_worker._of_outputs(outputs, targets).tolist() == pytest.approx(losses)


def test_outputs_and_targets_that_are_no_pairs_are_refused() -> None:
    with pytest.raises(ConfigError, match="are no pairs"):
        in_worker._of_outputs(torch.zeros(2, 3), torch.zeros(2, 4))


STEP = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh

generator = torch.Generator().manual_seed(0)
inputs = torch.randn(200, 5, generator=generator)
targets = inputs.sum(1) + 3 * torch.randn(200, generator=generator)


def step(model, batch):
    outputs = model(batch[0]).squeeze(-1)
    return {"loss": nn.functional.LOSS(outputs, batch[1]), "outputs": outputs, "targets": batch[1]}


data = mh.Data(TensorDataset(inputs, targets), test=TensorDataset(inputs, targets), batch_size=50)
trainer = mh.Trainer(
    model=lambda: nn.Linear(5, 1), step=step, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), data=data
)
trainer.fit("1 epoch")
trainer.test()
"""


@pytest.mark.parametrize(("loss", "is_known"), [("l1_loss", False), ("mse_loss", True)])
def test_loss_of_a_step_of_ones_own_is_that_of_the_test(loss: str, is_known: bool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STEP.replace("LOSS", loss))
    done = manyhosts(tmp_path, "run", "--workers", "1", "--run-dir", "own", "train.py")
    assert done.returncode == 0, done.stderr
    values = analysed(tmp_path, "own")["values"]
    reported = json.loads((tmp_path / "own" / "summary.json").read_text())["test"]["loss"]
    assert values["loss"]["value"] == pytest.approx(reported, rel=1e-5)
    assert ("low" in values["loss"]) is is_known
    assert ("error of outputs" in values) is not is_known


COUNTED = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh

generator = torch.Generator().manual_seed(0)
inputs, labels = torch.randn(90, 6, 5, generator=generator), torch.randint(3, (90, 6), generator=generator)
for index in range(90):
    labels[index, 1 + index % 6 :] = -100
worth = torch.rand(90, generator=generator)


def of_labels(model, batch):
    outputs = model(batch[0])
    loss = nn.functional.cross_entropy(outputs.transpose(1, 2), batch[1])
    return {"loss": loss, "outputs": outputs, "targets": batch[1]}


def of_two(model, batch):
    found = of_labels(model, batch)
    return {**found, "loss": {"labels": found["loss"], "size": 0.1 * found["outputs"].square().mean()}}


def of_worth(outputs, targets):
    numbers, weights = targets[:, 0], targets[:, 1]
    return ((outputs[:, 0] - numbers).square() * weights).sum() / weights.sum()


def count_of_two(batch):
    return {"labels": (batch[1] != -100).sum(), "size": len(batch[1])}


def of_rows(loss):
    pairs = torch.stack([inputs[:, 0, 0], worth], 1)
    return dict(loss=loss, weight=lambda batch: batch[1][:, 1].sum()), TensorDataset(inputs[:, 0], pairs)


rows = TensorDataset(inputs, labels)
found, data = {
    "labels": lambda: (dict(step=of_labels), rows),
    "two": lambda: (dict(step=of_two, weight=count_of_two), rows),
    "worth": lambda: of_rows(of_worth),
}["KIND"]()
trainer = mh.Trainer(
    model=lambda: nn.Linear(5, 3),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    data=mh.Data(data, test=data, batch_size=16),
    **found,
)
trainer.fit("2 epochs")
trainer.test()
"""


@pytest.mark.parametrize("kind", ["labels", "two", "worth"])
def test_loss_counts_what_it_counts_in_the_test(kind: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COUNTED.replace("KIND", kind))
    done = manyhosts(tmp_path, "run", "--workers", "1", "--run-dir", "one", "train.py")
    assert done.returncode == 0, done.stderr
    reported = json.loads((tmp_path / "one" / "summary.json").read_text())["test"]["loss"]
    assert analysed(tmp_path, "one")["values"]["loss"]["value"] == pytest.approx(reported, rel=1e-5)
