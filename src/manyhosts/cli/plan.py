"""`manyhosts plan`: measures a script for half a minute and predicts its speed and memory on other machines."""

from __future__ import annotations

import contextlib
import json
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from manyhosts.cli.progress import Progress
from manyhosts.cli.run_options import see_arguments
from manyhosts.cli.where import doubling, hosts_of, is_here, numbers, price_of, said_again, sizes_options, variables_of
from manyhosts.config import overrides
from manyhosts.errors import ConfigError
from manyhosts.launchers import scripts
from manyhosts.listeners.paint import paint, writable
from manyhosts.planner import catalog
from manyhosts.planner.catalog import Machines
from manyhosts.planner.measured import Network
from manyhosts.units import bytes_in_words, seconds_in_words

if TYPE_CHECKING:
    from manyhosts.measure.measure import Asked, Found
    from manyhosts.planner.measured import Measured
    from manyhosts.planner.plan import Plan
    from manyhosts.planner.predict import Prediction


_INTERRUPTED = 130
_PROGRAM = (sys.executable, "-m", "manyhosts.cli.main")
_LEAST_S = 5.0


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option("--workers", metavar="A,B,C", help="Numbers of workers on this machine.  [default: 1,2,4]")
@click.option(
    "--nodes", metavar="A,B,C", help="Numbers of machines.  [default with --hosts: 1, 2, 4, … and all of them]"
)
@click.option("--workers-per-node", metavar="A,B", help="Numbers of workers on each machine.  [default: 1]")
@sizes_options
@click.option("--machines", metavar="FILE", help="A catalog of machines that could be had, in TOML: see docs/plan.md.")
@click.option("--network", metavar="SPEED,LATENCY", help='Between machines, as in "10 Gbit/s, 0.1 ms", not measured.')
@click.option("--set", "settings", multiple=True, metavar="K=V", help="A setting of mh.Trainer or mh.Data, overridden.")
@click.option(
    "--calibrate", metavar="STUDY", help="The folder of a study of SCRIPT: learn from it how far off this is."
)
@click.option("--seconds", type=float, default=12, show_default=True, metavar="S", help="How long to measure, about.")
@click.option(
    "--patience",
    type=float,
    default=120,
    show_default=True,
    metavar="S",
    help="How long SCRIPT may take until it comes to fit.",
)
@click.option("--all", "everything", is_flag=True, help="Show every strategy and compression.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--dry-run", is_flag=True, help="Print what would be measured, and start nothing.")
@click.option("--trace", is_flag=True, help="Show where in manyhosts an error was raised.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
def plan(script: str, as_json: bool, dry_run: bool, **words: Any) -> int:
    """Measure SCRIPT for half a minute, and say how long it would take on more workers or other machines, and why.

    SCRIPT is run as it is, up to its first `fit`, which measures in place of training and then ends: nothing is
    trained, and nothing is kept. What is predicted, and how, is written down in docs/plan.md.

    Exit codes: 0 there is a plan, 1 the script failed, 2 the request was wrong or nothing fits, 130 interrupted.
    """
    from manyhosts.trials.runs import Interrupted

    began = time.monotonic()
    scripts.check(script, "script")
    see_arguments(script, words["arguments"])
    place = _Place(words)
    asked = _asked(script, place, words)
    if not scripts.uses_manyhosts(script, "script"):
        from manyhosts.measure.measure import without_trainer

        raise without_trainer(script)
    study = _study(words["calibrate"], asked)
    if dry_run:
        return _show(asked, place)
    try:
        found = _measured(asked, place, silent=as_json)
    except (Interrupted, KeyboardInterrupt):
        return _INTERRUPTED
    made = _planned(found, place, study)
    if as_json:
        print(json.dumps({**made.to_json(), "seconds": round(time.monotonic() - began, 1)}, indent=1))
        return 0

    print_plan(made, sys.stdout, everything=words["everything"])
    return 0


class _Place:
    """Where it is measured, and for which machines.

    Raises:
        ConfigError: the words contradict each other, or cannot be read.
    """

    def __init__(self, words: Mapping[str, Any]) -> None:
        self.hosts, each = hosts_of(words)
        self.is_here = is_here(words, self.hosts)
        self.where = said_again(words)
        self.network = None if words["network"] is None else Network.parse(words["network"], where="--network")
        self.catalog = None if words["machines"] is None else catalog.read(Path(words["machines"]))
        self.price = price_of(words)
        self.sizes = self._sizes(words, each)

    def _sizes(self, words: Mapping[str, Any], each: int | None) -> list[tuple[int, int]]:
        """Numbers of machines, and of workers on each."""
        workers, nodes, per_node = words["workers"], words["nodes"], words["workers_per_node"]
        if self.catalog is not None:
            for option, value in (("--workers", workers), ("--nodes", nodes), ("--price", words["price"])):
                if value is not None:
                    fix = f"leave {option} out: the catalog says it of each kind of machine"
                    raise ConfigError(f"both --machines and {option} are given", where=option, fix=fix)
            return sorted({size for each_kind in self.catalog for size in each_kind.sizes()})
        if workers is not None and (nodes is not None or per_node is not None or not self.is_here):
            raise ConfigError(
                "--workers counts workers on this machine, and machines are counted, too",
                where="--workers",
                fix="give --nodes, and --workers-per-node as well",
            )
        if workers is not None and self.network is not None:
            raise ConfigError(
                "--workers counts workers on this machine, and --network is between machines",
                where="--network",
                fix="count machines with --nodes, and --workers-per-node as well, or leave --network out",
            )
        on_each = numbers(per_node, "--workers-per-node") if per_node is not None else (each or 1,)
        if self.is_here and nodes is None and self.network is None:
            here = sorted(numbers(workers or "1,2,4", "--workers")) if per_node is None else sorted(on_each)
            return [(1, count) for count in here]
        if self.is_here and self.network is None:
            raise ConfigError(
                "machines are counted, and nothing says how fast they talk to each other",
                where="--nodes",
                fix='say it, as in --network "10 Gbit/s, 0.1 ms", or name them with --hosts: then it is measured',
            )
        return sorted((count, each) for count in self._nodes(nodes) for each in on_each)

    def _nodes(self, text: str | None) -> tuple[int, ...]:
        most = len(self.hosts) or 8
        if text is None:
            return doubling(most)
        counts = numbers(text, "--nodes")
        if self.hosts and max(counts) > most:
            fix = "name more hosts, or say how fast the others talk in a catalog: --machines"
            raise ConfigError(f"--nodes asks for {max(counts)} hosts, and {most} are named", where="--nodes", fix=fix)
        return counts

    def machines(self, found: Found) -> list[Machines]:
        """What is predicted for."""
        within = found.within or catalog.WITHIN
        if self.catalog is not None:
            return self.catalog
        return [
            Machines(
                name="",
                count=max(nodes for nodes, _ in self.sizes),
                workers=max(each for _, each in self.sizes),
                between=self.network or found.between or within,
                within=within,
                price=self.price,
                hosts_per_machine=found.hosts_per_machine,
                as_measured=True,
            )
        ]


def _asked(script: str, place: _Place, words: Mapping[str, Any]) -> Asked:
    """What is to be measured."""
    from manyhosts.measure.measure import Asked

    for option in ("seconds", "patience"):
        if not _LEAST_S <= words[option] < float("inf"):
            raise ConfigError(f"--{option} is {words[option]:g}", where=f"--{option}", fix=f"give {_LEAST_S:g} or more")
    return Asked(
        script=script,
        arguments=tuple(words["arguments"]),
        folder=Path.cwd(),
        workers=tuple(sorted({nodes * each for nodes, each in place.sizes})),
        workers_per_node=tuple(sorted({each for _, each in place.sizes})),
        nodes=tuple(sorted({nodes for nodes, _ in place.sizes})) if place.network is None else (1,),
        settings=overrides.parse(words["settings"]),
        environment=variables_of(words["env"]),
        seconds=words["seconds"],
        patience_s=words["patience"],
    )


def _measured(asked: Asked, place: _Place, *, silent: bool) -> Found:
    """Measure, saying on a terminal what."""
    from manyhosts.measure.measure import Where, measure, measure_on_hosts

    with contextlib.closing(Progress(sys.stderr, silent=silent)) as progress:
        if place.is_here:
            return measure(asked, progress.doing)
        return measure_on_hosts(asked, Where(program=_PROGRAM, words=place.where, hosts=place.hosts), progress.doing)


def _study(folder: str | None, asked: Asked) -> Path | None:
    """The folder of a study, seen to be one of what is asked.

    Raises:
        ConfigError: it holds none, or one of something else.
    """
    from manyhosts.study.study import see_that_of

    if folder is None:
        return None
    see_that_of(Path(folder), asked.script, asked.arguments, asked.settings)
    return Path(folder)


def _planned(found: Found, place: _Place, study: Path | None) -> Plan:
    from manyhosts.planner import plan as planning

    return planning.make(
        found.measured,
        place.machines(found),
        sizes=None if place.catalog is not None else place.sizes,
        strategy=planning.strategy_of(found.strategy),
        study=study,
    )


def _show(asked: Asked, place: _Place) -> int:
    """What would be measured, and predicted."""
    several = [count for count in asked.workers_per_node if count > 1]
    on = "this machine" if place.is_here else "the first of the hosts"
    print(f"measure on {on}: {asked.script}, one worker")
    if several:
        print(f"measure on {on}: {', '.join(map(str, several))} workers at once, as far as it has cores or GPUs")
    if not place.is_here and max(asked.nodes) > 1:
        print(f"measure between {max(asked.nodes)} hosts")
    print("predict: " + ", ".join(_size(nodes, each) for nodes, each in place.sizes))
    return 0


def _size(nodes: int, each: int) -> str:
    return f"{nodes} x {each}" if nodes > 1 else f"{each} here"


_WIDTH = 80
_ALIKE = 1.02
"""A strategy must be faster by more than that than one that changes less to be shown next to it."""


COMPRESSIONS = ("fp16", "bf16", "int8", "powersgd", "topk")
"""Those that a plan measures, the least lossy first, as far as its time allows."""


def print_plan(plan: Plan, stream: TextIO, *, everything: bool) -> None:
    """Print everything, in colours on a terminal. `everything`: every way, not only those that are worth a look."""
    from manyhosts.planner.interval import past

    def title(text: str) -> str:
        return paint(text, "bold") if stream.isatty() else text

    lines = [*_wrapped([f"{past()} A study measures."]), "", title("measured"), *_wrapped(_measured_lines(plan)), ""]
    for kind in plan.machines:
        own = [each for each in plan.predictions if each.machines == kind.name]
        shown = own if everything else worth_a_look(own)
        lines += [title(f"predicted{f' for {kind.name}' if kind.name else ''}"), *table(shown), ""]
        workers = max(each.workers for each in own)
        lines += [title(f"memory of one of {workers} worker{'s' * (workers > 1)}"), *memory_of(own), ""]
    if left := sorted({each.why_not for each in plan.predictions if each.why_not}):
        lines += [*_wrapped(f"* does not fit: {reason}" for reason in left), ""]
    if plan.calibration is not None:
        lines += [title("calibrated"), *_wrapped([f"{plan.calibration}."]), ""]
    lines += [title("advice"), *_wrapped([plan.recommendation.why])]
    stream.write(writable("\n".join(lines) + "\n", stream.encoding))


def worth_a_look(found: Iterable[Prediction]) -> list[Prediction]:
    """Of each size: the way that changes nothing about a step, then each that is faster than all before it."""
    shown: list[Prediction] = []
    fastest: dict[tuple[int, int], float] = {}
    for each in found:
        size = (each.nodes, each.workers)
        if size not in fastest or (each.fits and each.epoch_seconds * _ALIKE < fastest[size]):
            shown.append(each)
            fastest[size] = each.epoch_seconds if each.fits else float("inf")
    return shown


def table(found: Sequence[Prediction]) -> list[str]:
    """One row for each, in columns of at most 80 characters in all."""
    priced = any(each.price is not None for each in found)
    head = [
        "machines",
        "workers",
        "how",
        "step",
        "9 of 10 in",
        "epoch",
        "effic.",
        "memory",
        *(["price"] if priced else []),
    ]
    rows = [head, *(_row(each, priced=priced) for each in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return [
        " ".join(f"{cell:<{width}}" if column == 2 else f"{cell:>{width}}" for column, (cell, width) in
                 enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]  # fmt: skip


def _how(each: Prediction) -> str:
    words = (each.strategy, "" if each.compression == "none" else each.compression, each.setting)
    return " ".join(word for word in words if word)


def memory_of(found: Sequence[Prediction]) -> list[str]:
    """What a worker holds where there are most of them, in each way whose workers hold one model."""
    from manyhosts.planner import fit
    from manyhosts.planner.recommend import SAME_STEPS

    most = max(each.workers for each in found)
    shown = {_how(each): each.memory for each in found if each.workers == most and each.strategy in SAME_STEPS}
    return fit.table(shown.items())


def _row(each: Prediction, *, priced: bool) -> list[str]:
    row = [
        str(each.nodes),
        str(each.workers),
        _how(each) + ("" if each.fits else " *"),
        _time(each.step.seconds),
        _range(*each.step_range),
        _time(each.epoch_seconds),
        f"{100 * each.efficiency:.0f} %",
        bytes_in_words(each.memory.total),
    ]
    return [*row, "" if each.price is None else f"{each.price:.3g}"] if priced else row


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else seconds_in_words(seconds)


def _range(low: float, high: float) -> str:
    """Two digits of both, in the unit of the larger one: `31-45 ms`."""
    unit, times = ("ms", 1000.0) if high < 1 else ("s", 1.0)
    first, last = (float(f"{times * seconds:.2g}") for seconds in (low, high))
    return f"{first:g}-{last:g} {unit}"


def _measured_lines(plan: Plan) -> Iterable[str]:
    """The facts, a sentence each."""
    measured = plan.measured
    if measured.load > measured.cores + 1:  # the start of this measurement is the one
        yield (
            f"careful: {measured.load:.0f} processes wanted the {measured.cores} cores in the minute before, so all of "
            "this is slower than on a quiet machine, and what is predicted from it, too"
        )
    largest = measured.compute[-1]
    where = f"{measured.threads} threads of a CPU" if measured.device == "cpu" else measured.device
    yield (
        f"forward and backward pass of {largest.samples} samples: {_time(largest.forward_s)} and "
        f"{_time(largest.backward_s)} on {where}; the update: {_time(measured.update_s)}"
    )
    first = measured.buckets[0]
    count = len(measured.buckets)
    yield (
        f"gradient: {bytes_in_words(measured.gradient_bytes)} in {count} bucket{'s' * (count > 1)}, the first of which "
        f"is ready after {100 * first.ready:.0f} % of the backward pass"
    )
    processes = measured.loader_processes
    by = f"{processes} process{'es' * (processes > 1)}" if processes else "the worker itself"
    yield f"loader: {measured.loader_samples_per_second:,.0f} samples/s, by {by}"
    yield from _at_once_lines(measured)
    if measured.batch_norm_layers:
        yield (
            f"BatchNorm over the batch of all workers: {2 * measured.batch_norm_layers} exchanges in each pass over "
            "the model, on one host through shared memory"
        )
    dropped = [name for name in COMPRESSIONS if name not in measured.compression]
    if measured.compression and dropped:
        yield (
            f"careful: the time of --seconds was over before {', '.join(dropped)} could be measured, so no way with "
            f"{'it' if len(dropped) == 1 else 'them'} is predicted; a longer --seconds measures all"
        )
    for kind in plan.machines:
        name = f" of {kind.name}" if kind.name else ""
        if kind.hosts_per_machine > 1:
            yield f"{kind.hosts_per_machine} of the hosts are one machine{name}, and share its {measured.cores} cores"
        if kind.workers > 1:
            yield f"network within a machine{name}: {kind.within}"
        if kind.count > 1:
            yield f"network between machines{name}: {kind.between}"


def _at_once_lines(measured: Measured) -> Iterable[str]:
    """What workers that computed at the same time took from each other."""
    for workers, times in measured.contention.items():
        yield f"{workers} workers at once on this machine: each computes {times:.2f} times as long"
    for hosts, times in measured.contention_of_hosts.items():
        yield f"{hosts} hosts that are one machine: each worker computes {times:.2f} times as long"
    for tried in measured.tried:
        whose = f"{tried.nodes} hosts" if tried.nodes > 1 else f"{tried.workers} workers of this machine"
        if tried.steps:
            steps = ", ".join(f"{name} {_time(seconds)}" for name, seconds in tried.steps.items())
            yield f"real steps of {whose}, without data: {steps}; other ways are reckoned from these and their parts"
        elif measured.device == "cpu":
            yield f"real steps of {whose}: there was no time for any, so they are reckoned from their parts"


def _wrapped(sentences: Iterable[str]) -> list[str]:
    return [
        line
        for sentence in sentences
        for line in textwrap.wrap(sentence, _WIDTH, initial_indent="  ", subsequent_indent="  ")
    ]
