"""Where the runs of a trainer are kept, and how one that no one launched is resumed.

A script may make several trainers: what has one name (a directory, an address for snapshots) is the first one's, and
holds that of the others.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from pathlib import Path

from manyhosts.cluster.place import Place
from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.world import World
from manyhosts.config.settings import Settings
from manyhosts.errors import ConfigError, ManyhostsError
from manyhosts.launchers import script_imports
from manyhosts.records.run_directory import SEPARATE_DISKS, UNASKED, VARIABLE, RunDirectory, check_is_folder
from manyhosts.snapshot.separate_disks import own_disk
from manyhosts.training.consistency.same_given import compare_run_dirs
from manyhosts.training.process_session import ProcessSession


class RunPlace:
    """That of one trainer."""

    def __init__(self, session: ProcessSession, run_dir: str | Path | None) -> None:
        """`run_dir`: the script's own word for it."""
        given: object = run_dir
        if not isinstance(given, str | os.PathLike | None):
            raise ConfigError(
                f"run_dir is a {type(given).__name__}, and names a directory",
                where="mh.Trainer(run_dir=…)",
                fix='write run_dir="runs/mine"',
            )
        if given == "":
            raise ConfigError(
                "run_dir is empty", where="mh.Trainer(run_dir=…)", fix="name a directory, or leave it out: one is made"
            )
        self.number = session.next_number()
        self.script = _script()
        self._session, self._run_dir = session, run_dir
        self._chosen: Path | None = None
        """The directory, where no one has named one: every `fit` of this trainer continues in it."""

    @property
    def _names_directory(self) -> bool:
        """Whether the script's own word for the run directory counts."""
        return self._run_dir is not None and (not os.environ.get(VARIABLE) or UNASKED in os.environ)

    def compare(self, world: World) -> None:
        """See that the script names one run directory to all workers that share a disk. All of them call this.

        Raises:
            ConfigError: it names several.
        """
        own = str(self._run_dir) if self._names_directory else ""
        compare_run_dirs(world, own, disk=own_disk(world) if os.environ.get(SEPARATE_DISKS) else 0)

    def directory(self, world: World) -> RunDirectory:
        """The run directory, the same on every worker. All of them call this."""
        if self._run_dir is not None and self._names_directory:
            check_is_folder(str(self._run_dir), where="run_dir")
            return RunDirectory(Path(self._run_dir).absolute())
        if os.environ.get(VARIABLE):  # empty, it names none
            return RunDirectory(self._below(RunDirectory.choose(self.script).path.absolute()))
        if self._chosen is None:
            new = self._below(self._session.new_directory(self.script, once=_is_command())) if world.is_rank_0 else ""
            self._chosen = Path(gather_plain(world, str(new))[0])
        return RunDirectory(self._chosen)

    def trained(self) -> Path | None:
        """The directory that was named, where there are trained weights in it."""
        named = str(self._run_dir) if self._names_directory else os.environ.get(VARIABLE, "")
        path = Path(named).absolute() if self._names_directory else self._below(Path(named).absolute())
        found = RunDirectory(path)
        return path if named and (found.best.exists() or any(found.snapshots.glob("step-*"))) else None

    def _below(self, path: Path) -> Path:
        return path / f"trainer-{self.number}" if self.number > 1 and _is_command() else path

    def with_own_copy(self, settings: Settings) -> Settings:
        """`settings` with an address for snapshots that no other trainer of the script has."""
        to = settings.snapshots.to
        if to is None or self._session.is_first_at(to, self.number):
            return settings
        own = dataclasses.replace(settings.snapshots, to=f"{to.rstrip('/')}/trainer-{self.number}")
        return dataclasses.replace(settings, snapshots=own)

    def command(self, directory: RunDirectory) -> str:
        """What the user types to resume the run in `directory`; empty where no one has typed any."""
        if not _is_command():
            return ""
        words = shlex.join(sys.orig_argv)
        if "TORCHELASTIC_RUN_ID" in os.environ or Place.from_environment().size > 1:
            words = "(the command that has started this)"
        if self._names_directory:
            return words
        run_dir, here = directory.path if self.number == 1 else directory.path.parent, Path.cwd()
        short = run_dir.relative_to(here) if run_dir.is_relative_to(here) else run_dir
        return f"{VARIABLE}={shlex.quote(str(short))} {words}"


def add_command(error: BaseException, command: str) -> None:
    """Add to `error` the command that continues, wherever it is printed."""
    if not command or (isinstance(error, ManyhostsError) and error.exit_code == 2):
        return
    if isinstance(error, ManyhostsError):
        error.go_on = command
    else:
        error.add_note(f"manyhosts: resume with: {command}")


_OF_RUN = {"--workers", "--workers-per-node", "--nodes", "--hosts", "--set", "--on", "--resume", "--run-dir"}


def unread_options(script: Path) -> str:
    """What to say of options of `manyhosts run` that were typed after a script which no one launched, and which reads
    none; empty where there are none.
    """
    ours = [name for word in sys.argv[1:] if (name := word.partition("=")[0]) in _OF_RUN]
    is_launched = "TORCHELASTIC_RUN_ID" in os.environ or not _is_command()
    if not ours or is_launched or script_imports.reads_arguments(script, script.absolute().parent):
        return ""
    spec, here = getattr(sys.modules["__main__"], "__spec__", None), Path.cwd()
    path = script.absolute()
    typed = ["-m", spec.name] if spec else [str(path.relative_to(here) if path.is_relative_to(here) else path)]
    words = shlex.join(["manyhosts", "run", *sys.argv[1:], *typed])
    return f"{', '.join(ours)} had no effect, for {script.name} reads no arguments; to have it, type: {words}"


def _is_command() -> bool:
    """Whether this is a script that runs from its beginning to its end, no notebook."""
    return hasattr(sys.modules.get("__main__"), "__file__")


def _script() -> Path:
    """The script that the user started."""
    main = sys.modules.get("__main__")
    return Path(getattr(main, "__file__", None) or sys.argv[0] or "interactive")
