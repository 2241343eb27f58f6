"""Slurm's input, as text: the batch script, the options in it, lists of hosts."""

from __future__ import annotations

import re
import shlex
import sys

from manyhosts.control.job import Job
from manyhosts.errors import ConfigError
from manyhosts.launchers import choices, container_options

_FLAGS = {
    "partition": ("--partition", "the partition to queue in"),
    "account": ("--account", "the account that pays"),
    "time": ("--time", "the time limit, as Slurm writes it: 2:00:00 is two hours, 1-12 a day and a half"),
    "gpus": ("--gpus-per-node", "GPUs of each node: 4, or a100:4"),
    "qos": ("--qos", "the quality of service"),
    "constraint": ("--constraint", "features that the nodes must have"),
    "mem": ("--mem", "memory of each node: 64G; 0 is all"),
    "cpus": ("--cpus-per-task", "cores of each node"),
    "nodelist": ("--nodelist", "the nodes to use"),
    "exclude": ("--exclude", "nodes not to use"),
    "reservation": ("--reservation", "the reservation to use"),
    "array": ("--array", "the run several times, each with a run directory of its own: 0-3, or 0-3%1 one by one"),
    "dependency": ("--dependency", "what to wait for: afterok:4711"),
}
RUNTIMES = (*container_options.OF_FILES, container_options.PYXIS)
"""Not Docker, whose containers are outside of the job: Slurm would neither count nor end them."""
OPTIONS = {
    **{key: meaning for key, (_, meaning) in _FLAGS.items()},
    "exclusive": "yes: no other jobs on these nodes",
    "requeue": "no: do not continue in a new job when the time limit comes or a node fails",
    "warning": "seconds before the time limit at which a snapshot is made and the job queued again (default 90)",
    "python": "the Python on the nodes, or in the container, if it is not where it is here",
    **container_options.options(RUNTIMES),
}


def check(job: Job) -> None:
    """See that Slurm can be asked for `job`.

    Raises:
        ConfigError: an option contradicts another, or a path cannot stand in a batch script.
    """
    choices.yes(job.options, "requeue", default=True)
    choices.yes(job.options, "exclusive", default=False)
    choices.count(job.options, "warning", 90)
    for what, value in (("working directory", str(job.folder)), ("run directory", str(job.run_dir))):
        if not value.isprintable() or '"' in value or "\\" in value:  # it would be read as another line or option
            raise ConfigError(
                f"the {what} is {value!r}, which cannot stand in a batch script",
                where=f"the {what}",
                fix="use one whose path has no quotation marks, backslashes or control characters",
            )
    if choices.gpus(job.options).isdecimal():  # Slurm knows other words, too
        choices.see_that_gpus_are_used(job)


def script(job: Job) -> str:
    """The batch script. It becomes the head of the job, on its first node."""
    run_dir = str(job.run_dir).replace("%", "%%")  # %j and the like stand for something
    lines = {
        "--job-name": job.run_id,
        "--nodes": str(job.nodes),
        "--ntasks-per-node": "1",
        "--chdir": str(job.folder),
        "--output": f"{run_dir}/logs/slurm-{'%A_%a' if 'array' in job.options else '%j'}.log",
        "--open-mode": "append",  # a job that was queued again continues in the same log
        "--signal": f"B:USR1@{choices.count(job.options, 'warning', 90)}",
    }
    lines |= {flag: job.options[key] for key, (flag, _) in _FLAGS.items() if key in job.options}
    text = ["#!/bin/bash", *(f"#SBATCH {flag}={_quoted(value)}" for flag, value in lines.items())]
    text.append("#SBATCH --requeue" if choices.yes(job.options, "requeue", default=True) else "#SBATCH --no-requeue")
    text += ["#SBATCH --exclusive"] if choices.yes(job.options, "exclusive", default=False) else []
    python = sys.executable  # outside of containers, whose agents it starts
    if container_options.IMAGE not in job.options:
        python = job.options.get("python", python)
    start = [python, "-P", "-m", "manyhosts.launchers.slurm.batch", str(job.run_dir / "job.json")]
    return "\n".join([*text, f"exec {shlex.join(start)}", ""])


def allocation(job: Job) -> list[str]:
    """The command that gets an allocation as the batch script of `job` would, and runs the command after it there."""
    flags = [f"{flag}={job.options[key]}" for key, (flag, _) in _FLAGS.items() if key in job.options and key != "array"]
    flags += ["--exclusive"] if choices.yes(job.options, "exclusive", default=False) else []
    return ["salloc", "--quiet", f"--nodes={job.nodes}", "--ntasks-per-node=1", *flags]


def hosts_of(nodes: str) -> list[str]:
    """The hosts of what Slurm writes as `gpu[07-09,12],cpu1`, in its order."""
    found = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        before, opened, rest = part.partition("[")
        inside, _, after = rest.partition("]")
        numbers = []
        for span in inside.split(",") if opened else []:
            first, _, last = span.partition("-")
            numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
        found += [f"{before}{number}{after}" for number in numbers] if opened else [part]
    return found


def _quoted(value: str) -> str:
    return f'"{value}"' if re.search(r"\s", value) else value
