"""Callbacks act once per step on every worker, in order; what they keep is in snapshots; averages are evaluated."""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import events, images_and_labels, network
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.errors import ConfigError

pytestmark = pytest.mark.multiprocess
STEPS, BATCH, SAMPLES = 12, 20, 110  # 6 steps an epoch, the last of them smaller


class Target(nn.Module):
    """An online network, and a target that follows it by the hand of a callback."""

    def __init__(self) -> None:
        super().__init__()
        self.online = network()
        self.target = copy.deepcopy(self.online).requires_grad_(False)


def loss_of(model: Any, batch: Any) -> Tensor:
    images, labels = batch
    logits = model.online(images)
    with torch.no_grad():
        target = model.target(images)
    return nn.functional.cross_entropy(logits, labels) + nn.functional.mse_loss(logits, target)


@torch.no_grad()
def follow(model: Any, share: float = 0.1) -> None:
    for own, other in zip(model.target.parameters(), model.online.parameters(), strict=True):
        own.data.lerp_(other.data, share)


class Follow(mh.Callback):
    """Moves the target, and counts everything."""

    name = "follow"

    def __init__(self) -> None:
        self.points: list[tuple[str, int]] = []
        self.steps = 0

    def begin(self, moment: Any) -> None:
        self.points.append(("begin", moment.step))

    def after_step(self, moment: Any) -> None:
        self.steps += 1
        assert moment.updated
        assert (moment.before[0] + 1, self.steps) == (moment.step, moment.step)
        follow(moment.model)

    def after_epoch(self, moment: Any) -> None:
        self.points.append(("epoch", moment.step))

    def after_validation(self, moment: Any) -> None:
        assert moment.values["loss"] > 0
        self.points.append(("validation", moment.step))

    def end(self, moment: Any) -> None:
        self.points.append(("end", moment.step))

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


class After(mh.Callback):
    """Sees what the one before it has done."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def after_step(self, moment: Any) -> None:
        self.seen.append(float(next(moment.model.target.parameters()).sum()))


def data_of(**more: Any) -> mh.Data:
    return mh.Data(TensorDataset(*images_and_labels(SAMPLES)), batch_size=BATCH, **more)


def validation() -> TensorDataset:
    return TensorDataset(*images_and_labels(40, first=1000))


def trainer_of(folder: Path, **more: Any) -> mh.Trainer:
    settings = {"model": Target, "step": loss_of, "data": data_of(shuffle=False, validation=validation()), **more}
    return mh.Trainer(
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        snapshots=mh.Snapshots(every="1 step", keep=100),
        run_dir=folder,
        **settings,
    )


def weights(trainer: mh.Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def by_hand(model: Any, frozen: Any = None) -> dict[str, Tensor]:
    """The same in a loop as PyTorch's tutorials write it."""
    images, labels = images_and_labels(SAMPLES)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.05, momentum=0.9)
    for step in range(STEPS):
        first = step % 6 * BATCH
        optimizer.zero_grad()
        loss_of(model, (images[first : first + BATCH], labels[first : first + BATCH])).backward()
        optimizer.step()
        follow(model)
    return {name: value.clone() for name, value in model.state_dict().items()}


def followed(rank: int, folder: Path, more: dict[str, Any]) -> tuple[dict[str, Tensor], Any, Any]:
    follower, after = Follow(), After()
    torch.manual_seed(0)
    trainer = trainer_of(folder, model=Target(), callbacks=[follower, after], **more)
    trainer.fit(f"{STEPS} steps")
    return weights(trainer), follower.points, after.seen


