"""`--set key=value`: every key checked, every value read as its setting's type."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from manyhosts.config import overrides
from manyhosts.config.settings import Settings
from manyhosts.config.snapshots import Snapshots
from manyhosts.config.stopping import EarlyStopping
from manyhosts.config.strategies import DDP, ParameterServer
from manyhosts.errors import ConfigError

PLAIN = Settings(batch_size=32)


def given(settings: Settings) -> dict[str, Any]:
    return {each.name: getattr(settings, each.name) for each in dataclasses.fields(settings)}


def changed(*words: str, to: Settings = PLAIN) -> Settings:
    return overrides.apply(given(to), overrides.parse(words))


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("batch_size=512", "batch_size", 512),
        ("lr=0.01", "lr", 0.01),
        ("lr=1e-3", "lr", 1e-3),
        ("seed=7", "seed", 7),
        ("precision=bf16", "precision", "bf16"),
        ("duration=3 epochs or 2h", "duration", "3 epochs or 2h"),
        ("compile=yes", "compile", True),
        ("shuffle=off", "shuffle", False),
        ("activation_checkpointing=blocks", "activation_checkpointing", "blocks"),
        ("activation_checkpointing=0.5", "activation_checkpointing", 0.5),
        ("micro_batch_size=none", "micro_batch_size", None),
        ("snapshots.every=5 steps", "snapshots", Snapshots(every="5 steps")),
        ("snapshots.keep=9", "snapshots", Snapshots(keep=9)),
        ("early_stopping.patience=8", "early_stopping", EarlyStopping(patience=8)),
        ("strategy=ddp", "strategy", DDP()),
    ],
)
def test_word_changes_its_setting_and_no_other(word: str, key: str, value: Any) -> None:
    after = changed(word)
    assert getattr(after, key) == value
    assert {field for field in PLAIN.__slots__ if getattr(after, field) != getattr(PLAIN, field)} <= {key}


def test_field_of_a_strategy_is_known_by_its_own_name() -> None:
    assert changed("strategy=ddp", "bucket_mb=5").strategy == DDP(bucket_mb=5)
    assert changed("bucket_mb=5", to=Settings(batch_size=32, strategy=DDP())).strategy == DDP(bucket_mb=5)


def test_what_is_typed_completes_what_the_script_leaves_out() -> None:
    """The script's settings alone would be refused: only what they are together is checked."""
    script = {"batch_size": 12, "strategy": ParameterServer()}
    with pytest.raises(ConfigError, match="nothing says how many samples a micro-batch has"):
        overrides.apply(script, {})
    assert overrides.apply(script, overrides.parse(["micro_batch_size=3"])).micro_batch_size == 3
    assert overrides.apply({**script, "clip_gradients": 1.0}, {"strategy": "ddp"}).clip_gradients == 1.0
    assert overrides.apply({"strategy": DDP()}, {"batch_size": "12"}).batch_size == 12


def test_field_of_another_strategy_names_the_one_that_has_it() -> None:
    with pytest.raises(ConfigError, match="no setting of the strategy 'single'") as refused:
        changed("bucket_mb=5")
    assert "ddp" in refused.value.fix


def test_section_keeps_what_the_script_said_of_the_rest() -> None:
    mine = Settings(batch_size=32, early_stopping=EarlyStopping("accuracy", mode="max", patience=2))
    after = changed("early_stopping.patience=9", to=mine)
    assert after.early_stopping == EarlyStopping("accuracy", mode="max", patience=9)


def test_one_kind_of_batch_size_replaces_the_other() -> None:
    after = changed("batch_size_per_worker=8")
    assert (after.batch_size, after.batch_size_per_worker) == (None, 8)


@pytest.mark.parametrize("key", overrides.known_keys())
def test_every_setting_is_taken_by_its_name(key: str) -> None:
    overrides.check_keys([key])


@pytest.mark.parametrize("given", ["snapshots=20", "best=psnr", "early_stopping=loss"])
def test_name_of_several_settings_is_answered_with_all_of_them(given: str) -> None:
    group = given.partition("=")[0]
    with pytest.raises(ConfigError, match=f"'{group}' is the name of several settings") as refused:
        overrides.parse([given])
    assert all(each in refused.value.fix for each in overrides.known_keys() if each.startswith(f"{group}."))


def test_unknown_key_is_refused_with_the_nearest_and_the_way_to_all() -> None:
    with pytest.raises(ConfigError) as refused:
        overrides.parse(["batchsize=3"])
    assert refused.value.what == "there is no setting named 'batchsize'"
    assert refused.value.fix.startswith("did you mean 'batch_size'?")
    assert "similar: micro_batch_size, " in refused.value.fix, "the nearest is named once"
    assert "batch_size_per_worker" in refused.value.fix
    assert "manyhosts run --set help" in refused.value.fix
    assert len(refused.value.fix) < 200, "nobody reads fifty names"


