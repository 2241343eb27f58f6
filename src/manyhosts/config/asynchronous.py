"""The ways to train in which each micro-batch is an update of its own, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from manyhosts.config.kinds import check_kinds
from manyhosts.errors import ConfigError
from manyhosts.table import nearest

GIVEN_UP = ("workers", "micro", "resume")
"""What does not hold where updates come in the order of a clock: the same answer on any number of workers, with other
micro-batches, or a second time."""
PUSHED = ("none", "fp16", "bf16", "int8")
"""The compressions of what is pushed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterServer:
    """Servers on some of the workers keep parts of the model: all workers pull it, compute, and push gradients.

    Source: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server"; the bound: Ho et al. 2013,
    "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server".
    """

    name: ClassVar[str] = "parameter-server"
    in_step: ClassVar[str] = "ParameterServer(staleness=0)"

    staleness: int | None = None
    """How many micro-batches a worker may be ahead of the slowest one that still computes. None: any number; 0: no
    worker is ahead: each step is one update by the gradient of its entire batch, as in data parallelism."""
    servers: int | None = None
    """Into how many parts the parameters are cut, each kept by a server. None: one for each worker."""
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

    @property
    def is_asynchronous(self) -> bool:
        """Whether each micro-batch is an update of its own."""
        return self.staleness != 0

    @property
    def gives_up(self) -> tuple[str, ...]:
        """The promises that it does not keep: see `prove.promises`."""
        return GIVEN_UP if self.is_asynchronous else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Hogwild:
    """The workers of one machine update one model in shared memory, and no lock holds any of them up.

    Source: Niu, Recht, Ré and Wright 2011, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient
    Descent", arXiv:1106.5730.
    """

    name: ClassVar[str] = "hogwild"
    in_step: ClassVar[str] = ParameterServer.in_step
    gives_up: ClassVar[tuple[str, ...]] = GIVEN_UP
    is_asynchronous: ClassVar[bool] = True


def check_asynchronous(strategy: Any, settings: Any) -> None:
    """Refuse what a strategy cannot do of which a step is many updates, or one by servers.

    Raises:
        ConfigError: `settings` ask for it.
    """
    name, many = strategy.name, "a step is many updates"
    refused: list[tuple[bool, str, str, str]] = [
        (
            settings.precision == "fp16",
            "precision",
            "fp16 scales the loss, and the scale of one step would meet gradients of another",
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
    if strategy.is_asynchronous:
        refused += [
            (
                settings.micro_batch_size is None,
                "micro_batch_size",
                f"with strategy {name!r} {many}, and nothing says how many samples a micro-batch has",
                "give micro_batch_size: batch_size is what is trained on between two meetings of all workers",
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
                f"{many}, and the learning rate moves on only when all meet",
                "leave warmup out, or give a schedule, which moves with every meeting",
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
                "a batch is what all train on between two meetings, and no worker has a fixed part of it",
                "give batch_size",
            ),
        ]
    for is_asked, where, what, fix in refused:
        if is_asked:
            raise ConfigError(what, where=f"{where}, with strategy={name!r}", fix=fix)
