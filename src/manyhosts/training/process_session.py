"""What all trainers of a process share: the workers, the calls they make together, and who was the first anywhere."""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from manyhosts.cluster.membership import Membership
from manyhosts.cluster.place import Place
from manyhosts.communication.world import World
from manyhosts.elastic.session import CollectiveCalls
from manyhosts.errors import ConfigError
from manyhosts.records.run_directory import RunDirectory
from manyhosts.training.telemetry.watching import Watcher


class ProcessSession:
    """Begins with the first trainer of a process, and lasts until `close`, or until the process ends."""

    _current: ProcessSession | None = None

    def __init__(self) -> None:
        self.watcher: Watcher | None = None
        """What sees every step of its trainers that are made from now on."""
        self.in_place_of_fit: Callable[[Any], NoReturn] | None = None
        """Called with the `Trainer` by its `fit`, which goes no further: see `trained_script`."""
        self.in_step = False
        """Whether a step of a script's own loop is under way."""
        self.next_number = itertools.count(1).__next__
        """That of a new trainer: each has a run directory of its own."""
        self._first_at: dict[str, int] = {}
        """Address for snapshots → the number of the trainer that had it first."""
        self._directories: dict[Path, Path] = {}
        """Working directory → the run directory that was made below it, where no one has named one."""
        self._worlds: list[World] = []
        self._calls: CollectiveCalls | None = None
        atexit.register(self.close)

    @classmethod
    def current(cls) -> ProcessSession:
        """That of this process; a new one after `close`."""
        if ProcessSession._current is None:
            ProcessSession._current = cls()
        return ProcessSession._current

    @classmethod
    @contextmanager
    def separate(cls) -> Iterator[None]:
        """Within, trainers belong to a session of their own, which is closed at the end."""
        before, cls._current = cls._current, None
        try:
            yield
        finally:
            cls.current().close()
            cls._current = before

    def refuse_in_step(self, call: str) -> None:
        """See that what all workers do together, one call after another, is not called in the middle of one.

        Raises:
            ConfigError: it is.
        """
        if self.in_step:
            raise ConfigError(
                f"{call} is called inside of a step, which may be made again and can hold no other training",
                where="run.fit(step)",
                fix="call it outside of the step: a run is made once, before run.fit",
            )

    def world(self, backend: str | None) -> World:
        """The workers that this process belongs to. Workers that may change are the same for all its trainers."""
        if self._worlds and self._worlds[0].membership is not None:
            return self._worlds[0]
        place = Place.from_environment()
        if torch.distributed.is_initialized() and (made := torch.distributed.get_world_size()) != place.size:
            raise ConfigError(
                f"the script has made a group of {made} processes, and this one was started as 1 of {place.size}",
                where="init_process_group",
                fix="leave init_process_group and mp.spawn out, and start the workers: manyhosts run --workers "
                f"{made} SCRIPT",
            )
        world = World(place, backend=backend, membership=Membership.from_environment())
        self._worlds.append(world)
        return world

    def collective_calls(self, world: World) -> CollectiveCalls:
        """What the workers of `world` do together; where they never change, no one counts it."""
        if self._calls is None or self._calls.world is not world:
            self._calls = CollectiveCalls(world)
        return self._calls

    def is_first_at(self, address: str, number: int) -> bool:
        """Whether no other trainer than `number` has kept its snapshots at `address` before it."""
        return self._first_at.setdefault(address, number) == number

    def new_directory(self, script: Path, *, once: bool) -> Path:
        """A directory for a run of `script`, where no one has named one. `once`: the same for the entire session."""
        here = Path.cwd()
        if here not in self._directories or not once:
            self._directories[here] = RunDirectory.choose(script).path.absolute()
        return self._directories[here]

    def close(self) -> None:
        """Take the groups of workers down. Safe to call twice; trainers that were made before are of no use then."""
        atexit.unregister(self.close)
        if ProcessSession._current is self:
            ProcessSession._current = None
        for world in self._worlds:
            world.leave()
        self._worlds, self._calls = [], None
