"""Every expression that is about GPUs is executed: most in trainings on the stand-in, the others one by one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gpu_lines
import pytest
import torch
from ranks import free_port, run_ranks
from stand_in import tensor
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts import device, refusals
from manyhosts.cli.run import _rehearsed
from manyhosts.cluster.place import Place
from manyhosts.communication.model_watch import ModelWatch
from manyhosts.communication.nodes import Levels, Node
from manyhosts.communication.world import World
from manyhosts.config import profile
from manyhosts.config.settings import Settings
from manyhosts.config.strategies import DDP
from manyhosts.control import variables
from manyhosts.control.agent import node, script_faults, script_patches, script_probe
from manyhosts.control.agent.import_preloader import _Traces
from manyhosts.control.head.checks import _of_variables
from manyhosts.loss.comparison import Comparison, Look, Seen
from manyhosts.loss.set_draws import SetDraws
from manyhosts.measure.in_worker import machine, readiness, several_workers, updating
from manyhosts.measure.in_worker.batches import Batches
from manyhosts.measure.in_worker.passes import Passes, of_pass
from manyhosts.model import activation_checkpointing
from manyhosts.strategies.local_updates import LocalGradient
from manyhosts.strategies.strategy import Piece
from manyhosts.strategies.uncut_model import SingleProcess
from manyhosts.training.process_session import ProcessSession
from manyhosts.training.state.recovery import why_not_survive
from manyhosts.training.state.registry import put_weights, weights_of
from manyhosts.training.state.run_state import RunState

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("stand-in")]

INPUTS = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
DATA = TensorDataset(INPUTS, torch.arange(64) % 4)


def trainer(folder: Path, duration: str, **settings: Any) -> mh.Trainer:
    made = mh.Trainer(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        data=mh.Data(train=DATA, validation=DATA, batch_size=8),
        **{"snapshots": mh.Snapshots(every="4 steps"), "run_dir": folder, **settings},
    )
    made.fit(duration)
    return made


def trainings(folder: Path) -> None:
    """With what workers, snapshots, validation, audits and profiles ask of a device."""
    with patch.dict(os.environ, {profile.VARIABLE: "2 steps"}):
        plain = trainer(folder / "plain", "7 steps")
    assert (folder / f"plain/profile/rank-{plain.world.rank}/summary.txt").exists() or plain.world.rank
    assert plain.predict(TensorDataset(INPUTS), forward=lambda model, batch: model(batch[0])).shape == (64, 4)
    assert why_not_survive(plain.components) == ""
    ModelWatch(plain.components.model, plain.world).all_is_new()
    trainer(folder / "auto", "6 steps", strategy=mh.DDP(compression="auto", compress_above=16))
    trainer(folder / "int8", "2 steps", strategy=mh.DDP(compression="int8", compress_above=16))
    low_rank = mh.DDP(compression="powersgd", compress_above=1, powersgd_rank=1)
    trainer(folder / "powersgd", "2 steps", strategy=low_rank)
    fits = trainer(folder / "fits", "2 steps", strategy="auto")
    assert fits.settings.strategy == mh.DDP(), "in 16 GiB"
    assert 0 < device.memory_left(fits.world.device) < 1 << 34
    trainer(folder / "parts", "2 steps", strategy=mh.FSDP(units=["0", "3"]))
    copies = trainer(folder / "copies", "2 steps", strategy=mh.FSDP(units=["0", "3"], shard=1))
    assert "of a GPU" in why_not_survive(copies.components)
    offloaded = mh.FSDP(units=["0", "3"], cpu_offload=True)
    on_host = trainer(folder / "on host", "2 steps", strategy=offloaded, precision="fp16", clip_gradients=1.0)
    put_weights(on_host.components, weights_of(on_host.components))
    trainer(folder / "virtual", "2 steps", virtual_workers=4, audit=0.5)
    torch.use_deterministic_algorithms(False)


def measurements(folder: Path) -> None:
    """A plan measures one worker."""
    made = trainer(folder / "measured", "1 step", strategy=mh.LocalSGD(sync_every=100), batch_norm="local")
    components, where = made.components, made.world.device
    passes = Passes(components, Batches(components, RunState()))
    asked: dict[str, Any] = {"samples": 8, "seconds": 0.01}
    found = readiness.measure(passes, list(made.model.parameters()), bucket_bytes=600, **asked)
    assert [bucket.ready for bucket in found] == sorted(bucket.ready for bucket in found)
    seconds, kept, _ = updating.measure(components, passes, clip=None, **asked)
    assert seconds > 0
    assert kept >= 2 * sum(each.nbytes for each in made.model.parameters())
    assert sum(passes.once(8)) > 0
    alone, batch = SingleProcess(made.world), passes.batches.of(8)
    alone.parameters = list(made.model.parameters())
    piece = Piece(bring=lambda: batch, samples=8, weight=1.0, address=(0, 0, 0))
    alone.forward_backward(components.trained, [piece], components.compute, components.precision.scale, [0.0])
    assert all(each.grad is not None for each in alone.parameters)
    assert machine.copy_s_per_byte(where, 1 << 10, 1 << 12) > 0
    assert several_workers.owners_bandwidth(made.world, 1 << 12, seconds=0.1) > 0
    assert machine.memory_bytes(where) == 1 << 34
    assert machine.devices(where) == 8
    assert machine.memory_bytes(torch.device("cpu")) > 0


def bytes_of_a_pass() -> None:
    """The peak of the device's allocator is at least what is saved for the backward pass, and little more."""
    found = []
    for where in (torch.device("cpu"), torch.device(tensor.NAME, 0)):
        module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).to(where)
        inputs = torch.randn(512, 64).to(where)
        found.append(of_pass(lambda module=module, inputs=inputs: module(inputs).square().mean(), module))
    (saved, beside), (peak, nothing) = found
    assert saved <= peak <= 2 * saved, found
    assert 0 < beside < saved, found
    assert nothing == 0, "the peak has it"


