"""What is predicted of workers that compute the same samples: pipelines and cut layers, by arithmetic on paper."""

from __future__ import annotations

from dataclasses import replace

import pytest
from measured_training import MEASURED, group, machines

from manyhosts.config.asynchronous import PipeDream
from manyhosts.config.pipelined import Pipeline
from manyhosts.config.tensor_cut import Tensor
from manyhosts.errors import ConfigError
from manyhosts.planner.fit import Training, ways
from manyhosts.planner.measured import Block, CutLayers
from manyhosts.planner.memory import ModelBytes
from manyhosts.planner.predict import predictions
from manyhosts.planner.predict import ways as ways_of_a_plan
from manyhosts.planner.strategies.strategy import STRATEGIES

BLOCKS = tuple(Block(share=share, parameter_bytes=100, sent_bytes=0.0) for share in (0.1, 0.1, 0.1, 0.7))
CHAIN = replace(MEASURED, blocks=BLOCKS, micro_batch=2, device="cpu")
UNCUT = STRATEGIES.load("single")


def test_the_slowest_stage_decides_and_the_others_wait_for_its_ends() -> None:
    alone = UNCUT(None).step(CHAIN, group(1)).compute
    count = CHAIN.global_batch // 2
    slow = STRATEGIES.load("pipeline")(Pipeline()).step(replace(CHAIN, cores=8), group(2))
    # Stages take 0.3 and 0.7 of a pass: the first one's forward and backward pass are all that the slow one waits for.
    assert slow.compute == pytest.approx(alone * (0.7 + 0.3 / count))
    even = STRATEGIES.load("pipeline")(Pipeline(cuts="layers")).step(replace(CHAIN, cores=8), group(2))
    assert even.compute == pytest.approx(alone * (0.8 + 0.2 / count))
    assert even.update == pytest.approx(MEASURED.update_s * 200 / MEASURED.parameter_bytes)


def test_a_pipeline_that_is_not_emptied_between_updates_makes_more_of_them_and_keeps_older_weights() -> None:
    flushed, config = STRATEGIES.load("pipeline")(Pipeline()), PipeDream(accumulate=3)
    known, count = replace(CHAIN, cores=8), CHAIN.global_batch // 2
    step, plain = STRATEGIES.load("pipedream")(config).step(known, group(2)), flushed.step(known, group(2))
    assert (step.compute, step.communication_exposed) == (plain.compute, plain.communication_exposed)
    assert step.update == pytest.approx(-(-count // 3) * plain.update)
    held = STRATEGIES.load("pipedream")(config).memory(known, group(2))
    assert held.strategy == flushed.memory(known, group(2)).strategy + 300, "three of the four blocks, once more"
    asked = [each for each in ways_of_a_plan(known, config) if each.strategy == "pipedream"]
    assert [each.most for each in asked] == [4]


def test_messages_on_the_way_to_the_slowest_stage_are_waited_for() -> None:
    sends = replace(CHAIN, cores=8, blocks=tuple(replace(each, sent_bytes=1e6) for each in BLOCKS))
    slow = group(2, latency_s=0.01, bytes_per_second=1e8)
    step = STRATEGIES.load("pipeline")(Pipeline()).step(sends, slow)
    assert step.communication_exposed == pytest.approx(2 * (0.01 + 2e6 / 1e8))


def test_cut_layers_are_shared_out_and_the_rest_is_computed_by_all() -> None:
    layers = CutLayers(parameter_bytes=MEASURED.parameter_bytes // 2, exchanges=4, exchanged_bytes=400.0)
    cut = replace(MEASURED, cut_layers=layers, micro_batch=2, cores=8, device="cpu")
    tensor = STRATEGIES.load("tensor")(Tensor())
    step = tensor.step(cut, group(2))
    assert step.compute == pytest.approx(0.75 * UNCUT(None).step(cut, group(1)).compute)
    count = cut.global_batch // 2
    exposed = tensor.step(cut, group(2, latency_s=0.01, bytes_per_second=1e3)).communication_exposed
    assert exposed == pytest.approx(count * 4 * 2 * (0.01 + 2 * 100.0 / 2 / 1e3))


def test_a_plan_has_them_for_as_many_workers_as_there_are_blocks() -> None:
    layers = CutLayers(parameter_bytes=10, exchanges=1, exchanged_bytes=1.0)
    known = replace(CHAIN, cut_layers=layers)
    found = predictions(known, machines(8), [(2, 1), (8, 1)], ways_of_a_plan(known))
    assert {each.workers for each in found if each.strategy == "pipeline"} == {2}
    assert {each.workers for each in found if each.strategy == "tensor"} == {2, 8}
    on_gpu = replace(known, device="cuda")
    assert not {"pipeline", "tensor"} & {each.strategy for each in ways_of_a_plan(on_gpu)}


def test_copies_are_not_planned() -> None:
    with pytest.raises(ConfigError, match="one copy over all workers"):
        Pipeline(stages=2).check_planned(None)
    Tensor().check_planned(None)


MB = 1_000_000
MODEL = ModelBytes(
    parameters=100 * MB, gradients=100 * MB, optimizer=200 * MB, buffers=0, activations=8 * MB, on_cpu=True,
    blocks=(25 * MB,) * 4, divisible=80 * MB, together=2.0,
)  # fmt: skip
"""No block of it repeats, so `fsdp` finds no units."""


def test_what_data_parallelism_cannot_hold_is_cut_by_layers_or_into_stages() -> None:
    training = Training(model=MODEL, checkpointed=2 * MB, is_shared=True)
    found = {each.name: each.memory for each in ways(training, 2)}
    assert list(found) == ["ddp", "ddp, activation checkpointing", "tensor", "pipeline 1f1b"]
    assert found["tensor"].parameters == 60 * MB
    assert found["tensor"].activations == 16 * MB
    stage = found["pipeline 1f1b"]
    assert (stage.parameters, stage.gradients, stage.optimizer) == (50 * MB, 50 * MB, 100 * MB)
    assert stage.activations == 8 * MB, "half of the blocks, twice the samples"
    several = replace(MODEL, together=1.0, passes=8)
    flight = {each.name: each.memory for each in ways(replace(training, model=several), 2)}["pipeline 1f1b"]
    assert flight.activations == 8 * MB, "the first stage holds two micro-batches of half of the blocks"
