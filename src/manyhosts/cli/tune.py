"""`manyhosts tune`: searches settings and flags of a script within a budget."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from manyhosts.cli.progress import Progress
from manyhosts.cli.run_options import see_arguments
from manyhosts.cli.where import hosts_of, is_here, pairs, place_options, said_again, table_of, variables_of
from manyhosts.config import overrides
from manyhosts.errors import ConfigError
from manyhosts.launchers import choices, scripts
from manyhosts.launchers.launcher import LAUNCHERS
from manyhosts.records.run_directory import check_is_folder

if TYPE_CHECKING:
    from manyhosts.tune.asked import Asked, Slot
    from manyhosts.tune.tuner import Tuner

_INTERRUPTED = 130
_PROGRAM = (sys.executable, "-m", "manyhosts.cli.main")


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option(
    "--search",
    "searched",
    multiple=True,
    metavar="KEY=RANGE",
    help="What to try: lr=log:1e-4:1e-1, batch_size=32,64, --width=int:32:512.  [default: lr=auto, by a range test]",
)
@click.option("--metric", default="loss:min", show_default=True, metavar="NAME:max|min", help="Of the validations.")
@click.option("--budget", metavar="LIMITS", help="Time, workers' time, money: '2h', '3 worker-hours', '2h or $5'.")
@click.option("--trials", type=int, metavar="N", help="At most so many trials.")
@click.option("--price", metavar="PRICE", help="0.53/worker-hour, 0.53/host-hour or CATALOG.toml:NAME, as for `plan`.")
@click.option("--warn", metavar="COMMAND|URL", help="Also notified when 50, 80, 95 % of the budget are spent.")
@click.option("--sampler", default="tpe", show_default=True, metavar="NAME", help="tpe, cmaes, random or grid.")
@click.option("--pruner", default="median", show_default=True, metavar="NAME", help="median, hyperband or none.")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Of the sampler.")
@click.option("--workers", type=int, metavar="N", help="Workers of each trial, on this machine.  [default: 1]")
@click.option("--nodes", type=int, metavar="N", help="Hosts of each trial.  [default: 1]")
@click.option("--workers-per-node", type=int, metavar="M", help="Workers on each host.  [default: 1]")
@click.option("--at-once", type=int, metavar="N", help="Trials at once.  [default: 1; as many as --hosts allow]")
@place_options
@click.option("--set", "settings", multiple=True, metavar="K=V", help="A setting for all trials; see `run --set help`.")
@click.option("--storage", metavar="URL", help="An Optuna storage: sqlite:///F, postgresql://…, journal:FILE.")
@click.option("--study", "name", metavar="NAME", help="Name in a storage that searches share.  [default: the script's]")
@click.option("--run-dir", metavar="DIR", help="Where the search is kept.  [default: runs/tune-SCRIPT]")
@click.option("--json", "as_json", is_flag=True, help="Print tune.json.")
@click.option("--dry-run", is_flag=True, help="Print what would be run, and run nothing.")
@click.option("--trace", is_flag=True, help="Show where in manyhosts an error was raised.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
def tune(script: str, as_json: bool, dry_run: bool, **words: Any) -> int:
    """Search the settings and flags of SCRIPT that are best for a metric of its validations, within a budget.

    Each trial is a `manyhosts run` with a run directory of its own, in DIR/trials. The same command continues where a
    search was interrupted or killed; DIR/tune.json holds the result, and `manyhosts report DIR` shows it.

    Exit codes: 0 the search has a result, 1 every trial failed, 2 the request was wrong, 130 interrupted.
    """
    scripts.check(script, "script")
    see_arguments(script, words["arguments"])
    asked = _asked(script, words)
    if words["run_dir"]:
        check_is_folder(words["run_dir"], where="--run-dir")
    folder = Path(words["run_dir"] or Path("runs") / f"tune-{Path(script).stem}").absolute()
    if dry_run:
        return _show(asked)
    from manyhosts.trials.runs import Interrupted
    from manyhosts.tune.tuner import NAME, Tuner

    progress = Progress(sys.stderr, silent=as_json)

    def say(text: str) -> None:
        progress.close()
        print(f"tune: {text}", file=sys.stderr, flush=True)

    tuner = Tuner(asked, folder, _PROGRAM, say, progress.show)
    try:
        tuner.run()
    except Interrupted:
        say("interrupted; the same command continues")
        return _INTERRUPTED
    finally:
        progress.close()
    if as_json:
        print((folder / NAME).read_text(), end="")
    else:
        _print(tuner)
    return 0 if tuner.kept.best() is not None else 1


def _print(tuner: Tuner) -> None:
    """The best of it, as what is typed to have it again."""
    from manyhosts.tune.budget import in_words

    found = tuner.to_json()
    print(f"ended: {tuner.reason}; spent: {in_words(tuner.spent())}")
    if (best := found["best"]) is not None:
        print(f"best: {tuner.asked.metric} {best['value']:.4g}, trial {best['number']} of {len(found['trials'])}")
        ends = "" if best["status"] == "completed" else f" ({best['status']} before its end, to which this trains)"
        print(f"  its run: {best['run_dir']}\n  run it again: {best['command']}{ends}")
    else:
        print(f"no trial has a result: {tuner.folder / 'trials'} has what each has printed")
    print(f"search: {tuner.folder}")


def _asked(script: str, words: dict[str, Any]) -> Asked:
    """The words of the command line, made sense of.

    Raises:
        ConfigError: they contradict each other, or cannot be read.
    """
    from manyhosts.tune import budget, kept_trials, search
    from manyhosts.tune.asked import Asked

    for option, known in (("sampler", kept_trials.SAMPLERS), ("pruner", kept_trials.PRUNERS)):
        if words[option] not in known:
            what = f"there is no {option} {words[option]!r}"
            raise ConfigError(what, where=f"--{option}", fix=f"known: {', '.join(known)}")
    for option in ("trials", "workers", "nodes", "workers_per_node", "at_once"):
        if words[option] is not None and words[option] < 1:
            name = "--" + option.replace("_", "-")
            raise ConfigError(f"{name} is {words[option]}", where=name, fix="give 1 or more")
    parameters = search.parse(words["searched"])
    settings = overrides.parse(words["settings"])
    if both := sorted(settings.keys() & {each.name for each in parameters}):
        raise ConfigError(f"{both[0]} is both set and searched", where="--search", fix="leave one of them out")
    metric, maximise = search.metric(words["metric"])
    trials = words["trials"]
    if words["sampler"] == "grid":
        points = math.prod(len(each.grid()) for each in parameters)
        trials = points if trials is None and words["budget"] is None else trials
    hosts, each_of = hosts_of(words)
    slots, each, here = _slots({**words, "workers_per_node": each_of}, hosts)
    workers = each * (words["nodes"] or 1)
    price = budget.price_of(words["price"], each)
    return Asked(
        script=script,
        arguments=tuple(words["arguments"]),
        parameters=parameters,
        metric=metric,
        maximise=maximise,
        budget=budget.Budget.parse(words["budget"], trials, priced=bool(price)),
        price_s=price,
        sampler=words["sampler"],
        pruner=words["pruner"],
        seed=words["seed"],
        environment=tuple(words["env"]),
        settings=settings,
        slots=slots,
        workers=workers,
        is_here=here,
        waits_in_queue=bool(target := str(words["target"] or table_of(words).get("on", "")))
        and bool(LAUNCHERS.load(target).CHOOSES_HOSTS),
        storage=words["storage"],
        name=words["name"] or f"tune-{Path(script).stem}",
        warn=words["warn"],
    )


def _slots(words: dict[str, Any], hosts: tuple[str, ...]) -> tuple[tuple[Slot, ...], int, bool]:
    """Where trials run at once, on disjoint hosts or workers; workers on each host; whether that is this machine."""
    from manyhosts.control.agent import host_state
    from manyhosts.tune.asked import Slot

    nodes, each, at_once = words["nodes"] or 1, words["workers_per_node"], words["at_once"]
    variables_of(words["env"])
    more = (*said_again(words), *(word for name in words["env"] for word in ("--env", name)))
    if is_here(words, hosts):
        if words["nodes"] or each:
            fix = "give --workers; or name hosts for --nodes and --workers-per-node"
            option = "--nodes" if words["nodes"] else "--workers-per-node"
            raise ConfigError("trials on this machine have workers, not nodes", where=option, fix=fix)
        workers, at_once = words["workers"] or 1, at_once or 1
        own = [_share(os.environ, place, workers, at_once, host_state.cores()) for place in range(at_once)]
        return tuple(Slot(words=(*more, "--workers", str(workers)), environment=each) for each in own), workers, True
    if words["workers"] is not None:
        fix = "give --workers-per-node, and --nodes as well"
        raise ConfigError("--workers counts workers on this machine, and hosts are named", where="--workers", fix=fix)
    table = table_of(words)
    gpus = choices.gpus(
        {**{key: str(value) for key, value in table.get("o", {}).items()}, **pairs(words["options"], "-o")}
    )
    each = max(1, int(each or table.get("workers-per-node") or (gpus if gpus.isdecimal() else 1)))
    more = (*more, "--workers-per-node", str(each))  # what is counted is what is started
    if not hosts:
        return tuple(Slot(words=(*more, "--nodes", str(nodes))) for _ in range(at_once or 1)), each, False
    most = len(hosts) // nodes
    if not most or (at_once or 1) > most:
        needs = (at_once or 1) * nodes
        what = f"{at_once or 1} trials at once on {nodes} hosts each need {needs}, and {len(hosts)} are named"
        raise ConfigError(what, where="--hosts", fix="name more hosts, or give a smaller --at-once or --nodes")
    groups = [hosts[place * nodes : (place + 1) * nodes] for place in range(at_once or most)]
    return tuple(Slot(words=(*more, "--hosts", ",".join(group))) for group in groups), each, False


def _share(present: Any, place: int, workers: int, at_once: int, cores: int) -> dict[str, str]:
    """Of this machine's cores and GPUs, what one of several trials at once gets."""
    from manyhosts.control.agent import host_state

    if at_once == 1:
        return {}
    share = {"TUNE_SLOT": str(place)}  # so that each has a fork server of its own that stays for its next trial
    if "OMP_NUM_THREADS" not in present:
        share["OMP_NUM_THREADS"] = str(max(1, cores // (workers * at_once)))
    count = host_state.count(present)
    if count:
        if count < workers * at_once:
            what = (
                f"{at_once} trials at once with {workers} workers need {at_once * workers} GPUs, and {count} are here"
            )
            raise ConfigError(what, where="--at-once", fix="give less, or hide the GPUs with CUDA_VISIBLE_DEVICES=")
        names = (
            present.get(host_state.CHOSEN, "").split(",")
            if host_state.CHOSEN in present
            else list(map(str, range(count)))
        )
        share[host_state.CHOSEN] = ",".join(names[place * workers : (place + 1) * workers])
    return share


def _show(asked: Asked) -> int:
    """What would be searched, and how a trial would be started."""
    for each in asked.parameters:
        when = f", if {'='.join(each.condition)}" if each.condition else ""
        values = ", ".join(each.choices) or (
            "found by a range test" if each.kind == "auto" else f"{each.low:g} to {each.high:g}"
        )
        print(f"search {each.name} ({each.kind}): {values}{when}")
    print(f"budget: {asked.budget.text}")
    chosen = {each.name: f"<{each.name.lstrip('-')}>" for each in asked.parameters}
    for slot in asked.slots:
        line = shlex.join(["manyhosts", *asked.command(slot, chosen)])
        print(re.sub(r"'([^' ]*<[^' ]*>)'", r"\1", line))
    return 0
