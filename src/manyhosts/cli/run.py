"""`manyhosts run`: starts a script on one or many workers."""

from __future__ import annotations

import importlib.util
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from manyhosts.cli import run_options
from manyhosts.cli.cluster import cluster_option, target_options, typed_first, with_table
from manyhosts.cli.run_options import OPTION_OF, environment, measuring_options
from manyhosts.cli.where import Where, pairs, variables_of
from manyhosts.cluster.place import REHEARSED_GPUS
from manyhosts.config import overrides
from manyhosts.control import titles, variables
from manyhosts.control.agent import host_state, warm
from manyhosts.control.display import Display, PlainDisplay
from manyhosts.control.head import takeover
from manyhosts.control.job import Job
from manyhosts.control.plan import Plan
from manyhosts.control.screen import Screen
from manyhosts.errors import ConfigError
from manyhosts.launchers import background, named_runs, scripts
from manyhosts.launchers.launch import new_run_dir
from manyhosts.launchers.launcher import LAUNCHERS
from manyhosts.records import run_directory, run_lock
from manyhosts.records.run_record import GIVEN
from manyhosts.units import bytes_of

_TRAINING = ("manyhosts.training.trainer", "manyhosts.data.data")
"""Loaded once per host for scripts that import manyhosts."""
_REHEARSAL = "manyhosts.rehearsal"
_INTERRUPTED = 130
_CROWD = 4
"""Workers to a core, above which a run says that they are many."""
_NAMED = 3
"""Hosts that are named; of more, their number is given."""


