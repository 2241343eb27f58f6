"""What a resume may change, and what it may not: one table, compared with what a snapshot says it was asked with.

A snapshot's manifest keeps, as `run`, the settings that matter here, optimizer and schedule as the script made them,
and what identifies the training set. Where a run is resumed, rank 0 holds against this what is asked
now: what may not change ends the run on every worker before its first step, and what may takes effect with that step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.world import World
from manyhosts.config.settings import Settings
from manyhosts.config.stopping import EarlyStopping
from manyhosts.data.identity import difference
from manyhosts.errors import ConfigError, DataError, ManyhostsError
from manyhosts.records.run_record import plain_settings
from manyhosts.training.setup.build import Components

FIX = "put it back; or begin again in another run directory, with the weights of this one by mh.Trainer(init_from=…)"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    what: str
    """As the documents have it."""
    then: str
    """What a resume does about a change."""
    keys: tuple[str, ...] = ()
    """Where a snapshot keeps it; none where it keeps nothing of it, and no one looks."""
    refused: bool = False


TABLE = (
    Row("number of workers, hosts", "each batch is cut again"),
    Row(
        "`duration`",
        "the run ends where the new one says, counted from its very beginning; a plateau schedule and early stopping "
        "have counted the validation at the end of before",
    ),
    Row(
        "`batch_size`, `batch_size_per_worker`",
        "from the first step on; the place in an epoch is counted in samples, so it continues there",
        ("batch_size",),
    ),
    Row("`micro_batch_size`", "from the first step on", ("micro_batch_size",)),
    Row(
        "`lr`, weight decay and all other options of the optimizer; `lr_scaling`",
        "from the first step on, in each group; momentum and the like stay; the schedule is stepped from its beginning "
        "with the new rate, so it keeps its shape",
        ("options",),
    ),
    Row(
        "`schedule`: kind and parameters; none, or one where there was none",
        "as if it had been used from the first step; a plateau schedule keeps what "
        "validations have taught it. A function in it, as that of `LambdaLR`, is not compared: the new one holds",
        ("schedule",),
    ),
    Row("`warmup`", "as if it had been so from the first step", ("warmup",)),
    Row(
        "`weight`",
        "from the first step on; what the run has found its loss to be a mean over, it does not look for again",
    ),
    Row("`clip_gradients`", "from the first step on", ("clip_gradients",)),
    Row("`precision`", "from the first step on; the scale of `fp16` begins again", ("precision",)),
    Row(
        "`strategy` and its options, `mesh`, `compression`",
        "all continue from the one model in the snapshot; what the strategy before had kept back begins again, as do "
        "exact first steps (`sync_warmup`, `compression_warmup`), unless it is of the same kind and way of compression",
        ("strategy",),
    ),
    Row("`on_bad_step`", "from the first step on", ("on_bad_step",)),
    Row(
        "`early_stopping`",
        "from the next validation on; with another metric or mode the best value so far counts no more, and a run that "
        "the rule had ended continues where the new one would not have",
        ("early_stopping",),
    ),
    Row("`best`", "from the next validation on; the best value so far counts no more", ("best",)),
    Row("`validate_every`, `snapshots`, `evaluation_batch_size`, `record_samples`", "from the first step on"),
    Row("`keep_pictures`", "nothing: the first batch is over"),
    Row("`loader_workers`, `threads`, `backend`, `audit`, `balance`, `look_every`", "from the first step on"),
    Row("`compile`, `activation_checkpointing`", "from the first step on"),
    Row("`metrics`, validation and test set", "from the next validation on; nobody compares them"),
    Row("`loss`, `step`, `collate`, `listeners`", "from the first step on; nobody compares functions"),
    Row("`callbacks`", "from the first step on; each takes up its own state by its name, and a new one begins with the "
        "weights of the snapshot"),
    Row("`init_from`", "nothing: the snapshot has the weights"),
    Row("model: names, shapes and dtypes of its parameters and buffers", "refused", ("model",), refused=True),
    Row("kind of the optimizer", "refused: another one could make nothing of what this one has kept",
        ("optimizer",), refused=True),
    Row("parameter groups: their number, and which parameters are in them", "refused", ("groups",), refused=True),
    Row("length of the training set; whether it is a stream, and its class", "refused", ("data",), refused=True),
    Row(
        "content of the training set",
        "refused, where one of eight samples differs that are looked at; of a stream its class alone is compared",
        ("data",),
        refused=True,
    ),
    Row(
        "`weights` and `order` of `mh.Data`",
        "refused: an epoch would draw other samples in its rest; of `order` the first three epochs are compared",
        ("data",),
        refused=True,
    ),
    Row("`seed`, `shuffle`, `drop_last`", "refused: an epoch would repeat some samples and leave others out",
        ("seed", "shuffle", "drop_last"), refused=True),
    Row("`virtual_workers`", "refused: the bits depend on their number", ("virtual_workers",), refused=True),
    Row("`batch_norm`", "refused: it would be another model", ("batch_norm",), refused=True),
    Row("`schedule_every`", "refused: the schedule has counted the other way until now",
        ("schedule_every",), refused=True),
)  # fmt: skip
"""What a resume may change. `docs/resuming.md` has it as a table, and a test compares the two."""

_SETTINGS = (
    "seed", "shuffle", "drop_last", "virtual_workers", "batch_norm", "micro_batch_size", "warmup", "clip_gradients",
    "precision", "strategy", "on_bad_step", "schedule_every",
)  # fmt: skip
_STRUCTURE = {
    "name", "compression", "powersgd_rank", "topk_fraction", "error_feedback", "compress_above", "inside_node",
    "fragments", "outer_compression", "shard",
}  # fmt: skip
"""Options of a strategy that say what it keeps."""
_ABSENT = {"schedule_every": "step"}
"""What a snapshot means that was made before the key was known."""
_UNSAID = "CombinedOptimizer"
"""What snapshots of before say of the optimizers of a loop of one's own."""
_ABSENT_OF_STRATEGY = {"shard": 1, "units": [], "zero": 3}
"""The same of options of strategies: those of copies that step alone."""
_WATCHED = ("metric", "mode")