def outputs_that_are_computed_again() -> None:
    """Kernels of a GPU may add in any order."""
    one = torch.ones(3, device=torch.device(tensor.NAME, 0))
    assert activation_checkpointing._alike(one, one * 1.001)
    assert not activation_checkpointing._alike(one, one * 2)


def draws_of_a_look() -> None:
    """Whether something is drawn is seen by the generators, those of a GPU among them."""
    with SetDraws(0.5, {3}):
        assert torch.rand(3).tolist() == [0.5] * 3


def gradients_of_a_look(folder: Path) -> None:
    """Those of a batch are computed as in training."""
    made = mh.Trainer(
        model=lambda: nn.Linear(8, 4),
        loss=lambda scores, labels: nn.functional.cross_entropy(scores, labels),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        data=mh.Data(train=DATA, batch_size=8),
        run_dir=folder / "own loss",
    )
    made.fit("1 step")
    components = made.components
    look = Look(components.compute, components.trained, components.world.device, gradients=True)
    comparison = Comparison(look, components.trained, Seen())
    assert comparison._gradient([(DATA[:4], 1.0)]) == {}, "parameters of the stand-in are others"


class Line:
    """A worker's line to its agent, on which nothing comes."""

    joins = is_broken = False
    on_broken: Callable[[], None]


