"""Parts that lie in the memory of the host while a device computes: the bits of parts that lie on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from sharded import Case, assert_same, fit, make_trainer, outcome, samples
from stand_in import streams, tensor
from stand_in.tensor import OnDevice
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

from manyhosts.errors import ConfigError
from manyhosts.model.trained_module import collective_forward
from manyhosts.training.state.registry import put_weights, weights_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("stand-in")]

MICRO = {"micro_batch_size": 3, "clip_gradients": 0.1}
CASES = {
    **{f"zero {zero}": Case(options={"zero": zero}, trainer=MICRO) for zero in (1, 2, 3)},
    "sums in bf16": Case(options={"reduce": "bf16"}),
    "copies": Case(options={"shard": 1}),
    "copies in bf16": Case(options={"shard": 1, "reduce": "bf16"}),
    "loss with parameters": Case(centred=True),
    "fp16": Case(trainer={"precision": "fp16", "clip_gradients": 1e9}),
    "gathered in bf16": Case(options={"gather": "bf16"}, trainer={"precision": "bf16"}),
}
QUICK = ("copies", "fp16")


def host(case: Case) -> Case:
    return replace(case, options={**case.options, "cpu_offload": True})


def on_device(rank: int, folder: Path, cases: Mapping[str, Case], early: bool) -> Any:
    tensor.install()
    streams.early = early
    found = fit(rank, cases, folder)
    streams.early = False
    return found


def on_cpu(rank: int, folder: Path, cases: Mapping[str, Case]) -> Any:
    return fit(rank, cases, folder)


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param([name for name in CASES if name not in QUICK], marks=pytest.mark.slow)], ids=len
)
def test_parts_on_the_host_give_the_bits_of_parts_on_the_device(names: Sequence[str], tmp_path: Path) -> None:
    """Where the optimizer steps them by the same kernels."""
    cases = {name: CASES[name] for name in names}
    [expected, _] = run_ranks(2, on_device, tmp_path / "device", cases, False)
    moved = {name: host(case) for name, case in cases.items()}
    [found, other] = run_ranks(2, on_device, tmp_path / "host", moved, False)
    assert found == other
    for name in names:
        one, two = outcome(tmp_path / "device" / name, expected[name]), outcome(tmp_path / "host" / name, found[name])
        assert (two.losses, found[name]["sha"]) == (one.losses, expected[name]["sha"]), name
        assert two.norms == pytest.approx(one.norms, rel=1e-6), name


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["late", "early"])
def test_adamw_on_the_host_gives_the_bits_of_a_cpu(early: bool, tmp_path: Path) -> None:
    """Also where what travels beside the computation runs ahead of it."""
    cases = {"AdamW": replace(CASES["zero 3"], optimizer="AdamW")}
    [expected, _] = run_ranks(2, on_cpu, tmp_path / "cpu", cases)
    [found, _] = run_ranks(2, on_device, tmp_path / "host", {"AdamW": host(cases["AdamW"])}, early)
    assert found["AdamW"]["sha"] == expected["AdamW"]["sha"]


@pytest.mark.slow
def test_copies_of_a_model_on_hosts_equal_one_process(tmp_path: Path) -> None:
    case = Case(options={"shard": 2}, optimizer="AdamW", trainer=MICRO)
    [alone] = run_ranks(1, on_cpu, tmp_path / "one", {"copies": replace(case, strategy="ddp", options={})})
    [found, *_] = run_ranks(4, on_device, tmp_path / "four", {"copies": host(case)}, False)
    assert_same(
        outcome(tmp_path / "one" / "copies", alone["copies"]), outcome(tmp_path / "four" / "copies", found["copies"])
    )


class Fused(torch.optim.AdamW):
    """Steps by one kernel, also on a host."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, fused=True)


def fused(rank: int, folder: Path, cases: Mapping[str, Case]) -> Any:
    tensor.install()
    torch.optim.Fused = Fused  # type: ignore[attr-defined]  # where cases look for theirs
    return fit(rank, cases, folder)


class Overflowing(nn.LayerNorm):
    """Whose gradient overflows in the third step."""

    calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = super().forward(hidden)
        if out.requires_grad:
            self.calls += 1
            if self.calls == 3:
                out.register_hook(lambda gradient: gradient * torch.inf)
        return out


