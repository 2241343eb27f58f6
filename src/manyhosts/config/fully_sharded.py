"""Fully sharded data parallelism, as a plain value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from manyhosts.config.arguments import answering
from manyhosts.config.kinds import check_kinds
from manyhosts.config.mesh import Mesh
from manyhosts.config.strategy_settings import StrategySettings
from manyhosts.errors import ConfigError

_ZERO = "zero=3 lets go of parameters after each pass, zero=2 keeps them through a step, zero=1 gradients, too"
_OFFLOAD = "cpu_offload=True: parts, gradients and optimizer state lie in the memory of the host, and it steps them"
_FORMATS = 'mh.Trainer(precision="bf16"); here gather="bf16" and reduce="bf16" say what travels so'
OTHERWISE = {
    "offload": _OFFLOAD,
    "offload_policy": _OFFLOAD,
    "offload_optimizer": _OFFLOAD,
    "offload_param": _OFFLOAD,
    "reshard_after_forward": _ZERO,
    "sharding_strategy": _ZERO,
    "stage": _ZERO,
    "mp_policy": _FORMATS,
    "mixed_precision": _FORMATS,
    "param_dtype": 'gather="bf16", with mh.Trainer(precision="bf16")',
    "reduce_dtype": 'reduce="bf16"',
    "auto_wrap_policy": 'units="Block": the name of a class, or of modules',
    "ignored_modules": 'units="Block": what no unit holds is one more; every parameter is kept in parts',
    "mesh": 'shard="host": the workers of each host share a copy of the model; or a number of workers',
    "device_mesh": 'shard="host": the workers of each host share a copy of the model; or a number of workers',
}
"""Arguments that others have for it, and what to write here."""


@answering(OTHERWISE)
@dataclass(frozen=True, kw_only=True, slots=True)
class FSDP(StrategySettings):
    """Each worker keeps a part of parameters, gradients and optimizer state; it has a unit in full to compute it.

    Between two steps all is in parts, whatever `zero` is.
    """

    name: ClassVar[str] = "fsdp"
    axes: ClassVar[Mapping[str, str]] = {"shard": "shard"}

    units: str | Sequence[str] = ()
    """What is gathered and let go of together: names of modules, which may hold `*` (`blocks.*`), or of their classes
    (`Block`); several with commas between them. Empty: found from the model, see docs/large-models.md."""
    zero: int = 3
    """What a worker has in full during a step. `3`: nothing beyond the unit that it computes; `2`: all parameters, from
    the first forward pass to the last backward pass; `1`: all parameters, and the gradients of all micro-batches."""
    shard: int | Literal["host"] | None = None
    """How many workers, in the order of their ranks, share one copy of the model; the others hold further copies, whose
    gradients are summed. `host`: the workers of each host share one. None: all workers share one."""
    gather: Literal["exact", "bf16"] = "exact"
    """What gathered parameters are: `exact`: as they are kept; `bf16`: rounded, half the bytes, for precision bf16."""
    reduce: Literal["exact", "bf16"] = "exact"
    """How gradients travel: `exact`: as they are; `bf16`: rounded, half the bytes, and added in fp32."""
    cpu_offload: bool = False
    """Whether parts of parameters and gradients, and what the optimizer keeps of them, lie in the memory of the host
    while a GPU computes. Each unit's parts are copied to the GPU to be gathered, the sums of its gradients back, and
    the optimizer steps on the host."""

    def __post_init__(self) -> None:
        given: Any = self.units  # perhaps classes, as others take them
        words = [given] if isinstance(given, str | type) else given
        if isinstance(words, Sequence | set | frozenset):
            names = tuple(each.__name__ if isinstance(each, type) else each for each in words)
            if wrong := [each for each in names if not isinstance(each, str)]:
                raise ConfigError(
                    f"units holds a {type(wrong[0]).__name__}, and a unit is named",
                    where="FSDP(units=…)",
                    fix='give names of modules, or of their classes: units="Block"',
                )
            if not isinstance(given, str):
                object.__setattr__(self, "units", names)
        check_kinds(self, prefix="FSDP.")
        if self.zero not in (1, 2, 3):
            raise ConfigError(
                f"zero is {self.zero!r}, and there are three ways",
                where="FSDP(zero=…)",
                fix="set it to 1, 2 or 3: 3 takes the least memory, 1 sends the least",
            )
        shard = self.shard
        if shard not in (None, "host") and (not isinstance(shard, int) or isinstance(shard, bool) or shard < 1):
            raise ConfigError(
                f"shard is {shard!r}, but a copy of the model is shared by one worker or more",
                where="FSDP(shard=…)",
                fix='leave it out, or set it to "host" or to a number of workers such as 8',
            )
        for key in ("gather", "reduce"):
            if (value := getattr(self, key)) not in ("exact", "bf16"):
                raise ConfigError(f"{key} is {value!r}", where=f"FSDP({key}=…)", fix='choose "exact" or "bf16"')

    @property
    def patterns(self) -> tuple[str, ...]:
        """The words of `units`."""
        words = self.units.split(",") if isinstance(self.units, str) else self.units
        return tuple(word.strip() for word in words if word.strip())

    @property
    def by_layers(self) -> int:
        """Over how many workers each layer is cut."""
        return 1

    @property
    def variant(self) -> str:
        """What distinguishes it from others of this strategy."""
        return f"zero={self.zero}"

    @property
    def gathers_rounded(self) -> bool:
        """Whether passes see parameters of 16 bits, and workers keep them in fp32."""
        return self.gather == "bf16"

    def check_planned(self, mesh: Mesh | None) -> None:
        """Refuse what no plan knows the time and memory of.

        Raises:
            ConfigError: parts are to lie on the host.
        """
        if self.cpu_offload:
            raise ConfigError(
                "a plan does not know what parts in the memory of the host take: no one has measured it",
                where="FSDP(cpu_offload=True)",
                fix="plan it without: manyhosts plan --set strategy=fsdp; and compare with some steps of a run",
            )
        StrategySettings.check_planned(self, mesh)  # `super` does not know a class with slots

    def check_goes_with(self, settings: Any) -> None:
        """Refuse to gather in another format than the passes compute in.

        Raises:
            ConfigError: they do not compute in bf16.
        """
        if self.gather == "bf16" and settings.precision != "bf16":
            raise ConfigError(
                f"parameters are gathered in bf16, and precision is {settings.precision!r}",
                where="FSDP(gather=…)",
                fix='set precision="bf16", too, or leave gather out',
            )
