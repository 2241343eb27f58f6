"""`mh.Run`: a training loop of the user's own, with several models, optimizers and backward passes in one step."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import Dataset

from manyhosts.config import overrides
from manyhosts.config.arguments import OF_OWN_FIT, OF_PREDICT, OF_RUN, answers
from manyhosts.config.kinds import plain
from manyhosts.data.data import Data
from manyhosts.errors import ConfigError, ManyhostsError, check_run
from manyhosts.evaluation.predict import Forward, of_inputs
from manyhosts.loss.compute import UserStep, number_of
from manyhosts.model.combined_optimizer import CombinedOptimizer
from manyhosts.model.model_checks import check_called, check_maker, check_rates, make_schedule
from manyhosts.model.optimizer_kernels import fuse
from manyhosts.model.parameter_groups import MakeOptimizer, Parameters, check_options
from manyhosts.training.own_loop.own_step import LossOf, OwnStep
from manyhosts.training.own_loop.parts import Part
from manyhosts.training.session import Options, Session
from manyhosts.training.setup.build import MakeSchedule, ModelOrMaker
from manyhosts.training.telemetry.result import Result

_STEPS_OF_AN_EPOCH = 1000
_NAMES = {
    r"mh\.Trainer\(step=": "mh.Run(evaluate=",
    r"mh\.Trainer\(loss=…\)": "run.fit(step)",
    r"mh\.Trainer\(": "mh.Run(",
    r"mh\.Run\((model|optimizer)=": r"mh.Run(\1s=",
    r"mh\.Run\(schedule=": "mh.Run(schedulers=",
    r"\bset clip_gradients\b": "clip in the step, run.update(clip=1.0)",
    r"\btrainer\.fit\(": "run.fit(step, ",
    r"\btrainer\.(fit|validate|test|predict|save|model)\b": r"run.\1",
}
"""What an error of `mh.Trainer` names, and what it is called here; one after the other."""


def _made(step: Callable[[Run], object], run: Run) -> None:
    """Call the script's step.

    Raises:
        ConfigError: what it gives says that it has not been run, or is a loss that nothing is done with.
    """
    run._session.in_step = True
    try:
        found = step(run)
    finally:
        run._session.in_step = False
    if found is None:
        return
    check_run(found, what="the step", where="run.fit(step)")
    if isinstance(found, Tensor) and found.requires_grad:
        raise ConfigError(
            "the step gives a loss, and nothing is done with what a step gives",
            where="run.fit(step)",
            fix="write run.backward(loss) and run.update() in it, with def loss(batch): …",
        )


class Models(nn.ModuleDict):
    """All models of a run, by name."""

    def forward(self, *_: Any, **__: Any) -> Any:
        """Never to be called: which of them is meant is not known.

        Raises:
            ConfigError: it is.
        """
        raise ConfigError(
            "the models of a run are called as if they were one",
            where="mh.Run(models=…)",
            fix=f"name one: models[{next(iter(self))!r}](batch[0])",
        )


class PartNumbers(Dataset[int]):
    """What is read where a step makes its own data: the number of each part, once in every step."""

    def __init__(self, parts: int) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return self.parts * _STEPS_OF_AN_EPOCH

    def __getitem__(self, index: int) -> int:
        return index % self.parts


class Run(Session):
    """Trains by a step that the user writes, on any number of workers: same answer, and no work lost.

    ```python
    run = mh.Run(
        models={"generator": Generator, "critic": Critic},
        optimizers={name: lambda params: torch.optim.Adam(params, 2e-4) for name in ("generator", "critic")},
        data=mh.Data(train=images, batch_size=64),
    )

    def step(run):
        run.backward(critic_loss, "critic")
        run.update("critic")
        run.backward(generator_loss, "generator")
        run.update("generator")

    run.fit(step, "20 epochs")
    ```

    A step is one transaction: where a worker is lost in it, all of it is made again from its beginning, so its body may
    run more than once. It changes nothing but by `update`, `state` and `part`; it prints nothing.

    Args:
        models: by name, a module or a callable that makes one under the run's seed; or one of them, named "model".
        optimizers: by the name of the model whose parameters it steps, or names joined by "+"; makes the optimizer of a
            list of parameters. One alone is that of all models.
        data: as for `mh.Trainer`. None: a step makes its own data, and `virtual_workers` says in how many parts.
        schedulers: by the name of the optimizer: makes a learning-rate scheduler, stepped at each `update`. One alone
            makes that of each optimizer.
        evaluate: `evaluate(models, batch) -> loss`, or a mapping as of `mh.Trainer(step=…)`, for validation and test;
            `count` in it says what the batch counts, as in `backward`.
        options: every other argument of `mh.Trainer`.

    Raises:
        ConfigError: settings that make no sense, alone or together, or that an own loop does not go with.
    """

    has_counts = True
    called_in = "mh.Run(evaluate=…)"

    @answers("mh.Run", OF_RUN, more=Options.__annotations__)
    def __init__(
        self,
        *,
        models: ModelOrMaker | Mapping[str, ModelOrMaker],
        optimizers: MakeOptimizer | Mapping[str, MakeOptimizer],
        data: Data | None = None,
        schedulers: MakeSchedule | Mapping[str, MakeSchedule] | None = None,
        evaluate: UserStep | None = None,
        **options: Unpack[Options],
    ) -> None:
        given: object = models
        if isinstance(given, list | tuple):
            raise ConfigError(
                f"models is a {type(given).__name__}",
                where="mh.Run(models=…)",
                fix='give each a name: models={"first": Net, "second": Other}',
            )
        self._models = models if isinstance(models, Mapping) else {"model": models}
        self._makers = optimizers if isinstance(optimizers, Mapping) else {"+".join(map(str, self._models)): optimizers}
        one_for_all = {} if schedulers is None else dict.fromkeys(self._makers, schedulers)
        self._schedulers: Mapping[str, Any] = schedulers if isinstance(schedulers, Mapping) else one_for_all
        self.evaluates = evaluate is not None
        self._own_step = OwnStep(self._make_schedulers)
        self._check_names()
        if data is None:
            typed = overrides.from_environment().get("virtual_workers", "")
            parts = int(typed) if typed.isdecimal() else plain(options.get("virtual_workers"))
            if not isinstance(parts, int) or parts < 1:
                given = "" if parts is None else f", not {parts!r}"
                raise ConfigError(
                    f"there is no data, so virtual_workers must say in how many parts a step is computed{given}",
                    where="mh.Run(virtual_workers=…)",
                    fix="give virtual_workers=4, say: the same bits on 1 to 4 workers",
                )
            data = Data(train=PartNumbers(parts), batch_size=parts, shuffle=False)
        elif evaluate is None and isinstance(data, Data) and (data.validation is not None or data.test is not None):
            raise ConfigError(
                "there is a validation or test set, and nothing says what its loss is",
                where="mh.Run(evaluate=…)",
                fix="give evaluate=function(models, batch) -> loss",
            )
        if evaluate is not None:
            check_called(
                "evaluate",
                evaluate,
                ["models", "batch"],
                where="mh.Run(evaluate=…)",
                fix="give evaluate=function(models, batch) that returns the loss, or a dict with it",
            )
        super().__init__(
            model=self._make_models,
            optimizer=self._make_optimizers,
            data=data,
            step=evaluate or _nothing_to_evaluate,
            loss=None,
            schedule=None,
            weight="samples",
            own_step=self._own_step,
            options=options,
        )
        self._own_step.attributes, self._own_step.known = vars(self), frozenset([*vars(self), "_run"])

    @staticmethod
    def rename(error: ManyhostsError) -> None:
        """Have an error name what it is about as it is called here, and not as in `mh.Trainer`."""
        for name, own in _NAMES.items():
            error.what, error.where, error.fix = (
                re.sub(name, own, text) for text in (error.what, error.where, error.fix)
            )

    def _check_names(self) -> None:
        for argument, given in (("models", self._models), ("optimizers", self._makers)):
            if not given:
                raise ConfigError(
                    f"{argument} is empty",
                    where=f"mh.Run({argument}=…)",
                    fix=f"give {argument}={{name: …}}, or one alone",
                )
        for name in self._models:
            if not isinstance(name, str) or not name or "." in name or hasattr(nn.ModuleDict(), name):
                raise ConfigError(
                    f"{name!r} can be no name of a model",
                    where="mh.Run(models=…)",
                    fix=f"call it {str(name).replace('.', '_') or 'net'}_model, say",
                )
        for name in self._makers:
            if unknown := sorted({*name.split("+")} - self._models.keys()):
                raise ConfigError(
                    f"optimizer {name!r} names a model that is not there: {', '.join(unknown)}",
                    where="mh.Run(optimizers=…)",
                    fix=f"name it after its model, or models joined by '+': {', '.join(self._models)}",
                )
        if unknown := sorted(self._schedulers.keys() - self._makers.keys()):
            raise ConfigError(
                f"there is a scheduler {unknown[0]!r}, and no optimizer of this name",
                where="mh.Run(schedulers=…)",
                fix=f"name it after its optimizer: {', '.join(self._makers)}",
            )
        for name, each in self._makers.items():
            check_called(
                f"optimizer {name!r}",
                each,
                ["parameters"],
                where="mh.Run(optimizers=…)",
                fix="write lambda params: torch.optim.AdamW(params, lr=1e-3)",
            )
        for name, each in self._schedulers.items():
            check_called(
                f"scheduler {name!r}",
                each,
                ["optimizer"],
                where="mh.Run(schedulers=…)",
                fix="write lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000)",
            )

    def _make_models(self) -> nn.ModuleDict:
        made = {}
        for name, each in self._models.items():
            check_maker(each, f"model {name!r}", where="mh.Run(models=…)", write=f"models={{{name!r}: lambda: ")
            made[name] = each if isinstance(each, nn.Module) or not callable(each) else each()
            if not isinstance(made[name], nn.Module):
                raise ConfigError(
                    f"model {name!r} is a {type(made[name]).__name__}, not a torch.nn.Module",
                    where="mh.Run(models=…)",
                    fix="give a module, or a callable that makes one",
                )
        return Models(made)

    def _make_optimizers(self, _parameters: Parameters) -> CombinedOptimizer:
        made = {}
        for name, make in self._makers.items():
            parameters = self._parameters(name.split("+"))
            if not parameters:
                raise ConfigError(
                    f"optimizer {name!r} has nothing to step: that model has no parameter",
                    where="mh.Run(optimizers=…)",
                    fix="leave the optimizer out; what has no parameter need not be among the models",
                )
            found = make(parameters)
            calls_loss = isinstance(found, torch.optim.LBFGS)
            if calls_loss or not isinstance(found, Optimizer):
                what = "which calls the loss as often as it likes" if calls_loss else "not a torch.optim.Optimizer"
                raise ConfigError(
                    f"optimizer {name!r} is a {type(found).__name__}, {what}",
                    where="mh.Run(optimizers=…)",
                    fix="write lambda params: torch.optim.AdamW(params, lr=1e-3)",
                )
            check_options(parameters, found, self.world.notes)
            fuse(found, holds_full_model=True)
            made[name] = found
        return CombinedOptimizer(made)

    def _make_schedulers(self, optimizers: Mapping[str, Optimizer]) -> dict[str, LRScheduler]:
        schedulers = {}
        for name, make in self._schedulers.items():
            rates = [group["lr"] for group in optimizers[name].param_groups]
            schedulers[name] = made = make_schedule(make, optimizers[name])
            check_rates(self.settings, rates, optimizers[name], make)
            if isinstance(made, ReduceLROnPlateau):
                raise ConfigError(
                    f"scheduler {name!r} is a ReduceLROnPlateau, and an update has no value that it could look at",
                    where="mh.Run(schedulers=…)",
                    fix="take a scheduler that counts steps, such as torch.optim.lr_scheduler.CosineAnnealingLR",
                )
        return schedulers

    def _parameters(self, names: Sequence[str]) -> Parameters:
        """Those of the models of these names: each called as in its model, or after the model's name among several."""
        models = self.models
        one = models[names[0]] if len(names) == 1 else nn.ModuleDict({each: models[each] for each in names})
        found = {id(each): name for name, each in one.named_parameters()}
        return Parameters(one.parameters(), one, found)

    @answers("run.fit", OF_OWN_FIT)
    def fit(self, step: Callable[[Run], None], duration: str | None = None) -> Result:  # type: ignore[override]
        """Train by `step(run)` until the run is `duration` long; see `Trainer.fit`.

        Raises:
            ManyhostsError: see `manyhosts.errors`; nothing that is on disk is lost by it.
        """
        check_called(
            "the step", step, ["run"], where="run.fit", fix='write run.fit(step, "20 epochs"), with def step(run)'
        )
        self._own_step.step, code = partial(_made, step, self), getattr(step, "__code__", None)
        self._own_step.written = step
        self._own_step.place = f"{code.co_filename}, line {code.co_firstlineno}" if code else type(step).__name__
        with self._own_step.guarded():
            return super().fit(duration)

    @answers("run.predict", OF_PREDICT)
    def predict(
        self, dataset: Dataset[Any], *, forward: Forward | None = None, weights: Literal["best", "last"] = "best"
    ) -> Any:
        """`Trainer.predict`; `forward(models, batch)` says which of the models makes what. One alone needs none.

        Raises:
            ConfigError: there are several models and no `forward`; or see `Trainer.predict`.
        """
        if forward is None:
            if len(self._models) > 1:
                raise ConfigError(
                    f"there are several models ({', '.join(self._models)}), and which of them predicts is not known",
                    where="run.predict",
                    fix="give forward=lambda models, batch: models[name](batch[0])",
                )
            [name] = self._models

            def forward(models: nn.Module, batch: Any) -> Any:
                try:
                    return of_inputs(models.get_submodule(name), batch)
                except ConfigError as error:
                    own = error.fix.replace("lambda model, batch", "lambda models, batch")
                    error.fix = re.sub(r"\bmodel\(", f"models[{name!r}](", own)
                    raise

        return super().predict(dataset, forward=forward, weights=weights)

    # In a step.

    def backward(
        self,
        loss: LossOf,
        into: str | None = None,
        *,
        over_batch: Callable[[Any], Tensor | Mapping[str, Any]] | None = None,
    ) -> dict[str, Tensor]:
        """Compute the gradient of the batch for one optimizer, summed over all workers; other models get none.

        `loss(batch)` is called for each micro-batch of this worker: the mean over its samples, of shape (); or a
        mapping with `loss`, values to log and, where the mean is over something else (tokens, time steps), `count`:
        how many there are. All is divided once, by what all micro-batches of all workers count together.

        `over_batch(rows)`: for a loss that looks at the entire batch. `loss` then gives rows instead, a tensor with a
        row for each sample or a tuple of such, and `over_batch` the loss of all rows of the batch, in its order.

        Called again before the `update`, it adds to the gradient. Returns `loss` and the other values, means over the
        global batch, equal on all workers.
        """
        return self._own_step.backward(loss, into, over_batch)

    def update(self, optimizer: str | None = None, *, clip: float | None = None) -> Tensor:
        """Step the optimizer, and its scheduler. Returns the norm of the gradient before it is clipped to `clip`."""
        return self._own_step.update(optimizer, clip)

    def log(self, *unnamed: Any, **values: float | Tensor) -> None:
        """Record values with this step; those of rank 0 are written.

        Raises:
            ConfigError: it is called outside of a step, or a value has no name or is not one number.
        """
        if unnamed:
            raise ConfigError(
                f"run.log takes values by name, and a {type(unnamed[0]).__name__} comes without one",
                where="run.log",
                fix="write run.log(accuracy=0.9), or run.log(**values) of a dict",
            )
        if self._own_step.pieces is None:
            raise ConfigError(
                "run.log is called outside of a step, so that there is no step to record it with",
                where="run.log",
                fix="call it in the function that run.fit is given; what evaluate is to record it gives in its mapping",
            )
        if reserved := [name for name in values if name == "loss" or name.startswith("loss/")]:
            raise ConfigError(
                f"run.log({reserved[0]}=…) has the name of what run.backward records",
                where="run.log",
                fix="give it another name: the loss of each step is recorded by itself",
            )
        device = self.world.device
        self._own_step.logged |= {
            name: number_of(name, value, device, "run.log", torch.float64).to(device, torch.float64).detach()
            for name, value in values.items()
        }

    @property
    def steps_done(self) -> int:
        """Optimizer steps finished: the same on all workers, and after a resume."""
        return self._own_step.run_state.step

    @property
    def state(self) -> dict[str, Any]:
        """The script's own numbers and tensors: equal on all workers, in snapshots, and as before a step made again."""
        return self._own_step.state

    @property
    def part(self) -> Part:
        """The part of the batch that is computed now; inside a function that `backward` calls.

        Raises:
            ConfigError: none is computed.
        """
        if self._own_step.computed is None:
            raise ConfigError(
                "run.part is asked for where no part is computed",
                where="run.part",
                fix="ask for it in the function that run.backward is given",
            )
        return self._own_step.parts.of(self._own_step.computed)

    @property
    def models(self) -> nn.ModuleDict:
        """All models by name."""
        found = self._own_step.model
        assert isinstance(found, nn.ModuleDict), "_make_models() makes one"
        return found


def _nothing_to_evaluate(_models: nn.Module, _batch: Any) -> Tensor:
    raise ConfigError(
        "nothing says what the models make of a batch, which an evaluation asks, and lazy layers that have no shape",
        where="mh.Run(evaluate=…)",
        fix="give evaluate=function(models, batch) -> loss, or a dict with loss, outputs and targets; of lazy layers, "
        "or call the model once in the function that makes it",
    )
