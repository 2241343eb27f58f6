"""A pipeline that is not emptied between updates, against a plain simulation of its delays, and as runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from commands import summary
from launching import run
from ranks import run_ranks
from runs import step_lines
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.errors import ConfigError, TrainingError
from manyhosts.training.state.snapshot_schedule import SnapshotSchedule

pytestmark = pytest.mark.multiprocess
WIDTH, SAMPLES, BATCH, PIECE, STEPS = 6, 107, 42, 4, 5  # a batch is ten micro-batches of 4 and one of 2
LAYERS = 5


@dataclass(frozen=True)
class Case:
    """One training, in plain values that travel to other processes."""

    versions: Literal["two", "all", "one"]
    accumulate: int
    optimizer: str = "SGD"

    def of(self, params: Any) -> torch.optim.Optimizer:
        if self.optimizer == "AdamW":
            return torch.optim.AdamW(params, lr=0.02)
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    def strategy(self) -> mh.PipeDream:
        return mh.PipeDream(versions=self.versions, accumulate=self.accumulate, cuts="layers")


CASES = {
    "two": Case("two", 3),
    "two, AdamW": Case("two", 4, "AdamW"),
    "all": Case("all", 1),
    "all, AdamW": Case("all", 2, "AdamW"),
    "one": Case("one", 3),
    "one, AdamW": Case("one", 4, "AdamW"),
}


def network() -> nn.Sequential:
    torch.manual_seed(3)
    linear = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return nn.Sequential(*[part for each in linear for part in (each, nn.Tanh())])


def data() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, WIDTH, generator=made)
    return inputs, torch.sin(inputs.cumsum(1))


class Stale(torch.autograd.Function):
    """A linear layer whose backward pass finds other weights than its forward pass."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, bias: Tensor, later: Tensor) -> Tensor:
        ctx.save_for_backward(given, later)
        return functional.linear(given, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        [gradient], (given, later) = gradients, ctx.saved_tensors
        return gradient @ later, gradient.t() @ given, gradient.sum(0), None


def simulated(case: Case, stages: int, copies: int = 1) -> dict[str, Tensor]:
    """The weights that the published rules give, in one process, from a list of all that there were in a step.

    What a stage's forward pass of a micro-batch finds: all updates of the backward passes before it, of which there
    are as many as micro-batches before it, less those under way behind the stage (`all`, `one`); or the updates up to
    the group before last (`two`). Each of `copies` of a stage has a part of every batch, and of every micro-batch.
    """
    model, (inputs, targets) = network(), data()
    optimizer = case.of(model.parameters())
    for batch in batches():
        history = [{name: each.detach().clone() for name, each in model.named_parameters()}]
        optimizer.zero_grad()
        pieces = [
            torch.cat(each) for each in zip(*[part.split(PIECE // copies) for part in batch.chunk(copies)], strict=True)
        ]
        for number, rows in enumerate(pieces):
            group = number // case.accumulate
            hidden, leaves = inputs[rows], {}
            for layer in range(0, 2 * LAYERS, 2):
                behind = stages - 1 - max(s for s in range(stages) if s * 2 * LAYERS // stages <= layer)
                seen = max(number - behind, 0) // case.accumulate
                seen = max(group - 1, 0) if case.versions == "two" else seen
                weight, bias = (
                    leaves.setdefault(f"{layer}.{kind}", history[seen][f"{layer}.{kind}"].clone().requires_grad_())
                    for kind in ("weight", "bias")
                )
                if case.versions == "one":
                    hidden = Stale.apply(hidden, weight, bias, history[group][f"{layer}.weight"])
                else:
                    hidden = functional.linear(hidden, weight, bias)
                hidden = hidden.tanh()
            loss = functional.mse_loss(hidden, targets[rows]) * (len(rows) / len(batch))
            of_group = pieces[group * case.accumulate : (group + 1) * case.accumulate]
            (loss * (1 / sum(len(each) / len(batch) for each in of_group))).backward()
            for name, parameter in model.named_parameters():
                found = leaves[name].grad
                parameter.grad = found if parameter.grad is None else parameter.grad + found
            if (number + 1) % case.accumulate == 0 or number + 1 == len(pieces):
                optimizer.step()
                optimizer.zero_grad()
                history.append({name: each.detach().clone() for name, each in model.named_parameters()})
    return {name: each.detach() for name, each in model.named_parameters()}


def batches() -> Iterator[Tensor]:
    """The samples of each step, in the order of the dataset."""
    epoch = torch.arange(SAMPLES).split(BATCH)
    for step in range(STEPS):
        yield epoch[step % len(epoch)]


def trainer_of(case: Case, folder: Path, model: nn.Module, **further: Any) -> mh.Trainer:
    train = TensorDataset(*data())
    return mh.Trainer(
        model=model,
        data=mh.Data(train=train, validation=train, batch_size=BATCH, shuffle=False),
        run_dir=folder,
        **{
            "loss": nn.MSELoss(),
            "optimizer": case.of,
            "strategy": case.strategy(),
            "micro_batch_size": PIECE,
            **further,
        },
    )


def fit(rank: int, cases: Mapping[str, Case], folder: Path) -> dict[str, str]:
    found = {}
    for name, case in cases.items():
        found[name] = trainer_of(case, folder / name, network()).fit(f"{STEPS} steps").weights_sha256
    return found


@pytest.mark.parametrize("stages", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_stages_have_the_weights_that_a_plain_simulation_of_their_delays_has(stages: int, tmp_path: Path) -> None:
    answers = run_ranks(stages, fit, CASES, tmp_path)
    assert all(answer == answers[0] for answer in answers)
    for name, case in CASES.items():
        expected, found = simulated(case, stages), mh.load(tmp_path / name, weights="last")
        for key, value in expected.items():
            if case.versions == "one":
                torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-6, msg=f"{name}: {key}")
            else:
                assert torch.equal(found[key], value), f"{name}: {key}"
        lines = [line["values"] for line in step_lines(tmp_path / name)]
        behind = stages - 1
        most = {"two": 2, "all": 1 + -(-behind // case.accumulate), "one": 1}[case.versions]
        stale = {"two": 1, "all": most - 1, "one": min(1, behind)}[case.versions]
        assert all(line["versions_max"] == most and line["staleness_max"] == stale for line in lines), name


class Mixed(nn.Module):
    """A block in which chance and running statistics have a hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)

    def forward(self, given: Tensor) -> Tensor:
        found: Tensor = self.dropout(torch.tanh(self.norm(self.layer(given))))
        return found


def mixed() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(*[Mixed() for _ in range(4)], nn.Linear(WIDTH, WIDTH))


def both(rank: int, before: int, after: int, folder: Path) -> list[Any]:
    """The weights' hash and the validation loss where a run is taken up, and after it has continued."""
    found: list[Any] = []
    for steps in (before, after):
        if steps:
            result = trainer_of(Case("two", 3, "AdamW"), folder, mixed()).fit(f"{steps} steps")
            found += [result.weights_sha256, result.validation["loss"]]
    return found


def test_with_two_versions_one_run_has_the_same_bits_on_changing_numbers_of_stages(tmp_path: Path) -> None:
    [whole] = run_ranks(1, both, 0, 6, tmp_path / "whole")
    for workers, before in ((3, 0), (2, 2), (1, 4)):
        answers = run_ranks(workers, both, before, before + 2, tmp_path / "run")
        assert all(answer == answers[0] for answer in answers)
    assert answers[0][2:] == whole


def in_copies(rank: int, folder: Path) -> None:
    case, strategy = Case("all", 2), mh.PipeDream(versions="all", accumulate=2, stages=2, cuts="layers")
    trainer_of(case, folder, network(), strategy=strategy, micro_batch_size=PIECE // 2).fit(f"{STEPS} steps")


def test_copies_of_stages_update_by_the_gradient_of_all_of_them(tmp_path: Path) -> None:
    run_ranks(4, in_copies, tmp_path)
    expected, found = simulated(Case("all", 2), stages=2, copies=2), mh.load(tmp_path, weights="last")
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6, msg=key)


SCRIPT = """
    import os, signal, sys
    sys.path[:0] = [{tests!r}, {here!r}]
    import manyhosts as mh
    import torch
    from test_pipedream import Case, mixed, trainer_of

    class Trouble(torch.nn.Module):
        seen = 0

        def forward(self, given):
            self.seen += self.training
            if os.environ.get("RANK") == "1" and self.seen == 45 and not os.path.exists("killed"):
                open("killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            return given

    torch.set_num_threads(1)
    model = mixed()
    model[3].dropout = torch.nn.Sequential(model[3].dropout, Trouble())
    case = Case("{versions}", 3, "AdamW")
    trainer_of(case, None, model, snapshots=mh.Snapshots(every="2 steps")).fit("6 steps")
"""


def test_a_killed_stage_is_replaced_and_the_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """Also with a version for each micro-batch under way: which weights a pass finds follows from no clock."""
    here = Path(__file__).parent
    found = []
    for name in ("killed", "whole"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "whole":
            (folder / "killed").touch()  # so that nobody is
        script = SCRIPT.format(tests=str(here.parent), here=str(here), versions="all")
        done = run(folder, script, "--workers", "2", "--restarts", "1")
        assert done.code == 0, done.err
        found.append(summary(done.run_dir))
    assert [each["restarts"] for each in found] == [1, 0]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]


class Counted(torch.optim.SGD):
    """Notes its steps in a list that others write into, too."""

    def __init__(self, params: Any, notes: list[str]) -> None:
        super().__init__(params, lr=0.1)
        self.notes = [notes]

    def step(self, closure: Any = None) -> None:
        self.notes[0].append("update")
        super().step()


def test_what_reads_the_model_beside_a_step_is_waited_for_before_each_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(SnapshotSchedule, "before_update", lambda self: notes.append("wait"))
    trainer = trainer_of(Case("all", 4), tmp_path, network(), optimizer=lambda params: Counted(params, notes))
    trainer.fit("1 step")
    assert notes[:6] == ["wait", "update"] * 3, notes
    assert notes.count("update") == 3, "11 micro-batches, four behind each update but the last"


class Breaks(nn.MSELoss):
    """No number any more, from the middle of the second step on."""

    seen = 0

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(input, target) * (float("nan") if self.seen > 15 else 1)


def test_a_loss_that_is_no_number_ends_the_run_and_is_in_no_snapshot(tmp_path: Path) -> None:
    snapshots = mh.Snapshots(every="1 step")
    with pytest.raises(TrainingError, match="the loss is nan"):
        trainer_of(Case("two", 3), tmp_path, network(), loss=Breaks(), snapshots=snapshots).fit("3 steps")
    assert [each.name for each in (tmp_path / "snapshots").glob("step-*")] == ["step-00000001"]
    assert trainer_of(Case("two", 3), tmp_path, network()).fit("3 steps").steps == 3


class Tied(nn.Sequential):
    """The last layer is the first."""

    def __init__(self) -> None:
        super().__init__(*network())
        self[8].weight = self[0].weight


class Sloped(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (self.slope * outputs - targets).square().mean()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tied weights": ({"model": Tied}, "the weight '0.weight' is used by several stages"),
    "a loss with a parameter": ({"loss": Sloped()}, "the loss has parameters or buffers"),
    "too many stages": ({"strategy": mh.PipeDream(accumulate=1)}, "set accumulate=2 or more"),
    "a cut of nothing": ({"strategy": mh.PipeDream(cuts=["x", "y"])}, "where: PipeDream(cuts=…)"),
    "no multiple": ({"strategy": mh.PipeDream(stages=2)}, "which a mesh with pipeline=2 does not multiply to"),
}


def refused(rank: int, folder: Path) -> dict[str, str]:
    found = {}
    for name, (changes, _) in REFUSED.items():
        changed = {key: value() if key == "model" else value for key, value in changes.items()}
        try:
            trainer_of(Case("two", 4), folder / name, **{"model": network(), **changed}).fit("1 step")
        except ConfigError as error:
            found[name] = str(error)
    return found


def test_what_stages_cannot_keep_is_refused_on_every_worker(tmp_path: Path) -> None:
    answers = run_ranks(3, refused, tmp_path)
    for name, (_, words) in REFUSED.items():
        assert all(words in answer.get(name, "") for answer in answers), f"{name}: {answers[0].get(name)}"
        assert "mh.Pipeline(" not in answers[0][name], name
