"""A pipeline: each worker has a stage or several, the tensors of their blocks, and computes micro-batches in turn.

The workers of one copy of the model read the same samples, in the micro-batches in which one process would compute
them. With one copy weights come out bit for bit as those of that process, under every schedule and number of stages.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.layout import spread
from manyhosts.communication.mesh import Mesh
from manyhosts.communication.world import World
from manyhosts.config.pipelined import BY_LAYERS, BY_MEMORY, MEASURED, ZERO_BUBBLE, Pipeline
from manyhosts.config.stage_order import BACKWARD, WEIGHTS, Pass, best_cuts, even_cuts, loads, order_of
from manyhosts.data import randomness
from manyhosts.errors import ConfigError
from manyhosts.strategies.cut_model import ComputedTogether, check_memory
from manyhosts.strategies.materialise import is_meta, materialise, places_of
from manyhosts.strategies.pipeline.chain import Chain, block_bytes, find_chain
from manyhosts.strategies.pipeline.halves import Halves
from manyhosts.strategies.pipeline.look import Seen, look, prove
from manyhosts.strategies.pipeline.messages import OUTPUTS, Channel, Inbox
from manyhosts.strategies.pipeline.owners import Stages, check_tied, leave, stages_of, tied_of, uses_by_blocks
from manyhosts.strategies.pipeline.stage import Stage, evaluate
from manyhosts.strategies.strategy import Compute, InTwo, Piece, Scale, StepOutcome, Steppable
from manyhosts.strategies.tally import StepMetrics
from manyhosts.strategies.traits import Traits

_LAST = Pass("", 0, 0)
"""After the last pass of a step, which there is nothing to expect for."""


class Pipelined(ComputedTogether):
    """Parameters, gradients and optimizer state of some blocks on each worker, and of no other."""

    traits = Traits(communicates_in_forward=True, holds_full_model=False)
    least_samples = 4  # the others wait where a stage fails
    stage_kind: type[Stage] = Stage

    def __init__(self, config: Pipeline, world: World) -> None:
        """A strategy for several workers.

        Raises:
            ConfigError: they compute on GPUs.
        """
        stages = config.stages or world.size
        super().__init__(Mesh(world, pipe=stages), Stages(world), name="pipeline")
        self.workers = stages
        """Those of one copy of the model."""
        self.stages = stages * config.per_worker
        self.config = config
        self.own: list[Stage] = []
        """The stages of this worker, in the order of the model."""
        self.loss = nn.Module()
        """The loss, where it has tensors of its own: all keep them, and the last stage finds their gradients."""
        self.computed_s = 0.0
        """Seconds of steps until all stages were through, waits among them; the first step warms up and is left out."""
        self.waited_s = 0.0
        """Those of them that it waited for other stages."""
        self.theory: list[float] = []
        """The bubble of each step, in theory, beginning with the first."""
        self.draws: bool | None = None
        """Whether the optimizer draws random numbers; None as long as no one has seen it step."""

    def place(self, model: nn.Module) -> nn.Module:
        """Keep the tensors of this worker's blocks, equal to rank 0's, and the shapes of all others.

        Raises:
            ConfigError: the model is no chain of blocks, has fewer than there are workers, or the cuts name none.
        """
        uncut, *loss = model.children() if getattr(model, "is_never_called", False) else [model]
        if is_meta(model):
            materialise(model.modules(), places_of(model))
        check_memory(uncut, "strategy='pipeline'")
        _check_called(uncut)
        chain = find_chain(uncut)
        self._check_count(chain)
        self._check_copies(model, *loss)
        spread([*model.parameters(), *model.buffers()], self.world)
        seen = self._seen(uncut, chain)
        cuts = self._cuts(chain, seen.seconds, block_bytes(uncut))
        stages = stages_of(seen.uses, cuts)
        sample = self.sample
        check_tied(uncut, stages, "fp32" if sample is None else sample.precision)
        if sample is not None and self.world.is_rank_0 and not self.world.is_joining:
            prove(uncut, stages, cuts, sample.inputs(), sample.context)
        self.world.barrier()
        self._say(chain, cuts, seen.seconds)
        own = range(self.mesh.coordinate("pipe"), self.stages, self.workers)
        leave(uncut, stages, own)
        self.loss = loss[0] if loss else nn.Module()
        peers, inbox = self._peers(), Inbox(deque)
        for number in own:
            tied, halves = tied_of(uncut, stages, number), Halves() if self.config.schedule == ZERO_BUBBLE else None
            channel = Channel(self.world, peers, number, inbox)
            self.own.append(self.stage_kind(uncut, chain, cuts, tied, channel, halves))
        uncut.forward = partial(evaluate, self.own)
        self.parameters = list(model.parameters())
        return model

    def _check_count(self, chain: Chain) -> None:
        if chain.is_trunk and self.config.per_worker > 1:
            raise ConfigError(
                "stages that are interleaved share a worker, and a model that does more than to call its blocks would "
                "find there what another stage has before its first block",
                where="Pipeline(schedule=…)",
                fix="write the model as nn.Sequential, or choose another schedule",
            )
        if len(chain.blocks) < self.stages:
            raise ConfigError(
                f"there are {self.stages} stages, and the model has {len(chain.blocks)} blocks: "
                f"{', '.join(chain.names)}",
                where="strategy='pipeline'",
                fix=f"start fewer workers or set stages to fewer (with a stage on each worker, and under 'interleaved' "
                f"virtual_stages, there may be {len(chain.blocks)}), or write the model in more blocks",
            )

    def _check_copies(self, model: nn.Module, *loss: nn.Module) -> None:
        """See that copies of a stage, which read different samples, have nothing that follows from their own alone.

        Raises:
            ConfigError: there are such copies, and the model has BatchNorm layers or the loss has buffers.
        """
        if self.mesh.data.size == 1:
            return
        norms = [name for name, each in model.named_modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
        if norms or any(True for each in loss for _ in each.buffers()):
            what = f"{norms[0]} is a BatchNorm layer" if norms else "the loss has buffers"
            raise ConfigError(
                f"{what}, of which each of the {self.mesh.data.size} copies of a stage would see its own samples alone",
                where="Pipeline(stages=…)",
                fix=f"let all {self.world.size} workers be stages, so that there are no copies (stages=, or pipeline= "
                f"of a mesh), or {'use another norm' if norms else 'keep no buffer in the loss'}",
            )

    def _seen(self, model: nn.Module, chain: Chain) -> Seen:
        """What rank 0 has seen of the model, on every worker."""
        sample = self.sample
        if sample is None:
            if chain.is_trunk:
                raise ConfigError(
                    "the training set is a stream, so the model cannot be called before training begins, to see what "
                    "it does before and after its blocks",
                    where="strategy='pipeline'",
                    fix="write the model as nn.Sequential, or choose another strategy",
                )
            return Seen(uses_by_blocks(model, [block for _, block in chain.blocks]))
        reported: dict[str, Any] = {}
        if self.world.is_rank_0:  # of itself, as long as it has not met the others
            timed = self.config.cuts == MEASURED and self.stages > 1 and not self.world.is_joining
            seen = look(model, chain, sample.inputs(), sample.context, timed=timed)
            reported = {"uses": seen.uses, "seconds": seen.seconds}
        return Seen(**gather_plain(self.world, reported)[0])

    def _cuts(self, chain: Chain, seconds: list[float], sizes: Sequence[int]) -> list[int]:
        """The first block of each stage, and the number of blocks.

        Raises:
            ConfigError: a cut is none of the blocks', or there are more or fewer than stages need.
        """
        count, stages, named = len(chain.blocks), self.stages, self.config.named
        if self.world.part is not None:
            named = self.world.part.plan["cuts"]  # those of the workers that it will join
        if named:
            if unknown := [name for name in named if name not in chain.names[1:]]:
                raise ConfigError(
                    f"{unknown[0]!r} is no block with which a stage after the first could begin",
                    where="Pipeline(cuts=…)",
                    fix=f"name some of {', '.join(chain.names[1:])}",
                )
            places = [chain.names.index(name) for name in named]
            if places != sorted(set(places)) or len(places) != stages - 1:
                raise ConfigError(
                    f"cuts are {', '.join(named)}, and {stages} stages take {stages - 1}, each once, in the model's "
                    "order",
                    where="Pipeline(cuts=…)",
                    fix=f"write cuts={[chain.names[place] for place in sorted(set(places))]}"
                    if len(set(places)) == stages - 1
                    else f"name {stages - 1} of {', '.join(chain.names[1:])}; or leave cuts out",
                )
            return [0, *places, count]
        if self.config.cuts == BY_MEMORY:
            return best_cuts(
                [float(sum(each.nbytes for each in block.parameters())) for _, block in chain.blocks], stages
            )
        return best_cuts(seconds, stages) if seconds else even_cuts(count, stages)

    def _say(self, chain: Chain, cuts: Sequence[int], seconds: list[float]) -> None:
        begins = [chain.names[place] for place in cuts[:-1]]
        copies = self.mesh.data.size
        self.plan = {"cuts": begins[1:]}
        words = f"pipeline of {self.stages} stages ({self.config.schedule}), which begin with {', '.join(begins)}"
        words += f", in {copies} copies" if copies > 1 else ""
        if seconds:
            took = [f"{1e3 * each:.3g}" for each in loads(seconds, list(cuts))]
            words += f" (cut by measured time: {', '.join(took)} ms for each micro-batch)"
        elif self.config.cuts == MEASURED and self.sample is None:
            words += " (cut by layers, for nothing could be measured before training begins)"
        elif self.config.cuts in (BY_LAYERS, BY_MEMORY):
            words += f" (cut by {self.config.cuts})"
        self.world.notes.append(words)

    def forward_backward(
        self, model: nn.Module, pieces: Sequence[Piece], compute: Compute, scale: Scale, control_flags: Sequence[float]
    ) -> StepOutcome:
        """Send the micro-batches through, and add up the gradients of this stage's blocks."""
        for parameter in self.parameters:
            parameter.grad = None
        halves = cast(InTwo, compute)
        assert self.own, "place() comes before forward_backward()"
        if len(self.own) > 1:
            pieces = [replace(each, bring=cache(each.bring)) for each in pieces]  # each stage asks for a batch
        tally = StepMetrics(control_flags, self.agreed, self.world)
        losses: dict[int, Tensor] = {}
        begin, waited = time.perf_counter(), self._waited_s()
        for stage in self.own:
            stage.lend()
        order = order_of(
            self.config.schedule,
            workers=self.workers,
            virtual_stages=self.config.per_worker,
            micro_batches=len(pieces),
        )
        passes = order.passes[self.mesh.coordinate("pipe")]
        for (kind, place, number), (following, its_place, _) in zip(passes, [*passes[1:], _LAST], strict=True):
            stage = self.own[place // self.workers]
            then = partial(self.own[its_place // self.workers].expect, following)
            if kind == WEIGHTS:
                then()
                stage.weights(number)
            elif kind == BACKWARD:
                stage.backward(number, losses.pop(number) if stage.is_last else None, then)
            elif (loss := self._forward(stage, number, pieces[number], halves, tally, then)) is not None:
                losses[number] = scale(loss)
                del loss  # or this graph, and what it keeps, would stay until the next one
        self._share_loss()
        through, before = time.perf_counter(), self._waited_s()
        for stage in self.own:
            stage.channel.finish()
        self.sum_copies()
        self.world.wait(tally.start_sum())
        end = time.perf_counter()
        if self.theory:
            self.computed_s += end - begin
            self.waited_s += before - waited + end - through  # those that are through wait for the last one
        self.theory.append(order.bubble)
        return tally.outcome()

    def _peers(self) -> list[int]:
        """The ranks of the workers of this copy, by the number of each stage."""
        return [*self.mesh.peers("pipe")] * self.config.per_worker

    def resync(self, source: int, *, new: bool, gone: int) -> str:
        """Send to the stages of the copy that this worker is in now."""
        peers = self._peers()
        for stage in self.own:
            stage.channel.reset(peers)
        return super().resync(source, new=new, gone=gone)

    def _waited_s(self) -> float:
        return sum(stage.channel.waited_s for stage in self.own)

    def _forward(
        self, stage: Stage, number: int, piece: Piece, halves: InTwo, tally: StepMetrics, then: Callable[[], None]
    ) -> Tensor | None:
        """One micro-batch through this stage. The last one has its weighted loss."""
        inputs, targets = halves.inputs_of(piece)
        with halves.context():
            outputs = stage.forward(number, inputs, then)
            return tally.add(halves.values_of(outputs, targets), piece.weight) if stage.is_last else None

    @torch.no_grad()
    def _share_loss(self) -> None:
        """Have on all workers what the last stage has found for the loss's own tensors."""
        parameters, buffers = list(self.loss.parameters()), list(self.loss.buffers())
        if not parameters and not buffers:
            return
        if self.own[-1].is_last:
            for other in range(self.workers - 1):
                self.own[-1].channel.send([[each.grad for each in parameters], buffers], other, OUTPUTS)
            return
        gradients, changed = self.own[0].channel.receive(self.stages - 1, OUTPUTS)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for buffer, value in zip(buffers, changed, strict=True):
            buffer.copy_(value)

    @torch.no_grad()
    def _norms(self, model: nn.Module) -> list[Tensor]:
        """The norm of each gradient, in the model's order, on every worker, as the one that holds it has found it."""
        own = torch.zeros(2, len(self.parameters), dtype=torch.float64)
        of_loss = set() if self.mesh.coordinate("pipe") == 0 else {id(each) for each in self.loss.parameters()}
        trained = [(place, each) for place, each in enumerate(self.parameters) if id(each) not in of_loss]
        here = [(place, each.grad) for place, each in trained if each.grad is not None]
        for (place, _), norm in zip(here, torch._foreach_norm([grad for _, grad in here]) if here else (), strict=True):
            own[0, place], own[1, place] = norm.double(), 1.0
        norms, there = self.mesh.along("pipe").all_reduce(own)
        return [norm.to(each.dtype) for norm, has, each in zip(norms, there, self.parameters, strict=True) if bool(has)]

    @torch.no_grad()
    def norm(self, model: nn.Module) -> Tensor:
        """That of the full gradient, from the norms of its tensors in the order of one process."""
        norms = self._norms(model)
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    @torch.no_grad()
    def clip_gradients(self, model: nn.Module, max_norm: float) -> Tensor:
        """Scale the gradients of this stage as PyTorch's `clip_grad_norm_` would scale all."""
        norms = self._norms(model)
        given: list[list[Tensor | None]] = [[*norms]]
        groups = _group_tensors_by_device_and_dtype(given).values() if norms else ()
        alike = [
            each for [own], _ in groups for each in own if each is not None
        ]  # in the order in which PyTorch adds them
        norm = torch.linalg.vector_norm(torch.stack(alike)) if alike else torch.zeros(())
        nn.utils.clip_grads_with_norm_([each for each in self.parameters if each.grad is not None], max_norm, norm)
        return norm

    def update(self, model: nn.Module, optimizer: Steppable) -> None:
        """Step the optimizer, which sees gradients of this stage's tensors alone.

        Raises:
            ConfigError: it draws random numbers, of which each stage would draw the same.
        """
        before = randomness.states() if self.draws is None else None
        optimizer.step()
        if before is not None:
            self.draws = randomness.drawn_since(before)
            if self.draws:
                raise ConfigError(
                    "the optimizer draws random numbers, one tensor after another, and a stage has not all of them",
                    where="mh.Trainer(optimizer=…)",
                    fix='choose one that draws none, such as AdamW, or strategy="ddp"',
                )

    def about_time(self) -> str:
        """How long stages have waited, in a sentence; empty where nothing was computed. All workers call this."""
        if not self.computed_s:
            return ""
        is_undivided = any(
            stage.halves is not None and stage.number and not stage.halves.is_sound for stage in self.own
        )
        own = torch.tensor([self.waited_s / self.computed_s, is_undivided], dtype=torch.float64)
        shares, flags = self.mesh.along("pipe").stack(own).T.tolist()
        undivided = ", ".join(str(stage) for stage, each in enumerate(flags) if each)
        counted = self.theory[1:]
        expected = sum(counted) / len(counted)
        waited = ", ".join(f"{100 * share:.1f} %" for share in shares)
        return (
            f"pipeline: the stages waited {waited} of the time of their passes; where all take equally long and "
            f"messages no time it would be {100 * expected:.1f} %, and less with smaller micro-batches"
            + f"; stages {undivided} computed backward passes in one piece, for in halves their bits differ"
            * bool(undivided)
        )


def _check_called(model: nn.Module) -> None:
    """See that nothing hangs on a call of the entire model, which stages never make.

    Raises:
        ConfigError: hooks do.
    """
    if model._forward_hooks or model._forward_pre_hooks or model._backward_hooks or model._backward_pre_hooks:
        raise ConfigError(
            "the model has hooks, which a stage would not call, for it computes some of its blocks",
            where="strategy='pipeline'",
            fix="put them on a block, or do it in the block's forward",
        )
