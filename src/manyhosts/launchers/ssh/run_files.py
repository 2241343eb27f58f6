"""What a run has in its working directory here, and hosts of ssh are to have there: files, the script, data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from manyhosts.control.display import Display
from manyhosts.control.job import Job
from manyhosts.hosts import data, sync, version_check
from manyhosts.hosts.containers import Container
from manyhosts.hosts.data import Data
from manyhosts.hosts.files import Files
from manyhosts.launchers.ssh.host import Host, of_all
from manyhosts.units import bytes_in_words

_WORTH_A_WORD_BYTES = 10_000_000


class RunFiles:
    """Those of one run; none before `choose`."""

    def __init__(self, job: Job, container: Container | None, display: Display) -> None:
        self._job, self._container, self._display = job, container, display
        self._files: Files | None = None
        self._data: Data | None = None

    def choose(self) -> None:
        """See what there is here."""
        job = self._job
        if job.sync:
            needed = job.program if job.kind == "script" else ""
            leave_out = [job.run_dir, *(job.folder / path for path in job.bring)]
            leave_out += [Path(self._container.image)] if self._container and self._container.is_file else []
            self._files = Files.to_bring(job.folder, leave_out=leave_out, needed=needed)
        if job.bring:
            self._data = Data.read(job.folder, job.bring, self._display.warn)

    def bring(self, lacking: Sequence[Host]) -> None:
        """Bring hosts what they lack, all at the same time.

        Raises:
            LaunchError: a host does not take it.
        """
        if lacking and self._files is not None:
            for note in self._files.notes():
                self._display.warn(f"manyhosts: {note}")
            if self._files.size > _WORTH_A_WORD_BYTES:
                names, size = ", ".join(host.name for host in lacking), bytes_in_words(self._files.size)
                words = f"manyhosts: {len(self._files.paths)} files, {size}: what {names} lack is brought there"
                self._display.warn(words)
        of_all(lacking, self.bring_to)

    def bring_to(self, host: Host) -> None:
        """Bring one host what it lacks.

        Raises:
            LaunchError: it does not take it.
        """
        if self._files is not None:

            def report(gone: int, total: int) -> None:
                at = f"{bytes_in_words(gone)} of {bytes_in_words(total)}"
                self._display.warn(f"manyhosts: {at} are on {host.name}")

            sync.bring(host.connection, self._files, progress=report)
        if self._data is not None:
            data.bring(host.connection, host.facts["executable"], self._data, self._display.warn)

    def _has_script(self, host: Host) -> bool:
        return self._job.kind != "script" or bool(host.connection.ask("exists", path=self._script))

    @property
    def _script(self) -> str:
        """Where it is to be on every host."""
        return str(self._job.folder / self._job.program)

    def see_script(self, hosts: Sequence[Host]) -> None:
        """See that all of `hosts` have the script.

        Raises:
            LaunchError: one has not.
        """
        names = [host.name for host in hosts]
        version_check.see_that_all_have(self._script, names, of_all(hosts, self._has_script), synced=self._job.sync)

    def see_that_none_has_changed(self) -> None:
        """See that a host which comes late is brought what the others were.

        Raises:
            LaunchError: a file is another one by now.
        """
        if self._files is not None:
            self._files.see_that_none_has_changed()
