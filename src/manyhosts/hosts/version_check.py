"""Whether hosts fit together: the same versions everywhere, and everybody reaches everybody."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from manyhosts.errors import LaunchError
from manyhosts.hosts import containers, ways
from manyhosts.hosts.containers import Container


def here(manyhosts: str) -> dict[str, str]:
    """This machine's versions, in the words of a remote probe. What it does not have itself, hosts may differ in."""
    found = {"python": platform.python_version(), "manyhosts": manyhosts, "torch": ""}
    if importlib.util.find_spec("torch") is not None:
        found["torch"] = importlib.metadata.version("torch")
    return found


def see_that_each_is_named_once(facts: Mapping[str, Mapping[str, Any]]) -> None:
    """See that no two names mean one machine: two agents of one host would write to the same files.

    Raises:
        LaunchError: two do.
    """
    names: dict[str, str] = {}
    for host, found in facts.items():
        machine = found.get("machine", "")
        if machine and names.setdefault(machine, host) != host:
            raise LaunchError(
                f"{names[machine]} and {host} are two names of one machine",
                where=f"host {host}",
                fix="name it once, and give --workers-per-node for several workers on it",
            )


def see_that_images_agree(facts: Mapping[str, Mapping[str, Any]], container: Container) -> None:
    """See that every host (name → its facts) has the same image under the name that was given.

    Raises:
        LaunchError: one has another.
    """
    for one, other in different_images(facts):
        raise LaunchError(
            f"hosts {one} and {other} have different images: {container.image} is {image_of(facts[one])} on {one} and"
            f" {image_of(facts[other])} on {other}",
            where=f"between {one} and {other}",
            fix=containers.to_have_the_same(container.image),
        )


def different_images(facts: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of hosts (name → its facts) with different images: one that has what most have, and one that has not.

    Two images are the same where the words by which their hosts know them have one in common: Docker and Podman, and
    an image that was pulled and one that was loaded from a file, have some words of their own.
    """
    known = {host: words for host, found in facts.items() if (words := containers.known_as(found))}
    if not known:
        return []
    usual = max(known, key=lambda host: sum(bool(known[host] & words) for words in known.values()))
    return [(usual, host) for host, words in known.items() if not words & known[usual]]


def image_of(found: Mapping[str, Any]) -> str:
    """How the image of a host is called in a sentence."""
    return min(containers.known_as(found), default="unknown")[:23]


def see_that_they_agree(
    facts: Mapping[str, Mapping[str, Any]], mine: Mapping[str, str], container: Container | None = None
) -> None:
    """See that every host (name → its facts) has the same packages.

    Patches of Python may differ (3.11.2 and 3.11.7), and so may builds of torch (2.13.0+cpu and 2.13.0+cu130). What is
    in a container may have another Python and another torch than this machine has.

    Raises:
        LaunchError: one differs from this machine, or from most of the others.
    """
    for package in ("manyhosts", "torch"):
        for host, found in facts.items():
            if not found[package] and (package == "manyhosts" or mine["torch"]):
                python = found["executable"]
                if container is not None:
                    raise containers.lacks(container, host, package, python, mine["manyhosts"])
                raise LaunchError(
                    f"host {host} has no {package}: {python} does not find it",
                    where=f"host {host}",
                    fix=f"{remedy(package, mine[package], python)}; or name the right Python with -o python=PATH",
                )
    if container is not None:
        mine = {**mine, "python": "", "torch": ""}
    for package in ("python", "manyhosts", "torch"):
        usual = mine[package] or Counter(found[package] for found in facts.values()).most_common(1)[0][0]
        for host, found in facts.items():
            if counts(package, found[package]) != counts(package, usual):
                of = "this machine has" if mine[package] else "others have"
                fix = remedy(package, usual, found["executable"])
                raise LaunchError(
                    f"host {host} has {package} {found[package]}, and {of} {usual}",
                    where=f"host {host}, {found['executable']}",
                    fix=fix if container is None else containers.rebuilt(container, package, usual),
                )


def check_connections(
    names: Sequence[str], places: Sequence[tuple[str, int]], answers: Sequence[Sequence[str]]
) -> None:
    """See that every host reached the place (address, port) of every other; `answers` say why not, by host and place.

    Raises:
        LaunchError: some did not; each pair is named once.
    """
    closed: dict[frozenset[int], tuple[int, int, str]] = {}
    for one, said in enumerate(answers):
        for other, reason in enumerate(said):
            if reason and one != other:
                closed.setdefault(frozenset((one, other)), (one, other, reason))
    if not closed:
        return
    one, other, reason = next(iter(closed.values()))
    address, port = places[other]
    pairs = ", ".join(" and ".join(names[host] for host in sorted(pair)) for pair in closed)
    more = f" (and so it is between {len(closed)} pairs: {pairs})" if len(closed) > 1 else ""
    raise LaunchError(
        f"host {names[one]} cannot open a connection to host {names[other]} at {address} port {port}: {reason}{more}",
        where=f"between {names[one]} and {names[other]}",
        fix=ways.LET_THEM_MEET,
    )


def see_that_all_have(path: str, names: Sequence[str], there: Sequence[bool], *, synced: bool) -> None:
    """See that the script is on every host.

    Raises:
        LaunchError: one has it not.
    """
    missing = [name for name, found in zip(names, there, strict=True) if not found]
    if missing:
        fix = (
            "start from a folder that holds it: what is below the working directory is brought to every host"
            if synced
            else "leave --no-sync out, or see that the folder is shared with that host"
        )
        raise LaunchError(
            f"there is no script {path} on host {', '.join(missing)}", where=f"host {missing[0]}", fix=fix
        )


def counts(package: str, version: str) -> str:
    """The part of a version that must be the same."""
    if package == "python":
        return ".".join(version.split(".")[:2])
    return version.partition("+")[0]


def remedy(package: str, version: str, python: str, *, named: str = "name one with -o python=PATH") -> str:
    """How `version` of `package` comes to a host whose Python is `python`; `named`: how another Python is named."""
    if package == "python":
        short = counts(package, version)
        return f"install Python {short} there with the same packages, or {named}"
    return f"install the same there: {python} -m pip install {containers.installable(package, version)}"
