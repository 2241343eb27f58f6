"""Measures a script: starts it on one worker, then on several at once, and puts together what they report."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from manyhosts.config import overrides
from manyhosts.config.strategies import BY_NAME, CUTS, DDP
from manyhosts.control import variables
from manyhosts.control.agent import warm
from manyhosts.control.job import Job
from manyhosts.errors import ConfigError, LaunchError, ManyhostsError, ScriptError
from manyhosts.launchers import scripts
from manyhosts.measure import lines
from manyhosts.measure.request import Request
from manyhosts.planner.measured import Measured, Network, Tried
from manyhosts.trials.forked import LocalTrialRunner
from manyhosts.trials.runs import Signals, Trial

INSIDE = "manyhosts.measure.in_worker"
_TRAINING = ("manyhosts.training.trainer", "manyhosts.data.data", INSIDE, "manyhosts.measure.in_worker.measurer")
"""Loaded once for all that is started."""
SETTINGS = {"duration": "1000000000 steps", "snapshots.every": "1000000000 steps", "snapshots.to": "none"}
"""However short the training is, there are steps enough to time; and nothing is kept of them."""
_ALONE, _TOGETHER, _ALL_TOGETHER = 0.42, 0.53, 0.85
"""Shares of the time: for one worker, for each number of them at once, and for all of these numbers. Real steps of
several workers are what is known least of, and need the most of it."""
_WARM_S, _LAST_S = 30.0, 0.1
"""How long torch stays loaded on the hosts of a start for the next one, and after the last one."""
_FEWEST_ABLE, _FOR_A_CORE = 4, 2
_MOST_TOGETHER = 3
"""Numbers of workers that are tried at once."""
_STARTS = 2
"""Of the same workers on this machine: which core has which thread is another thing in each start, and makes the steps
of some compressions a third longer or shorter until its end. A start on hosts takes too long to be repeated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What is to be measured."""

    script: str
    arguments: tuple[str, ...] = ()
    folder: Path
    """Where the script is started, absolute."""
    workers: tuple[int, ...] = (1, 2, 4)
    """Numbers that will be predicted."""
    workers_per_node: tuple[int, ...] = (1,)
    """Numbers of them on one machine, of which some are tried."""
    nodes: tuple[int, ...] = (1,)
    """Numbers of machines; where hosts are there to be tried, the most of them are."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """As `--set` gives them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """For the script."""
    seconds: float = 20.0
    patience_s: float = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What was measured."""

    measured: Measured
    strategy: Mapping[str, Any] = field(default_factory=dict)
    """That of the script: its `name`, and its settings as far as they are plain values."""
    within: Network | None = None
    """Between the workers of one machine; None where there was one worker."""
    between: Network | None = None
    """Between machines; None where no two were tried."""
    hosts_per_machine: int = 1
    """Hosts that turned out to be of one and the same machine."""


@dataclass(slots=True)
class Told:
    """What the workers of one start have said, and how they ended."""

    report: Callable[[str], None]
    by_kind: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: ManyhostsError | None = None
    output: Sequence[str] = ()

    def hear(self, line: str) -> None:
        """One line of the output."""
        said = lines.heard(line)
        if said is None:
            return
        self.by_kind[said["kind"]] = said
        if said["kind"] == "measures":
            self.report(str(said["what"]))

    def of(self, kind: str, script: str) -> dict[str, Any]:
        """What was said of this kind.

        Raises:
            ManyhostsError: the script failed, or never came to `fit`.
        """
        if kind in self.by_kind:
            return self.by_kind[kind]
        raise _why(self, script)


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """How workers are started."""

    program: Sequence[str]
    """What is called instead of `manyhosts`."""
    words: Sequence[str]
    """After `run`, for every start: `--on slurm`, `--cluster lab`."""
    hosts: Sequence[str]
    """Where they are named: a start on n of them takes the first n."""


Starts = Callable[[Request, int, int], Told]
"""Starts the script to be measured, to its end: so many nodes, and workers on each."""


def measure(asked: Asked, report: Callable[[str], None], stage: LocalTrialRunner | None = None) -> Found:
    """Measure on this machine. `report` is called with what is being measured, for somebody who waits.

    `stage` is what workers are forked from, where one is there already; it stays.

    Raises:
        ConfigError: the script does not come to `Trainer.fit`.
        ManyhostsError: it fails.
        Interrupted: by Ctrl-C or SIGTERM.
    """
    with _on_this_machine(asked, report, stage) as start:
        return collect(asked, start)


def collect(asked: Asked, start: Starts, *, between: bool = False) -> Found:
    """Start as often as is needed. `between`: there are several machines to try the network between."""
    alone = start(Request(workers=asked.workers, seconds=_ALONE * asked.seconds, patience_s=asked.patience_s), 1, 1)
    reported = alone.of("measured", asked.script)
    measured = Measured.from_json(reported["measured"])
    sizes = [(1, count) for count in _tried(asked, measured, reported["devices"])]
    sizes += [(nodes, 1) for nodes in _tried_hosts(asked)] if between else []
    together = Request(
        workers=asked.workers,
        seconds=min(_TOGETHER, _ALL_TOGETHER / max(1, len(sizes))) * asked.seconds,
        patience_s=asked.patience_s,
        together=True,
        uncut=reported["strategy"]["name"] in CUTS,  # its passes exchange, and its hosts must share a disk
    )
    contention: dict[int, float] = {}
    spreads = [0.0]
    of_hosts: dict[int, float] = {}
    tried: list[Tried] = []
    for nodes, each in sizes:
        starts = 1 if between else _STARTS
        once = replace(together, seconds=together.seconds / starts)
        said = _middle([start(once, nodes, each).of("together", asked.script) for _ in range(starts)])
        sharing = 1 if nodes == 1 else int(said["of_one_machine"])
        # What the workers of a machine share is what all of them send at once.
        network = _network(said, senders=each)
        tried.append(
            Tried(
                nodes=nodes, workers_per_node=each, hosts_per_machine=sharing, network=network, steps=said["steps"],
                full_step_s=said["full_step_s"],
            )
        )  # fmt: skip
        if each > 1 or sharing > 1:
            (contention if nodes == 1 else of_hosts)[each * sharing] = _slower(said, measured, at_once=each * sharing)
            spreads.append(said["pass_spread_s"] / said["pass_s"])
    tried.sort(key=lambda each: (each.nodes, each.workers_per_node))
    measured = replace(
        measured,
        contention={count: times for count, times in contention.items() if times},
        contention_of_hosts={count: times for count, times in of_hosts.items() if times},
        contention_spread=max(spreads),
        tried=tuple(tried),
    )
    return Found(
        measured=measured,
        strategy=reported["strategy"],
        within=next((each.network for each in reversed(tried) if each.nodes == 1), None),
        between=next((each.network for each in reversed(tried) if each.nodes > 1), None),
        hosts_per_machine=max((each.hosts_per_machine for each in tried), default=1),
    )


def _middle(starts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What equal starts have measured, in the mean; of the real steps those that each of them had time for."""
    steps = {
        name: statistics.mean(each["steps"][name] for each in starts)
        for name in starts[0]["steps"] if all(name in each["steps"] for each in starts)
    }  # fmt: skip
    means = {
        name: statistics.mean(each[name] for each in starts)
        for name, value in starts[0].items() if isinstance(value, float)
    }  # fmt: skip
    full_step_s = means["full_step_s"] if all(each["full_step_s"] for each in starts) else 0.0
    return {**starts[0], **means, "steps": steps, "full_step_s": full_step_s}


