"""A trainer whose snapshots go to an object store, too: its disk may be lost, and the store may be away for a while."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from object_stores import ADDRESS, Store, trial_store
from runs import Recipe, make_trainer, step_lines
from torch import nn

import manyhosts as mh
from manyhosts.cli.main import main
from manyhosts.errors import ConfigError, SnapshotError
from manyhosts.events import Event, Note, RunEnded, SnapshotCopied, StepDone
from manyhosts.records.metrics import read
from manyhosts.snapshot.objects import client
from manyhosts.training.process_session import ProcessSession
from manyhosts.training.telemetry.result import Result

RECIPE = Recipe(augment=True, batch_norm=True, dropout=0.2, schedule=True)  # 5 steps an epoch
EVERY_4 = mh.Snapshots(every="4 steps", keep=2, to=ADDRESS)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(client, "_FIRST_PAUSE_S", 0.0)
    with trial_store() as made:
        yield made


def fit(run: Path, duration: str, *, heard: list[Event] | None = None, recipe: Recipe = RECIPE, **more: Any) -> Result:
    """As in a process of its own: a second trainer of one process has an address of its own."""
    ProcessSession.current().close()
    more.setdefault("snapshots", EVERY_4)
    listen = [heard.append] if heard is not None else []
    return make_trainer(recipe, run, **{"listeners": listen, **more}).fit(duration)


def steps_kept(store: Store) -> list[int]:
    return sorted(int(name[5:13]) for name in store.manifests() if name.startswith("step-"))


def test_run_goes_on_from_the_store_where_its_disk_is_empty(store: Store, tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", "15 steps", snapshots=mh.Snapshots(every="4 steps"))
    fit(tmp_path / "first", "9 steps")
    assert steps_kept(store)[-1] == 9
    heard: list[Event] = []
    result = fit(tmp_path / "second", "15 steps", heard=heard)
    assert result.weights_sha256 == whole.weights_sha256
    assert f"brought the snapshot of step 9 from {ADDRESS}" in [news.text for news in heard if isinstance(news, Note)]
    assert [line["step"] for line in step_lines(tmp_path / "second")] == list(range(1, 16))
    assert [line["loss"] for line in step_lines(tmp_path / "second")] == [
        line["loss"] for line in step_lines(tmp_path / "whole")
    ]
    assert [news.step for news in heard if isinstance(news, SnapshotCopied)][-1] == 15
    assert steps_kept(store)[-1] == 15
    assert len(steps_kept(store)) <= 2


def test_going_on_from_the_store_after_an_orderly_end_is_no_restart(store: Store, tmp_path: Path) -> None:
    for duration in ("8 steps", "12 steps"):
        fit(tmp_path / duration, duration)
    events = [line["event"] for line in read(tmp_path / "12 steps" / "metrics.jsonl")]
    assert (events.count("start"), events.count("end"), events.count("restart")) == (2, 2, 0)


def test_copies_are_on_record(store: Store, tmp_path: Path) -> None:
    fit(tmp_path / "run", "8 steps")
    copied = [line for line in read(tmp_path / "run" / "metrics.jsonl") if line["event"] == "copied"]
    assert {line["step"] for line in copied} >= {8}
    assert all(line["address"].startswith(f"{ADDRESS}/") and line["bytes"] > 0 for line in copied)


def test_best_model_comes_from_the_store_too(store: Store, tmp_path: Path) -> None:
    fit(tmp_path / "first", "10 steps")
    shutil.rmtree(tmp_path / "first")
    fit(tmp_path / "second", "10 steps")
    assert (tmp_path / "second" / "best" / "manifest.json").exists()


def test_disk_that_is_as_new_as_the_store_is_gone_on_from(store: Store, tmp_path: Path) -> None:
    fit(tmp_path, "8 steps")
    heard: list[Event] = []
    store.log.clear()
    fit(tmp_path, "10 steps", heard=heard)
    assert not [news.text for news in heard if isinstance(news, Note) and "brought" in news.text]
    assert not [line for line in store.log if line.startswith("read") and "tensors" in line]


def test_damaged_newest_on_the_disk_is_replaced_by_the_one_in_the_store(store: Store, tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", "12 steps", snapshots=None)
    fit(tmp_path / "run", "8 steps")
    [path] = (tmp_path / "run" / "snapshots" / "step-00000008").glob("tensors-*")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    result = fit(tmp_path / "run", "12 steps")
    assert result.weights_sha256 == whole.weights_sha256
    assert steps_redone(tmp_path / "run") == 0


def steps_redone(run: Path) -> int:
    lines = read(run / "metrics.jsonl")
    return sum(line.get("steps_redone", 0) for line in lines)


def test_damaged_newest_in_the_store_is_named_and_the_one_before_it_taken(store: Store, tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", "12 steps", snapshots=None)
    for duration in ("4 steps", "8 steps"):
        fit(tmp_path / "first", duration)
    [damaged] = [name for name in store.names() if name.startswith("step-00000008.") and "tensors" in name]
    store.flip(damaged)
    heard: list[Event] = []
    result = fit(tmp_path / "second", "12 steps", heard=heard)
    assert result.weights_sha256 == whole.weights_sha256
    notes = " ".join(news.text for news in heard if isinstance(news, Note))
    assert f"passed over {ADDRESS}/step-00000008." in notes
    assert "brought the snapshot of step 4" in notes


def test_store_that_goes_away_costs_copies_and_not_the_run(store: Store, tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", "20 steps", snapshots=None)
    heard: list[Event] = []

    def go_and_come(event: Event) -> None:
        heard.append(event)
        if isinstance(event, StepDone):
            store.away = 6 <= event.step < 16

    result = fit(tmp_path / "run", "20 steps", listeners=[go_and_come])
    assert result.status == "completed"
    assert result.weights_sha256 == whole.weights_sha256
    said = [news.text for news in heard if isinstance(news, Note) and "is not copied" in news.text]
    assert said
    assert all("it stays on the disk, and the next one is tried" in text for text in said)
    assert steps_kept(store)[-1] == 20


def test_run_ends_when_its_last_snapshot_has_arrived(store: Store, tmp_path: Path) -> None:
    about_to, at_the_end = store.about_to, []

    def slowly(kind: str, where: str, *, writes: bool = False) -> None:
        time.sleep(0.03)
        about_to(kind, where, writes=writes)

    def look(event: Event) -> None:
        if isinstance(event, RunEnded):
            at_the_end.extend(steps_kept(store))

    store.about_to = slowly  # type: ignore[method-assign]
    fit(tmp_path, "4 steps", listeners=[look])
    assert at_the_end == [4]


def test_snapshot_that_the_store_lacks_is_copied_when_the_run_goes_on(store: Store, tmp_path: Path) -> None:
    fit(tmp_path, "8 steps", snapshots=mh.Snapshots(every="4 steps"))
    assert not store.objects
    fit(tmp_path, "8 steps")
    assert steps_kept(store) == [8]
    shutil.rmtree(tmp_path)
    fit(tmp_path, "12 steps")
    assert [line["step"] for line in step_lines(tmp_path)] == list(range(1, 13)), "the record has come along"


@pytest.mark.parametrize("trouble", [{"buckets": set()}, {"away": True}, {"denied": {"put"}}])
def test_address_that_cannot_be_used_is_said_before_the_first_step(
    store: Store, trouble: dict[str, Any], tmp_path: Path
) -> None:
    for name, value in trouble.items():
        setattr(store, name, value)
    heard: list[Event] = []
    with pytest.raises(ConfigError) as caught:
        fit(tmp_path, "3 steps", heard=heard)
    assert caught.value.where == ADDRESS
    assert not [event for event in heard if isinstance(event, StepDone)]


def test_snapshots_of_another_script_are_refused(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(tmp_path / "first", "4 steps")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/elsewhere/other.py", raising=False)
    with pytest.raises(ConfigError, match=r"are kept there, not those of other\.py"):
        fit(tmp_path / "second", "4 steps")


def test_snapshots_of_another_model_are_refused_and_stay(store: Store, tmp_path: Path) -> None:
    fit(tmp_path / "first", "4 steps")
    before = store.manifests()
    with pytest.raises(SnapshotError, match="it is of another model"):
        fit(tmp_path / "second", "4 steps", recipe=Recipe(batch_norm=False))
    assert store.manifests() == before


def test_two_trainers_of_a_script_do_not_mix_their_snapshots(store: Store, tmp_path: Path) -> None:
    ProcessSession.current().close()
    data = mh.Data(train=torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), batch_size=4)
    for name, width in (("a", 1), ("b", 3)):
        mh.Trainer(
            model=nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1)),
            loss=nn.MSELoss(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            data=data,
            snapshots=EVERY_4,
            run_dir=tmp_path / name,
        ).fit("4 steps")
    whose = {name.split("/")[0] for name in store.manifests()}
    assert len(whose) == 2
    assert len([name for name in whose if name.startswith("trainer-")]) == 1


def test_run_directory_in_a_store_is_refused_with_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        make_trainer(Recipe(), "s3://bucket/run").fit("1 steps")  # type: ignore[arg-type]
    assert "snapshots.to" in caught.value.fix


def test_run_directory_in_a_store_is_refused_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    assert main(["run", "--run-dir", "s3://bucket/run", str(script)]) == 2
    assert "--set snapshots.to=ADDRESS" in capsys.readouterr().err
