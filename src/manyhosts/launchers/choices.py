"""What `-o KEY=VALUE` may ask of a target: checked, so that a slip of the pen does not wait in a queue for a day."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from manyhosts.control.job import Job
from manyhosts.errors import ConfigError
from manyhosts.table import nearest
from manyhosts.units import Duration


def check(target: str, job: Job, known: Mapping[str, str], *, encrypts: bool = False) -> None:
    """See that `target` knows every option that was given; `known` has a line on each.

    `encrypts`: whether it sees to encryption itself.

    Raises:
        ConfigError: it does not know one, one is empty, or encryption is required and the target cannot see to that.
    """
    if job.encrypt and not encrypts:
        raise ConfigError(
            f"--encrypt required, but {target} does not report which links it uses",
            where="--encrypt",
            fix="start the run with --on ssh, which knows the links, or leave --encrypt out",
        )
    for key, value in job.options.items():
        if key not in known:
            listed = ", ".join(known) or "it has none"
            raise ConfigError(
                f"{target} has no option {key!r}",
                where=f"-o {key}={value}",
                fix=f"{nearest(key, known)}known here: {listed}; `manyhosts run --on {target} --help` explains them",
            )
        if not value or not value.isprintable():
            trouble = "has no value" if not value else f"has the value {value!r}, which is more than a line of text"
            raise ConfigError(f"the option {key!r} {trouble}", where=f"-o {key}", fix=f"write it as -o {key}=VALUE")


def yes(given: Mapping[str, str], key: str, *, default: bool) -> bool:
    """A switch among the options.

    Raises:
        ConfigError: it is neither yes nor no.
    """
    value = given.get(key, "yes" if default else "no")
    if value not in ("yes", "no"):
        raise ConfigError(f"{key} is {value!r}", where=f"-o {key}={value}", fix="write yes or no")
    return value == "yes"


def count(given: Mapping[str, str], key: str, default: int) -> int:
    """An integer among the options, 1 or more.

    Raises:
        ConfigError: it is none.
    """
    value = given.get(key, str(default))
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"{key} is {value!r}", where=f"-o {key}={value}", fix="give an integer, 1 or more")
    return int(value)


def seconds(given: Mapping[str, str], key: str) -> int | None:
    """A length of time among the options; None where it is not given.

    Raises:
        ConfigError: it is none.
    """
    if key not in given:
        return None
    limit = Duration.parse(given[key], where=f"-o {key}", fix="write it as 8h, or 90 min")
    if limit.seconds is None:
        raise ConfigError(f"{key} is {given[key]!r}", where=f"-o {key}", fix="write it as 8h, or 90 min")
    return int(limit.seconds)


def pairs(given: Mapping[str, str], key: str, known: Mapping[str, str], *, between: str = "=") -> dict[str, str]:
    """Several `BEFORE=AFTER`, separated by commas; `known` has a line on each option.

    Raises:
        ConfigError: one is written otherwise.
    """
    found = {}
    for word in given[key].split(",") if key in given else []:
        before, _, after = word.partition(between)
        if not before or not after:
            raise ConfigError(f"cannot read {word!r}", where=f"-o {key}", fix=f"{key}: {known[key]}")
        found[before] = after
    return found


def gpus(given: Mapping[str, str]) -> str:
    """The number of GPUs that is asked for, without their kind: `4` for `a100:4`, and `0` for none."""
    return given.get("gpus", "0").rpartition(":")[2]


def see_that_gpus_are_used(job: Job) -> None:
    """See that a worker is there for each GPU that is asked for.

    Raises:
        ConfigError: the number of GPUs is none, or one worker would have many and use one.
    """
    count = gpus(job.options)
    if not count.isdecimal():
        raise ConfigError(f"gpus is {job.options['gpus']!r}", where="-o gpus", fix="give an integer")
    if job.check and job.workers_are_chosen and job.workers_per_node == 1 < int(count):
        raise ConfigError(
            f"every node gets {count} GPUs, and one worker that uses one of them",
            where=f"-o gpus={job.options['gpus']}",
            fix=f"leave --workers-per-node out, or give --workers-per-node {count}",
        )


def with_a_worker_for_each_gpu(job: Job) -> Job:
    """`job` with as many workers on each node as GPUs are asked for, where the user has not said how many."""
    count = gpus(job.options)
    if job.workers_are_chosen or not count.isdecimal() or int(count) < 1:
        return job
    return replace(job, workers_per_node=int(count), workers_are_chosen=True)