class _Run(click.Command):
    """`run`, whose help lists the options of the target that `--on` named before it. It understands torchrun's, too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = [option for option in self.params if isinstance(option, click.Option)]
        flags = {word for option in options if option.is_flag for word in option.opts} | {"--help"}
        with_value = {word for option in options if not option.is_flag for word in option.opts}
        read = run_options.translate(args, flags, with_value)
        ours, rest = run_options.split(read.words, with_value)
        run_options.check(ours, rest, flags | with_value)
        if read.left_out or read.is_other:
            left_out = f"; left out, since it need not be said: {', '.join(read.left_out)}" if read.left_out else ""
            words = shlex.join(["manyhosts", "run", *read.words])
            print(f"manyhosts: torchrun's options are read as: {words}{left_out}", file=sys.stderr, flush=True)
        return super().parse_args(ctx, read.words)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        target = ctx.params.get("target")
        if target is not None:
            known = LAUNCHERS.load(target).OPTIONS
            with formatter.section(f"Options of {target}, each as -o KEY=VALUE"):
                formatter.write_dl(list(known.items()) or [("(none)", "")])


def _settings(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """The words of `--set`; `help` alone lists what can be set."""
    if "help" in value:
        lines = overrides.table()
        width = max(len(key) for key, _ in lines)
        for key, default in lines:
            click.echo(f"{key:<{width}}  {default}".rstrip())
        ctx.exit(0)
    return with_table(ctx, parameter, value)


_ENV = "A variable that all workers get; NAME alone takes the value that it has here. Its value is shown nowhere."


@click.command(cls=_Run, context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option(
    "--on",
    "target",
    is_eager=True,  # before --help, which then has more to show
    metavar="TARGET",
    help="Where to run it.  [default: ssh with --hosts, else local]",
)
@cluster_option
@click.option("--hosts", metavar="A,B,C", help="Hosts that ssh reaches; ranks go by this order.")
@click.option("--hostfile", metavar="FILE", help="A file with a host on each line, and slots=N for its workers.")
@click.option(
    "--workers",
    type=int,
    metavar="N",
    help="Workers on this machine.  [default: one per GPU, or 1 where there is none]",
)
@click.option(
    "--nodes",
    metavar="N",
    help="Hosts; on local, several are rehearsed here. MIN:MAX: they may go and come while it runs.  [default: 1]",
)
@click.option(
    "--workers-per-node",
    type=int,
    metavar="M",
    help="Workers on each host.  [default: one per GPU that it has, or 1]",
)
@click.option("--restarts", type=int, default=0, show_default=True, metavar="N", help="Start again after a failure.")
@click.option(
    "--hang-timeout",
    type=float,
    metavar="SECONDS",
    help="End or mend a run that gets no further for so long; 0: never.  [default: 600 with a trainer, else never]",
)
@click.option(
    "--head-timeout",
    type=float,
    default=300,
    show_default=True,
    metavar="SECONDS",
    help="How long hosts keep training when they lose contact with this machine; 0: not at all.",
)
@click.option(
    "--ports",
    metavar="A-B",
    default="",
    help="Take every port that is opened from this range, as in 29500-29600, for firewalls that let no other through.",
)
@click.option("--no-sync", is_flag=True, help="Do not bring the working directory to the hosts.")
@click.option(
    "--bring",
    multiple=True,
    metavar="PATH",
    callback=with_table,
    help="Data below this folder that hosts of ssh are to have: what one lacks is sent there, once.",
)
@click.option("--no-check", is_flag=True, help="Do not look at the hosts first; `manyhosts doctor` looks closer.")
@click.option(
    "--encrypt",
    type=click.Choice(["required"]),
    metavar="required",
    help="Refuse links between hosts that are not encrypted.",
)
@target_options("An option of the target; `run --on TARGET --help` lists them.")
@click.option("--show", metavar="RANK", help="Show the output of this rank alone, or of several: 0,3; logs keep all.")
@click.option(
    "--log-size",
    default="1 GiB",
    show_default=True,
    metavar="SIZE",
    help="How large a worker's log grows before it becomes LOG.1 and another is begun; 0: no limit.",
)
@click.option("--no-prefix", is_flag=True, help="Show lines as they are, without the rank before them.")
@click.option("--env", multiple=True, metavar="K[=V]", callback=with_table, help=_ENV)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="K=V",
    callback=_settings,
    help="A setting of mh.Trainer or mh.Data, overridden; --set help lists them.",
)
@measuring_options
@click.option("--run-dir", metavar="DIR", help="Where the record is kept.  [default: runs/SCRIPT-TIME]")
@click.option(
    "--resume", type=click.Choice(["last"]), metavar="last", help="Continue with the newest run of SCRIPT in runs."
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as in `python -m`.")
@click.option("--no-python", is_flag=True, help="SCRIPT is an executable, started as it is.")
@click.option("--rehearse", is_flag=True, help="Run a script that was written for CUDA and NCCL on CPU and Gloo.")
@click.option("--warm", is_flag=True, help="Keep torch loaded for ten minutes, for the next run with --warm.")
@click.option("--detach", is_flag=True, help="Run in the background and print a handle.")
@click.option("--dry-run", is_flag=True, help="Print what would be started, and start nothing.")
@click.option("--trace", is_flag=True, help="Show where in manyhosts an error was raised.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
def run(**words: Any) -> int:
    """Start SCRIPT on one or many workers: any script that runs under torchrun, unchanged.

    Everything after SCRIPT is the script's own. Each worker's output is kept in DIR/logs. The cores of a host are
    shared out between its workers (OMP_NUM_THREADS), unless that variable is set.

    Ctrl-C asks the workers to end; a second Ctrl-C kills them.
    """
    job = _job(words)
    titles.set_title(f"manyhosts {shlex.join(sys.argv[1:])}", "manyhosts run")
    target = words["target"] or ("ssh" if job.hosts else "local")
    run_options.see_arguments(words["script"], words["arguments"], job.kind)
    for note in _crowd(job) if target == "local" else []:
        print(f"manyhosts: {note}", file=sys.stderr, flush=True)
    launcher = LAUNCHERS.load(target)()
    jobs = background.jobs_of(launcher) if words["detach"] else None
    if words["detach"] and target == "join" and "secret-file" not in job.options:
        raise ConfigError(
            "the secret with which hosts join could not be shown, and must not be in a log",
            where="--detach",
            fix="have it written into a file that only you may read: -o secret-file=FILE",
        )
    plan = launcher.plan(job)
    if words["dry_run"]:
        print(plan)
        return 0
    before = None
    if not job.run_dir_is_chosen:
        before = scripts.unfinished(job.program, job.kind)
        job = replace(job, run_dir=run_directory.claimed(job.run_dir))
        plan = plan if job.run_dir == plan.job.run_dir else launcher.plan(job)
    run_lock.see_that_free(job.run_dir, takeover.start_of(job.run_dir))
    named_runs.keep_interruption(job.run_dir, interrupted=False)
    if jobs is not None:
        for note in plan.notes:
            print(f"manyhosts: {note}", file=sys.stderr)
        handle = f"{target}://{jobs.send(plan)}"
        named_runs.keep_handle(job.run_dir, handle)
        print(handle)
        return 0
    named_runs.keep_handle(job.run_dir, "")
    with Screen(sys.stdout, sys.stderr, logs=job.run_dir / "logs") as screen:
        display = _display(screen)
        is_own = job.kind == "module" and job.program.startswith("manyhosts.")  # who runs that says what it does
        if not (sys.stdout.isatty() or is_own):  # on a terminal a live line says what is awaited
            display.warn(_beginning(plan))
        if before is not None and not is_own:
            name = before.relative_to(Path.cwd())
            display.warn(f"manyhosts: this is a new run; one was not finished, and --run-dir {name} continues it")
        try:
            code = launcher.submit(plan, display)
        finally:
            display.close()
            if not job.run_dir_is_chosen:
                run_directory.drop_if_empty(job.run_dir)
    named_runs.keep_interruption(job.run_dir, interrupted=code == _INTERRUPTED)
    return code


def _beginning(plan: Plan) -> str:
    """What is started and where, in one line: the script's first word may take long to come."""
    job = plan.job
    count = "1 worker" if job.workers == 1 else f"{job.workers} workers"
    size = f" with {count}" if job.workers_are_chosen else ""
    hosts = f" on {', '.join(plan.hosts[:_NAMED])}" if plan.hosts else ""
    more = f" and {len(plan.hosts) - _NAMED} more hosts" if len(plan.hosts) > _NAMED else ""
    run_dir = job.run_dir.relative_to(Path.cwd()) if job.run_dir.is_relative_to(Path.cwd()) else job.run_dir
    return f"manyhosts: starting {job.program}{size}{hosts}{more}; logs and record in {run_dir}"


