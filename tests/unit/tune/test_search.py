"""What `--search` says, and what a range test of learning rates finds."""

from __future__ import annotations

import math
import re

import pytest

from manyhosts.errors import ConfigError
from manyhosts.tune import range_test, search


def test_every_kind_of_range_is_read() -> None:
    words = [
        "lr=log:1e-4:1e-1",
        "batch_size=32,64",
        "--width=int:32:512:32",
        "--depth=intlog:1:8",
        "--drop=float:0:0.5",
    ]
    found = {each.name: each for each in search.parse(words)}
    assert [found[name].kind for name in ("lr", "batch_size", "--width", "--depth", "--drop")] == [
        "log", "choice", "int", "intlog", "float",
    ]  # fmt: skip
    assert (found["--width"].low, found["--width"].high, found["--width"].step) == (32, 512, 32)
    assert search.parse([])[0].kind == "auto"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lr"], "cannot read"),
        (["lr=log:1:0.1"], "not below"),
        (["lr=log:0:1"], "no logarithm"),
        (["lr=log:a:1"], "cannot read"),
        (["--width=int:1.5:4"], "integers"),
        (["lr=0.1"], "nothing to choose"),
        (["width=3,4"], "a flag of the script is written with its dashes: --search --width=…"),
        (["lrr=log:1:2"], "no setting named 'lrr'"),
        (["batch_size=float:1:2"], "not an integer"),
        (["lr=0.1,0.2", "lr=0.3,0.4"], "twice"),
        (["lr=0.1,0.2 if --kind=a"], "which is not searched"),
        (["lr=0.1,0.2 if --kind=c", "--kind=a,b"], "never given"),
        (["--a=1,2 if --b=1", "--b=1,2 if --a=1"], "which is not searched"),
    ],
)
def test_what_cannot_be_searched_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        search.parse(words)


def test_conditions_come_after_what_they_depend_on_and_leave_out_what_does_not_apply() -> None:
    found = search.parse(["--nesterov=true,false if --optimizer=sgd", "--optimizer=sgd,adamw"])
    assert [each.name for each in found] == ["--optimizer", "--nesterov"]
    assert search.grid(found) == [
        {"--optimizer": "sgd", "--nesterov": "true"},
        {"--optimizer": "sgd", "--nesterov": "false"},
        {"--optimizer": "adamw"},
    ]
    assert search.words({"lr": 0.1, "--optimizer": "sgd"}) == (["--set", "lr=0.1"], ["--optimizer=sgd"])


def test_a_grid_takes_as_many_values_as_it_is_told() -> None:
    (each,) = search.parse(["lr=log:1e-4:1e-1:4"])
    assert [f"{value:.1e}" for value in each.grid()] == ["1.0e-04", "1.0e-03", "1.0e-02", "1.0e-01"]
    with pytest.raises(ConfigError, match="single values"):
        search.grid(search.parse(["lr=log:1e-4:1e-1"]))


def test_what_is_better_has_to_be_said() -> None:
    assert search.metric("loss") == ("loss", False)
    assert search.metric("accuracy:max") == ("accuracy", True)
    with pytest.raises(ConfigError, match="is more or less of 'accuracy' better"):
        search.metric("accuracy")


def loss_at(rate: float) -> float:
    """Falls once steps are of a length that matters, and explodes beyond 1."""
    return 2.3 - 2 / (1 + (0.01 / rate) ** 2) if rate < 1 else math.inf


def test_a_range_test_finds_the_rates_below_which_a_loss_explodes() -> None:
    low, guess, high = range_test.ranges([loss_at(range_test.rate_of(step)) for step in range(range_test.STEPS)])
    assert low < 0.01 < high <= 1
    assert low < guess < high
    assert range_test.ranges([2.3] * range_test.STEPS) is None
    assert range_test.ranges([2.3, 2.2]) is None
    assert range_test.ranges([]) is None


def test_optuna_chooses_within_the_ranges() -> None:
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    found = search.parse(["lr=log:1e-4:1e-1", "--width=int:32:64:16", "--kind=a,b", "--depth=intlog:1:8 if --kind=a"])
    for _ in range(20):
        chosen = search.suggest(study.ask(), found)
        assert 1e-4 <= float(chosen["lr"]) <= 1e-1
        assert chosen["--width"] in (32, 48, 64)
        assert ("--depth" in chosen) == (chosen["--kind"] == "a")


@pytest.mark.parametrize("below", [0.0, 2.3, 5.0, 100.0])
def test_rates_do_not_depend_on_the_level_of_a_loss(below: float) -> None:
    losses = [loss_at(range_test.rate_of(step)) for step in range(range_test.STEPS)]
    shifted = [each - below if math.isfinite(each) else each for each in losses]
    assert range_test.ranges(shifted) == pytest.approx(range_test.ranges(losses))


def test_remedy_for_a_range_that_a_grid_cannot_take_is_taken() -> None:
    for given in ("lr=auto", "lr=log:1e-4:1e-1"):
        with pytest.raises(ConfigError) as raised:
            search.parse([given])[0].grid()
        found = re.search(r"--search (\S+)", raised.value.fix)
        assert found is not None
        assert len(search.parse([found[1]])[0].grid()) == 5
