"""`strategy="auto"`: the same on all workers, what it names gives the same, and what cannot be is refused."""

from __future__ import annotations

import copy
import json
import re
import resource
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from cgroups import cgroup_with, within
from commands import summary
from launching import MANYHOSTS, environment
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.control.agent import host_state
from manyhosts.errors import ConfigError
from manyhosts.planner.fit import ways
from manyhosts.training.setup import build, choose_strategy

pytestmark = pytest.mark.multiprocess
MUCH = 10**12


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = inputs + self.down(torch.tanh(self.up(inputs)))
        return out


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 32), *[Block(32) for _ in range(4)], nn.Linear(32, 3))


def trainer(run_dir: Path, **options: Any) -> mh.Trainer:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(16, 4, generator=generator), torch.randint(0, 3, (16,), generator=generator)
    return mh.Trainer(
        **{"model": make_model, **options},
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        data=mh.Data(train=TensorDataset(inputs, targets), batch_size=8),
        run_dir=run_dir,
    )


def name_of(made: mh.Trainer) -> str:
    strategy = made.settings.strategy
    zero = f" zero={strategy.zero}" if isinstance(strategy, mh.FSDP) else ""
    return f"{strategy.name}{zero}{' again' if made.settings.activation_checkpointing else ''}"


def decided(rank: int, run_dir: Path, rooms: list[int], options: dict[str, Any]) -> list[str]:
    """What is decided where the last worker alone has so little room beyond what every worker needs."""
    found = []
    for room in rooms:
        own = room + 64_000_000 if rank == 1 else MUCH
        host_state.memory_left = lambda share=1, own=own: own  # type: ignore[assignment]
        try:
            found.append(name_of(trainer(run_dir, strategy="auto", **options)))
        except ConfigError as error:
            found.append(str(error))
    return found


def test_worker_with_the_least_memory_decides_for_all(tmp_path: Path) -> None:
    """The model has 69 kB; with gradients, optimizer and the copy for a snapshot a worker of `ddp` has 380 kB."""
    rooms = [MUCH, 360_000, 250_000, 0]
    reported = run_ranks(2, decided, tmp_path, rooms, {})
    assert reported[0] == reported[1]
    plain, less, least, nothing = reported[0]
    assert plain == "ddp"
    assert less.startswith("fsdp zero=")
    assert least.startswith(("fsdp zero=3", "tensor", "pipeline")) or "does not fit" in least
    assert "the training does not fit into" in nothing
    for word in ("ddp needs", "fsdp zero=3, activation checkpointing needs", "kB parameters +", "and there are 2",
                 "rank 1", "to spare"):  # fmt: skip
        assert word in nothing, nothing


def joined(rank: int, run_dir: Path) -> str:
    """What is decided by a worker that comes to others: alone it would compute all of the batch."""
    host_state.memory_left = lambda share=1: 0  # type: ignore[assignment]

    def choose(given: choose_strategy.Given) -> Any:
        given.world.is_joining = True
        try:
            return choose_strategy.choose(given)
        finally:
            given.world.is_joining = False

    build.choose = choose
    return name_of(trainer(run_dir, strategy="auto"))


def test_worker_that_comes_to_others_is_not_refused_for_a_batch_of_which_it_will_have_a_share(tmp_path: Path) -> None:
    assert run_ranks(1, joined, tmp_path) == ["single again"]  # with checkpoints it needs least


def trained(rank: int, folder: Path) -> dict[str, str]:
    """The weights of each strategy, where there is memory enough."""
    found = {}
    for strategy in ("ddp", "auto"):
        made = trainer(folder / strategy, strategy=strategy)
        found[strategy] = made.fit("3 steps").weights_sha256
    return found


def test_where_there_is_memory_enough_it_is_ddp_to_the_last_bit_and_says_so(tmp_path: Path) -> None:
    for found in run_ranks(2, trained, tmp_path):
        assert found["auto"] == found["ddp"]
    assert summary(tmp_path / "auto")["strategy"] == "ddp"
    record = json.loads((tmp_path / "auto" / "run.json").read_text())
    assert record["settings"]["strategy"]["name"] == "ddp"
    lines = [json.loads(line) for line in (tmp_path / "auto" / "metrics.jsonl").read_text().splitlines()]
    [said] = [line["text"] for line in lines if line["event"] == "note" and "auto" in line["text"]]
    assert said.startswith("strategy='auto' is ddp: ")
    assert [line.split("  ")[1] for line in said.splitlines()[2:]][::2] == [
        "ddp", "fsdp zero=1", "fsdp zero=2", "fsdp zero=3", "tensor"
    ]  # fmt: skip
    assert "auto" not in (tmp_path / "ddp" / "metrics.jsonl").read_text()


