"""Container runtimes that need no image: they take the command lines of the real ones, refuse all others, and obey.

Each knows the flags of the real command line that are used here, with the number of their values. A container sees the
Python of this machine as `python3`, the folders that were mounted, and in place of the hidden ones nothing; it has the
variables that it was given, and for Apptainer those of the host.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

SOURCE = r'''#!/bin/sh
"exec" {python} "-SE" "$0" "$@"  # as pip does it: the path of Python may have a space
import json, os, shlex, sys

CONFIG = json.loads({config!r})
FLAGS = {{
    "docker": ({{"--rm", "--interactive"}}, {{
        "--pull", "--network", "--ipc", "--pid", "--user", "--userns", "--group-add", "--entrypoint", "--log-driver",
        "--label", "--workdir", "--env", "--volume", "--gpus", "--device", "--ulimit",
    }}),
    "apptainer": ({{"--nv"}}, {{"--bind", "--pwd"}}),
}}
FLAGS["podman"] = (FLAGS["docker"][0], FLAGS["docker"][1] - {{"--gpus"}})
FLAGS["singularity"] = FLAGS["apptainer"]


def fail(words, code=125):
    sys.stderr.write(words + "\n")
    sys.exit(code)


def read(name, words):
    """The flags, by name, and the rest."""
    given = {{}}
    while words and words[0].startswith("-"):
        flag = words.pop(0)
        if flag in FLAGS[name][0]:
            given.setdefault(flag, []).append("")
        elif flag in FLAGS[name][1]:
            given.setdefault(flag, []).append(words.pop(0))
        else:
            fail(f"unknown flag: {{flag}}")
    return given, words


def start(name, image, given, words):
    mounts = [mount.split(":") for mount in given.get("--volume", [])]
    mounts += [mount.split(":") for each in given.get("--bind", []) for mount in each.split(",")]
    for source, *_ in mounts:
        if not os.path.exists(source):
            fail(f"{{source}} is not there, and would be made for root")
    folder = given.get("--workdir", given.get("--pwd", ["/"]))[0]
    homes = (sys.prefix, sys.base_prefix)
    stage = next(each for each in ("/srv", "/media", "/mnt") if os.path.isdir(each) and each not in str(homes))
    lines = ["set -e", f"stage={{stage}}", "mount -n -t tmpfs none $stage", "mkdir $stage/bin"]
    if image["python"]:
        python = "#!/bin/sh\n" + image["python"] + '\nexec ' + shlex.quote(sys.executable) + ' "$@"\n'
        lines.append(f"printf %s {{shlex.quote(python)}} > $stage/bin/python3; chmod 755 $stage/bin/python3")
    for number, (source, *_) in enumerate(mounts):
        kind = "mkdir" if os.path.isdir(source) else "touch"
        lines.append(f"{{kind}} $stage/{{number}}; mount -n --rbind {{shlex.quote(source)}} $stage/{{number}}")
    for hidden in CONFIG["hidden"]:
        if os.path.isdir(hidden):
            lines.append(f"mount -n -t tmpfs none {{shlex.quote(hidden)}}")
    for number, (source, target, *mode) in enumerate(mounts):
        place = shlex.quote(target)
        lines.append(f"[ -e {{place}} ] || mkdir -p {{place}}; mount -n --rbind $stage/{{number}} {{place}}")
        lines += [f"mount -n -o remount,bind,ro {{place}}"] if mode == ["ro"] else []
    kept = dict(os.environ) if "apptainer" in name or "singularity" in name else {{}}
    for each in given.get("--env", []):
        variable, equals, value = each.partition("=")
        if equals or variable in os.environ:
            kept[variable] = value if equals else os.environ[variable]
    kept |= image.get("environment", {{}})
    lines.append(f"cd {{shlex.quote(folder)}}")
    if image["python"]:
        lines.append('export PATH="$stage/bin:/usr/sbin:/usr/bin:/sbin:/bin"; exec "$@"')
    else:
        lines.append('ln -s /bin/sh /bin/uname $stage/bin; export PATH="$stage/bin"; exec "$@"')
    with open(CONFIG["reported"], "a") as file:
        words_of_all = [[flag, value] for flag, values in given.items() for value in values]
        file.write(json.dumps({{"runtime": name, "options": words_of_all, "command": words}}) + "\n")
    os.execvpe(
        "unshare",
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", "\n".join(lines), "container", *words],
        {{**kept, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}},
    )


def main():
    name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
    if words == ["--version"]:
        print("podman version 4.3.1" if CONFIG["says_podman"] or name == "podman" else f"{{name}} version 26.1.0")
        return
    if name in ("apptainer", "singularity"):
        if words[:2] != ["--silent", "exec"]:
            fail(f"unknown command: {{words[:2]}}", 1)
        given, (path, *command) = read(name, words[2:])
        if not path.startswith(tuple("abcdefghijklmnopqrstuvwxyz")) and not os.path.exists(path):
            fail(f"FATAL:   could not open image {{path}}", 255)
        image = {{"python": "", **CONFIG["images"].get(path, CONFIG["images"].get("*", {{}}))}}
        image["python"] = image["python"] or ":"
        start(name, image, given, command)
    if CONFIG["refuses"]:
        fail(CONFIG["refuses"], 1)
    if words[:2] == ["info", "--format"]:
        print(json.dumps(CONFIG["security"]))
        return
    if words[:2] == ["image", "inspect"]:
        image = CONFIG["images"].get(words[-1])
        if image is None:
            fail(f"Error: No such image: {{words[-1]}}", 1)
        digests = " ".join(f"{{words[-1].partition(':')[0]}}@{{digest}}" for digest in image["digests"])
        print(f"{{image['architecture']}} {{image['id']}} {{digests}} ")
        return
    if words[:1] != ["run"]:
        fail(f"unknown command: {{words[:1]}}")
    given, (called, *command) = read(name, words[1:])
    assert given["--pull"] == ["never"]
    if "--gpus" in given and not CONFIG["gpus"]:
        fail('docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].')
    start(name, CONFIG["images"][called], given, command)


main()
'''


def image(
    identity: str = "11", *, digests: Sequence[str] = (), architecture: str = "", python: str = ":"
) -> dict[str, object]:
    """An image. `python`: a line of sh before its Python starts; empty where it has none."""
    return {
        "id": f"sha256:{identity * 32}",
        "digests": [f"sha256:{digest * 32}" for digest in digests],
        "architecture": architecture or {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, ""),
        "python": python,
    }


def install(
    runtime: str,
    folder: Path,
    *,
    images: Mapping[str, object],
    reported: str,
    hidden: Sequence[str] = (),
    **more: object,
) -> None:
    """Put `runtime` into `folder`, with its images by name. Each start of a container is a line of the file `reported`.

    `hidden` are folders that containers do not see. `refuses`: what it says to everybody.
    """
    config = {
        "images": images,
        "reported": reported,
        "hidden": list(hidden),
        "refuses": "",
        "security": [],
        "gpus": False,
    }
    config |= {"says_podman": False, **more}
    path = folder / runtime
    path.write_text(SOURCE.format(python=json.dumps(sys.executable), config=json.dumps(config)))
    path.chmod(0o755)