@pytest.mark.parametrize(
    ("typed", "written"),
    [
        ("epochs=2", 'duration="2 epochs"'),
        ("max_steps=50", 'duration="50 steps"'),
        ("learning_rate=3e-4", "lr=3e-4"),
        ("num_workers=4", "loader_workers=4 (processes that read); --workers 4"),
        ("epochs=many", 'duration="20 epochs"'),
    ],
)
def test_name_of_another_program_is_answered_with_ours_and_the_amount_that_was_typed(typed: str, written: str) -> None:
    with pytest.raises(ConfigError) as refused:
        overrides.parse([typed])
    assert refused.value.fix.startswith(f"write --set {written}")


def test_table_has_every_key_with_its_default() -> None:
    table = dict(overrides.table())
    assert list(table) == overrides.known_keys()
    assert (table["seed"], table["snapshots.every"], table["shuffle"], table["lr"]) == ("0", "10 min", "true", "")


@pytest.mark.parametrize(
    "word",
    [
        "batch_size=many",
        "batch_size=1.5",
        "lr=fast",
        "compile=perhaps",
        "precision=fp8",
        "batch_size=0",
        "activation_checkpointing=2",
        "activation_checkpointing=0",
    ],
)
def test_value_that_does_not_fit_is_refused(word: str) -> None:
    with pytest.raises(ConfigError) as refused:
        changed(word)
    assert word.partition("=")[0] in refused.value.what
    assert refused.value.fix


def test_number_that_may_be_a_word_is_refused_with_the_words() -> None:
    with pytest.raises(ConfigError, match="not a number") as refused:
        changed("activation_checkpointing=block")
    assert "'blocks', 'all'" in refused.value.fix


def test_word_without_a_sign_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot read 'lr'"):
        overrides.parse(["lr"])


def test_value_may_hold_the_sign_itself() -> None:
    assert overrides.parse(["snapshots.to=file://a=b"]) == {"snapshots.to": "file://a=b"}


def test_overrides_travel_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in overrides.to_environment({"lr": "0.01", "duration": "3 epochs"}).items():
        monkeypatch.setenv(key, value)
    assert overrides.from_environment() == {"lr": "0.01", "duration": "3 epochs"}


def test_nothing_to_override_sets_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(overrides.VARIABLE, raising=False)
    assert overrides.to_environment({}) == {}
    assert overrides.from_environment() == {}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "the file has no settings"),
        ("- lr\n", "the file is a list"),
        ("lr: [1]\n", "lr is a list"),
        ("lr: {a: 1}\n", "lr is a section"),
        ("lr: 1\nbatch_size: [40\n", "line 3: expected ',' or ']'"),
    ],
)
def test_file_that_is_not_settings_is_rejected_in_words(text: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as found:
        overrides.parse([str(path)])
    assert what in found.value.what
    assert found.value.where == f"--set {path}"


@pytest.mark.parametrize(
    ("text", "what", "where"),
    [
        ("batch_size: forty\n", "'forty', which is not an integer", " batch_size=forty"),
        ("batch_size: 32\nlearning_rate: 0.1\n", "no setting named 'learning_rate'", ""),
    ],
)
def test_wrong_value_or_key_of_a_file_is_told_with_its_file(text: str, what: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=what) as found:
        overrides.parse([str(path)])
    assert found.value.where == f"--set {path}{where}"


@pytest.mark.parametrize(
    "words",
    [
        ("sync_every=32", "fragments=16"),
        ("fragments=16",),
        ("sync_every=4", "sync_at_most=6"),
        ("servers=2", "dedicated=true"),
        ("dedicated=true",),
        ("sync_every=2", "outer_lr=0.5"),
        ("fragments=16", "outer_lr=0.5"),
        ("dedicated=true", "staleness=4"),
        ("sync_rule=quadratic", "sync_at_most=6"),
    ],
)
def test_settings_that_others_decide_the_range_of_are_looked_at_together(words: tuple[str, ...]) -> None:
    assert overrides.parse(words) == dict(word.split("=") for word in words)


@pytest.mark.parametrize("words", [("sync_every=2", "fragments=16"), ("fragments=many",), ("dedicated=perhaps",)])
def test_settings_that_cannot_be_together_are_refused_before_a_run(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        overrides.parse(words)


def test_key_of_a_file_that_is_no_text_is_refused_in_words(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "labels.yaml").write_text("1: cat\n")
    with pytest.raises(ConfigError, match="1 is a int in YAML"):
        overrides.of_file(tmp_path / "labels.yaml")
