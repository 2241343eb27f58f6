"""What is wrong with hosts, alone or compared with each other: facts in, findings out."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from manyhosts.cluster.findings import Finding, Level
from manyhosts.control.head import checks
from manyhosts.doctor import fast_links
from manyhosts.hosts import version_check as ssh_agreement
from manyhosts.units import bytes_in_words

Facts = Mapping[str, Any]
SLOW = 1.3
"""A host this many times slower than the median host is named: the others wait for it in every step."""
_HOT_C = 90
_TAKEN = 0.2


def versions_here(manyhosts: str) -> dict[str, str]:
    """This machine's versions of what hosts must agree in."""
    return ssh_agreement.here(manyhosts)


def findings(
    hosts: Sequence[Facts],
    mine: Mapping[str, str],
    data: Sequence[str],
    *,
    shares_disk: bool,
    script: Facts | None = None,
) -> list[Finding]:
    """What is wrong with `hosts`, whose versions are to be `mine` and whose `data` are to be the same.

    `script` is what this machine has of it.

    `shares_disk`: whether the run directory and the script must be on a disk that they share.
    """
    in_images = any(host.get("image") for host in hosts)
    if in_images:
        mine = {**mine, "python": "", "torch": ""}  # hosts have those of their image, whatever this machine has
    found = [*_of_images(hosts), *_of_versions(hosts, mine)]
    for host in hosts:
        reported = host.get("condition")
        if reported is None:
            continue
        clock = host.get("clock", {"offset_s": 0, "unsure_s": 0})
        found += checks.host_findings(host["name"], reported, offset_s=clock["offset_s"], unsure_s=clock["unsure_s"])
        found += [*_of_graphics(host), *_of_quota(host)]
    machines = {host["machine"]: host for host in reversed(hosts) if "machine" in host}  # hosts of a lab share one
    found += [finding for host in reversed(machines.values()) for finding in _of_load(host)]
    found += [*_of_graphics_together(hosts), *fast_links.findings(hosts)]
    found += _of_run_dir(hosts, shares_disk=shares_disk)
    found += _of_script(hosts, script, shares_disk=shares_disk)
    for path in data:
        found += _of_data(hosts, path)
    return [*found, *_of_speed(hosts)]


def _of_images(hosts: Sequence[Facts]) -> Iterator[Finding]:
    facts = {host["name"]: host for host in hosts}
    for usual, host in ssh_agreement.different_images(facts):
        has, most = ssh_agreement.image_of(facts[host]), ssh_agreement.image_of(facts[usual])
        yield Finding(
            level="error",
            check="image",
            what=f"host {host} has another image than {usual}: {has}, and {usual} has {most}",
            where=f"host {host}",
            fix="have the same one everywhere: pull it again on each host, or copy the file; NAME@sha256:… names it for"
            " good",
        )


def _of_versions(hosts: Sequence[Facts], mine: Mapping[str, str]) -> Iterator[Finding]:
    for package in ("python", "manyhosts", "torch"):
        having = [host[package] for host in hosts if host[package]]
        if not having and not mine[package]:
            continue
        usual = mine[package] or Counter(having).most_common(1)[0][0]
        for host in hosts:
            name, python = host["name"], host["executable"]
            if not host[package]:
                what = f"host {name} has no {package}: {python} does not find it"
            elif ssh_agreement.counts(package, host[package]) != ssh_agreement.counts(package, usual):
                of = "this machine has" if mine[package] else "most others have"
                what = f"host {name} has {package} {host[package]}, and {of} {usual}"
            else:
                continue
            fix = ssh_agreement.remedy(package, usual, python)
            yield Finding(level="error", check="versions", what=what, where=f"host {name}, {python}", fix=fix)
    for host in hosts:
        said = host.get("exercise", {})
        if "trouble" in said:
            yield Finding(
                level="error",
                check="versions",
                what=f"torch cannot be loaded on host {host['name']}: {said['trouble']}",
                where=f"host {host['name']}, {host['executable']}",
                fix=f"see what `{host['executable']} -c 'import torch'` says there",
            )


def _of_quota(host: Facts) -> Iterator[Finding]:
    reported = host.get("condition", {"cores": 1})
    quota = reported.get("cpu_quota")
    if quota is not None and quota < reported["cores"]:
        yield Finding(
            level="note",
            check="load",
            what=f"host {host['name']} has {reported['cores']} cores, and the CPU quota of this cgroup is {quota:.2g}"
            " of them: when that is used up, all of its processes pause for a moment",
            where=f"host {host['name']}",
            fix="raise its cpu.max (CPUQuota= of systemd, --cpus of a container), or give workers fewer threads",
        )


