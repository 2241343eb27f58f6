"""What is predicted where layers are cut and their parts are kept in parts, by arithmetic on paper."""

from __future__ import annotations

from dataclasses import replace

import pytest
from measured_training import MEASURED, group, machines

from manyhosts.config.mesh import Mesh
from manyhosts.config.sharded_layers import ShardedLayers
from manyhosts.config.strategies import FSDP
from manyhosts.errors import ConfigError
from manyhosts.planner.measured import CutLayers
from manyhosts.planner.memory import ModelBytes
from manyhosts.planner.plan import strategy_of
from manyhosts.planner.predict import predictions, ways
from manyhosts.planner.strategies.sharded_layers import by_axis
from manyhosts.planner.strategies.strategy import STRATEGIES

LAYERS = CutLayers(parameter_bytes=500, exchanges=4, exchanged_bytes=400.0)
CUT = replace(MEASURED, unit_bytes=(300, 300, 300, 100), compression={}, cut_layers=LAYERS, micro_batch=2)
MODEL = STRATEGIES.load("fsdp+tensor")(ShardedLayers(size=2))


def test_those_who_cut_a_layer_are_one_reader_with_their_share_of_it() -> None:
    step, alone = MODEL.step(CUT, group(1, 4)), STRATEGIES.load("single")(None).step(CUT, group(1))
    # Half of the parameters are cut in two, so each computes three quarters of it, of half of the samples.
    assert step.compute == pytest.approx(0.75 * alone.compute / 2)
    assert step.update == pytest.approx(0.75 * CUT.update_s / 2)
    assert step.other == pytest.approx(alone.other)


def test_exchanges_of_cut_layers_are_waited_for_and_share_the_wire() -> None:
    slow, none = group(1, 4, latency_s=0.01, bytes_per_second=1e3), replace(LAYERS, exchanges=0)
    longer = MODEL.step(CUT, slow).communication_exposed
    longer -= MODEL.step(replace(CUT, cut_layers=none), slow).communication_exposed
    # Two micro-batches of four exchanges of 200 bytes: two rounds of a ring, in which both send half of it, over what
    # two such pairs share.
    assert longer == pytest.approx(2 * 4 * 2 * (0.01 + 2 * 100 / (1e3 / 2)))


def test_layers_are_cut_within_a_host_where_it_has_the_workers() -> None:
    readers, together = by_axis(group(2, 2, bytes_per_second=8.0), 2)
    assert (readers.nodes, readers.workers_per_node, readers.between.bytes_per_second) == (2, 1, 4.0)
    assert (together.nodes, together.workers_per_node, together.within.bytes_per_second) == (1, 2, 8.0)
    readers, together = by_axis(group(4, bytes_per_second=8.0), 2)
    assert (readers.nodes, together.nodes, readers.between.bytes_per_second) == (2, 2, 8.0)


def test_a_worker_holds_a_part_of_its_share_and_at_the_start_what_the_trial_does() -> None:
    held = MODEL.memory(CUT, group(1, 4))
    assert (held.parameters, held.gradients, held.optimizer) == (375, 375, 750)
    large = replace(CUT, micro_batch=None, compute=(replace(CUT.compute[0], activation_bytes=10**6),))
    uncut = STRATEGIES.load("fsdp")(FSDP()).memory(large, group(1, 4))
    assert MODEL.memory(large, group(1, 4)).activations == 2 * uncut.activations, "each has the samples of two"
    small = replace(CUT, compute=(replace(CUT.compute[0], activation_bytes=1),))
    assert MODEL.memory(small, group(1, 4)).total == 4 * CUT.parameter_bytes, "at the start more than in a step"


@pytest.mark.parametrize("activations", [0, 1000, 10**6])
@pytest.mark.parametrize("units", [(1000,), (100, 900), (250, 250, 250, 250), (450, 450, 100)])
@pytest.mark.parametrize("workers", [4, 8])
def test_what_fits_so_fits_with_fsdp_too_which_is_why_auto_has_no_need_of_it(
    activations: int, units: tuple[int, ...], workers: int
) -> None:
    model = ModelBytes(
        parameters=1000, gradients=1000, optimizer=2000, buffers=0, activations=activations, on_cpu=True, units=units,
        divisible=1000, together=float(workers),
    )  # fmt: skip
    fsdp = STRATEGIES.load("fsdp")(FSDP()).largest(model, workers)  # type: ignore[attr-defined]
    assert fsdp.total <= MODEL.largest(model, workers).total  # type: ignore[attr-defined]


def test_a_plan_has_it_where_a_script_asks_for_it_and_says_how_layers_are_cut() -> None:
    asked = ShardedLayers().planned(Mesh(tensor=2))
    ShardedLayers().check_planned(Mesh(tensor=2))
    assert asked == ShardedLayers(size=2)
    assert strategy_of({"name": "fsdp+tensor", "size": 2}) == asked
    found = predictions(CUT, machines(1, 8), [(1, 3), (1, 4), (1, 8)], ways(CUT, asked))
    assert {each.workers for each in found if each.strategy == "fsdp+tensor" and each.fits} == {4, 8}
    assert {each.setting for each in found if each.strategy == "fsdp"} == {"zero=1", "zero=2", "zero=3"}
    of_copies = ShardedLayers().planned(Mesh(shard=4, tensor=2))
    found = predictions(CUT, machines(1, 8), [(1, 4), (1, 8)], ways(CUT, of_copies))
    assert {each.workers for each in found if each.strategy == "fsdp+tensor" and each.fits} == {8}
    assert "fsdp+tensor" not in {each.strategy for each in ways(CUT)}


@pytest.mark.parametrize("mesh", [None, Mesh(shard=2), Mesh(replicate=2, shard=2, tensor=2)])
def test_a_plan_wants_the_number_that_cut_a_layer_and_finds_that_of_copies(mesh: Mesh | None) -> None:
    with pytest.raises(ConfigError, match=r"mesh\.tensor=2"):
        ShardedLayers().check_planned(mesh)
