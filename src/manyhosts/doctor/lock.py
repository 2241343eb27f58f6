"""`manyhosts.lock`: what hosts had installed on a day when all was well. The doctor holds them to it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from manyhosts.cluster.findings import Finding
from manyhosts.errors import ConfigError
from manyhosts.records.atomic_file import read_json, write_atomically, write_json

NAME = "manyhosts.lock"
SCHEMA_VERSION = 1
_MOST = 8
_NOT_FOR_IMAGES = ("manyhosts", "pip", "setuptools", "wheel")

Facts = Mapping[str, Any]


def write(path: Path, hosts: Sequence[Facts]) -> None:
    """Write down what `hosts`, as the doctor has found them, have."""
    write_json(path, {"schema_version": SCHEMA_VERSION, "hosts": {host["name"]: _of(host) for host in hosts}})


def in_folder(folder: Path) -> dict[str, Any] | None:
    """What the lock in `folder` says; None where there is none.

    Raises:
        ConfigError: it cannot be read.
    """
    return read(folder / NAME) if (folder / NAME).exists() else None


def read(path: Path) -> dict[str, Any]:
    """What a lock says of each host.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    if not path.exists():
        raise ConfigError(f"there is no {path.name}", where=str(path.parent), fix="write one: manyhosts env lock")
    try:
        return dict(read_json(path, version=SCHEMA_VERSION)["hosts"])
    except (ConfigError, KeyError, TypeError) as cause:
        what = cause.what if isinstance(cause, ConfigError) else f"{path.name} names no hosts"
        fix = "write it again: manyhosts env lock, with the same --hosts"
        raise ConfigError(what, where=str(path), fix=fix) from cause


def findings(kept: Mapping[str, Facts], hosts: Sequence[Facts]) -> Iterator[Finding]:
    """Differences of `hosts` from what was `kept`. A host that was not there then is compared with the first one."""
    for host in hosts:
        if "packages" not in host:
            continue
        name, now = host["name"], _of(host)
        then = kept.get(name) or next(iter(kept.values()))
        versions = {"python": then["python"], **then["packages"]}
        found = {"python": now["python"], **now["packages"]}
        other = [package for package in versions if found.get(package) != versions[package]]
        if other:
            said = [
                f"{package} is {found.get(package, 'missing')}, not {versions[package]}" for package in other[:_MOST]
            ]
            more = f", and {len(other) - _MOST} more" if len(other) > _MOST else ""
            builds = [each for each in other if _plain(found.get(each, "")) == _plain(versions[each])]
            wanted = " ".join(
                f"{package}=={_plain(versions[package])}"
                for package in other[:_MOST]
                if package not in ("python", "manyhosts", *builds)
            )
            more += f"; the build of {builds[0]} comes from an index that has it (--extra-index-url)" if builds else ""
            yield Finding(
                level="error",
                check="lock",
                what=f"host {name} is not as {NAME} has it: {'; '.join(said)}{more}",
                where=f"host {name}, {host['executable']}",
                fix=(f"{host['executable']} -m pip install {wanted}" if wanted else "give it that version")
                + "; or, where the new versions are wanted, manyhosts env lock again, with the same --hosts",
            )
        for what in ("gpus", "cores", "memory"):
            if name in kept and then.get(what) != now[what]:
                yield Finding(
                    level="warning",
                    check="lock",
                    what=f"host {name} had {what} {then.get(what)} when {NAME} was written, and has {now[what]}",
                    where=f"host {name}",
                    fix="see whether that is meant: results and times may differ; manyhosts env lock again, with "
                    "the same --hosts, takes it up",
                )


_VERSIONS = f"# The versions of {NAME}."
_HEAD = f"# A container for training, with the versions of {NAME}."


def in_the_way(folder: Path) -> Path | None:
    """What `write_recipe` would overwrite in `folder` and has not written; None where there is no such file."""
    heads = {folder / "Dockerfile": _HEAD, folder / "requirements.lock": _VERSIONS}
    return next((path for path, head in heads.items() if path.exists() and not _begins_with(head, path)), None)


def _begins_with(head: str, path: Path) -> bool:
    return path.is_file() and path.read_text(errors="replace").startswith(head)


def write_recipe(folder: Path, kept: Mapping[str, Facts]) -> list[Path]:
    """Write a Dockerfile, and the versions it installs, of what the first host in a lock has. Returns both."""
    host = next(iter(kept.values()))
    pins = [f"{name}=={version.partition('+')[0]}" for name, version in host["packages"].items()]
    pins = [pin for pin in pins if pin.partition("==")[0] not in _NOT_FOR_IMAGES]
    builds = sorted({version for name, version in host["packages"].items() if name == "torch" and "+" in version})
    note = (
        f"# torch is the build {builds[0]}: --build-arg PIP_EXTRA_INDEX_URL=… names where it is had.\n"
        if builds
        else ""
    )
    wheel = f"manyhosts-{host['manyhosts']}-py3-none-any.whl"
    recipe = (
        f"{_HEAD} Next to it: requirements.lock and {wheel},\n"
        f"# which `pip wheel --no-deps .` makes in a clone of manyhosts.\n{note}"
        f"FROM python:{host['python']}-slim\n"
        "ARG PIP_EXTRA_INDEX_URL=\n"
        "RUN apt-get update && apt-get install --yes --no-install-recommends git openssh-client \\\n"
        "    && rm -rf /var/lib/apt/lists/*\n"
        f"COPY requirements.lock {wheel} /tmp/\n"
        f"RUN python3 -m pip install --no-cache-dir --no-deps -r /tmp/requirements.lock /tmp/{wheel}\n"
    )
    write_atomically(folder / "Dockerfile", recipe.encode())
    write_atomically(folder / "requirements.lock", "".join(f"{line}\n" for line in (_VERSIONS, *pins)).encode())
    return [folder / "Dockerfile", folder / "requirements.lock"]


def _of(host: Facts) -> dict[str, Any]:
    return {
        "python": host["python"],
        "manyhosts": host["manyhosts"],
        "packages": {name: version for name, version in host["packages"].items() if re.match(r"\d", version)},
        "cores": host["condition"]["cores"],
        "memory": round(host["condition"].get("memory", {}).get("total", 0) / 2**30) if _has_memory(host) else None,
        "gpus": [gpu["name"] for gpu in host["graphics"]["gpus"]],
    }


def _plain(version: str) -> str:
    """A version without the build of it, which no public index has."""
    return version.partition("+")[0]


def _has_memory(host: Facts) -> bool:
    return isinstance(host["condition"].get("memory"), Mapping)