def _slower(said: Mapping[str, Any], measured: Measured, *, at_once: int) -> float:
    """How many times as long workers at once computed as one alone; 0 where that many samples were not measured.

    Workers that take turns on one core are as many times slower as there are of them. More than twice that is not
    theirs: something else had the cores at that moment, and it is not known what they take from each other.
    """
    usual = {each.samples: each.forward_s + each.backward_s for each in measured.compute}.get(said["samples"])
    return min(2.0 * at_once, max(1.0, said["pass_s"] / usual)) if usual else 0.0


def _network(said: Mapping[str, Any], *, senders: int = 1) -> Network:
    """What was measured of the network; `senders`: workers whose bytes go the same way."""
    return Network(
        latency_s=said["latency_s"],
        bytes_per_second=senders * said["bandwidth"],
        owners_bytes_per_second=senders * said["owners_bandwidth"],
        processor_s_per_message=said["processor_s_per_message"],
        processor_s_per_byte=said["processor_s_per_byte"],
        spread=said["spread"],
    )


def _tried(asked: Asked, measured: Measured, devices: int) -> list[int]:
    """How many workers at once: as many as the machine has devices for, a few for each core; some of the numbers."""
    most = devices if measured.device != "cpu" else max(_FEWEST_ABLE, _FOR_A_CORE * measured.cores)
    able = sorted({count for count in asked.workers_per_node if 1 < count <= most})
    return able if len(able) <= _MOST_TOGETHER else [*able[: _MOST_TOGETHER - 1], able[-1]]


