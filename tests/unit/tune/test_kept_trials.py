"""What Optuna's storage keeps of a search, in each kind of storage, with each sampler and each pruner."""

from __future__ import annotations

from pathlib import Path

import pytest
import sklearn.ensemble  # noqa: F401  # as Optuna does; it sets variables

from manyhosts.errors import ConfigError
from manyhosts.tune import kept_trials, search
from manyhosts.tune.asked import Asked, Slot
from manyhosts.tune.budget import Budget
from manyhosts.tune.kept_trials import KeptTrials


def kept(folder: Path, *, where: str | None = None, sampler: str = "random", pruner: str = "none") -> KeptTrials:
    (folder / "train.py").write_text("")
    asked = Asked(
        script=str(folder / "train.py"), parameters=search.parse(["lr=log:1e-3:1", "--width=int:1:9"]), metric="loss",
        maximise=False, budget=Budget.parse(None, 9, priced=False), sampler=sampler, pruner=pruner,
        slots=(Slot(words=()),), workers=1, storage=where, name="N",
    )  # fmt: skip
    return KeptTrials(asked, folder / "T")


def tried(found: KeptTrials, count: int) -> None:
    """As many trials, whose value is far more a matter of lr than of the width."""
    for _ in range(count):
        trial = found.study.ask()
        chosen = search.suggest(trial, found.asked.parameters)
        value = 10 * abs(float(chosen["lr"]) - 0.1) + int(chosen["--width"]) / 1000
        for key, kept_value in (("status", "completed"), ("best", value), ("seconds", 2.0)):
            trial.set_user_attr(key, kept_value)
        trial.report(value, 1)
        assert trial.should_prune() in (False, True)
        found.study.tell(trial, value)


@pytest.mark.parametrize("where", [None, "sqlite:///{}/other.db", "journal:{}/J"])
def test_trials_are_there_again_in_each_storage(where: str | None, tmp_path: Path) -> None:
    place = None if where is None else where.format(tmp_path)
    tried(kept(tmp_path, where=place), 3)
    again = kept(tmp_path, where=place)
    assert [each["status"] for each in again.to_json()] == ["completed"] * 3
    assert again.best().user_attrs["best"] == min(each["value"] for each in again.to_json())
    failed = again.study.ask()
    for key, kept_value in (("status", "failed"), ("best", -1.0)):
        failed.set_user_attr(key, kept_value)
    assert again.best().user_attrs["best"] > 0
    assert again.seconds(without=[0]) == 4.0
    assert again.complete_s() == [2.0] * 3


@pytest.mark.parametrize("sampler", kept_trials.SAMPLERS)
@pytest.mark.parametrize("pruner", kept_trials.PRUNERS)
def test_each_sampler_goes_with_each_pruner(sampler: str, pruner: str, tmp_path: Path) -> None:
    found = kept(tmp_path, where=f"journal:{tmp_path / 'J'}", sampler=sampler, pruner=pruner)
    tried(found, 6)
    assert len({each["settings"]["lr"] for each in found.to_json()}) == 6


def test_what_the_value_depends_on_is_said_of_enough_trials(tmp_path: Path) -> None:
    found = kept(tmp_path, where=f"journal:{tmp_path / 'J'}")
    assert found.importance() == {}
    tried(found, 40)
    shares = found.importance()
    assert shares["lr"] > shares["--width"]


def test_another_metric_in_the_same_storage_is_refused(tmp_path: Path) -> None:
    found = kept(tmp_path)
    found.study.set_user_attr("asked", {**found.asked.in_common(), "metric": "accuracy"})
    with pytest.raises(ConfigError, match="begun with another metric"):
        kept(tmp_path)


def test_trial_of_a_search_that_shows_no_sign_of_life_is_run_again_by_one_that_shares_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two searches in one journal: what the first has begun and beats no more, the second takes."""
    first, second = (kept(tmp_path, where=f"journal:{tmp_path / 'J'}") for _ in range(2))
    beats = kept_trials.Heartbeats()
    left, alive = first.study.ask(), first.study.ask()
    for number, trial in enumerate((left, alive)):
        search.suggest(trial, first.asked.parameters)
        trial.set_user_attr("heartbeat", f"1 {number}")

    def dead() -> list[int]:
        return [each.number for each in second.begun() if each.state.name == "RUNNING" and beats.is_dead(each)]

    assert dead() == [], "seen for the first time"
    monkeypatch.setattr(kept_trials, "_SILENT_S", 0.0)
    alive.set_user_attr("heartbeat", "1 2")
    assert dead() == [left.number]
    chosen = second.all()[left.number].params
    second.leave(second.all()[left.number])
    assert [each.number for each in second.begun()] == [alive.number], "its place is taken by the one that waits"
    again = second.study.ask()
    search.suggest(again, second.asked.parameters)
    assert again.params == chosen
    assert again.user_attrs["run"] == str(left.number), "its run is resumed"