def _of_load(host: Facts) -> Iterator[Finding]:
    reported = host.get("condition", {"load": 0.0, "cores": 1})
    if reported["load"] > 1.5 * reported["cores"] + 1:
        yield Finding(
            level="note",
            check="load",
            what=f"host {host['name']} has {reported['load']:.1f} programs at work on {reported['cores']} cores",
            where=f"host {host['name']}",
            fix="see who they are: `top` there",
        )


def _of_graphics(host: Facts) -> Iterator[Finding]:
    name, graphics = host["name"], host["graphics"]

    def finding(level: Level, what: str, fix: str, number: int | None = None) -> Finding:
        where = f"host {name}" + (f", GPU {number}" if number is not None else "")
        return Finding(level=level, check="gpu", what=what, where=where, fix=fix)

    if graphics["trouble"]:
        what = f"the GPUs of host {name} cannot be asked: {graphics['trouble']}"
        yield finding("error", what, "install or load the driver there, and see what `nvidia-smi` says")
    for number, gpu in enumerate(graphics["gpus"]):
        who = f"GPU {number} of host {name} ({gpu['name']})"
        if gpu["errors"]:
            what = f"{who} has had {gpu['errors']} memory errors that could not be corrected"
            yield finding("error", what, f"`nvidia-smi --gpu-reset -i {number}` there, or have it replaced", number)
        if gpu["slowed"] or (gpu["temperature"] or 0) >= _HOT_C:
            what = f"{who} slows itself down at {gpu['temperature']} °C"
            yield finding("warning", what, "see to its cooling and its power supply", number)
        if gpu["memory"] and (gpu["memory_used"] or 0) > _TAKEN * gpu["memory"]:
            what = f"{bytes_in_words(gpu['memory_used'])} of {bytes_in_words(gpu['memory'])} of {who} are taken already"
            yield finding("warning", what, "see by whom: `nvidia-smi` there", number)
    said = host.get("exercise", {})
    if (
        graphics["gpus"]
        and said.get("cuda") is False
        and host["condition"]["environment"].get("CUDA_VISIBLE_DEVICES") != ""
    ):
        what = f"host {name} has GPUs, and its torch {said['torch']} does not use them"
        yield finding("warning", what, "install a build of torch that fits the driver: see pytorch.org")


def _of_graphics_together(hosts: Sequence[Facts]) -> Iterator[Finding]:
    kinds: dict[str, list[str]] = defaultdict(list)
    for host in hosts:
        if "graphics" in host:
            kinds[_gpus_in_words(host["graphics"]["gpus"])].append(host["name"])
    if len(kinds) > 1:
        what = "hosts have different GPUs: " + "; ".join(f"{', '.join(who)}: {kind}" for kind, who in kinds.items())
        fix = "the slowest sets the pace; run on hosts of one kind, or give each as much as it can do"
        yield Finding(level="warning", check="gpu", what=what, where="between the hosts", fix=fix)


def _gpus_in_words(gpus: Sequence[Facts]) -> str:
    if not gpus:
        return "no GPU"
    return " and ".join(f"{count} x {name}" for name, count in Counter(gpu["name"] for gpu in gpus).items())


def _of_run_dir(hosts: Sequence[Facts], *, shares_disk: bool) -> Iterator[Finding]:
    seen = [host for host in hosts if "run_dir" in host]
    for host in seen:
        name, found = host["name"], host["run_dir"]
        if found["trouble"]:
            yield Finding(
                level="error",
                check="run directory",
                what=f"host {name} cannot write to the run directory: {found['trouble']}",
                where=f"host {name}, {found['path']}",
                fix="give a --run-dir that every host may write to",
            )
    separate = [host["name"] for host in seen if host["run_dir"]["shared"] is False]
    if separate:
        fix = "name a --run-dir on a file system that all hosts share"
        if not shares_disk:
            fix = f"nothing need be done: the record is brought here from the first host; or {fix}"
        yield Finding(
            level="error" if shares_disk else "note",
            check="run directory",
            what=f"the run directory is not shared: {', '.join(separate)} do{'es' * (len(separate) == 1)} not see what"
            f" {seen[0]['name']} writes",
            where=str(seen[0]["run_dir"]["path"]),
            fix=fix,
        )


