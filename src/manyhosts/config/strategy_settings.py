"""What the settings of every strategy answer, as most of them do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from manyhosts.config.mesh import Mesh
from manyhosts.errors import ConfigError

T = TypeVar("T")


class StrategySettings:
    """Derive from this, and answer what the strategy does in its own way."""

    __slots__ = ()
    name: ClassVar[Any]
    """Of the strategy."""
    axes: ClassVar[Mapping[str, str]] = {}
    """The axes that it puts workers along, and which setting says the size of each; see `mesh.axes_of`."""
    why_not_virtual: ClassVar[str] = "cuts the model and its sums"
    """What several workers do that virtual workers never do; empty where they can be shared out over them."""
    steps_some: ClassVar[bool] = False
    """Whether each worker steps some of the tensors, and others see what comes out."""
    serves: ClassVar[bool] = False
    """Whether what is stepped are other tensors than the model's own."""
    passes_copies: ClassVar[bool] = False
    """Whether passes go through copies of the parameters, which have none of their hooks."""
    drifts: ClassVar[bool] = False
    """Whether workers step alone for a while."""
    unplanned: ClassVar[str] = ""
    """The setting that says how many workers make a copy of the model, where a plan is for one copy over all."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """Which modules of the model are units, as the script has it; empty: they are found."""
        return ()

    @property
    def gathers_rounded(self) -> bool:
        """Whether passes see parameters of 16 bits, and workers keep them in fp32."""
        return False

    @property
    def keeps_some(self) -> bool:
        """Whether something of a step is kept besides the model, so that no step can be left out entirely."""
        return bool(getattr(self, "compression", "none") != "none")

    @property
    def about_weights(self) -> str:
        """What it does to what samples count, in a sentence; empty where it does nothing."""
        return ""

    def check_shared(self, settings: Any, workers: int) -> None:
        """See that so many workers, two or more, can do what else `settings` ask for.

        Raises:
            ConfigError: they cannot.
        """
        if settings.virtual_workers is not None and self.why_not_virtual:
            raise ConfigError(
                f"strategy {self.name!r} {self.why_not_virtual}, which virtual workers never do",
                where="virtual_workers",
                fix='leave virtual_workers out, or choose "ddp"',
            )
        if settings.on_bad_step == "skip" and self.keeps_some:
            raise ConfigError(
                "a bad step is left out by all, with nothing kept of it; compression and local steps keep some of it",
                where="on_bad_step",
                fix='leave compression and local steps out, or use on_bad_step="stop"',
            )

    def check_kept(self, name: str) -> None:
        """See that workers can keep a tensor of a callback, called `name`, alike.

        Raises:
            ConfigError: they cannot.
        """

    def check_thawed(self, name: str) -> None:
        """See that a parameter, called `name`, can be trained in a part of the run alone.

        Raises:
            ConfigError: it cannot.
        """

    def check_own_loop(self, *, is_shared: bool) -> None:
        """See that it sums the gradients of one optimizer at a time. `is_shared`: whether there may be several workers.

        Raises:
            ConfigError: it does not.
        """
        if is_shared or getattr(self, "many_updates", False):
            raise ConfigError(
                f"a loop of one's own runs with strategy='ddp', and this is {self.name!r}",
                where="strategy",
                fix="leave strategy out; virtual_workers=… goes with it",
            )

    # For plans.

    one_host: ClassVar[bool] = False
    """Whether all workers must be on one host, whose memory they share."""

    @property
    def block(self) -> int:
        """By which a plan has the number of workers divisible."""
        return 1

    @property
    def per_worker(self) -> int:
        """How many stages a worker has."""
        return 1

    def most_workers(self, blocks: int) -> int | None:
        """How many there can be for a model of so many `blocks`; None: as many as one likes."""
        return None

    def planned(self, mesh: Mesh | None) -> Any:
        """The same with the sizes of `mesh`, as far as a plan takes any."""
        return self

    def check_planned(self, mesh: Mesh | None) -> None:
        """See that a plan knows what it takes.

        Raises:
            ConfigError: it does not.
        """
        if not getattr(self, "planned_if_asked", True):
            raise ConfigError(
                f"a plan does not know yet what strategy {self.name!r} takes as it is set",
                where=f"strategy={self.name!r}",
                fix="run some steps of it: their times and bytes are in the run's summary",
            )
        if (key := self.unplanned) and getattr(self, key):
            raise ConfigError(
                f"the strategy has {key}={getattr(self, key)}, and a plan is for one copy over all workers",
                where=f"strategy={self.name!r}",
                fix=f"leave {key} out; with copies run some steps of it, whose times and bytes are in the run's "
                "summary",
            )
        if mesh is not None:
            raise ConfigError(
                f"the mesh has {mesh}, and a plan is for other numbers of workers, too",
                where="mesh",
                fix="leave it out; where workers keep the model in parts write --set shard=… in its place",
            )


def own_or(default: T, own: object) -> T:
    """The script's `own` settings, where they are of the kind of `default`, or else that."""
    return own if type(own) is type(default) else default


class Served(StrategySettings):
    """Where workers step what they keep for all."""

    __slots__ = ()
    steps_some: ClassVar[bool] = True
    serves: ClassVar[bool] = True