def _tried_hosts(asked: Asked) -> list[int]:
    """How many hosts at once. All of them come first: where torch is loaded it stays so.

    Two hosts are not four halves: what they share, cores and a switch, is shared by fewer.
    """
    return sorted({2, max(asked.nodes)} & {*asked.nodes} - {1}, reverse=True)


def make_stage(asked: Asked) -> LocalTrialRunner:
    """What workers are forked from: it has loaded what the script needs."""
    return LocalTrialRunner(scripts.preload(asked.script, "script", own=_TRAINING), asked.folder)


@contextlib.contextmanager
def _on_this_machine(asked: Asked, report: Callable[[str], None], given: LocalTrialRunner | None) -> Iterator[Starts]:
    """Workers forked from one process."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="manyhosts-plan-", ignore_cleanup_errors=True))
        stage = given or make_stage(asked)
        if given is None:
            stack.callback(stage.close)
        number = 0

        def start(request: Request, nodes: int, workers_per_node: int) -> Told:
            nonlocal number
            assert nodes == 1, f"{nodes} machines, and this is one"
            number += 1
            reported = Told(report)
            report("starting the script")
            job = Job(
                program=asked.script,
                arguments=asked.arguments,
                folder=asked.folder,
                run_dir=Path(folder) / str(number),
                workers_per_node=workers_per_node,
                environment={**asked.environment, **environment(asked, request), variables.FIRST: INSIDE},
            )
            reported.error, reported.output = stage.run(job, hang_s=request.patience_s + 60, hear=reported.hear)
            return reported

        yield start


def environment(asked: Asked, request: Request) -> dict[str, str]:
    """The variables of a worker that measures."""
    return {**overrides.to_environment(settings_of(asked, request)), **request.environment()}


def settings_of(asked: Asked, request: Request) -> dict[str, str]:
    """What is set of a script that is measured, as `--set` gives it."""
    settings = {**asked.settings, **SETTINGS}
    if request.uncut:
        of_others = {each.name for kind in BY_NAME.values() for each in fields(kind)} - {
            each.name for each in fields(DDP)
        }
        kept = {key: value for key, value in settings.items() if key not in of_others and not key.startswith("mesh.")}
        settings = kept | {"strategy": DDP.name}
    return settings


def measure_on_hosts(asked: Asked, where: Where, report: Callable[[str], None]) -> Found:
    """As `measure`, where it will run: each start is an ordinary `manyhosts run`, whose workers measure.

    Raises:
        LaunchError: they could not be started; what `manyhosts run` said of it is reported.
        Interrupted: by a signal.
    """
    with _by_run(asked, where, report) as start:
        return collect(asked, start, between=True)


def command(asked: Asked, where: Where, request: Request, nodes: int, workers_per_node: int) -> list[str]:
    """What is typed after `manyhosts run` for one start, without what has it measure."""
    hosts = ["--hosts", ",".join(where.hosts[:nodes])] if where.hosts else ["--nodes", str(nodes)]
    words = [*where.words, *hosts]
    words += ["--workers-per-node", str(workers_per_node)]
    for key, value in settings_of(asked, request).items():
        words += ["--set", f"{key}={value}"]
    return words


@contextlib.contextmanager
def _by_run(asked: Asked, where: Where, report: Callable[[str], None]) -> Iterator[Starts]:
    # What an engine starts must see its run directory: the nodes of Slurm share the folder that one works in, not /tmp.
    place = None if where.hosts else asked.folder
    with tempfile.TemporaryDirectory(prefix="manyhosts-plan-", dir=place, ignore_cleanup_errors=True) as folder:
        number = 0

        def start(request: Request, nodes: int, workers_per_node: int) -> Told:
            nonlocal number
            number += 1
            on = f"{nodes} host{'s' * (nodes > 1)}"
            report(f"starting {workers_per_node * nodes} worker{'s' * (workers_per_node * nodes > 1)} on {on}")
            words = ["run", *command(asked, where, request, nodes, workers_per_node)]
            for key, value in {**request.environment(), variables.FIRST: INSIDE}.items():
                words += ["--env", f"{key}={value}"]
            for name in asked.environment:
                words += ["--env", name]  # its value is seen by no one who lists processes
            if where.hosts:
                words.append("--warm")
            words += ["--run-dir", str(Path(folder) / str(number)), asked.script, *asked.arguments]
            stays = {warm.VARIABLE: str(_WARM_S if nodes not in _tried_hosts(asked)[-1:] else _LAST_S)}
            given = replace(asked, environment={**asked.environment, **stays})
            return _heard([*where.program, *words], Path(folder) / f"{number}.log", given, report)

        yield start


def _heard(words: Sequence[str], log: Path, asked: Asked, report: Callable[[str], None]) -> Told:
    """Run a command to its end, hearing each line."""
    reported = Told(report)
    with Signals() as signals:
        trial = Trial(words, log, environment=asked.environment, folder=asked.folder, hear=reported.hear)
        code = trial.wait(signals)
        signals.check()
    if code:
        reported.error = LaunchError(
            "; ".join(line.strip() for line in trial.reason().splitlines()),
            where="manyhosts run",
            fix="see that the script runs there: manyhosts run, with the same hosts",
        )
    return reported


def _why(reported: Told, script: str) -> ManyhostsError:
    """Why there is no measurement."""
    if "trains alone" in reported.by_kind:
        return without_trainer(script)
    if (late := reported.by_kind.get("late")) is not None:
        return ConfigError(
            f"the script has not come to fit in {late['seconds']:g} seconds",
            where=script,
            fix="give it longer with --patience SECONDS, or arguments with which it prepares less",
        )
    if reported.error is not None:
        return reported.error
    if (ended := reported.by_kind.get("no fit")) is not None:
        if not ended["made"]:
            return without_trainer(script)
        return ConfigError(
            "the script ends without calling fit, so there is no training to measure",
            where=script,
            fix="name the script that trains, with the arguments that make it train",
        )
    return ScriptError(
        "the workers ended before they had measured", where=script, fix="see what it prints: manyhosts run " + script
    )


def without_trainer(script: str) -> ConfigError:
    """The error of a script that is not ours to measure."""
    return ConfigError(
        "the script trains without mh.Trainer, so it is not known what a step of it is",
        where=script,
        fix="plan a script that calls mh.Trainer(…).fit(…); `manyhosts study` measures any script by running it",
    )
