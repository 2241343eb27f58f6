"""The working directory as one small file, for engines that bring files to nodes but no folders."""

from __future__ import annotations

import gzip
import io
import os
import sys
import tarfile
from pathlib import Path

from manyhosts.control.job import Job
from manyhosts.errors import ConfigError
from manyhosts.hosts.files import IGNORE_FILE, Files


def pack(folder: Path, *, leave_out: Path, needed: str = "") -> bytes:
    """What a node needs of `folder`, as a compressed archive: the same bytes for the same files. See `Files.to_bring`.

    Raises:
        ConfigError: there is more than 2 GiB of it, or a file cannot be read.
    """
    packed = io.BytesIO()
    try:
        with (
            gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as squeezed,
            tarfile.open(fileobj=squeezed, mode="w") as archive,
        ):
            files = Files.to_bring(folder, leave_out=[leave_out], needed=needed)
            for note in files.notes():
                sys.stderr.write(f"manyhosts: {note}\n")
            for path in files.paths:
                archive.add(folder / path, arcname=path, recursive=False)
    except OSError as cause:
        raise ConfigError(
            f"a file of the working directory cannot be read: {cause.strerror}",
            where=str(cause.filename),
            fix=f"name it in {IGNORE_FILE} if the run does not need it",
        ) from cause
    return packed.getvalue()


def unpack(packed: Path, folder: Path) -> None:
    """Put what `pack` has packed into `folder`.

    Raises:
        ConfigError: it is missing or incomplete, or `folder` cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(packed, mode="r:gz") as archive:
            archive.extractall(folder, filter="data")
    except (OSError, EOFError, tarfile.TarError) as cause:
        raise ConfigError(
            f"the working directory cannot be unpacked: {cause}",
            where=f"{packed} to {folder}",
            fix="see that the disk of the node is not full, and start the run again",
        ) from cause


def program_there(job: Job) -> str:
    """What to run where the working directory was unpacked: a script by its path below that.

    Raises:
        ConfigError: the script is outside of what is packed.
    """
    if job.kind != "script":
        return job.program
    here, folder = os.path.abspath(job.folder / job.program), os.path.abspath(job.folder)
    if os.path.commonpath([here, folder]) != folder:
        raise ConfigError(
            f"the script must be inside the working directory, {job.folder}",
            where=job.program,
            fix="start from a folder that holds it",
        )
    return os.path.relpath(here, folder)
