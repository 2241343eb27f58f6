"""The session: model, data and workers, ready to be trained, evaluated and saved. Its faces: `mh.Trainer`, `mh.Run`."""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from torch import Tensor, nn
from torch.utils.data import Dataset

from manyhosts.callbacks.callback import Callback, Callbacks
from manyhosts.cluster.place import Place
from manyhosts.cluster.reports import Reporter
from manyhosts.communication.gathering import gather_plain
from manyhosts.config import overrides
from manyhosts.config.arguments import OF_EVALUATION, OF_FIT, OF_PREDICT, answers
from manyhosts.config.init_from import InitFrom
from manyhosts.config.mesh import Mesh
from manyhosts.config.settings import ActivationCheckpointing, Settings
from manyhosts.config.snapshots import Snapshots
from manyhosts.config.stopping import Best, EarlyStopping
from manyhosts.config.strategies import DDP, Strategy, named
from manyhosts.data import randomness
from manyhosts.data.data import Data, check_dataset, is_several
from manyhosts.device import backend_for
from manyhosts.elastic import rendezvous
from manyhosts.errors import ConfigError
from manyhosts.evaluation.dataset_forward import ForwardPasses
from manyhosts.evaluation.evaluate import Evaluation, Evaluations, OfAllSets
from manyhosts.evaluation.metrics import flattened
from manyhosts.evaluation.predict import Forward, Prediction, of_inputs
from manyhosts.events import Event, Listener, Note, TestDone
from manyhosts.loss.compute import Loss, UserStep
from manyhosts.loss.weighing import Weight
from manyhosts.model import trained_module
from manyhosts.model.model_checks import check_callbacks, check_given, check_is_main, with_direction
from manyhosts.model.parameter_groups import MakeOptimizer
from manyhosts.model.sharded_state import full_state
from manyhosts.snapshot.load import load
from manyhosts.snapshot.weights import check_path
from manyhosts.snapshot.weights import save as save_weights
from manyhosts.training.consistency.same_given import compare_calls, compare_data
from manyhosts.training.consistency.same_weights import compare_weights
from manyhosts.training.fit import Fit
from manyhosts.training.own_loop.own_step import OwnStep
from manyhosts.training.process_session import ProcessSession
from manyhosts.training.setup.build import Components, MakeSchedule, ModelOrMaker, attach_callbacks, build
from manyhosts.training.setup.run_place import RunPlace, unread_options
from manyhosts.training.state.registry import TrainerState
from manyhosts.training.state.weights import Used, chosen, frozen, holding, load_initial
from manyhosts.training.telemetry.result import Result

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection


class Options(TypedDict, total=False):
    """What both faces of a session take; `mh.Trainer` says what each means."""

    metrics: Mapping[str, Metric | MetricCollection] | None
    strategy: str | Strategy | Mesh | None
    precision: Literal["fp32", "bf16", "fp16"]
    micro_batch_size: int | None
    clip_gradients: float | None
    snapshots: Snapshots | None
    validate_every: str
    early_stopping: EarlyStopping | None
    best: str | Best | None
    listeners: Sequence[Listener]
    callbacks: Sequence[Callback]
    init_from: str | Path | Mapping[str, Any] | InitFrom | None
    seed: int
    virtual_workers: int | None
    balance: Literal["even", "speed"]
    audit: float | None
    on_bad_step: Literal["stop", "skip", "rewind"]
    batch_norm: Literal["global", "local"]
    schedule_every: Literal["step", "epoch"]
    lr_scaling: Literal["sqrt", "linear"] | None
    warmup: str | None
    compile: bool
    activation_checkpointing: ActivationCheckpointing
    backend: Literal["gloo", "nccl"] | None
    record_samples: bool
    threads: int | None
    keep_pictures: int
    run_dir: str | Path | None


_NO_SETTINGS = ("metrics", "listeners", "callbacks", "init_from", "run_dir")
_OF_DATA = ("batch_size", "batch_size_per_worker", "evaluation_batch_size", "drop_last", "shuffle", "loader_workers")