@dataclass(frozen=True, slots=True)
class Changes:
    """What is other than in a snapshot."""

    said: tuple[str, ...] = ()
    """Each with what it was and is: `lr 0.1 → 0.01`."""
    keys: frozenset[str] = frozenset()
    """The keys of what changed, as in `Row.keys`; `watched` (what is the best model, by now), `stopping` (what early
    stopping watches) and `kept back` besides them."""
    unknown: str = ""
    """Why it is not known what changed; nothing where it is."""

    @property
    def optimizer(self) -> bool:
        """Whether options or schedule changed."""
        return bool(self.keys & {"options", "schedule"})

    def reported(self) -> list[str]:
        """For the person who started the run: one sentence, or none."""
        if self.unknown:
            return [self.unknown]
        return [f"changed since the snapshot: {', '.join(self.said)}"] if self.said else []


def asked_of(settings: Settings, components: Components) -> dict[str, Any]:
    """What a snapshot keeps of what the run was asked, in plain values."""
    plain = plain_settings(settings)
    return {
        **{key: plain[key] for key in _SETTINGS},
        "early_stopping": plain_settings(settings.early_stopping or EarlyStopping(components.watched_loss, mode="min")),
        **({} if settings.best is None else {"best": plain_settings(settings.best)}),
        "stops_early": settings.early_stopping is not None,
        "batch_size": components.batches.size,
        **components.initial_optimizer.asked,
        "data": components.batches.identity(),
    }


def compare(before: Mapping[str, Any], now: Callable[[], Mapping[str, Any]], world: World, where: str) -> Changes:
    """What has changed since a snapshot was made, as rank 0 sees it. Every worker calls this.

    `before`: what its manifest says; `now` is asked on rank 0 alone.

    Raises:
        ConfigError, DataError: something that must not change has, on every worker alike.
    """
    if not before:
        return Changes(
            unknown="the snapshot does not say what its run was asked, as those of format 1: nobody knows what changed"
        )
    found: list[tuple[str, str]] = []
    error: ManyhostsError | None = None
    if world.is_rank_0:
        asked = json.loads(json.dumps(now()))
        error = next((kind(what, where=where, fix=FIX) for kind, what in _refusals(before, asked)), None)
        found = [] if error else list(_changes(before, asked))
    reported = gather_plain(world, found, error)[0]
    return Changes(tuple(text for _, text in reported if text), frozenset(key for key, _ in reported))


