"""The ways to train in which each micro-batch is an update of its own, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from manyhosts.config.kinds import check_kinds
from manyhosts.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterServer:
    """Servers on some of the workers keep parts of the model: all workers pull it, compute, and push gradients.

    Source: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server"; the bound: Ho et al. 2013,
    "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server".
    """

    name: ClassVar[str] = "parameter-server"

    staleness: int | None = None
    """How many micro-batches a worker may be ahead of the slowest one that still computes. None: any number; 0: no
    worker is ahead: each step is one update by the gradient of its whole batch, as in data parallelism."""
    servers: int | None = None
    """Into how many parts the parameters are cut, each kept by a server. None: one for each worker."""
    look_ahead: bool = True
    """Whether a worker that pulls is given the values that the pushes under way are expected to make, in place of the
    newest: each adds what the last update did. Its gradient is then about one of the values that it will change."""
    compression: str = "none"
    """How pushed gradients are made smaller: `none`, `fp16`, `bf16` or `int8`."""
    error_feedback: bool = True
    """Whether a worker keeps what a compression drops, and adds it to the next gradient that it pushes."""
    compress_above: int = 1024
    """Tensors with fewer elements (biases, norms) are pushed uncompressed."""

    def __post_init__(self) -> None:
        check_kinds(self, prefix="ParameterServer.")
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

    def check_goes_with(self, settings: Any) -> None:
        """Refuse what cannot be done beside it; see `check_asynchronous`."""
        check_asynchronous(self, settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hogwild:
    """The workers of one machine update one model in shared memory, and no lock holds any of them up.

    Source: Niu, Recht, Ré and Wright 2011, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient
    Descent", arXiv:1106.5730.
    """

    name: ClassVar[str] = "hogwild"
    is_asynchronous: ClassVar[bool] = True

    def check_goes_with(self, settings: Any) -> None:
        """Refuse what cannot be done beside it; see `check_asynchronous`."""
        check_asynchronous(self, settings)


def check_asynchronous(strategy: ParameterServer | Hogwild, settings: Any) -> None:
    """Refuse what such a strategy cannot do.

    Raises:
        ConfigError: `settings` ask for it.
    """
    name = strategy.name
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
    each = "each micro-batch is an update of its own"
    if strategy.is_asynchronous:
        refused += [
            (
                settings.micro_batch_size is None,
                "micro_batch_size",
                f"with strategy {name!r} {each}, and nothing says how many samples that are",
                "give micro_batch_size: batch_size is what is trained on between two meetings of all workers",
            ),
            (
                settings.clip_gradients is not None,
                "clip_gradients",
                f"{each}, whose gradient no worker but one has seen",
                "leave clip_gradients out, or choose ParameterServer(staleness=0)",
            ),
            (
                settings.warmup is not None,
                "warmup",
                f"{each}, and the learning rate moves on only when all meet",
                "leave warmup out, or give a schedule, which moves with every meeting",
            ),
            (
                settings.balance == "speed",
                "balance",
                "micro-batches go to whoever is free, so shares follow speed already",
                "leave balance out",
            ),
            (
                settings.on_bad_step in ("skip", "rewind"),
                "on_bad_step",
                f"{each}, and others have built on a bad one when it is found",
                'leave it out, or use on_bad_step="stop"',
            ),
            (
                settings.batch_size_per_worker is not None,
                "batch_size_per_worker",
                "micro-batches go to whoever is free, so nobody knows how many samples a worker has",
                "give batch_size",
            ),
        ]
    for is_asked, where, what, fix in refused:
        if is_asked:
            raise ConfigError(f"{what}", where=f"{where}, with strategy={name!r}", fix=fix)
