"""CSV, Weights & Biases, MLflow: what they keep of a run, also of one that is resumed."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stories import ended, started, stepped, validated, was_tested

import manyhosts as mh
from manyhosts.errors import ConfigError
from manyhosts.events import Event, Recovered

STORY: list[Event] = [
    started(),
    *(stepped(step, loss=float(step), gradient_norm=0.5, values={"extra": 7.0}) for step in (1, 2, 3)),
    validated(3, loss=0.5, accuracy=0.75),
    ended(3),
    was_tested(3, loss=0.25),
]


def recovered(step: int) -> Recovered:
    return Recovered(
        step=step, reason="a loss", how="rewound", steps_redone=1, seconds_lost=0.1, time=1.0, rewound=True
    )


def reported(listener: Any, *events: Event) -> None:
    for event in events:
        listener(event)
    listener.close()


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def column(path: Path, name: str) -> list[tuple[int, float]]:
    return [(int(row["step"]), float(row[name])) for row in table(path) if row[name]]


def test_csv_has_a_line_for_each_event_and_a_column_for_each_value(tmp_path: Path) -> None:
    path = tmp_path / "new" / "values.csv"
    reported(mh.CSVLogger(path), *STORY)
    assert [row["step"] for row in table(path)] == ["1", "2", "3", "3", "3"]
    assert column(path, "train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert column(path, "train/extra") == [(step, 7.0) for step in (1, 2, 3)]
    assert column(path, "validation/accuracy") == [(3, 0.75)]
    assert column(path, "test/loss") == [(3, 0.25)]
    assert [each.name for each in path.parent.iterdir()] == ["values.csv"]


def test_csv_of_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "values.csv"
    reported(mh.CSVLogger(path), started(), *(stepped(step, loss=1.0) for step in (1, 2, 3, 4)), validated(4, loss=9.0))
    with path.open("a") as file:
        file.write("5,1.0,0.")  # a process was killed as it wrote
    again = mh.CSVLogger(path)
    reported(again, started(2), *(stepped(step, loss=2.0) for step in (3, 4, 5)), ended(5))
    assert column(path, "train/loss") == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]
    assert column(path, "validation/loss") == []
    reported(again, recovered(4), stepped(5, loss=3.0))
    assert column(path, "train/loss")[3:] == [(4, 2.0), (5, 3.0)]
    reported(mh.CSVLogger(path), stepped(6, loss=4.0))  # a worker that leads after the first one was lost
    assert column(path, "train/loss")[4:] == [(5, 3.0), (6, 4.0)]
    reported(mh.CSVLogger(path), started(), stepped(1, loss=5.0))
    assert column(path, "train/loss") == [(1, 5.0)]


def test_csv_is_on_the_disk_when_it_is_flushed(tmp_path: Path) -> None:
    logger = mh.CSVLogger(tmp_path / "values.csv")
    for event in (started(), stepped(1), stepped(2)):
        logger(event)
    logger.flush()
    assert [row["step"] for row in table(tmp_path / "values.csv")] == ["1", "2"]


@pytest.mark.parametrize(
    ("package", "make"),
    [("wandb", lambda: mh.WandbLogger("digits")), ("mlflow", lambda: mh.MLflowLogger("digits"))],
)
def test_package_that_is_missing_is_named_when_the_logger_is_made(
    package: str, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"takes {package}, which is not installed") as found:
        make()
    assert found.value.fix == f"pip install {package}"


@pytest.mark.filterwarnings("ignore")  # of MLflow's own
def test_mlflow_keeps_values_and_continues_a_run_of_the_same_name(tmp_path: Path) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    reported(mh.MLflowLogger("digits", name="first", uri=uri), *STORY)
    reported(mh.MLflowLogger("digits", name="first", uri=uri), started(3), stepped(4, loss=4.0), ended(4))
    client = tracking.MlflowClient(uri)
    [run] = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.info.status == "FINISHED"
    found = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(each.step, each.value) for each in found] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert run.data.metrics["validation/accuracy"] == 0.75
    assert run.data.metrics["test/loss"] == 0.25


@pytest.mark.filterwarnings("ignore")
def test_wandb_writes_files_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    reported(mh.WandbLogger("digits", name="first", folder=tmp_path), *STORY)
    wandb.teardown()  # its own process, which ends with this one
    [file] = (tmp_path / "wandb").glob("offline-run-*-first/run-first.wandb")
    content, place, rows = file.read_bytes(), 7, []
    assert len(content) < 1 << 15, "one block of the log: a record is a checksum, its length, its kind, its bytes"
    while place + 7 <= len(content):
        length = int.from_bytes(content[place + 4 : place + 6], "little")
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content[place + 7 : place + 7 + length])
        place += 7 + length
        keys = {"/".join([each.key, *each.nested_key]).lstrip("/"): each.value_json for each in record.history.item}
        rows += [keys] if keys else []
    losses = [(int(row["step"]), float(row["train/loss"])) for row in rows if "train/loss" in row]
    assert losses == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert [float(row["test/loss"]) for row in rows if "test/loss" in row] == [0.25]


def test_test_of_a_run_that_is_over_and_asked_again_has_one_line(tmp_path: Path) -> None:
    path = tmp_path / "values.csv"
    reported(mh.CSVLogger(path), *STORY)
    reported(mh.CSVLogger(path), started(3), ended(3), was_tested(3, loss=0.5), was_tested(3, loss=0.75))
    assert column(path, "test/loss") == [(3, 0.5), (3, 0.75)]
    assert [step for step, _ in column(path, "train/loss")] == [1, 2, 3]


def one(folder: Path, pattern: str) -> Path:
    [found] = folder.glob(pattern)
    return found


def test_tables_of_two_runs_at_one_place_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "values.csv"

    def run(name: str, *events: Event) -> None:
        logger = mh.CSVLogger(path)
        logger.begin_run(tmp_path / "runs" / name)
        reported(logger, *events)

    run("a", started(), stepped(1, loss=1.0), ended(1))
    run("b", started(), stepped(1, loss=7.0), stepped(2, loss=8.0), ended(2))
    assert column(path, "train/loss") == [(1, 7.0), (2, 8.0)]
    assert column(one(tmp_path, "values-a-*"), "train/loss") == [(1, 1.0)]
    run("a", started(1), stepped(2, loss=2.0), ended(2))
    assert column(path, "train/loss") == [(1, 1.0), (2, 2.0)]
    assert column(one(tmp_path, "values-b-*"), "train/loss") == [(1, 7.0), (2, 8.0)]


def test_tables_of_two_runs_at_once_are_two(tmp_path: Path) -> None:
    path = tmp_path / "values.csv"
    both = [mh.CSVLogger(path), mh.CSVLogger(path)]
    for name, each in zip("ab", both, strict=True):
        each.begin_run(tmp_path / name)
        each(started())
    for place, each in enumerate(both):
        reported(each, stepped(1, loss=float(place)), stepped(2, loss=float(place)))
    assert column(path, "train/loss") == [(1, 1.0), (2, 1.0)]
    assert column(one(tmp_path, "values-a-*"), "train/loss") == [(1, 0.0), (2, 0.0)]