def settings_of(data: Data, options: Options) -> Settings:
    """The plain values among what was given, as the command line has changed them."""
    asked: dict[str, Any] = {**options}
    best, strategy, snapshots = (asked.get(name) for name in ("best", "strategy", "snapshots"))
    way = DDP() if strategy is None else named(strategy)
    if not isinstance(snapshots, Snapshots | None):
        fix = 'write snapshots=mh.Snapshots(every="1 epoch"); a run has one at its end in any case'
        raise ConfigError(f"snapshots is {snapshots!r}", where="mh.Trainer(snapshots=…)", fix=fix)
    given = {
        **{name: each for name, each in asked.items() if name not in _NO_SETTINGS},
        **{name: getattr(data, name) for name in _OF_DATA},
        "mesh": strategy if isinstance(strategy, Mesh) else None,
        "strategy": way,
        "snapshots": snapshots or Snapshots(),
        "best": Best(best) if isinstance(best, str) else best,
    }
    return overrides.apply(given, overrides.from_environment())


def _listed(given: Any) -> Any:
    """What an iterator gives, which can be gone through once; anything else as it is."""
    return list(given) if isinstance(given, Iterator) else given


def _rates_of(components: Components) -> list[float]:
    return [float(group["lr"]) for group in components.optimizer.param_groups]


