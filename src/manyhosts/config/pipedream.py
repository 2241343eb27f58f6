"""A pipeline that is not emptied between two updates, as a plain value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from manyhosts.config.pipelined import Pipeline
from manyhosts.errors import ConfigError

VERSIONS = ("two", "all", "one")


@dataclass(frozen=True, kw_only=True, slots=True)
class PipeDream(Pipeline):
    """A pipeline of stages, each of which updates its weights while other micro-batches are under way.

    Sources: Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training" (`all`); Narayanan et
    al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", arXiv:2006.09503 (`two`); Elam et al. 2026, "Breaking
    the Bubble: Asynchronous Pipeline Parallel Training with Bounded Weight Inconsistency", arXiv:2606.07881 (`one`).
    """

    name: ClassVar[str] = "pipedream"
    is_asynchronous: ClassVar[bool] = True

    versions: Literal["two", "all", "one"] = "two"
    """Which weights the two passes of a micro-batch compute with, and so how many versions a stage keeps. `two`: those
    of one update ago, on every stage alike; `all`: the newest of its forward pass, kept until its backward pass;
    `one`: the newest of each pass, so that nothing is kept, and at most one update lies between them."""
    accumulate: int = 4
    """Micro-batches behind one update. At least one fewer than there are stages, but with `all`, which takes any."""

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

    def check_goes_with(self, settings: Any) -> None:
        """Refuse what stages that update their weights by themselves cannot do.

        Raises:
            ConfigError: `settings` ask for it.
        """
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
                "stages cut the model, which virtual workers hold in full",
                'leave virtual_workers out, or choose "ddp"',
            ),
            (settings.compile, "compile", "a stage computes some blocks of the model alone", "leave compile out"),
            (
                settings.micro_batch_size is None,
                "micro_batch_size",
                "stages compute different micro-batches at a time, and nothing says how many samples one has",
                "give micro_batch_size: batch_size is what is trained on between two meetings of all stages",
            ),
            (
                settings.clip_gradients is not None,
                "clip_gradients",
                "a stage would have to wait for all others at each update to know the norm of the full gradient",
                'leave clip_gradients out, or use strategy="pipeline"',
            ),
            (
                settings.warmup is not None,
                "warmup",
                "a step is many updates, and the learning rate moves on only when all meet",
                "leave warmup out, or give a schedule, which moves with every meeting",
            ),
            (
                settings.balance == "speed",
                "balance",
                "all stages compute the same samples, each in blocks of its own",
                "leave balance out: the model is cut by measured time",
            ),
            (
                settings.on_bad_step in ("skip", "rewind"),
                "on_bad_step",
                "a step is many updates, and stages have built on a bad one when it is found",
                'leave it out, or use on_bad_step="stop"',
            ),
            (
                settings.batch_size_per_worker is not None,
                "batch_size_per_worker",
                "a batch is what is trained on between two meetings, and passes through all stages",
                "give batch_size",
            ),
        ]
        for is_asked, where, what, fix in refused:
            if is_asked:
                raise ConfigError(what, where=f"{where}, with strategy={self.name!r}", fix=fix)