def _check_words(words: Mapping[str, Any]) -> None:
    """See that no two options contradict each other.

    Raises:
        ConfigError: they do.
    """
    if words["workers"] is not None and words["workers_per_node"] is not None:
        raise ConfigError("both --workers and --workers-per-node are given", where="--workers", fix="give one of them")
    if words["rehearse"] and words["no_python"]:
        what = "--rehearse changes what Python gives a script, and --no-python starts a program as it is"
        raise ConfigError(what, where="--rehearse", fix="leave --no-python out, and name the script itself")
    if "" in words["bring"]:
        raise ConfigError("--bring is empty", where="--bring", fix="name a folder or a file below this one")
    if words["run_dir"] == "":
        raise ConfigError("--run-dir is empty", where="--run-dir", fix="name a directory, or leave it out")
    if words["resume"] and words["run_dir"]:
        raise ConfigError(
            "both --resume last and --run-dir are given",
            where="--resume",
            fix="give one: a run directory that holds a run is resumed",
        )


def _job(words: Mapping[str, Any]) -> Job:
    words = typed_first(words)
    # What a script that was started by itself says to resume with, typed before this command.
    is_worker = bool({"RANK", run_directory.UNASKED} & os.environ.keys())
    if words["run_dir"] is None and not words["resume"] and not is_worker:
        words["run_dir"] = os.environ.get(run_directory.VARIABLE) or None
    _check_words(words)
    kind = scripts.kind_of(module=words["module"], no_python=words["no_python"])
    scripts.check(words["script"], kind)
    changed, measuring = overrides.parse(words["settings"]), environment(words["profile"], words["metrics_port"])
    if words["run_dir"]:
        run_directory.check_is_folder(words["run_dir"], where="--run-dir")
    where = Where(
        target=words["target"],
        hosts=words["hosts"],
        hostfile=words["hostfile"],
        nodes=words["nodes"],
        options=words["options"],
    )
    least, most = where.least_and_most()
    hosts, slots = where.named()
    if words["workers"] is not None and (hosts or where.target_or(hosts) != "local"):
        raise ConfigError(
            "--workers counts workers on this machine, and others are to train",
            where="--workers",
            fix="use --workers-per-node, with --nodes or --hosts",
        )
    chosen = words["workers"] if words["workers"] is not None else words["workers_per_node"]
    if chosen is None and slots:
        chosen = slots[0]
    here = where.target_or(hosts) == "local"
    job = Job(
        program=words["script"],
        kind=kind,
        arguments=tuple(words["arguments"]),
        folder=Path.cwd(),
        run_dir=_run_dir(words, kind, elsewhere=not here),
        words=() if variables.NOT_RESUMED in os.environ else tuple(click.get_current_context().find_root().obj or ()),
        run_dir_is_chosen=bool(words["run_dir"] or words["resume"]),
        nodes=len(hosts) or (1 if most is None else most),
        nodes_are_chosen=bool(hosts) or most is not None,
        least_nodes=least,
        workers_per_node=chosen if chosen is not None else max(1, host_state.count(os.environ)) if here else 1,
        workers_are_chosen=chosen is not None or here,
        workers_of=dict(enumerate(slots)) if words["workers_per_node"] is None else {},
        restarts=words["restarts"],
        show=_ranks(words["show"]),
        prefix=not words["no_prefix"],
        log_bytes=bytes_of(words["log_size"], where="--log-size"),
        warm_s=_warm_s(where.target_or(hosts)) if words["warm"] else 0.0,
        hang_timeout_s=words["hang_timeout"],
        head_timeout_s=words["head_timeout"],
        ports=words["ports"],
        hosts=hosts,
        options=pairs(words["options"], "-o"),
        sync=not words["no_sync"],
        bring=_brought(words, where.target_or(hosts)),
        check=not words["no_check"],
        encrypt=words["encrypt"] is not None,
        hidden=tuple(variables_of(words["env"])),
        environment=_environment(words, {**overrides.to_environment(changed), **measuring}),
        overrides=changed,
        for_trainer=tuple(OPTION_OF[variable] for variable in measuring),
        preload=scripts.preload(words["script"], kind, own=_TRAINING, settings=changed),
        uses_manyhosts=scripts.uses_manyhosts(words["script"], kind),
    )
    scripts.check_run_dir(job)
    return job