class Session:
    """One model, or several, and its data on these workers. A face says what a step is."""

    has_counts = False
    """Whether `step` may say what a batch of an evaluation counts, by a value named `count`."""

    speaks = True
    """Whether it says on the terminal which weights an evaluation without `fit` has used."""

    called_in = "mh.Trainer(step=…)"
    """Where the script says what the model makes of a batch of held-out data, where it has no loss."""

    def __init__(  # noqa: PLR0913  # what the two faces give, by name
        self,
        *,
        model: ModelOrMaker,
        optimizer: MakeOptimizer,
        data: Data,
        loss: Loss | None,
        step: UserStep | None,
        schedule: MakeSchedule | None,
        weight: Weight | None,
        options: Options,
        own_step: OwnStep | None = None,
    ) -> None:
        """`own_step`: what a step does, where the script computes its gradients itself."""
        check_is_main()
        ProcessSession.current().refuse_in_step(f"mh.{type(self).__name__}(…)")
        reporter = Reporter.from_environment()
        self._is_launched = reporter is not None
        self._report: Callable[..., None] = (lambda *_, **__: None) if reporter is None else reporter.send
        self._report("trainer")
        metrics, listeners = options.get("metrics"), _listed(options.get("listeners", ()))
        check_given(
            model=model,
            data=data,
            loss=loss,
            step=step,
            optimizer=optimizer,
            schedule=schedule,
            metrics=metrics,
            listeners=listeners,
        )
        self.settings = settings_of(data, options)
        self.data = data
        self.metrics = flattened(metrics or {})
        self.settings = with_direction(self.settings, data, self.metrics)
        self.loss, self.user_step = loss, step
        self.listeners, acting = list(listeners), Callbacks(_listed(options.get("callbacks", ())))
        check_callbacks(acting)
        init_from = options.get("init_from")
        init = init_from if isinstance(init_from, InitFrom) or init_from is None else InitFrom(init_from)
        self._begins_with_given = init is not None or isinstance(model, nn.Module)
        self._session = session = ProcessSession.current()
        self.world = session.world(self.settings.backend)
        self._place = RunPlace(session, options.get("run_dir"))
        if self.metrics and data.validation is None and data.test is None:
            self.world.notes.append("metrics= has no effect: mh.Data has neither a validation nor a test set")
        if not self._is_launched and self._place.number == 1:
            self.world.notes += [text] if (text := unread_options(self._place.script)) else []
        if self._place.number > 1:
            gc.collect()  # a trainer that is gone held a model, and its parts refer to each other
        self._run: Fit | None = None
        self._ended_with = ""
        """The hash of the weights that the last `fit` has left."""
        self._rates: list[float] = []
        """The learning rates that it has left."""
        self._at_end: weakref.finalize[..., Session] | None = None
        """What ends the last run's records: when another one begins, or this object is gone."""

        def make() -> Components:
            compare_calls(self.world, f"mh.{type(self).__name__}(…)")
            self._place.compare(self.world)
            components = build(
                settings=self.settings,
                world=self.world,
                data=data,
                model=model if init is None else frozen(model, init.freeze),
                loss=loss,
                step=step,
                optimizer=optimizer,
                schedule=schedule,
                weight=weight,
                own_step=own_step,
                callbacks=acting,
                watcher=session.watcher,
            )
            if init is not None:
                load_initial(components, init)
            attach_callbacks(components)
            return components

        self._collective_calls = session.collective_calls(self.world)
        # The first trainers come before the first call, when no one has anything that could be lost.
        self.components: Components = (
            make() if not self._collective_calls.number else self._call("", make, has_outcome=False)
        )
        self.settings = self.components.settings
        self._provider = TrainerState(self.components)
        self._collective_calls.add(self._place.number, self._provider)

    @property
    def model(self) -> nn.Module:
        """The model, as the strategy has placed it."""
        return self.components.model

    @property
    def number(self) -> int:
        """Which trainer of its process this is, from 1."""
        return self._place.number

    @answers("trainer.fit", OF_FIT)
    def fit(self, duration: str | None = None) -> Result:
        """Train until the run is `duration` long: `"20 epochs"`, `"500 steps"`, `"2h30m"`, `"20 epochs or 2h"`.

        A run directory that holds snapshots is resumed; what it has done counts. The random generators of
        the script (torch, NumPy, Python) are afterwards as they were before, here and in `validate` and `test`.

        Raises:
            ManyhostsError: see `manyhosts.errors`; nothing that is on disk is lost by it.
        """
        self._session.refuse_in_step("fit")
        if self._session.in_place_of_fit is not None:
            self._session.in_place_of_fit(self)
        settings = self._place.with_own_copy(self.settings)
        if duration is not None and "duration" not in overrides.from_environment():
            settings = dataclasses.replace(settings, duration=duration)
        if self._at_end is not None:
            self._at_end()
        if self._rates and self._rates != _rates_of(self.components):
            self.world.notes.append(
                "the learning rate was changed after the last fit, and training continues with that of its snapshot: "
                "change it in a callback, or give a schedule"
            )
        directory, listeners = self._place.directory(self.world), self.listeners
        validation = None if self.data.validation is None else self._evaluation("validation")
        if self.components.watcher is not None:
            listeners = list(self.components.watcher.fits(validation, listeners))
        self._run = Fit(
            calls=self._collective_calls,
            provider=self._provider,
            settings=settings,
            directory=directory,
            script=self._place.script,
            validation=validation,
            listeners=listeners,
            report=self._report,
            go_on_with="" if self._is_launched else self._place.command(directory),
            ended_with=self._ended_with,
        )
        self._at_end = weakref.finalize(self, self._run.run_log.end)
        self._at_end.atexit = False  # a script that ends closes what is open by itself
        self._ended_with, self._rates = "", []  # until it has ended
        with randomness.undisturbed():
            result = self._run.fit()
        self._ended_with, self._rates = result.weights_sha256, _rates_of(self.components)
        return result

    def _call(self, name: str, once: Callable[[], Any], *, weights: str = "best", has_outcome: bool = True) -> Any:
        """What all workers do together, and again from its beginning where some are lost meanwhile.

        `name`, with `weights`: under which they see that they do the same; empty for what does so itself.
        """
        self._session.refuse_in_step("validate, test, predict or save")
        world, calls, components = self.world, self._collective_calls, getattr(self, "components", None)
        layout = None if components is None else components.strategy.layout()
        if components is None or (layout is None and components.strategy.mesh.parts == 1):
            alike = calls.layout is None  # a worker that comes late knows how one model is cut, and of no other
        else:
            alike = layout is not None and calls.trainers == 1

        def compared() -> Any:
            if name:
                compare_calls(world, name if weights == "best" else f"{name}(weights={weights!r})")
            return once()

        return rendezvous.make(
            calls,
            compared,
            most=self.settings.virtual_workers or 0,
            survives=world.backend == backend_for(world.device) and alike,
            layout=layout,
            has_outcome=has_outcome,
            provider=self._provider if self._run is not None else None,
        )

    @answers("trainer.validate", OF_EVALUATION)
    def validate(self, *, weights: Literal["best", "last"] = "best") -> dict[str, float]:
        """`loss` and every metric over the entire validation set, each sample once. `weights` as in `test`.

        Raises:
            ConfigError: there is no validation set.
        """
        evaluation = self._evaluation("validation")
        with randomness.undisturbed():
            values: dict[str, float] = self._call(
                "validate", lambda: self._validate(evaluation, weights), weights=weights
            )
        return values

    def summary(self, *, depth: int = 2) -> str:
        """The model in a table: its modules down to `depth`, their parameters, and how many of these are trained."""
        return trained_module.summary(self.model, depth=depth)

    def _validate(self, evaluation: OfAllSets, weights: Literal["best", "last"]) -> dict[str, float]:
        with holding(weights, self.components, self._run) as used:
            values = self._evaluated(evaluation, f"the validation of {used}")
        self._say(f"validated: {used}")
        return values

    def _say(self, text: str) -> None:
        """Report which weights were used: in the run's record, or, where nothing was trained, on the terminal."""
        if self._run is not None:
            self._emit(self._run, Note(text=text, step=self._run.state.step, time=time.time()))
        elif self.speaks and self.world.is_rank_0 and ((there := self._place.trained()) or not self._begins_with_given):
            text += ": fit was not called, and they are those that the model begins with"
            text += f"; {there} holds weights that were trained: fit takes them up, or init_from" if there else ""
            sys.stderr.write(f"manyhosts: {text}\n")

    def _emit(self, run: Fit, news: Event) -> None:
        if self.world.is_rank_0 and not self._collective_calls.over:
            run.run_log.become_rank_0()  # another one may have led while it trained
        run.run_log.emit(news)
        run.run_log.flush()

    @answers("trainer.test", OF_EVALUATION)
    def test(self, *, weights: Literal["best", "last"] = "best") -> dict[str, float]:
        """`loss` and every metric over the entire test set, each sample once.

        `weights="best"`: those of the best validation, where `fit` has kept them; `"last"`: those of now. Either are
        averages where a callback evaluates by them. `validate`, `predict` and `save` use the same, and all say which.

        Raises:
            ConfigError: there is no test set.
        """
        evaluation = self._evaluation("test")
        with randomness.undisturbed():
            values: dict[str, float] = self._call("test", lambda: self._test(evaluation, weights), weights=weights)
        return values

    @answers("trainer.predict", OF_PREDICT)
    def predict(
        self, dataset: Dataset[Any], *, forward: Forward | None = None, weights: Literal["best", "last"] = "best"
    ) -> Any:
        """What the model, in evaluation mode, makes of each sample of `dataset`, in its order, each sample once.

        `forward(model, batch)`: what is wanted of a batch; without it `model(inputs)`, where an (inputs, targets) pair
        gives its inputs. It returns tensors `(samples of the batch, …)`, or tuples, lists and dicts of them. They come
        back in the same form, over the entire dataset, on the CPU, with the same bits on any number of workers that
        compute with as many threads. Every worker holds all of it: return what is wanted, not all that the model has.
        `weights` as in `test`.

        Raises:
            ConfigError: `dataset` is a stream or a loader, or what comes out has no row for each sample.
            DataError: a sample cannot be read.
        """
        check_dataset("prediction", dataset, where="trainer.predict(dataset)", is_stream_fine=False)
        prediction = Prediction(self._passes(dataset, "prediction"), forward or of_inputs)
        with randomness.undisturbed():
            return self._call(
                "predict", lambda: self._predict(dataset, prediction, weights), weights=weights, has_outcome=False
            )

    def _predict(self, dataset: Dataset[Any], prediction: Prediction, weights: Literal["best", "last"]) -> Any:
        if self.world.is_joining and self._run is not None and not self._run.has_end:
            raise ConfigError(
                "the other workers have finished this prediction, and this one came too late to be given their weights",
                where="trainer.predict",
                fix="start the same command again: all workers begin together then",
            )
        compare_data(self.world, {"prediction": dataset})
        with holding(weights, self.components, self._run) as used:
            compare_weights(self.components, "before the prediction")
            predicted = prediction(self.model)
        self._say(f"predicted: {used}")
        return predicted

    @property
    def is_main(self) -> bool:
        """Whether this worker is the one that does what is to be done once: rank 0."""
        return Place.from_environment().rank == 0

    @answers("trainer.save", {})
    def save(self, path: str | Path, *, weights: Literal["best", "last"] = "best") -> None:
        """Write the model's weights to one file, once: `.safetensors`, or `.pt` with a `state_dict`.

        `weights` as in `test`. All workers call it; the file is there when it returns.

        Raises:
            ConfigError: it cannot be written there.
        """
        file = Path(path)
        check_path(file)
        self._call("save", lambda: self._save(file, weights), weights=weights)

    def _save(self, file: Path, weights: Literal["best", "last"]) -> None:
        holding, keep = self.components.strategy.holding, self.world.is_rank_0
        best = chosen(weights, self._run)
        if best is None:
            with self.components.callbacks.evaluated(self.components.trained):
                state = full_state(self.model.state_dict(), holding, keep=keep)
                state = {name: each.clone() if isinstance(each, Tensor) else each for name, each in state.items()}
        else:
            # The best may be kept without it.
            state = full_state(self.components.frozen_base.tensors(), holding, keep=keep)
        error: ConfigError | None = None
        if self.world.is_rank_0:
            try:
                save_weights(file, state if best is None else {**state, **load(best).state["model"]})
            except ConfigError as found:
                error = found
        gather_plain(self.world, None, error)
        self._say(f"saved in {file}: {Used.of(self.components, self._run, is_best=best is not None)}")

    def _evaluated(self, evaluation: OfAllSets, which: str) -> dict[str, float]:
        compare_weights(self.components, f"before {which}")
        weighing = self.components.weighing
        if self._run is None and self.user_step is not None and not (self.has_counts or weighing.said or weighing.rule):
            text = "the loss is averaged over samples: no step of fit has shown whether it is a mean over labels, say"
            sys.stderr.write(f"manyhosts: {text}; weight= says it\n" * self.world.is_rank_0)
        return evaluation(self.model)

    def _test(self, evaluation: OfAllSets, weights: Literal["best", "last"]) -> dict[str, float]:
        begin = time.perf_counter()
        with holding(weights, self.components, self._run) as used:
            values = self._evaluated(evaluation, "the test of the best model" if used.is_best else "the test")
        if self._run is not None:
            self._emit(
                self._run,
                TestDone(
                    step=self._run.state.step,
                    values=values,
                    seconds=time.perf_counter() - begin,
                    time=time.time(),
                    weights="best" if used.is_best else "last",
                    weights_step=used.step,
                ),
            )
        else:
            self._say(f"tested: {used}")
        return values

    def _evaluation(self, name: Literal["validation", "test"]) -> OfAllSets:
        given = getattr(self.data, name)
        if given is None:
            raise ConfigError(f"there is no {name} set", where=f"mh.Data({name}=…)", fix="give one")
        if is_several(given):
            return Evaluations({key: self._over(dataset, f"{name}/{key}") for key, dataset in given.items()})
        return self._over(given, name)

    def _over(self, dataset: Dataset[Any], name: str) -> Evaluation:
        return Evaluation(
            self._passes(dataset, name),
            loss=self.loss,
            step=self.user_step,
            metrics=self.metrics,
            weighing=self.components.weighing,
            has_counts=self.has_counts,
        )

    def _passes(self, dataset: Any, name: str) -> ForwardPasses:
        return ForwardPasses.over(
            dataset,
            name,
            data=self.data,
            settings=self.settings,
            strategy=self.components.strategy,
            on_progress=partial(self._report, "busy"),
        )