@pytest.mark.parametrize("workers", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_target_that_a_callback_moves_is_that_of_a_loop_by_hand_however_a_batch_is_cut(
    workers: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    wanted = by_hand(Target())
    for number, more in enumerate([{}, {"micro_batch_size": 3}, {"micro_batch_size": 1}][: 2 if workers > 1 else 3]):
        answers = run_ranks(workers, followed, tmp_path / str(number), more)
        for found, points, seen in answers:
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
            assert points == [
                ("begin", 0), ("epoch", 6), ("validation", 6), ("epoch", 12), ("validation", 12), ("end", 12)
            ]  # fmt: skip
            assert seen == answers[0][2], "the same on every worker, after the one before it"
            assert len(seen) == STEPS


def resumed(rank: int, folder: Path, more: dict[str, Any]) -> list[Any]:
    """A whole run; and one resumed from each of a few snapshots of it, with what its callback had counted."""
    whole = trainer_of(folder / "whole", callbacks=[Follow()], **more)
    found: list[Any] = [whole.fit(f"{STEPS} steps").weights_sha256]
    for step in (3, 6):
        path = folder / f"from-{step}"
        if rank == 0:
            half = folder / f"half-{step}"
            shutil.copytree(folder / "whole", half)
            for each in (half / "snapshots").iterdir():
                if int(each.name.removeprefix("step-")) > step:
                    shutil.rmtree(each)
            half.rename(path)
        while not path.exists():
            time.sleep(0.01)
        follower = Follow()
        found.append(trainer_of(path, callbacks=[follower], **more).fit(f"{STEPS} steps").weights_sha256)
        assert follower.points[0] == ("begin", step)
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_state_of_a_callback_is_in_snapshots_also_at_the_end_of_an_epoch(workers: int, tmp_path: Path) -> None:
    for found in run_ranks(workers, resumed, tmp_path, {}):
        assert len(set(found)) == 1


def virtual(rank: int, folder: Path) -> tuple[str, dict[str, Tensor]]:
    trainer = trainer_of(folder, callbacks=[Follow(), mh.EMA(0.9)], virtual_workers=4)
    sha = trainer.fit(f"{STEPS} steps").weights_sha256
    return sha, trainer.components.callbacks.tensors()


def test_callbacks_keep_the_bits_of_virtual_workers(tmp_path: Path) -> None:
    found = [run_ranks(workers, virtual, tmp_path / str(workers))[0] for workers in (1, 2)]
    assert found[0][0] == found[1][0]
    for name, value in found[0][1].items():
        assert torch.equal(value, found[1][1][name]), name


def averaged(rank: int, folder: Path, kind: str, strategy: str) -> dict[str, Any]:
    """A run with an average; what its evaluations used; and the same resumed from its middle."""
    given = {"ema": lambda: mh.EMA(0.8), "swa": lambda: mh.SWA("3 steps", every="2 steps")}[kind]
    settings = {"model": lambda: network(batch_norm=True), "step": None, "loss": nn.CrossEntropyLoss()}
    settings |= {"strategy": strategy, "batch_norm": "global"} if strategy != "single" else {}
    made = lambda path, **more: trainer_of(path, **settings, callbacks=[given()], **more)  # noqa: E731
    trainer = made(folder / "whole")
    result = trainer.fit(f"{STEPS} steps")
    found: dict[str, Any] = {"validation": dict(result.validation), "sha": result.weights_sha256}
    found["now"] = trainer.validate(weights="last")
    found["best"] = trainer.validate()
    trainer.save(folder / "last.safetensors", weights="last")
    trainer.save(folder / "best.safetensors")
    state = trainer.components.callbacks.by_name[kind].averages()
    holding = trainer.components.strategy.holding
    found["average"] = {name: holding.full(value).clone() for name, value in state.items()}
    found["trained"] = {name: holding.full(value).clone() for name, value in trainer.model.state_dict().items()}
    if rank == 0:
        shutil.copytree(folder / "whole", folder / "half")
        for each in (folder / "half" / "snapshots").iterdir():
            if int(each.name.removeprefix("step-")) > 7:
                shutil.rmtree(each)
        (folder / "half").rename(folder / "again")
    while not (folder / "again").exists():
        time.sleep(0.01)
    again = made(folder / "again")
    found["resumed"] = again.fit(f"{STEPS} steps").weights_sha256
    state = again.components.callbacks.by_name[kind].averages()
    found["resumed average"] = {name: holding.full(value).clone() for name, value in state.items()}
    return found


@pytest.mark.parametrize(
    ("workers", "kind", "strategy"),
    [
        (1, "ema", "single"),
        (2, "ema", "ddp"),
        (2, "ema", "fsdp"),
        (2, "swa", "ddp"),
        pytest.param(1, "swa", "single", marks=pytest.mark.slow),
        pytest.param(3, "ema", "fsdp", marks=pytest.mark.slow),
    ],
)
def test_average_is_evaluated_kept_as_best_saved_and_taken_up_by_a_resume(
    workers: int, kind: str, strategy: str, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    found, *others = run_ranks(workers, averaged, tmp_path, kind, strategy)
    assert found["now"]["loss"] == pytest.approx(found["validation"]["loss"], rel=1e-6)
    last, best = load_file(tmp_path / "last.safetensors"), mh.load(tmp_path / "whole")
    for name, value in found["average"].items():
        torch.testing.assert_close(last[name], value.to(last[name].dtype))
        assert torch.equal(found["resumed average"][name], value), name
    moved = [name for name, value in found["trained"].items() if not torch.equal(value, last[name])]
    assert "0.weight" in moved, "what is trained is not what is evaluated"
    [*_, line] = [line for line in events(tmp_path / "whole", "validation") if line["best"]]
    assert found["best"]["loss"] == pytest.approx(line["values"]["loss"], rel=1e-6)
    for name, value in load_file(tmp_path / "best.safetensors").items():
        assert torch.equal(best[name], value), name
    assert found["resumed"] == found["sha"]
    for other in others:
        assert other["now"] == found["now"]


def frozen_later(rank: int, folder: Path, *durations: str) -> str:
    for duration in durations:
        result = mh.Trainer(
            model=network,
            loss=nn.CrossEntropyLoss(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            data=mh.Data(train=TensorDataset(*images_and_labels(SAMPLES)), batch_size=BATCH),
            callbacks=[mh.Freeze("4", start="3 steps")],
            strategy=mh.DDP(compression="int8", compress_above=1),
            run_dir=folder,
        ).fit(duration)
    return result.weights_sha256


def test_what_is_compressed_together_stays_so_after_a_part_is_frozen_and_the_run_resumed(tmp_path: Path) -> None:
    """The order in which gradients come is found in the first backward pass, in which all were trained."""
    undisturbed = run_ranks(2, frozen_later, tmp_path / "one", "9 steps")
    assert run_ranks(2, frozen_later, tmp_path / "two", "5 steps", "9 steps") == undisturbed


def test_ema_and_swa_are_those_of_their_formulas(tmp_path: Path) -> None:
    rows: list[dict[str, Tensor]] = []

    class Note(mh.Callback):
        def after_step(self, moment: Any) -> None:
            rows.append({name: each.detach().clone() for name, each in moment.model.named_parameters()})

    ema, swa = mh.EMA(0.9, warmup=False), mh.SWA("4 steps", every="3 steps")
    for number, each in enumerate([ema, swa]):
        rows.clear()
        torch.manual_seed(0)
        model = network()
        wanted = {name: value.detach().clone() for name, value in model.named_parameters()}
        trainer_of(
            tmp_path / str(number), model=model, step=None, loss=nn.CrossEntropyLoss(), callbacks=[Note(), each]
        ).fit("10 steps")
        for name in wanted:
            if each is ema:
                for row in rows:
                    wanted[name] = 0.9 * wanted[name] + 0.1 * row[name]
            else:
                wanted[name] = torch.stack([rows[step - 1][name] for step in (6, 9)]).mean(0)
            torch.testing.assert_close(each.averages()[name], wanted[name])


def test_what_is_no_callback_is_refused(tmp_path: Path) -> None:
    for given, words in (
        (mh.EMA(), "no list"),
        ([mh.EMA], "the class EMA"),
        ([print], "a callback is a builtin"),
        ([mh.EMA(), mh.EMA()], "two callbacks have the name 'ema'"),
        ([mh.EMA(), mh.SWA("1 epoch")], "both give weights"),
    ):
        with pytest.raises(ConfigError, match=words):
            trainer_of(tmp_path, callbacks=given)
    with pytest.raises(ConfigError, match="is a time"):
        mh.SWA("10 min")
    with pytest.raises(ConfigError, match="no trained parameter of the model is called 'backbone'"):
        trainer_of(tmp_path, callbacks=[mh.Freeze("backbone")])


def thawing_by_hand(freeze: dict[str, tuple[int, int]]) -> dict[str, Tensor]:
    """A loop in which the parts of the model below each name are frozen before steps [first, last)."""
    images, labels = images_and_labels(SAMPLES)
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        for name, each in model.named_parameters():
            first, last = next((when for part, when in freeze.items() if name.startswith(part)), (0, 0))
            each.requires_grad_(not first <= step < last)
            each.grad = None
        at = step % 6 * BATCH
        nn.functional.cross_entropy(model(images[at : at + BATCH]), labels[at : at + BATCH]).backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def frozen(rank: int, folder: Path, kind: str, more: dict[str, Any]) -> dict[str, Tensor]:
    given = {
        "thaw at an epoch": [mh.Freeze("0", until="1 epoch")],
        "thaw at a step": [mh.Freeze("0.*", until="4 steps")],
        "freeze later": [mh.Freeze("0", start="7 steps")],
        "both": [mh.Freeze("0", start="2 steps", until="1 epoch")],
    }[kind]
    torch.manual_seed(0)
    made = lambda path: trainer_of(  # noqa: E731
        path, model=network(), step=None, loss=nn.CrossEntropyLoss(), callbacks=given, **more
    )
    if more.pop("resumed", False):
        made(folder).fit("5 steps")
        given[:] = [copy.copy(each) for each in given]
    trainer = made(folder)
    trainer.fit(f"{STEPS} steps")
    holding = trainer.components.strategy.holding
    return {name: holding.full(value).clone() for name, value in trainer.model.state_dict().items()}


FROZEN = {
    "thaw at an epoch": {"0": (0, 6)},
    "thaw at a step": {"0": (0, 4)},
    "freeze later": {"0": (7, 99)},
    "both": {"0": (2, 6)},
}


@pytest.mark.parametrize("kind", FROZEN)
@pytest.mark.parametrize(
    ("workers", "more"),
    [
        (1, {}),
        (2, {}),
        (1, {"resumed": True}),
        (2, {"virtual_workers": 4}),
        pytest.param(2, {"strategy": "fsdp"}, marks=pytest.mark.slow),
        pytest.param(2, {"resumed": True}, marks=pytest.mark.slow),
        pytest.param(2, {"virtual_workers": 4, "resumed": True}, marks=pytest.mark.slow),
    ],
)
def test_parts_are_frozen_and_thawed_as_in_a_loop_by_hand(
    workers: int, more: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    wanted = thawing_by_hand(FROZEN[kind])
    for found in run_ranks(workers, frozen, tmp_path, kind, more):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def own_loop(rank: int, folder: Path) -> tuple[list[int], bool]:
    steps: list[int] = []

    class Count(mh.Callback):
        def after_step(self, moment: Any) -> None:
            steps.append(moment.step)

    def cost(batch: Any) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(run.models["model"](images), labels)

    def step(run: Any) -> None:
        for _ in range(2):  # two updates in each step
            run.backward(cost)
            run.update()

    run = mh.Run(
        models=network,
        optimizers=lambda params: torch.optim.SGD(params, lr=0.05),
        data=data_of(),
        callbacks=[Count(), mh.EMA(0.9)],
        run_dir=folder,
    )
    run.fit(step, "7 steps")
    return steps, run.components.callbacks.by_name["ema"].count == 7


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_loop_of_ones_own_has_them_once_per_step_too(workers: int, tmp_path: Path) -> None:
    for steps, averaged in run_ranks(workers, own_loop, tmp_path):
        assert steps == list(range(1, 8))
        assert averaged


def frozen_for_a_while(rank: int, folder: Path, strategy: str, when: Mapping[str, str]) -> str:
    try:
        mh.Trainer(
            model=network,
            loss=nn.CrossEntropyLoss(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            data=mh.Data(TensorDataset(*images_and_labels(SAMPLES)), batch_size=BATCH),
            strategy=strategy,
            callbacks=[mh.Freeze("0", **when)],
            run_dir=folder,
        ).fit("5 steps")
    except ConfigError as refused:
        return str(refused)
    return "trained"


@pytest.mark.parametrize("strategy", ["local-sgd", "diloco"])
@pytest.mark.parametrize(
    ("when", "words"),
    [
        ({"until": "3 steps"}, "for a part of the run"),
        ({"start": "3 steps"}, "for a part of the run"),
        ({}, "trained"),
    ],
)
def test_what_is_frozen_for_a_while_is_refused_where_workers_drift(
    tmp_path: Path, strategy: str, when: dict[str, str], words: str
) -> None:
    """What is exchanged is chosen when the run begins: what is thawed then would drift apart."""
    for said in run_ranks(2, frozen_for_a_while, tmp_path, strategy, when):
        assert words in said