def worlds(port: str) -> None:
    """What is asked where others continue without a lost worker."""
    ProcessSession.current().close()
    with (
        patch.object(device, "of_worker", lambda *_, **__: torch.device("cpu")),
        pytest.raises(mh.errors.ConfigError, match="no GPU"),
    ):
        World(Place.from_environment(), backend="nccl")
    with patch.dict(os.environ, {"MASTER_PORT": port, HANDLING: "3"}):
        world = World(Place.from_environment(), membership=Line())  # type: ignore[arg-type]
        assert os.environ[HANDLING] == "0", "else PyTorch would end them"
        assert [HANDLING in note for note in world.notes] == [True], "what the user chose is not overruled in silence"
    world.confirms = True
    world.barrier()
    assert world.all_reduce(torch.ones(2, device=world.device)).tolist() == [2.0, 2.0]
    assert world.drain()
    alone = LocalGradient(world)
    shares = alone.share_of(Node(world, Levels.one(world)), 0.5)
    assert isinstance(shares, Tensor), "nobody waits for it"
    assert shares.item() == 1.0, "both of this node have half a batch"
    world.barrier()
    world.abort()
    world.leave()


def of_script() -> None:
    """Of scripts that are not ours: tensors of CUDA, without their memory."""
    with FakeTensorMode():
        weight = torch.empty(3, device="cuda:1", requires_grad=True)
    with patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "4,7"}), patch.object(torch.cuda, "device_count", lambda: 2):
        assert script_faults.gpu_of(weight) == ("7", 2)
    assert script_faults.gpu_of(torch.ones(1)) is None
    with (
        patch.object(torch.cuda, "is_initialized", lambda: True),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
    ):
        fingerprints, learning = script_faults.Fingerprints(), script_probe.Learning()
        fingerprints.add("batch", [weight])
        assert fingerprints.read() == {}, "a captured graph would repeat what is done"
        learning.inspect(torch.optim.SGD([nn.Parameter(torch.ones(1))]), ())
        assert not learning.can_tell
    with patch.object(torch.accelerator, "is_available", lambda: False), patch.dict(os.environ):
        os.environ.pop("ACCELERATE_USE_CPU", None)
        script_patches._configure_accelerate(None)  # type: ignore[arg-type]
        assert os.environ["ACCELERATE_USE_CPU"] == "true"
    assert not refusals._has_gpu()


def of_hosts() -> None:
    """What agents and the head say of a host's environment."""
    found: dict[str, str] = {}
    assert node.use_interface("127.0.0.1", found) == "127.0.0.1"
    assert found["NCCL_SOCKET_IFNAME"] == found["GLOO_SOCKET_IFNAME"]
    given = variables.of_host({}, cores=2, workers=1)
    assert (given[HANDLING], given["PYTORCH_NVML_BASED_CUDA_CHECK"]) == ("1", "1")
    environment = {"CUDA_VISIBLE_DEVICES": "", "NCCL_SOCKET_IFNAME": "ib0"}
    reported = {"environment": environment, "has_gpus": True, "cores": 2, "interfaces": ["eth0"]}
    assert [finding.level for finding in _of_variables("a", reported)] == ["warning", "error"]
    assert _rehearsed([])["CUDA_VISIBLE_DEVICES"] == ""
    assert not _Traces([]).left_by(lambda: None)
    with pytest.raises(mh.errors.ConfigError, match="backend"):
        Settings(batch_size=1, strategy=DDP(), backend="mpi")  # type: ignore[arg-type]
    assert device.make(torch.device(tensor.NAME, 0)).startswith("stand-in, ")


def executed(rank: int, folder: Path, port: str) -> set[gpu_lines.Place]:
    """Where this worker has come to in all of these."""
    tensor.install()
    found = gpu_lines.watch()
    of_script()
    of_hosts()
    bytes_of_a_pass()
    outputs_that_are_computed_again()
    draws_of_a_look()
    trainings(folder)
    gradients_of_a_look(folder)
    measurements(folder)
    worlds(port)
    return found


def test_every_expression_that_is_about_gpus_is_executed(tmp_path: Path) -> None:
    text = gpu_lines.expressions()
    assert len(text) > 50, "the look for them found none"
    answers = run_ranks(2, executed, tmp_path, str(free_port()), timeout_s=240)
    missing = [f"{place[0]}:{place[1]}  {text[place]}" for place in sorted(text.keys() - set.union(*answers))]
    assert not missing, "executed by no test: have one of the functions here reach it\n" + "\n".join(missing)
