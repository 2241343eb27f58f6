"""The ways to spread a step over workers, as plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

from manyhosts.config.arguments import OF_DDP, answering
from manyhosts.config.asynchronous import Hogwild, ParameterServer, PipeDream
from manyhosts.config.compression import check_name
from manyhosts.config.fully_sharded import FSDP
from manyhosts.config.kinds import check_kinds
from manyhosts.config.local_steps import DiLoCo, LocalSGD, check_inside_node
from manyhosts.config.mesh import OF_MESH, Mesh, axes_of
from manyhosts.config.pipelined import BY_MEMORY, Pipeline
from manyhosts.config.sharded_layers import ShardedLayers
from manyhosts.config.strategy_settings import StrategySettings, own_or
from manyhosts.config.tensor_cut import Tensor
from manyhosts.errors import ConfigError
from manyhosts.table import nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class Single(StrategySettings):
    """One process; the choice of a run with one worker."""

    name: ClassVar[str] = "single"

    def check_shared(self, settings: Any, workers: int) -> None:
        """Refuse several workers.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"strategy 'single' trains in one process, but there are {workers} workers",
            where="strategy",
            fix='leave strategy out, or choose "ddp"',
        )


@answering(OF_DDP)
@dataclass(frozen=True, kw_only=True, slots=True)
class DDP(StrategySettings):
    """Every worker holds the entire model; gradients are summed over all of them in each step."""

    name: ClassVar[str] = "ddp"
    axes: ClassVar[Mapping[str, str]] = {"replicate": ""}
    why_not_virtual: ClassVar[str] = ""

    bucket_mb: float = 25.0
    """Gradients travel in buckets of about this many megabytes, while the backward pass still runs."""
    compression: str | Callable[..., Any] = "none"
    """How gradients are made smaller on their way: `none`, `fp16`, `bf16`, `int8`, `powersgd`, `topk`, `auto` (by
    measuring network and model), the name of a way that another package adds, or a function of your own (see
    `manyhosts.communication.compression.exchange`)."""
    powersgd_rank: int = 8
    """Columns of the two thin matrices in whose place PowerSGD sends a gradient."""
    topk_fraction: float = 0.01
    """The share of the numbers that `topk` sends."""
    error_feedback: bool = True
    """Whether what a compression drops is kept and added to the next step's gradient."""
    compression_warmup: int = 0
    """Steps at the start of a run whose gradients travel uncompressed."""
    compress_above: int = 1024
    """Tensors with fewer elements (biases, norms) travel uncompressed."""
    inside_node: Literal["exact", "alike"] = "exact"
    """What the workers of one node do among themselves, where there are several nodes of several workers each:
    `exact`: exchange every bit, and compress between nodes only; `alike`: compress as between nodes."""
    compression_errors: bool = False
    """Log for each layer how large what is kept back is, relative to the gradient: `compression_error/LAYER`."""

    def __post_init__(self) -> None:
        check_kinds(self, prefix="DDP.")
        if isinstance(self.compression, str):
            check_name(self.compression)
        if not 0 < self.topk_fraction <= 1:
            raise ConfigError(
                f"topk_fraction is {self.topk_fraction}, but it is a share of all numbers",
                where="DDP(topk_fraction=…)",
                fix="give a number above 0 and at most 1, such as 0.01",
            )
        for key, least in (("powersgd_rank", 1), ("compression_warmup", 0), ("compress_above", 0)):
            if getattr(self, key) < least:
                raise ConfigError(
                    f"{key} is {getattr(self, key)}", where=f"DDP({key}=…)", fix=f"set it to {least} or more"
                )
        check_inside_node("DDP", self.inside_node)
        if self.bucket_mb <= 0:
            raise ConfigError(
                f"bucket_mb is {self.bucket_mb}, but a bucket must hold something",
                where="DDP(bucket_mb=…)",
                fix="leave it out, or give a number of megabytes such as 25",
            )

    def check_own_loop(self, *, is_shared: bool) -> None:
        """Refuse to compress.

        Raises:
            ConfigError: that is asked for.
        """
        if self.compression != "none":
            raise ConfigError(
                "a loop of one's own does not compress gradients yet", where="compression", fix="leave compression out"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Auto(StrategySettings):
    """The simplest way that fits into the memory of every worker, decided as a run begins: the model uncut, or cut."""

    name: ClassVar[str] = "auto"


Spread = DDP | FSDP | Pipeline | Tensor | ShardedLayers
Strategy = Single | Spread | LocalSGD | DiLoCo | ParameterServer | Hogwild | PipeDream | Auto
BY_NAME: dict[str, type[Strategy]] = {kind.name: kind for kind in get_args(Strategy)}


_COMBINED: dict[str, Strategy] = {
    "ddp+tensor": Tensor(size=OF_MESH),
    "ddp+pipeline": Pipeline(stages=OF_MESH),
    "model": Pipeline(cuts=BY_MEMORY),
    "fsdp+diloco": DiLoCo(shard=OF_MESH),
    "fsdp+local-sgd": LocalSGD(shard=OF_MESH),
}
"""Names with settings of their own. Copies of a model that several workers compute or keep together, where the mesh
says how many; and a model whose layers lie on several workers, so that each holds as little as can be."""
_BY_AXIS = {"shard": "fsdp", "tensor": "ddp+tensor", "pipeline": "ddp+pipeline", "replicate": "ddp"}
"""The strategy that puts workers along each axis of a mesh."""


CUTS = (FSDP.name, ShardedLayers.name)
"""Those whose workers hold parts of the model, and read samples of their own."""
OF_SAME_SAMPLES = (Tensor.name, Pipeline.name)
"""Those whose workers hold parts of the model, and compute the same samples."""


def cutting(own: Strategy | None = None) -> list[FSDP]:
    """The ways to cut a model, from the one that sends least. `own`: its settings, where it is one, but for these."""
    return [replace(own_or(FSDP(), own), zero=zero) for zero in (1, 2, 3)]


def of_same_samples(own: Strategy | None = None) -> list[Tensor | Pipeline]:
    """The same whose workers compute together; of a pipeline the stages hold as little as can be."""
    return [own_or(Tensor(), own), own_or(Pipeline(cuts=BY_MEMORY), own)]


def kind_of(name: str) -> type[Strategy] | None:
    """The class of the settings of that strategy, or combination; None for one that is not known here."""
    return type(_COMBINED[name]) if name in _COMBINED else BY_NAME.get(name)


def check_goes_with(strategy: Strategy, settings: Any) -> None:
    """See that a strategy can do what else `settings` ask for.

    Raises:
        ConfigError: it cannot.
    """
    _check_axes(strategy, settings.mesh)
    if hasattr(strategy, "check_goes_with"):
        strategy.check_goes_with(settings)


def _check_axes(strategy: Strategy, mesh: Mesh | None) -> None:
    known = ("replicate", *axes) if (axes := axes_of(strategy)) else ()
    for name, size in mesh.sizes.items() if mesh is not None else ():
        if size > 1 and name not in known:
            raise ConfigError(
                f"the mesh has {name}={size}, and strategy {strategy.name!r} puts no workers along that axis",
                where=f"mesh.{name}",
                fix=f"leave it out, or choose strategy={_BY_AXIS[name]!r}; besides replicate a mesh has one of shard, "
                "tensor and pipeline, or shard and tensor (strategy='fsdp+tensor')",
            )


def many_updates(strategy: Strategy) -> bool:
    """Whether a step is many updates: on one worker, too."""
    return getattr(strategy, "many_updates", False)


def gives_up(strategy: Strategy) -> tuple[str, ...]:
    """The promises that a strategy does not keep, by its design: see `prove.promises`."""
    return getattr(strategy, "gives_up", ())


def named(strategy: str | Strategy | Mesh) -> Strategy:
    """The strategy of a name, with its defaults, or a mesh; a value passes through.

    Raises:
        ConfigError: no strategy has that name.
    """
    if isinstance(strategy, Mesh):
        axes = [axis for axis, size in strategy.sizes.items() if size and axis != "replicate"]
        return named(ShardedLayers.name if {*ShardedLayers.axes} <= {*axes} else _BY_AXIS[(*axes, "replicate")[0]])
    if not isinstance(strategy, str):
        return strategy
    known, parts = (*BY_NAME, *_COMBINED), sorted(strategy.split("+"))
    name = next((each for each in known if sorted(each.split("+")) == parts), None)
    if name is None:
        raise ConfigError(
            f"there is no strategy named {strategy!r}",
            where="strategy",
            fix=f"{nearest(strategy, known)}known: {', '.join(known)}",
        )
    return _COMBINED[name] if name in _COMBINED else BY_NAME[name]()
