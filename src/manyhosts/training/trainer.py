"""`mh.Trainer`: the face of a session for a model, a loss and an optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from manyhosts.callbacks.callback import Callback
from manyhosts.config.arguments import OF_TRAINER, answers
from manyhosts.config.init_from import InitFrom
from manyhosts.config.mesh import Mesh
from manyhosts.config.settings import ActivationCheckpointing
from manyhosts.config.snapshots import Snapshots
from manyhosts.config.stopping import Best, EarlyStopping
from manyhosts.config.strategies import Strategy
from manyhosts.data.data import Data
from manyhosts.events import Listener
from manyhosts.loss.compute import Loss, UserStep
from manyhosts.loss.weighing import Weight
from manyhosts.model.parameter_groups import MakeOptimizer
from manyhosts.training.session import Options, Session
from manyhosts.training.setup.build import MakeSchedule, ModelOrMaker

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection


class Trainer(Session):
    """Trains a model on any number of workers.

    Args:
        model: a module, whose weights are the script's own affair, or a callable that makes one under the run's seed,
            so that every run begins with the same weights.
        loss: `loss(model(inputs), targets)`, the mean over the samples it is given. Parameters and buffers of a module
            are treated as the model's: `optimizer` is given them, workers agree on them, snapshots have them.
        optimizer: makes the optimizer of a list of parameters; called after the strategy has placed the model.
            `mh.groups(params, {"backbone.*": {"lr": 1e-5}})` makes groups with rates by the parameters' names.
        data: the datasets and the size of the batch.
        metrics: names and torchmetrics metrics, computed over the entire validation or test set.
        step: in place of `loss`: `step(model, batch) -> loss`, or a mapping with `loss` and values to log. With metrics
            it also gives `outputs` and `targets`.
        schedule: makes a learning-rate scheduler of the optimizer.
        schedule_every: when the schedule moves on: after each optimizer `"step"`, or at the end of each `"epoch"`, for
            which a schedule such as `StepLR(optimizer, step_size=1)` is mostly written.
        weight: what a piece counts in the mean over a batch: `weight(batch)`, a number, called on the CPU before the
            piece is computed; `"samples"`: its samples, whatever the loss looks like. Not needed for PyTorch's losses.
        strategy: how a step is spread over the workers: a name, a value such as `mh.DDP()`, or a mesh: with
            `mh.Mesh(tensor=2)` two workers compute each copy of the model.
        precision: `"fp32"`, `"bf16"` or `"fp16"`, by autocast.
        micro_batch_size: most samples in one forward pass; gradients add up.
        clip_gradients: largest norm of the gradient over all parameters.
        snapshots: when a snapshot is made, how many are kept, and where else, such as in an object store.
        validate_every: how often `fit` validates.
        early_stopping: when `fit` ends before its duration is over: `mh.EarlyStopping("accuracy")`. Whether higher or
            lower is better comes from the metric.
        best: the metric by which the model in `best/` is chosen: `"accuracy"`, or `mh.Best("score", mode="max")` for
            one that does not say which way is better. Where it is not given, that of early stopping, or the loss.
        listeners: anything callable with one event; called on rank 0.
        callbacks: what may act at named points, on every worker and once per step: `mh.EMA()`, or an `mh.Callback`.
        init_from: weights to begin with: a snapshot, a run directory, a `.safetensors` or a `.pt` file, a folder of
            Hugging Face's, a `state_dict`; or `mh.InitFrom`, which also says what may differ and what is frozen.
        seed: of the order of the samples, augmentation, dropout, and a model that is made by a callable.
        virtual_workers: cut each batch into so many parts, by whichever worker computed: no bit depends on the workers.
        balance: `"speed"`: fast workers take more of each batch, by what is measured while they train, so that no one
            waits for the slowest; with virtual workers entire parts move, and no bit changes.
        audit: with virtual workers, the share of all parts that another worker computes again, such as 0.01: one whose
            bits are wrong is named and left out.
        on_bad_step: what to do about a loss or gradient that is NaN or infinite: `"stop"`, `"skip"` that update, or
            `"rewind"`: go back to the last snapshot, and leave those samples out.
        batch_norm: `"global"`: BatchNorm sees the batch of all workers; `"local"`: each worker's own part.
        lr_scaling, warmup: what the learning rate does when `batch_size_per_worker` lets the batch grow.
        compile: run the model through `torch.compile`, its repeated blocks each by itself.
        activation_checkpointing: `"blocks"`: the model's repeated blocks keep their input alone for the backward pass,
            and are computed again in it; `0.5`: half of them; `"all"`: every module of several layers.
        backend: `"gloo"` or `"nccl"`; by the device where it is not given.
        record_samples: write which samples each step took to `logs/samples-<rank>.jsonl`.
        threads: threads that torch computes with in one worker; torch's own choice, or 1 with virtual workers.
        keep_pictures: how many samples of the first batch are written to the run directory for `manyhosts report`,
            where they are pictures. None unless asked.
        run_dir: where everything of the run goes; `manyhosts run --run-dir` overrules it.

    Every one that is a plain value can be changed by `manyhosts run --set key=value`.

    Raises:
        ConfigError: settings that make no sense, alone or together.
    """

    @answers("mh.Trainer", OF_TRAINER)
    def __init__(  # noqa: PLR0913  # the user's entire vocabulary, by name only
        self,
        *,
        model: ModelOrMaker,
        optimizer: MakeOptimizer,
        data: Data,
        loss: Loss | None = None,
        step: UserStep | None = None,
        metrics: Mapping[str, Metric | MetricCollection] | None = None,
        schedule: MakeSchedule | None = None,
        schedule_every: Literal["step", "epoch"] = "step",
        weight: Weight | None = None,
        strategy: str | Strategy | Mesh | None = None,
        precision: Literal["fp32", "bf16", "fp16"] = "fp32",
        micro_batch_size: int | None = None,
        clip_gradients: float | None = None,
        snapshots: Snapshots | None = None,
        validate_every: str = "1 epoch",
        early_stopping: EarlyStopping | None = None,
        best: str | Best | None = None,
        listeners: Sequence[Listener] = (),
        callbacks: Sequence[Callback] = (),
        init_from: str | Path | Mapping[str, Any] | InitFrom | None = None,
        seed: int = 0,
        virtual_workers: int | None = None,
        balance: Literal["even", "speed"] = "even",
        audit: float | None = None,
        on_bad_step: Literal["stop", "skip", "rewind"] = "stop",
        batch_norm: Literal["global", "local"] = "global",
        lr_scaling: Literal["sqrt", "linear"] | None = None,
        warmup: str | None = None,
        compile: bool = False,
        activation_checkpointing: ActivationCheckpointing = None,
        backend: Literal["gloo", "nccl"] | None = None,
        record_samples: bool = False,
        threads: int | None = None,
        keep_pictures: int = 0,
        run_dir: str | Path | None = None,
    ) -> None:
        super().__init__(
            model=model,
            optimizer=optimizer,
            data=data,
            loss=loss,
            step=step,
            schedule=schedule,
            weight=weight,
            options=Options(
                metrics=metrics,
                strategy=strategy,
                precision=precision,
                micro_batch_size=micro_batch_size,
                clip_gradients=clip_gradients,
                snapshots=snapshots,
                validate_every=validate_every,
                early_stopping=early_stopping,
                best=best,
                listeners=listeners,
                callbacks=callbacks,
                init_from=init_from,
                seed=seed,
                virtual_workers=virtual_workers,
                balance=balance,
                audit=audit,
                on_bad_step=on_bad_step,
                batch_norm=batch_norm,
                schedule_every=schedule_every,
                lr_scaling=lr_scaling,
                warmup=warmup,
                compile=compile,
                activation_checkpointing=activation_checkpointing,
                backend=backend,
                record_samples=record_samples,
                threads=threads,
                keep_pictures=keep_pictures,
                run_dir=run_dir,
            ),
        )
