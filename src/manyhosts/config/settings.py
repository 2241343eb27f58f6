"""Every plain setting of a training run: what the script asked, laid over by `--set`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from manyhosts.config.kinds import check_kinds
from manyhosts.config.mesh import Mesh
from manyhosts.config.snapshots import Snapshots
from manyhosts.config.stopping import Best, EarlyStopping
from manyhosts.config.strategies import Single, Strategy, check_goes_with
from manyhosts.errors import ConfigError
from manyhosts.table import nearest
from manyhosts.units import Duration

ActivationCheckpointing = float | Literal["blocks", "all"] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The plain values of one `Trainer`. Recorded in `run.json`; each can be changed by `--set key=value`."""

    duration: str = "1 epoch"
    """How long `fit` trains: `"20 epochs"`, `"500 steps"`, `"2h30m"`, `"20 epochs or 2h"`."""
    batch_size: int | None = None
    """Samples of one optimizer step, over all workers."""
    batch_size_per_worker: int | None = None
    """The other way: samples per worker and step, so that the batch grows with the workers."""
    micro_batch_size: int | None = None
    """Most samples in one forward pass. None: all that a worker has in a step."""
    evaluation_batch_size: int | None = None
    """Most samples in one forward pass of validation and test, on each worker; else `micro_batch_size`, or a batch."""
    drop_last: bool = False
    shuffle: bool = True
    loader_workers: int | Literal["auto"] = 0
    """Processes per worker that fetch samples. 0: the worker fetches its own. `auto`: as many as the first batches show
    are needed."""
    lr: float | None = None
    """Overrides the learning rate of every parameter group. None: as the script made the optimizer."""
    lr_scaling: Literal["sqrt", "linear"] | None = None
    """What the learning rate does as `batch_size_per_worker` makes the batch grow with the workers."""
    warmup: str | None = None
    """The learning rate rises linearly from 0 over this duration (epochs or steps)."""
    strategy: Strategy = field(default_factory=Single)
    mesh: Mesh | None = None
    """How many workers there are along each axis. None: as the strategy says."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    clip_gradients: float | None = None
    """Largest norm of the gradient over all parameters."""
    batch_norm: Literal["global", "local"] = "global"
    """Whether BatchNorm's statistics are those of the batch over all workers, or of each worker's part."""
    snapshots: Snapshots = field(default_factory=Snapshots)
    validate_every: str = "1 epoch"
    early_stopping: EarlyStopping | None = None
    best: Best | None = None
    """By which metric the best model is chosen. None: by that of early stopping, or the loss."""
    schedule_every: Literal["step", "epoch"] = "step"
    """How often the learning-rate schedule moves on."""
    seed: int = 0
    virtual_workers: int | None = None
    """Cut each batch into so many parts, on however many workers: the same bits on 1 to that many workers."""
    balance: Literal["even", "speed"] = "even"
    """How a batch is cut over the workers: into equal parts, or by how fast each is found to be while it trains; with
    virtual workers entire parts move, and no bit changes."""
    audit: float | None = None
    """The share of the virtual workers' parts that another worker computes again, to compare the bits."""
    weight: Literal["samples"] | None = None
    """`samples`: pieces count by their samples in the mean over a batch, whatever the loss looks like. None: as the
    script says, or as the loss is known or found to be."""
    look_every: int = 800
    """One batch in so many is computed in two cuts and compared, where batches are cut. 0: only at the start."""
    threads: int | None = None
    """Threads that torch computes with in one worker. None: torch's own choice; 1 with virtual workers."""
    on_bad_step: Literal["stop", "skip", "rewind"] = "stop"
    """What to do about a loss or gradient that is NaN or infinite: stop; leave that step's update out and continue;
    or go back to the last snapshot, and leave its samples out when they come again."""
    compile: bool = False
    activation_checkpointing: ActivationCheckpointing = None
    """What is computed again in the backward pass, to keep less: `blocks` (the repeated ones), such a fraction of them,
    or `all` modules of several layers. None: nothing."""
    backend: Literal["gloo", "nccl"] | None = None
    """None: Gloo for CPU, NCCL for GPU."""
    record_samples: bool = False
    """Write which samples each step took, by index, to `logs/samples-<rank>.jsonl`."""
    keep_pictures: int = 0
    """How many samples of the first batch are written to disk for `manyhosts report`, where they are pictures."""

    def __post_init__(self) -> None:
        check_kinds(self)
        for key in (*_COUNTS, *_ABOVE_ZERO):
            check_size(key, getattr(self, key))
        if self.loader_workers != "auto" and (not isinstance(self.loader_workers, int) or self.loader_workers < 0):
            raise ConfigError(
                f"loader_workers is {self.loader_workers!r}",
                where="loader_workers",
                fix='set it to 0 or more, or to "auto"',
            )
        if self.keep_pictures < 0:
            raise ConfigError(
                f"keep_pictures is {self.keep_pictures}", where="keep_pictures", fix="set it to 0 (none) or more"
            )
        if self.look_every < 0:
            raise ConfigError(
                f"look_every is {self.look_every}", where="look_every", fix="set it to 0 (never) or more steps"
            )
        _one_of("precision", self.precision, ("fp32", "bf16", "fp16"))
        _one_of("batch_norm", self.batch_norm, ("global", "local"))
        _one_of("balance", self.balance, ("even", "speed"))
        _one_of("lr_scaling", self.lr_scaling, ("sqrt", "linear", None))
        _one_of("on_bad_step", self.on_bad_step, ("stop", "skip", "rewind"))
        _one_of("schedule_every", self.schedule_every, ("step", "epoch"))
        _one_of("weight", self.weight, ("samples", None))
        if str(self.backend) == "smddp":
            raise ConfigError(
                "backend is 'smddp', Amazon's own collectives, over which a Trainer does not talk",
                where="backend",
                fix="leave backend out: NCCL uses EFA by itself where the image has its plugin (aws-ofi-nccl)",
            )
        _one_of("backend", self.backend, ("gloo", "nccl", None))
        self._check_activation_checkpointing()
        self._check_audit()
        self._check_balance()
        check_goes_with(self.strategy, self)
        self._check_batch()
        self._check_durations()

    def _check_activation_checkpointing(self) -> None:
        asked = self.activation_checkpointing
        is_fraction = isinstance(asked, int | float) and not isinstance(asked, bool) and 0 < asked <= 1
        if not (asked in (None, "blocks", "all") or is_fraction):
            raise ConfigError(
                f"activation_checkpointing is {asked!r}",
                where="activation_checkpointing",
                fix='write "blocks", "all", or a fraction of the blocks such as 0.5; or leave it out',
            )

    def _check_audit(self) -> None:
        if self.audit is None:
            return
        if not 0 < self.audit <= 1:
            raise ConfigError(
                f"audit is {self.audit}, but it is the share of the parts that are computed again",
                where="audit",
                fix="give a number above 0 and at most 1, such as 0.01, or leave it out",
            )
        if self.virtual_workers is None:
            raise ConfigError(
                "audit compares the bits of parts that two workers compute, and only virtual workers have such parts",
                where="audit",
                fix="give virtual_workers, too (as many as the most workers you will have), or leave audit out",
            )
        if self.snapshots.to is not None:
            raise ConfigError(
                "audit sets snapshots aside that may hold errors, and cannot do so in a remote copy",
                where="audit",
                fix="leave snapshots.to or audit out",
            )

    def _check_balance(self) -> None:
        if self.balance == "speed" and self.batch_norm == "local" and self.virtual_workers is None:
            raise ConfigError(
                "batch_norm='local' lets BatchNorm see each worker's own part, and with balance='speed' its size "
                "follows the machine's speed: that would change the model",
                where="balance",
                fix='leave batch_norm out (BatchNorm then sees the entire batch), or use balance="even"',
            )

    def _check_batch(self) -> None:
        if self.batch_size is None and self.batch_size_per_worker is None:
            raise ConfigError(
                "no batch size is given",
                where="mh.Data(batch_size=…)",
                fix="say batch_size=256 (over all workers), or batch_size_per_worker=32 (grows with them)",
            )
        if self.batch_size is not None and self.batch_size_per_worker is not None:
            raise ConfigError(
                f"both batch_size={self.batch_size} and batch_size_per_worker={self.batch_size_per_worker} are given",
                where="mh.Data(…)",
                fix="keep one: batch_size is over all workers, batch_size_per_worker is each one's",
            )
        if self.lr_scaling is not None and self.batch_size_per_worker is None:
            raise ConfigError(
                f"lr_scaling={self.lr_scaling!r} has nothing to follow: the batch does not grow with the workers",
                where="lr_scaling",
                fix="leave it out, or give mh.Data(batch_size_per_worker=…) in place of batch_size",
            )

    def _check_durations(self) -> None:
        Duration.parse(self.duration, where="fit(…)")
        Duration.parse(self.validate_every, where="validate_every")
        if self.warmup is not None and Duration.parse(self.warmup, where="warmup").seconds is not None:
            raise ConfigError(
                f"warmup {self.warmup!r} is a time, but the learning rate must not depend on how fast a machine is",
                where="warmup",
                fix='give epochs or steps, such as warmup="5 epochs"',
            )


_COUNTS = (
    "batch_size", "batch_size_per_worker", "micro_batch_size", "evaluation_batch_size", "virtual_workers", "threads",
)  # fmt: skip
_ABOVE_ZERO = ("lr", "clip_gradients")


def check_size(key: str, value: float | None) -> None:
    """See that a setting that counts something is at least 1, and a rate or a norm above 0 and finite.

    Raises:
        ConfigError: it is not.
    """
    if value is None:
        return
    if key in _COUNTS and value < 1:
        raise ConfigError(f"{key} is {value}", where=key, fix="set it to 1 or more")
    if key in _ABOVE_ZERO and not 0 < value < math.inf:
        raise ConfigError(f"{key} is {value}", where=key, fix="give a finite number above 0, or leave it out")


def _one_of(key: str, value: str | None, known: tuple[str | None, ...]) -> None:
    if value not in known:
        words = ", ".join("None" if word is None else repr(word) for word in known)
        near = nearest(str(value), [word for word in known if word is not None])
        raise ConfigError(f"{key} is {value!r}", where=key, fix=f"{near}choose one of {words}")