@pytest.mark.slow
def test_fused_kernel_on_the_host_is_told_nothing_that_is_still_on_its_way(tmp_path: Path) -> None:
    """As whether a gradient of fp16 has overflowed, for then nothing must be stepped."""
    trainer = {"precision": "fp16", "clip_gradients": None}
    case = Case(optimizer="AdamW", options={"units": "Block"}, block={"norm": Overflowing}, trainer=trainer)
    [expected, _] = run_ranks(2, on_device, tmp_path / "device", {"AdamW": case}, False)
    [found, _] = run_ranks(2, fused, tmp_path / "host", {"AdamW": host(replace(case, optimizer="Fused"))})
    one, two = (
        replace(outcome(tmp_path / place / "AdamW", answer["AdamW"]), norms=[])
        for place, answer in (("device", expected), ("host", found))
    )
    assert_same(one, two)


ADAM = Case(optimizer="AdamW")


def where_all_lies(rank: int, folder: Path) -> None:
    tensor.install()
    trainer = make_trainer(host(ADAM), folder)
    trainer.fit("2 steps")
    for name, parameter in trainer.model.named_parameters():
        state = trainer.components.optimizer.state[parameter]
        held = [parameter, *([] if parameter.grad is None else [parameter.grad]), *state.values()]
        if parameter.dim() == 0:
            assert isinstance(parameter.data, OnDevice), name
            continue
        for each in held:
            local = each.detach().to_local() if isinstance(each, DTensor) else each
            assert not isinstance(local, OnDevice), name
        assert tensor.is_pinned(parameter.detach().to_local()), name
        taken_up = trainer.components.strategy.holding.like(parameter, parameter.detach().to_local().clone())
        assert not isinstance(taken_up.to_local(), OnDevice), name


def test_parts_gradients_and_state_of_the_optimizer_lie_on_the_host(tmp_path: Path) -> None:
    run_ranks(2, where_all_lies, tmp_path)


def gone_on_with(rank: int, folder: Path, first: Case, then: Case) -> tuple[str, list[list[float]]]:
    tensor.install()
    make_trainer(first, folder).fit("5 steps")
    trainer = make_trainer(then, folder)
    sha = trainer.fit("9 steps").weights_sha256
    best = trainer.predict(TensorDataset(samples(5, 3).tensors[0]), weights="best")
    last = trainer.predict(TensorDataset(samples(5, 3).tensors[0]), weights="last")
    assert trainer.fit("10 steps").steps == 10
    return sha, [*best.tolist(), *last.tolist()]


@pytest.mark.slow
def test_runs_go_on_with_parts_from_the_host_to_the_device_and_back(tmp_path: Path) -> None:
    """Snapshots, the best weights and the last ones: as if all had been in one place."""
    on, off = host(Case(trainer={"validate_every": "2 steps"})), Case(trainer={"validate_every": "2 steps"})
    ways = {"stays off": (off, off), "stays": (on, on), "comes": (off, on), "goes": (on, off)}
    found = {name: run_ranks(2, gone_on_with, tmp_path / name, *way) for name, way in ways.items()}
    assert all(each == found["stays off"] for each in found.values()), found


def put_while_read(rank: int, folder: Path) -> None:
    tensor.install()
    trainer = make_trainer(host(ADAM), folder)
    trainer.fit("2 steps")
    components, words = trainer.components, samples(5, 3).tensors[0].to(trainer.world.device)
    others = {"model": {name: torch.zeros_like(value) for name, value in weights_of(components)["model"].items()}}
    with torch.no_grad(), collective_forward(components.model):
        before = components.model(words).cpu()
        under_way = components.model(words)
        put_weights(components, others)
        assert torch.equal(under_way.cpu(), before), "it took weights that came after it"
        assert not components.model(words).cpu().any()


def test_weights_are_put_on_the_host_when_the_device_has_read_those_of_before(tmp_path: Path) -> None:
    run_ranks(2, put_while_read, tmp_path)


class Halving(torch.optim.Optimizer):
    """Looks at norms of whole tensors."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / (1 + parameter.grad.norm().item()))


def by_norms(rank: int, folder: Path) -> str:
    tensor.install()
    torch.optim.Halving = Halving  # type: ignore[attr-defined]  # where cases look for theirs
    with pytest.raises(ConfigError) as raised:
        make_trainer(host(replace(CASES["zero 3"], optimizer="Halving")), folder).fit("2 steps")
    return f"{raised.value.what} {raised.value.fix}"


def test_optimizer_that_would_send_parts_of_the_host_is_refused(tmp_path: Path) -> None:
    for said in run_ranks(2, by_norms, tmp_path):
        assert "Halving does in its step" in said
        assert "AdamW" in said


def without_a_gpu(rank: int, folder: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        make_trainer(host(CASES["zero 3"]), folder).fit("2 steps")
    return str(raised.value)


def test_parts_are_not_kept_away_from_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    for said in run_ranks(2, without_a_gpu, tmp_path):
        assert "this worker computes on the CPU" in said
        assert "FSDP(cpu_offload=True)" in said
    assert not (tmp_path / "snapshots").exists()
