"""The ways to train in which a step is many updates, which wait for no worker, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from manyhosts.config.kinds import check_kinds
from manyhosts.config.pipelined import Pipeline
from manyhosts.config.strategy_settings import Served
from manyhosts.errors import ConfigError
from manyhosts.table import nearest

GIVEN_UP = ("workers", "micro", "resume")
"""What does not hold where updates come in the order of a clock: the same answer on any number of workers, with other
micro-batches, or a second time."""
PUSHED = ("none", "fp16", "bf16", "int8")
"""The compressions of what is pushed."""
VERSIONS = ("two", "all", "one")


def check_goes_with(strategy: Any, settings: Any) -> None:
    """Refuse what such a strategy cannot do.

    Raises:
        ConfigError: `settings` ask for it.
    """
    name, many = strategy.name, "a step is many updates"
    refused: list[tuple[bool, str, str, str]] = [
        (
            settings.precision == "fp16",
            "precision",
            "fp16 scales the loss, and the scale of one step would be applied to gradients of another",
            'set precision="bf16" or "fp32"',
        ),
        (
            settings.virtual_workers is not None,
            "virtual_workers",
            f"strategy {name!r} cuts no batch into parts that do not depend on who computes them",
            'leave virtual_workers out, or choose "ddp"',
        ),
        (settings.compile, "compile", "a compiled model was not tried with it", "leave compile out"),
    ]
    if strategy.many_updates:
        refused += [
            (
                settings.micro_batch_size is None,
                "micro_batch_size",
                f"with strategy {name!r} {many}, and nothing says how many samples a micro-batch has",
                "give micro_batch_size: batch_size is what is trained on between two synchronisations of all workers",
            ),
            (
                settings.clip_gradients is not None,
                "clip_gradients",
                f"{many}, and to know the norm of the entire gradient of one its workers would have to wait for others",
                f"leave clip_gradients out, or choose {strategy.in_step}",
            ),
            (
                settings.warmup is not None,
                "warmup",
                f"{many}, and the learning rate moves on only when all synchronise",
                "leave warmup out, or give a schedule, which moves with every synchronisation",
            ),
            (
                settings.balance == "speed",
                "balance",
                "no worker has a share of a batch that could follow its speed",
                "leave balance out: a free worker takes the next micro-batch, and stages are cut by measured time",
            ),
            (
                settings.on_bad_step in ("skip", "rewind"),
                "on_bad_step",
                f"{many}, and workers have built on a bad one when it is found",
                'leave it out, or use on_bad_step="stop"',
            ),
            (
                settings.batch_size_per_worker is not None,
                "batch_size_per_worker",
                "a batch is what all train on between two synchronisations, and no worker has a fixed part of it",
                "give batch_size",
            ),
        ]
    for is_asked, where, what, fix in refused:
        if is_asked:
            raise ConfigError(what, where=f"{where}, with strategy={name!r}", fix=fix)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterServer(Served):
    """Servers on some of the workers keep parts of the model: all workers pull it, compute, and push gradients.

    Source: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server"; the bound: Ho et al. 2013,
    "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server".
    """

    name: ClassVar[str] = "parameter-server"
    in_step: ClassVar[str] = "ParameterServer(staleness=0)"
    by_design: ClassVar[str] = "makes updates in the order in which gradients come"
    check_goes_with = check_goes_with

    staleness: int | None = None
    """How many micro-batches a worker may be ahead of the slowest one that still computes. None: any number; 0: no
    worker is ahead: each step is one update by the gradient of its entire batch, as in data parallelism."""
    servers: int | None = None
    """Into how many parts the parameters are cut, each kept by a server. None: one for each worker."""
    dedicated: bool = False
    """Whether the first workers, as many as `servers`, keep parameters and compute nothing. One always computes."""
    look_ahead: bool = True
    """Whether a worker that pulls is given the values that the pushes under way are expected to make, in place of the
    newest: each adds what the last update did. Its gradient is then about one of the values that it will change.
    With an optimizer that keeps nothing of its updates, as SGD without momentum, it is given the newest."""
    compression: str = "none"
    """How pushed gradients are made smaller: `none`, `fp16`, `bf16` or `int8`."""
    error_feedback: bool = True
    """Whether a worker keeps what a compression drops, and adds it to the next gradient that it pushes."""
    compress_above: int = 1024
    """Tensors with fewer elements (biases, norms) are pushed uncompressed."""

    def __post_init__(self) -> None:
        check_kinds(self, prefix="ParameterServer.")
        if self.compression not in PUSHED:
            raise ConfigError(
                f"compression is {self.compression!r}, and a push goes from one worker to one other, number by number: "
                "what takes all workers or entire matrices does not fit",
                where="ParameterServer(compression=…)",
                fix=f"{nearest(self.compression, PUSHED)}choose one of {', '.join(PUSHED)}",
            )
        if self.staleness is not None and self.staleness < 0:
            raise ConfigError(
                f"staleness is {self.staleness}, and no worker can be fewer than 0 micro-batches ahead",
                where="ParameterServer(staleness=…)",
                fix="give 0 (synchronous) or more, or None for no bound",
            )
        if self.servers is not None and self.servers < 1:
            raise ConfigError(
                f"servers is {self.servers}, but somebody must keep the parameters",
                where="ParameterServer(servers=…)",
                fix="give 1 or more, or leave it out",
            )

        if self.dedicated and (self.servers is None or not self.many_updates):
            raise ConfigError(
                "dedicated servers are workers that compute nothing, and "
                + ("no one says how many there are" if self.many_updates else "in step each worker has its share"),
                where="ParameterServer(dedicated=True)",
                fix="give servers, too" if self.many_updates else "leave it out, or give another staleness than 0",
            )

    @property
    def planned_if_asked(self) -> bool:
        """Whether a plan knows what it takes, and looks at it where the script asks for it."""
        return not self.dedicated

    @property
    def many_updates(self) -> bool:
        """Whether a step is many updates: on one worker, too."""
        return self.staleness != 0

    @property
    def gives_up(self) -> tuple[str, ...]:
        """The promises that it does not keep: see `prove.promises`."""
        return GIVEN_UP if self.many_updates else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Hogwild(Served):
    """The workers of one machine update one model in shared memory, and no lock holds any of them up.

    Source: Niu, Recht, Ré and Wright 2011, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient
    Descent", arXiv:1106.5730.
    """

    name: ClassVar[str] = "hogwild"
    in_step: ClassVar[str] = ParameterServer.in_step
    by_design: ClassVar[str] = ParameterServer.by_design
    gives_up: ClassVar[tuple[str, ...]] = GIVEN_UP
    many_updates: ClassVar[bool] = True
    planned_if_asked: ClassVar[bool] = True
    one_host: ClassVar[bool] = True
    compression: ClassVar[str] = "none"
    check_goes_with = check_goes_with


@dataclass(frozen=True, kw_only=True, slots=True)
class PipeDream(Pipeline):
    """A pipeline of stages, each of which updates its weights while other micro-batches are under way.

    Sources: Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training" (`all`); Narayanan et
    al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", arXiv:2006.09503 (`two`); Elam et al. 2026, "Breaking
    the Bubble: Asynchronous Pipeline Parallel Training with Bounded Weight Inconsistency", arXiv:2606.07881 (`one`).
    """

    name: ClassVar[str] = "pipedream"
    in_step: ClassVar[str] = 'strategy="pipeline"'
    by_design: ClassVar[str] = "makes an update of some micro-batches by a gradient of older weights"
    passes_copies: ClassVar[bool] = True
    many_updates: ClassVar[bool] = True
    planned_if_asked: ClassVar[bool] = True
    check_goes_with = check_goes_with

    versions: Literal["two", "all", "one"] = "two"
    """Which weights the two passes of a micro-batch compute with, and so how many versions a stage keeps. `two`: those
    of one update ago, on every stage alike; `all`: the newest of its forward pass, kept until its backward pass;
    `one`: the newest of each pass, so that nothing is kept, and at most one update lies between them."""
    accumulate: int = 4
    """Micro-batches of one update. At least one fewer than there are stages, but with `all`, which takes any."""

    def __post_init__(self) -> None:
        Pipeline.__post_init__(self)  # `super()` knows the class of before `slots`
        if self.versions not in VERSIONS:
            raise ConfigError(
                f"versions is {self.versions!r}",
                where="PipeDream(versions=…)",
                fix=f"choose one of {', '.join(VERSIONS)}",
            )
        if self.accumulate < 1:
            raise ConfigError(
                f"accumulate is {self.accumulate}, and an update is made by the gradient of some micro-batch",
                where="PipeDream(accumulate=…)",
                fix="give 1 or more",
            )
        if self.schedule != "1f1b":
            raise ConfigError(
                f"schedule is {self.schedule!r}, and which weights a pass finds is known of the order 1f1b alone",
                where="PipeDream(schedule=…)",
                fix='leave schedule out, or use strategy="pipeline"',
            )

    @property
    def gives_up(self) -> tuple[str, ...]:
        """The promises that it does not keep: see `prove.promises`. Two versions are the same ones on every stage."""
        return ("micro",) if self.versions == "two" else ("workers", "micro")

    def updates(self, micro_batches: int) -> int:
        """How many updates a step of so many micro-batches makes."""
        return -(-micro_batches // self.accumulate)

    def most_versions(self, stage: int, stages: int) -> int:
        """How many versions of its weights a stage keeps at a time, the newest among them."""
        if self.versions == "all":
            return 1 - (stage + 1 - stages) // self.accumulate  # those of the micro-batches under way, rounded up
        return 1 if self.versions == "one" else 2

    def check_stages(self, stages: int) -> None:
        """See that so many stages keep no more versions, and no older ones, than was asked for.

        Raises:
            ConfigError: they would.
        """
        if self.versions != "all" and self.accumulate < stages - 1:
            raise ConfigError(
                f"{stages} stages have up to {stages - 1} micro-batches under way, and with an update after each "
                f"{self.accumulate} they need more versions than versions={self.versions!r} has",
                where="PipeDream(accumulate=…)",
                fix=f'set accumulate={stages - 1} or more, or versions="all"',
            )