def _refusals(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[type[ManyhostsError], str]]:
    """Each thing that must not have changed: the kind of error, and the sentence."""
    plain = [key for row in TABLE if row.refused for key in row.keys if key not in ("model", "groups", "data")]
    for key in plain:
        if (begun := before.get(key, _ABSENT.get(key))) not in (now[key], _UNSAID):
            yield ConfigError, f"{key} is {_word(now[key])}, and the run began with {_word(begun)}"
    if len(before["groups"]) != len(now["groups"]):
        counts = f"{len(now['groups'])} parameter groups, and the run began with {len(before['groups'])}"
        yield ConfigError, f"the optimizer has {counts}"
    for number, (old, new) in enumerate(zip(before["groups"], now["groups"], strict=False)):
        of_group = f"parameter group {number} of the optimizer"
        if old["tensors"] != new["tensors"]:
            there = f"and the run began with {old['tensors']} there"
            yield ConfigError, f"{of_group} has {new['tensors']} parameters, {there}"
        elif old["names"] != new["names"]:
            yield ConfigError, f"{of_group} holds other parameters, or in another order, than when the run began"
    if reason := difference(before["data"], now["data"]):
        yield DataError, reason


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each thing that has changed and may: its key, and what it was and is; no words where it goes without saying."""
    for key in ("batch_size", *_SETTINGS):
        if key != "strategy" and (begun := before.get(key, _ABSENT.get(key))) != now[key]:
            yield key, f"{key} {_word(begun)} → {_word(now[key])}"
    for number, (old, new) in enumerate(zip(before["options"], now["options"], strict=True)):
        of_group = f" of parameter group {number}" if len(now["options"]) > 1 else ""
        for key, words in _others_in_words(old, new):
            yield "options", f"{key}{of_group} {words}"
    yield from _schedule_changes(before["schedule"] or {}, now["schedule"] or {})
    own = now.get("schedules", {})
    begun_with = before.get("schedules", own)  # snapshots of before do not say
    for name in {**begun_with, **own}:
        yield from _schedule_changes(begun_with.get(name, {}), own.get(name, {}))
    absent = {key: value for key, value in _ABSENT_OF_STRATEGY.items() if key in now["strategy"]}
    for key, words in _others_in_words({**absent, **before["strategy"]}, now["strategy"]):
        yield "strategy", f"{'strategy' if key == 'name' else key} {words}"
        if key in _STRUCTURE:
            yield "kept back", ""
    yield from _changes_of_rules(before, now)


def _changes_of_rules(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if before["stops_early"] != now["stops_early"]:
        yield "early_stopping", f"early stopping {'off' if before['stops_early'] else 'on'}"
    for key, words in _others_in_words(before["early_stopping"], now["early_stopping"]):
        yield "early_stopping", f"early_stopping.{key} {words}"
        if key in _WATCHED:
            yield "stopping", ""
    for key, words in _others_in_words(_chosen_by(before), _chosen_by(now)):
        yield "watched", f"best.{key} {words}" if "best" in before or "best" in now else ""


def _chosen_by(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Metric and mode by which the best model is chosen."""
    rule = asked.get("best") or asked["early_stopping"]
    return {key: rule[key] for key in _WATCHED}


def _schedule_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if old.get("kind") != new.get("kind"):
        yield "schedule", f"schedule {old.get('kind', 'none')} → {new.get('kind', 'none')}"
        return
    for key, words in _others_in_words(old, new):
        if key in ("_schedulers", "groups"):
            yield "schedule", f"parameters of the schedule {new['kind']}"
        else:
            yield "schedule", f"{key} of the schedule {words}"


def _others_in_words(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The keys whose values differ, in their order, with what each was and is."""
    keys = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
    return [(key, f"{_word(old.get(key))} → {_word(new.get(key))}") for key in keys]


def _word(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
