"""BatchNorm by the kernels of a GPU: workers with parts of a batch, one with none, give what one process gives."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from stand_in import streams, tensor
from torch import Tensor, nn

from manyhosts.cluster.place import Place
from manyhosts.communication.batch_norm import make_global
from manyhosts.communication.shared_norm import acting
from manyhosts.communication.world import World
from manyhosts.errors import ConfigError

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("stand-in")]

CUT = (None, 5, 3)
"""What each worker has of the batch. The first has a ghost, for which PyTorch's own kernel gives NaN on all."""
STEPS = 3
LAYERS: dict[str, tuple[type[nn.Module], dict[str, Any], tuple[int, ...], torch.memory_format]] = {
    "plain": (nn.BatchNorm2d, {}, (4, 3), torch.contiguous_format),
    "channels last": (nn.BatchNorm2d, {}, (4, 3), torch.channels_last),
    "volumes, channels last": (nn.BatchNorm3d, {}, (4, 3, 2), torch.channels_last_3d),
    "rows": (nn.BatchNorm1d, {}, (), torch.contiguous_format),
    "lines": (nn.BatchNorm1d, {}, (9,), torch.contiguous_format),
    "mean of all steps": (nn.BatchNorm2d, {"momentum": None}, (4, 3), torch.contiguous_format),
    "not affine": (nn.BatchNorm2d, {"affine": False}, (4, 3), torch.channels_last),
    "nothing kept": (nn.BatchNorm2d, {"track_running_stats": False}, (4, 3), torch.contiguous_format),
}


def made(name: str) -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """The layer, the whole batch of each step, and the gradient of what comes out."""
    kind, options, shape, memory_format = LAYERS[name]
    torch.manual_seed(0)
    layer = kind(6, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    batches, gradients = ([torch.randn(8, 6, *shape) for _ in range(STEPS)] for _ in range(2))
    return layer, [batch.mul(2).add(3).to(memory_format=memory_format) for batch in batches], gradients


def trained(layer: nn.Module, batches: list[Tensor], gradients: list[Tensor]) -> dict[str, Tensor]:
    """What the layer gave, and what it has."""
    found = {}
    for step, (batch, gradient) in enumerate(zip(batches, gradients, strict=True)):
        samples = batch.detach().requires_grad_()
        output = layer(samples)
        output.backward(gradient.to(output.device))
        found |= {f"output {step}": output.detach(), f"input {step}": samples.grad}
    found |= {f"gradient of {name}": each.grad for name, each in layer.named_parameters()}
    return found | dict(layer.named_buffers())


def of_part(rank: int) -> dict[str, dict[str, Tensor]]:
    """What each layer gave on this worker, which has its part of the batch."""
    tensor.install()
    world, found = World(Place.from_environment()), {}
    for name in LAYERS:
        layer, batches, gradients = made(name)
        layer.to(world.device)
        batch = make_global(layer, world)
        assert batch is not None
        batch.ghost = CUT[rank] is None
        first = sum(size or 0 for size in CUT[:rank])
        part = slice(first, first + (CUT[rank] or 2))  # the samples of a ghost are those of somebody else
        own = [each[part].contiguous(memory_format=LAYERS[name][3]).to(world.device) for each in batches]
        with (
            acting(batch),
            streams.no_synchronisation(),
            patch.object(torch, "batch_norm_stats", wraps=torch.batch_norm_stats) as stats,
            patch.object(world, "stack", wraps=world.stack) as forward,
            patch.object(world, "all_reduce", wraps=world.all_reduce) as backward,
        ):
            gradient = [each[part].contiguous() * (not batch.ghost) for each in gradients]
            pinned = [tensor.pin(each).to(world.device, non_blocking=True) for each in gradient]
            given = trained(layer, own, pinned)
        assert [each.call_count for each in (stats, forward, backward)] == [STEPS] * 3, "one exchange each way"
        found[name] = {key: value.cpu() for key, value in given.items()}
    world.leave()
    return found


def test_workers_with_parts_of_a_batch_and_one_with_none_give_what_one_process_gives() -> None:
    answers = run_ranks(3, of_part)
    for name in LAYERS:
        layer, batches, gradients = made(name)
        parts = [answer[name] for answer in answers]
        for key, expected in trained(layer, batches, gradients).items():
            if key.startswith(("output", "input")):
                found = [torch.cat([part[key] for part in parts[1:]])]
                assert key.startswith("output") or not parts[0][key].any(), "of a ghost nothing is learned"
            elif key.startswith("gradient"):
                found = [sum(part[key] for part in parts)]
            else:
                found = [part[key] for part in parts]
            few = 1e-6 * float(expected.abs().max())
            for each in found:
                torch.testing.assert_close(each, expected, rtol=0, atol=few, msg=f"{name}, {key}")


def of_modes(rank: int) -> list[str]:
    """What a step begins with where all layers are in one mode, and where one is in evaluation on one worker."""
    tensor.install()
    world = World(Place.from_environment())
    layers = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)).to(world.device)
    batch, found = make_global(layers, world), []
    assert batch is not None
    batch.begin_step(8)  # the memory is made
    with streams.no_synchronisation():
        layers[0].eval()
        batch.begin_step(8)
        layers.train()
        batch.begin_step(8)
    if rank == 1:
        layers[2].eval()
    try:
        batch.begin_step(8)
    except ConfigError as error:
        found.append(str(error.what))
    found.append(str(batch.exchanges))
    world.leave()
    return found


def test_layer_that_is_evaluated_on_one_gpu_of_a_host_is_named_and_no_host_waits_for_its_device() -> None:
    for what, exchanges in run_ranks(2, of_modes):
        assert what.startswith("the BatchNorm '2' is in evaluation mode on rank 1 and in training mode on the others")
        assert exchanges == "0", "statistics are not among them"
