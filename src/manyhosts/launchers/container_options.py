"""What `-o` may say of containers, for every target that starts them: `-o container=IMAGE` and what goes with it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from manyhosts.control.job import Job
from manyhosts.control.plan import Later
from manyhosts.errors import ConfigError
from manyhosts.hosts.containers import SCRIPT, Container
from manyhosts.launchers import choices

IMAGE, RUNTIME, MOUNTS, GPUS = "container", "container-runtime", "container-mounts", "container-gpus"
PULLED, OF_FILES = ("docker", "podman"), ("apptainer", "singularity")
ON_HOSTS = (*PULLED, *OF_FILES)
"""What hosts may have that are reached one by one."""
PYXIS = "pyxis"
"""Slurm's own way: srun itself starts the container."""
PYTHONS = ("python3", "python")
"""What is tried in an image, in this order."""
_NAME = re.compile(r"[A-Za-z0-9][\w./:@#+-]*")
_URI = re.compile(r"[a-z][a-z-]*://[\w./:@+-]+")
_NO_PATH = re.compile(r"[:,\n]")


def planned(container: Container, words: Sequence[str]) -> list[str]:
    """What starts `words` in a container, as a plan has it: the script is filled in last, and shown by its name."""
    return container.command(words, Later(SCRIPT, SCRIPT))


def options(runtimes: Sequence[str]) -> dict[str, str]:
    """What `-o` takes of a target that knows these runtimes: key → what it means."""
    return {
        IMAGE: "an image in which agents and workers run: NAME:TAG, or a file .sif of Apptainer",
        RUNTIME: f"what starts containers: {', '.join(runtimes)} (default: what the host has that has the image)",
        MOUNTS: "further folders that containers see: /path, /path:/there or /path:/there:ro, separated by commas",
        GPUS: "no: containers get no GPUs (default: all of their host)",
    }


def of(job: Job, runtimes: Sequence[str]) -> Container | None:
    """How commands of `job` start in containers; None where it asks for none. `runtimes` are those of its target.

    Raises:
        ConfigError: an option makes no sense, or a path cannot be mounted.
    """
    given = job.options
    if IMAGE not in given:
        for key in (RUNTIME, MOUNTS, GPUS):
            if key in given:
                raise ConfigError("no image is named", where=f"-o {key}={given[key]}", fix=f"add -o {IMAGE}=IMAGE")
        return None
    runtime = given.get(RUNTIME, "any")
    if runtime not in ("any", *runtimes):
        raise ConfigError(
            f"{runtime!r} is no container runtime that can be used here",
            where=f"-o {RUNTIME}={runtime}",
            fix=f"give one of {', '.join(runtimes)}",
        )
    if runtime == PYXIS and GPUS in given:
        raise ConfigError(
            "Pyxis gives a container the GPUs that Slurm gives the job",
            where=f"-o {GPUS}",
            fix=f"leave -o {GPUS} out, and ask for GPUs with -o gpus=",
        )
    container = Container(
        image=_image(job, runtime, runtimes),
        runtime=runtime,
        folder=job.folder,
        run_dir=job.run_dir,
        mounts=tuple(_mount(each) for each in given[MOUNTS].split(",")) if MOUNTS in given else (),
        gpus=choices.yes(given, GPUS, default=True),
    )
    for path in (container.folder, container.run_dir):
        if _NO_PATH.search(str(path)):
            raise ConfigError(
                f"a folder whose path has a colon or a comma cannot be mounted in a container: {path}",
                where=f"-o {IMAGE}",
                fix="use one whose path has neither",
            )
    return container


def _image(job: Job, runtime: str, runtimes: Sequence[str]) -> str:
    """The image as hosts get it: a file by its absolute path."""
    image = job.options[IMAGE]
    is_file = image.startswith(("/", "./", "../")) or image.endswith((".sif", ".sqsh"))
    if is_file and not _NO_PATH.search(image):
        if runtime in PULLED:
            raise ConfigError(
                f"{runtime} does not run image files, and {image} is one",
                where=f"-o {RUNTIME}={runtime}",
                fix=f"name an image that it has, as NAME:TAG, or leave -o {RUNTIME} out",
            )
        return os.path.normpath(job.folder / image)
    if not _NAME.fullmatch(image) and not _URI.fullmatch(image):
        raise ConfigError(
            f"{image!r} is no name of an image",
            where=f"-o {IMAGE}",
            fix="write it as REGISTRY/NAME:TAG, NAME@sha256:…, docker://NAME:TAG or /path/to/image.sif",
        )
    runs_names = runtime in (*PULLED, PYXIS) or (runtime == "any" and set(PULLED) & set(runtimes))
    if not _URI.fullmatch(image) and not runs_names:
        raise ConfigError(
            f"Apptainer does not know an image {image!r}",
            where=f"-o {IMAGE}={image}",
            fix=f"build a file of it once, `apptainer build image.sif docker://{image}`, and give its path",
        )
    if _URI.fullmatch(image) and runtime in PULLED:
        raise ConfigError(
            f"{runtime} does not know images by {image.partition(':')[0]}://",
            where=f"-o {IMAGE}={image}",
            fix=f"write it as {image.partition('://')[2]}",
        )
    return image


def _mount(word: str) -> str:
    """`word` as SOURCE:TARGET or SOURCE:TARGET:ro."""
    parts = word.split(":")
    mode = [parts.pop()] if parts[-1] in ("ro", "rw") else []
    if not 1 <= len(parts) <= 2 or not all(part.startswith("/") for part in parts):
        raise ConfigError(
            f"cannot read the mount {word!r}",
            where=f"-o {MOUNTS}",
            fix="write it as /path, /path:/there or /path:/there:ro",
        )
    return ":".join([parts[0], parts[-1], *mode])
