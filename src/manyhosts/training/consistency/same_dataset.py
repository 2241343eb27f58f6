"""Whether a training set is changed while it is trained on: by one worker alone, or unseen by loader processes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch.utils.data import Dataset

from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.world import World
from manyhosts.events import LossLooked

_PLAIN = (bool, int, float, str, type(None))
_DEEPEST = 8


class DatasetWatch:
    """The plain values that a training set has as attributes, looked at with each validation and at the end."""

    def __init__(self, dataset: Dataset[Any] | None, world: World, *, elsewhere: bool) -> None:
        """`elsewhere`: it is read in loader processes, which have copies of it."""
        self.dataset, self.world, self.elsewhere = dataset, world, elsewhere
        self.first = self._now()
        self.is_told = False

    def _now(self) -> dict[str, str]:
        return dict(_plain_values(self.dataset, "", _DEEPEST))

    def look(self) -> None:
        """See whether any has changed on some workers alone, and say so once. Every worker calls this."""
        now = self._now()
        own = [name for name, value in now.items() if self.first.get(name) != value]
        if self.is_told or not self.world.any(bool(own)):
            return
        reported = gather_plain(self.world, now)
        differing = [name for name in reported[0] if any(each.get(name) != reported[0][name] for each in reported)]
        if not differing and not (self.elsewhere and own):
            return
        self.is_told = True
        name = (differing or own)[0]
        where = "on other workers it is another" if differing else "loader processes read copies made before"
        text = (
            f"the training set's {name} was changed while it was trained on, and {where}: change it on every worker "
            "alike, in a callback (listeners are called on the leader alone), with loader_workers=0"
        )
        self.world.notes.append(text)
        self.world.news.append(partial(LossLooked, outcome="not tried", text=text))


def _plain_values(held: object, path: str, deep: int) -> Iterator[tuple[str, str]]:
    if not deep or not hasattr(held, "__dict__"):
        return
    for name, value in vars(held).items():
        if isinstance(value, _PLAIN):
            yield f"{path}{name}", repr(value)
        elif isinstance(value, Dataset) or name in ("transform", "target_transform", "transforms"):
            yield from _plain_values(value, f"{path}{name}.", deep - 1)