def _environment(words: Mapping[str, Any], settings: Mapping[str, str]) -> dict[str, str]:
    """The environment of all workers, in addition to what the engine gives them; `settings` among it."""
    unasked = {} if words["run_dir"] or words["resume"] else {run_directory.UNASKED: "1"}
    rehearsed = _rehearsed(words["env"]) if words["rehearse"] else {}
    given = variables_of(words["env"])
    named = {GIVEN: ",".join(given)} if given else {}
    return {**given, **named, **settings, **unasked, **rehearsed}


def _warm_s(target: str) -> float:
    """How long what workers are forked from stays.

    Raises:
        ConfigError: it cannot stay there.
    """
    if target not in ("local", "ssh") or not warm.IS_POSSIBLE:
        of_engine = f"{target} ends what a run has started"
        what = of_engine if warm.IS_POSSIBLE else "this system has no names of sockets without a file"
        raise ConfigError(
            f"--warm keeps a process on each host for the next run there, and {what}",
            where="--warm",
            fix="leave it out",
        )
    text = os.environ.get(warm.VARIABLE, "")
    try:
        seconds = float(text or warm.STAYS_S)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{warm.VARIABLE} is {text!r}", where=warm.VARIABLE, fix="give seconds above 0, such as 600")
    return seconds


def _brought(words: Mapping[str, Any], target: str) -> tuple[str, ...]:
    """The data that hosts are to have, as paths below this folder where they are."""
    if words["bring"] and target not in ("ssh", "local"):
        raise ConfigError(
            f"--bring sends data to hosts that ssh reaches, and this run is on {target}",
            where="--bring",
            fix="put the data where the hosts find it, and give the script that path",
        )
    return tuple(os.path.relpath(path) for path in words["bring"])


def _run_dir(words: Mapping[str, Any], kind: scripts.Kind, *, elsewhere: bool) -> Path:
    """Where the record is kept: what was asked for, the newest of this script, or a new one."""
    if words["resume"]:
        return scripts.last_run_dir(words["script"], kind, elsewhere=elsewhere)
    return Path(words["run_dir"]).absolute() if words["run_dir"] else new_run_dir(words["script"])


def _ranks(words: str | None) -> tuple[int, ...]:
    """The ranks that `--show` names, or none."""
    numbers = [] if words is None else words.split(",")
    if not all(number.strip().isdecimal() for number in numbers):
        fix = "give ranks, as in --show 0 or --show 0,3"
        raise ConfigError(f"cannot read {words!r} as ranks", where="--show", fix=fix)
    return tuple(int(number) for number in numbers)


def _rehearsed(words: Sequence[str]) -> dict[str, str]:
    """What a rehearsal adds to the environment: the GPUs that it is to have, and none of the real ones."""
    gpus_to_have = variables_of(words).get("CUDA_VISIBLE_DEVICES", "")
    return {variables.FIRST: _REHEARSAL, REHEARSED_GPUS: gpus_to_have, "CUDA_VISIBLE_DEVICES": ""}


def _crowd(job: Job) -> list[str]:
    """What deserves a word: workers that mostly wait for a core. Few to a core are how one tries a script out."""
    cores = host_state.cores()
    if job.workers_per_node <= _CROWD * cores:
        return []
    shared = f"{job.workers_per_node} workers share the {cores} cores of this machine"
    return [f"{shared}, so each step takes longer than with {cores}, and memory is used for each"]


def _display(screen: Screen) -> Display:
    """The live display on a terminal, where it is installed; plain lines elsewhere."""
    if importlib.util.find_spec("manyhosts.listeners.terminal") is not None:
        from manyhosts.listeners.terminal import Display

        return Display(screen.out, screen.err)
    return PlainDisplay(screen.out, screen.err)
