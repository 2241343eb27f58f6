"""The watcher of a script with mh.Trainer: what goes into each step and what comes out of it, on every worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from manyhosts.config.settings import Settings
from manyhosts.data import randomness
from manyhosts.data.steps import LoadedPiece, Step
from manyhosts.errors import ConfigError
from manyhosts.evaluation.evaluate import OfAllSets
from manyhosts.events import Listener
from manyhosts.listeners.loggers import Logger
from manyhosts.prove.conduct import TrialConfig
from manyhosts.prove.in_worker import plain
from manyhosts.prove.in_worker.calm import RemoveNondeterminism
from manyhosts.prove.in_worker.experiments import Experiments, fetcher_of
from manyhosts.prove.in_worker.sketch import digests_of_rows, facts_of_all
from manyhosts.prove.in_worker.writer import Writer
from manyhosts.records.run_record import plain_settings
from manyhosts.strategies.strategy import StepOutcome
from manyhosts.training.state.run_state import RunState
from manyhosts.training.telemetry.watching import Watcher


class Recorder(Watcher):
    """Writes one line when training begins and one per step."""

    def __init__(self, conduct: TrialConfig, writer: Writer, calm: RemoveNondeterminism) -> None:
        self.conduct, self.writer, self.calm = conduct, writer, calm
        self.components: Any = None
        self.experiments: Experiments | None = None
        self.drew = False
        """Whether the forward passes of this step drew random numbers."""
        self.collate_drew = torch.zeros(1, dtype=torch.uint8).share_memory_()
        """1 where `collate` drew random numbers, in this process or in one that fetches for it."""
        self.line: dict[str, Any] = {}
        self.shapes: dict[str, Any] = {}
        """Of all buffers, before the first step."""
        self.pieces: list[list[int]] = []
        """The samples of each piece of this step."""

    def fits(self, validation: OfAllSets | None, listeners: Sequence[Listener]) -> Sequence[Listener]:
        """Leave tables and trackers alone: a trial is none of the user's runs."""
        return [each for each in listeners if not isinstance(each, Logger)]

    def made(self, model: nn.Module) -> None:
        """Take out of the model what this trial leaves out."""
        plain.count_no_more()
        self.calm.change(model)

    def begins(self, components: Any, settings: Settings, state: RunState) -> None:
        """Write where training begins, and what it is asked for.

        Raises:
            ConfigError: the model is cut into stages.
        """
        if any(each.is_meta for each in components.trained.parameters()):
            why = "prove compares every tensor on every worker, and a stage of a pipeline has its own alone"
            self.writer.add("begin", step=state.step, settings=plain_settings(settings), untried=why)
            raise ConfigError(
                why,
                where=f"strategy={settings.strategy.name!r}",
                fix="try the script with --set strategy=ddp: a pipeline is to give the same bits",
            )
        self.components = components
        self.calm.change_compute(components.compute)
        if self.conduct.experiments:
            self.experiments = Experiments(components, settings, state, self.calm)
        self._watch_chance(components)
        self.writer.add(
            "begin",
            step=state.step,
            settings=plain_settings(settings),
            repeats=getattr(getattr(components.batches.source, "order", None), "repeats", False),
            steps_per_epoch=components.batches.source.steps_per_epoch,
            outside=[list(parameter.shape) for parameter in self._outside()],
            batch_norm=any(
                isinstance(module, nn.modules.batchnorm._BatchNorm) for module in components.model.modules()
            ),
            persistent=sorted(components.model.state_dict()),
            weights=facts_of_all(self._weights()),
            buffers=facts_of_all(self._buffers()),
            optimizer=self._optimizer(),
        )

    def reads(self, step: Step) -> Step:
        """Note the samples. Returns the step without what this trial leaves out of them; so is the model."""
        pieces = step.fetched()
        self.line = {
            "epoch": step.epoch,
            "samples": step.samples,
            "shards": step.shards,
            "taken": [int(index) for index in step.taken],
            "data": {
                str(int(index)): digest
                for piece in pieces
                if piece.plan.weight
                for index, digest in zip(
                    piece.plan.indices, digests_of_rows(piece.batch, len(piece.plan.indices)), strict=False
                )
            },
            "before": self._digests(),
        }
        self.pieces = [[int(index) for index in piece.plan.indices if piece.plan.weight] for piece in pieces]
        if not self.components.strategy.mesh.leads_replica:
            self.pieces = []  # another worker of its copy reads the same ones
        self.line["own"] = [index for piece in self.pieces for index in piece]
        # Of a step that counts nothing, and so is passed over, there is no more to note.
        self.line |= {"values": {}, "lr": [], "gradients": {}, "drew": False, "left": "", "ends": [], "drawn": []}
        changed = [LoadedPiece(piece.plan, self.calm.change_batch(piece.batch)) for piece in pieces]
        self.calm.freeze(self.components.trained)
        self.calm.samples = [[int(index) for index in piece.plan.indices] for piece in pieces] or [[]]
        self.calm.passes, self.calm.left, self.calm.ends, self.calm.drawn = 0, "", set(), set()
        self.drew = False
        if self.experiments is not None:
            self.writer.add("experiments", **self.experiments.run())
            self.writer.end()
        return replace(step, pieces=changed)

    def differentiates(self, outcome: StepOutcome) -> None:
        """Note losses and gradients."""
        if (computed := self.components.strategy.computed) is not None:  # every worker was given all pieces
            self.line["own"] = [index for number in computed for index in self.pieces[number]]
        gradients = {name: tensor.grad for name, tensor in self._weights().items() if tensor.grad is not None}
        self.line |= {
            "values": {name: float(value) for name, value in outcome.values.items()},
            "lr": [float(group["lr"]) for group in self.components.optimizer.param_groups],
            "gradients": facts_of_all(gradients),
            "drew": self.drew or bool(self.collate_drew),
            "left": self.calm.left or ("by collate" if self.collate_drew else ""),
            "ends": sorted(self.calm.ends),
            "drawn": sorted(self.calm.drawn),
        }

    def steps(self, step: int) -> None:
        """Note what the step has made of weights and buffers, and end where that is due."""
        self.line["weights"] = facts_of_all(self._weights())
        self.line["buffers"] = facts_of_all(self._buffers())
        self.line["optimizer"] = self._optimizer()
        self.writer.add("step", step=step, **self.line)
        self.writer.after_step(step)

    def _buffers(self) -> dict[str, Tensor]:
        """Every buffer by name, but for caches: not persistent, and of another shape than before the first step."""
        found = dict(self.components.trained.named_buffers())
        self.shapes = self.shapes or {name: each.shape for name, each in found.items()}
        kept = self.components.trained.state_dict().keys()
        return {name: each for name, each in found.items() if name in kept or each.shape == self.shapes.get(name)}

    def _weights(self) -> dict[str, Tensor]:
        """Every parameter by name, those that only the optimizer has at the end."""
        outside = {f"(outside the model) {number}": tensor for number, tensor in enumerate(self._outside())}
        return {**dict(self.components.trained.named_parameters()), **outside}

    def _optimizer(self) -> dict[str, str]:
        """What the optimizer keeps of each parameter, such as a momentum → its hash."""
        names = {id(parameter): name for name, parameter in self._weights().items()}
        state = self.components.optimizer.state
        kept = {
            f"{key} of {names[id(parameter)]}": value
            for parameter, values in state.items()
            if id(parameter) in names
            for key, value in values.items()
            if isinstance(value, Tensor)
        }
        return {name: facts[0] for name, facts in facts_of_all(kept).items()}

    def _outside(self) -> list[Tensor]:
        inside = {id(parameter) for parameter in self.components.trained.parameters()}
        groups = self.components.optimizer.param_groups
        return [tensor for group in groups for tensor in group["params"] if id(tensor) not in inside]

    def _digests(self) -> dict[str, str]:
        """The hash of each parameter and buffer as it is before a step."""
        everything = {**self._weights(), **dict(self.components.trained.named_buffers())}
        return {name: facts[0] for name, facts in facts_of_all(everything).items()}

    def _watch_chance(self, components: Any) -> None:
        """See whether random numbers are drawn between the seeding of a forward pass and its loss."""
        compute, fetcher = components.compute, fetcher_of(components.batches.source)
        if fetcher is not None and fetcher.collate is not default_collate:
            fetcher.collate = SeenCollate(fetcher.collate, self.collate_drew)
        if components.own_step is not None:
            components.own_step.call = _Seen(components.own_step.call, self)
        elif compute.step is not None:
            if not isinstance(compute.step, _Seen):
                compute.step = _Seen(compute.step, self)
        elif not isinstance(compute.loss, _Seen):
            before: list[Any] = []

            def note(model: nn.Module, _: Any) -> None:
                if model.training and not before:
                    before.append(randomness.states())

            components.model.register_forward_pre_hook(note)
            compute.loss = _Seen(compute.loss, self, before)


class _Seen:
    """A loss or a step that notes whether random numbers were drawn meanwhile."""

    def __init__(self, call: Callable[..., Any], recorder: Recorder, before: list[Any] | None = None) -> None:
        self.call, self.recorder, self.before = call, recorder, before
        self.__wrapped__ = call  # who reads the code of a step reads this one's

    def __call__(self, *values: Any) -> Any:
        began = randomness.states() if not self.before else self.before[0]
        result = self.call(*values)
        self.recorder.drew = self.recorder.drew or randomness.drawn_since(began)
        if self.before is not None:
            self.before.clear()
        return result


class SeenCollate:
    """A `collate` that notes whether it drew random numbers."""

    def __init__(self, collate: Callable[[list[Any]], Any], drew: Tensor) -> None:
        self.collate, self.drew = collate, drew
        self.__wrapped__ = collate  # it keeps what the script keeps, not what this does

    def __call__(self, samples: list[Any]) -> Any:
        """The batch."""
        before = randomness.states()
        batch = self.collate(samples)
        if not self.drew and randomness.drawn_since(before):
            self.drew.fill_(1)
        return batch