def _of_script(hosts: Sequence[Facts], mine: Facts | None, *, shares_disk: bool) -> Iterator[Finding]:
    asked = [host for host in hosts if "script" in host]
    if not any(host["script"] for host in asked):
        return
    level: Level = "error" if shares_disk else "note"
    fix = (
        "put it where all hosts see it"
        if shares_disk
        else "nothing need be done: `manyhosts run` brings it there, where it is below the working directory"
    )
    usual = Counter(_identity(host["script"]) for host in asked if host["script"]).most_common(1)[0][0]
    usual, than = (_identity(mine), "this machine's") if _identity(mine) else (usual, "that of most others")
    for host in asked:
        name = host["name"]
        if _identity(host["script"]) != usual:
            what = f"host {name} has no such script"
            if host["script"]:
                what = f"the script on host {name} is another one than {than}"
            yield Finding(level=level, check="script", what=what, where=f"host {name}", fix=fix)


def _of_data(hosts: Sequence[Facts], path: str) -> Iterator[Finding]:
    having = [(host["name"], host["data"][path]) for host in hosts if path in host.get("data", {})]

    slash = "" if any(found and found.get("kind") == "file" for _, found in having) else "/"

    def finding(level: Level, what: str, host: str) -> Finding:
        fix = (
            f"bring it there: rsync -a FROM:{path}{slash} {path}{slash}"
            if level == "error"
            else "name a smaller folder"
        )
        return Finding(level=level, check="data", what=what, where=f"host {host}, {path}", fix=fix)

    known = [_identity(found) for _, found in having if found and "sha256" in found]
    usual = Counter(known).most_common(1)[0][0] if known else None
    model = next((name for name, found in having if found and _identity(found) == usual), "")
    for name, found in having:
        if found is None:
            yield finding("error", f"host {name} does not have {path}", name)
        elif "trouble" in found:
            yield finding("error", f"host {name} cannot read {path}: {found['trouble']}", name)
        elif _identity(found) != usual:
            theirs, other = _size(found), _size(next(each for host, each in having if host == model))
            how = f"{theirs} there, {other} on {model}" if theirs != other else f"both {theirs}, with other content"
            yield finding("error", f"{path} on host {name} is not what it is on the others: {how}", name)


def _identity(found: Facts | None) -> str:
    return str(found.get("sha256", "")) if found else ""


def _size(found: Facts) -> str:
    files = f"{found['files']} file{'s' * (found['files'] != 1)}, " if found["kind"] == "folder" else ""
    return files + bytes_in_words(found["bytes"])


def slow_ones(hosts: Sequence[Facts]) -> dict[str, float]:
    """Hosts that compute much slower than the median host, and how many times.

    What other programs take of a host counts, but not among hosts that are one machine in truth: they take it from each
    other.
    """
    known = [host for host in hosts if host.get("speed", {}).get("cpu")]
    alone = Counter(host["machine"] for host in known)
    return _far_below(
        {
            host["name"]: host["speed"]["cpu"] * (host["speed"]["share"] if alone[host["machine"]] == 1 else 1)
            for host in known
        }
    )


def _far_below(speeds: Mapping[str, float]) -> dict[str, float]:
    if len(speeds) < 2:
        return {}
    usual = statistics.median_high(speeds.values())
    return {name: usual / speed for name, speed in speeds.items() if usual / speed >= SLOW}


def _of_speed(hosts: Sequence[Facts]) -> Iterator[Finding]:
    by_name = {host["name"]: host for host in hosts}
    for name, factor in slow_ones(hosts).items():
        yield Finding(
            level="warning",
            check="speed",
            what=f"host {name} computes {factor:.1f} times slower than the others{_reason(by_name[name], hosts)}",
            where=f"host {name}",
            fix="see what else runs there (`top`), its power settings (`cpupower frequency-info`) and its heat",
        )
    gpus = {
        (host["name"], number): speed
        for host in hosts
        for number, speed in enumerate(host.get("speed", {}).get("gpus", []))
    }
    for name, factor in _far_below(
        {f"{number} of host {host}": speed for (host, number), speed in gpus.items()}
    ).items():
        fix = "see its clocks and what else uses it: `nvidia-smi -q -d CLOCK,PERFORMANCE` there"
        what = f"GPU {name} computes {factor:.1f} times slower than the others"
        yield Finding(level="warning", check="speed", what=what, where=f"GPU {name}", fix=fix)


def _reason(slow: Facts, hosts: Sequence[Facts]) -> str:
    """Why a host is slow, where that is known."""
    own = _cores(slow)
    most = max(map(_cores, hosts))
    if own < most:
        return f"; it has {own:g} core{'s' * (own > 1)}, others have {most:g}"
    share = slow["speed"]["share"]
    return f"; other programs take {1 - share:.0%} of it" if share < 1 / SLOW else ""


def _cores(host: Facts) -> float:
    reported = host.get("condition", {"cores": 0, "cpu_quota": None})
    return float(min(reported["cores"], reported["cpu_quota"] or reported["cores"]))