def trained_in_little(rank: int, folder: Path) -> tuple[str, list[str], str, str]:
    """What is taken where a worker has just what a pipeline needs; what needs no more than that; and the weights, as
    those where it was asked for by its name."""
    widths = [4, 300, 300, 300, 3]  # two layers have nearly all parameters, and `fsdp` has each of them in one piece
    layers = [nn.Linear(*each) for each in pairwise(widths)]
    already = sum(each.nbytes for layer in layers for each in layer.parameters())
    two = lambda: nn.Sequential(*copy.deepcopy(layers))  # noqa: E731
    host_state.memory_left = lambda share=1: MUCH  # type: ignore[assignment]
    training = trainer(folder / "much", strategy="auto", model=two).components.chosen_for
    assert training is not None
    found = {way.name: way.needed for way in ways(training, 2)}
    host_state.memory_left = lambda share=1: found["pipeline 1f1b"] - already  # type: ignore[assignment]
    made = trainer(folder / "little", strategy="auto", model=two)
    fit = [name for name, needed in found.items() if needed <= found["pipeline 1f1b"]]
    own = made.fit("3 steps").weights_sha256
    named = trainer(folder / "named", strategy=name_of(made), model=two)
    return name_of(made), fit, own, named.fit("3 steps").weights_sha256


def test_model_that_neither_ddp_nor_fsdp_can_hold_is_cut_by_layers_or_stages_and_trains(tmp_path: Path) -> None:
    for name, fit, own, named in run_ranks(2, trained_in_little, tmp_path):
        assert (name, fit) == ("tensor", ["tensor", "pipeline 1f1b"])
        assert own == named


def gone_on(rank: int, folder: Path, room: int) -> list[str]:
    """Two steps with all the memory there is, and two more with little."""
    notes = []
    for steps, own in ((2, MUCH), (4, room + 64_000_000)):
        host_state.memory_left = lambda share=1, own=own: own  # type: ignore[assignment]
        made = trainer(folder, strategy="auto")
        made.fit(f"{steps} steps")
        notes.append(name_of(made))
    return notes


def test_run_that_is_gone_on_with_decides_anew_and_says_what_changed(tmp_path: Path) -> None:
    first, second = run_ranks(2, gone_on, tmp_path, 360_000)[0]
    assert first == "ddp"
    assert second.startswith("fsdp")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert any("strategy ddp → fsdp" in line.get("text", "") for line in lines)


def test_one_worker_is_single_and_virtual_workers_stay_what_they_are(tmp_path: Path) -> None:
    assert run_ranks(1, decided, tmp_path, [MUCH], {}) == [["single"]]
    assert run_ranks(2, decided, tmp_path, [MUCH], {"virtual_workers": 4}) == [["ddp"]] * 2
    [[refused], _] = run_ranks(2, decided, tmp_path, [0], {"virtual_workers": 4})
    assert "no number of workers" in refused
    assert "fsdp" not in refused


def within_addresses(rank: int, folder: Path, room: int) -> str:
    """What comes of a training with 28 MB of parameters, where this process has so many addresses left for it."""
    status = Path("/proc/self/status").read_text()
    used = int(re.search(r"VmSize:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]
    resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
    try:
        made = mh.Trainer(
            model=lambda: nn.Sequential(*[nn.Sequential(nn.Linear(840, 840), nn.Tanh()) for _ in range(10)]),
            loss=nn.functional.mse_loss,
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
            data=mh.Data(train=TensorDataset(torch.randn(32, 840), torch.randn(32, 840)), batch_size=8),
            snapshots=mh.Snapshots(every="2 steps"),
            run_dir=folder,
            strategy="auto",
        )
    except ConfigError as refused:
        return str(refused)
    return made.fit("5 steps").status


@pytest.mark.skipif(sys.platform != "linux", reason="addresses are counted by Linux")
def test_what_is_chosen_fits_into_the_addresses_that_a_process_may_have(tmp_path: Path) -> None:
    """With as much as it says that it needs, and nothing beyond that, it trains and makes its snapshots."""
    [refused] = run_ranks(1, within_addresses, tmp_path / "refused", 150_000_000)
    [needed] = [float(each) for each in re.findall(r"single needs ([\d.]+) MB", refused)][:1]
    stacks = 12 * (8 << 20)
    [status] = run_ranks(1, within_addresses, tmp_path / "fits", int(needed * 1e6) + stacks + 12_000_000)
    assert status == "completed"
    assert summary(tmp_path / "fits")["steps"] == 5


@pytest.mark.slow  # one worker: the test above; the choice among ways: those before it
@pytest.mark.skipif(sys.platform != "linux", reason="addresses are counted by Linux")
def test_several_workers_train_within_the_addresses_that_each_may_have_in_the_way_that_fits(tmp_path: Path) -> None:
    """Each way with as much as it says that it needs, and less than the one before it; below the last it is refused."""
    room = 400_000_000
    refused, other = run_ranks(2, within_addresses, tmp_path / "refused", room)
    assert refused == other, "both are refused, in the same words"
    [left] = [float(each) for each in re.findall(r"does not fit into the ([\d.]+) MB", refused)]
    needed = {way: float(most) for way, most in re.findall(r"(ddp|fsdp zero=\d) needs ([\d.]+) MB", refused)}
    assert needed["ddp"] > needed["fsdp zero=1"] > needed["fsdp zero=3"] > left
    for way, strategy in (("ddp", "ddp"), ("fsdp zero=3", "fsdp")):
        folder = tmp_path / strategy
        reported = run_ranks(2, within_addresses, folder, room + int((needed[way] - left + 5) * 1e6))
        assert reported == ["completed"] * 2, reported
        run = json.loads((folder / "run.json").read_text())
        assert (run["strategy"], summary(folder)["steps"]) == (strategy, 5)
        assert sorted(each.name for each in (folder / "snapshots").glob("step-*")), "and its snapshots are there"


def in_few_addresses(rank: int, folder: Path, strategy: str, room: int) -> tuple[str, str]:
    """What is taken for two layers of 29 MB each where this process has so many addresses left, and what comes of it.

    Both are in one piece under `fsdp`, which has to gather them: cut over the workers they take less.
    """
    status = Path("/proc/self/status").read_text()
    used = int(re.search(r"VmSize:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]
    resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
    widths = [4, 2700, 2700, 2700, 3]
    try:
        made = trainer(
            folder, strategy=strategy, model=lambda: nn.Sequential(*[nn.Linear(*each) for each in pairwise(widths)])
        )
        return name_of(made), made.fit("1 step").status
    except ConfigError as refused:
        return "", str(refused)
    except (RuntimeError, MemoryError) as error:
        return "", f"{type(error).__name__}: {error}"


@pytest.mark.skipif(sys.platform != "linux", reason="addresses are counted by Linux")
def test_model_that_ddp_has_no_memory_for_is_cut_by_layers_or_stages_under_a_limit_of_the_kernel(
    tmp_path: Path,
) -> None:
    room = 400_000_000
    [(_, refused), _] = run_ranks(2, in_few_addresses, tmp_path / "refused", "auto", room)
    [left] = [float(each) for each in re.findall(r"does not fit into the ([\d.]+) MB", refused)]
    needed = {way: float(most) for way, most in re.findall(r"([\w =]+) needs ([\d.]+) MB", refused)}
    least = min(needed[" tensor"], needed[" pipeline 1f1b"])
    assert least + 20 < min(most for way, most in needed.items() if way not in (" tensor", " pipeline 1f1b"))
    room += int((least - left + 5) * 1e6)
    [(name, status), *_] = run_ranks(2, in_few_addresses, tmp_path / "auto", "auto", room)
    assert name in ("tensor", "pipeline")
    assert status == "completed"
    assert summary(tmp_path / "auto")["steps"] == 1
    failed = run_ranks(2, in_few_addresses, tmp_path / "ddp", "ddp", room)
    assert any("allocate memory" in status for _, status in failed), failed


LIMITED = Path(__file__).with_name("limited_script.py")


def limited(strategy: str, folder: Path, group: Path) -> tuple[int, str]:
    """The script's run within `group`, where each worker may have 450 MB beyond what it had before the trainer."""
    words = [*MANYHOSTS, "run", "--workers", "4", "--env", f"GROUP={group}", "--env", "ROOM=450000000"]
    words += ["--set", f"strategy={strategy}", "--run-dir", str(folder), str(LIMITED)]
    done = subprocess.run(
        within(group, words), cwd=folder.parent, env=environment(), capture_output=True, text=True, timeout=240
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_model_that_ddp_has_no_memory_for_under_a_limit_of_the_kernel_trains_with_auto(tmp_path: Path) -> None:
    """AdamW and 30 million parameters: a worker of `ddp` holds 480 MB, and 570 MB while it makes a snapshot."""
    with cgroup_with(None) as group:
        _, said = limited("ddp", tmp_path / "ddp", group)
    assert "was killed by the kernel for want of memory" in said, "the others may continue, with what that one had"
    with cgroup_with(None) as group:
        code, said = limited("auto", tmp_path / "auto", group)
    assert code == 0, said
    assert "killed" not in said
    assert "strategy='auto' is fsdp" in said
    assert summary(tmp_path / "auto")["steps"] == 3
