"""`manyhosts prove` on small scripts with real workers: right ones hold, and of a broken one the cause is named."""

from __future__ import annotations

import getpass
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import stages
from launching import alive, wait_until
from preloaded import descendants
from prove_faults import FAULTS
from prove_scripts import BROKEN, RIGHT, SMALL, Script

from manyhosts.cli.prove import print_proof
from manyhosts.errors import ConfigError, ScriptError
from manyhosts.prove.prove import Proof, prove
from manyhosts.prove.trials import Asked, make_stage
from manyhosts.trials.forked import LocalTrialRunner

STEPS = 8
SLOW_RIGHT = (
    "adamw with weight decay",
    "unseeded model",
    "batch norm",
    "augmentation",
    "attention with dropout",
    "slopes that are drawn",
    "an order with repeats",
)


def first_of_each(scripts: Mapping[str, Any]) -> list[Any]:
    """The names of all; those of a cause that an earlier one has as slow tests."""
    first = {script.cause: name for name, script in reversed(scripts.items())}
    return [name if name in first.values() else pytest.param(name, marks=pytest.mark.slow) for name in scripts]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTrialRunner]:
    with stages.loaded(lambda *place: make_stage(Asked(script=place[0], folder=place[1])), tmp_path_factory) as made:
        yield made


def proof_of(script: Script, folder: Path, stage: LocalTrialRunner, workers: tuple[int, ...] = (1, 2)) -> Proof:
    path = folder / "script.py"
    path.write_text(script.code)
    promises = (script.promise,) if script.promise else ()
    asked = Asked(script=str(path), folder=folder, workers=workers, steps=STEPS, promises=promises)
    return prove(asked, lambda _: None, stage)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW_RIGHT else name for name in RIGHT]
)
def test_a_right_script_is_not_accused(name: str, tmp_path: Path, stage: LocalTrialRunner) -> None:
    proof = proof_of(RIGHT[name], tmp_path, stage, workers=(1, 2, 3) if name in ("batch norm", "dropout") else (1, 2))
    assert proof.holds, json.dumps(proof.to_json(), indent=1)
    assert all(verdict.status == "holds" or verdict.note for verdict in proof.verdicts)
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"], "nothing is left behind"


@pytest.mark.parametrize("name", first_of_each(BROKEN))
def test_the_cause_is_named(name: str, tmp_path: Path, stage: LocalTrialRunner) -> None:
    script = BROKEN[name]
    proof = proof_of(script, tmp_path, stage)
    (verdict,) = proof.verdicts
    assert verdict.status == "fails", proof.to_json()
    assert verdict.cause is not None
    assert verdict.cause.kind == script.cause, verdict
    assert script.named in verdict.cause.what
    assert verdict.cause.fix
    assert ("after_step" in verdict.cause.fix) == (name == "a teacher averaged in the step")
    assert verdict.cause.evidence
    assert not proof.holds


@pytest.mark.slow
def test_a_wrong_gradient_that_float32_hides_is_found(tmp_path: Path, stage: LocalTrialRunner) -> None:
    (verdict,) = proof_of(SMALL, tmp_path, stage).verdicts
    assert verdict.status == "fails"
    assert verdict.departure is not None
    assert verdict.departure.name.startswith("side.")


@pytest.mark.parametrize("name", first_of_each(FAULTS))
def test_a_fault_of_the_trainer_is_found(name: str, tmp_path: Path, stage: LocalTrialRunner) -> None:
    fault = FAULTS[name]
    proof = proof_of(fault, tmp_path, stage)
    (verdict,) = proof.verdicts
    assert not proof.holds
    found = verdict.departure
    assert found is not None, verdict
    assert (found.step, found.what) == (fault.step, fault.what), verdict
    assert fault.tensor in ("", found.name), verdict
    assert verdict.cause is not None
    assert verdict.cause.kind == (fault.cause or "unknown"), verdict
    assert fault.named in verdict.cause.what


def test_what_ends_early_is_not_said_to_hold(tmp_path: Path, stage: LocalTrialRunner) -> None:
    text = """
def step(model, batch):
    step.number += 1
    if step.number == 5 and os.environ["WORLD_SIZE"] == "2":
        raise RuntimeError("this is my own")
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


step.number = 0
fit(step=step, weight="samples")
"""
    path = tmp_path / "script.py"
    path.write_text(Script(text).code)
    asked = Asked(script=str(path), folder=tmp_path, workers=(1, 2), steps=STEPS, promises=("samples", "ranks"))
    proof = prove(asked, lambda _: None, stage)
    assert [verdict.status for verdict in proof.verdicts] == ["not judged", "not judged"]
    assert all("ends after step 4" in verdict.note for verdict in proof.verdicts), proof.verdicts
    assert not proof.holds


def test_a_gradient_that_is_wrong_by_a_thousandth_is_found(tmp_path: Path, stage: LocalTrialRunner) -> None:
    text = """
from manyhosts.communication.world import World

reduce = World.start_all_reduce
World.start_all_reduce = lambda self, tensor: reduce(self, tensor.mul_(1.001) if tensor.numel() > 100 else tensor)
fit()
"""
    proof = proof_of(Script(text, "workers"), tmp_path, stage)
    (verdict,) = proof.verdicts
    assert verdict.departure is not None, verdict
    assert (verdict.departure.step, verdict.departure.what) == (1, "gradient")
    assert verdict.departure.amount == pytest.approx(1e-3, rel=0.2)


@pytest.mark.parametrize("drawn", ["", pytest.param(" + 0.1 * torch.randn_like(inputs)", marks=pytest.mark.slow)])
def test_small_fault_is_not_judged_where_a_script_cannot_be_run_in_float64(
    drawn: str, tmp_path: Path, stage: LocalTrialRunner
) -> None:
    text = """
class Cast(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, inputs):
        return self.last(self.first(inputs DRAWN).tanh().to(torch.float32))


def loss(outputs, targets):
    mean = nn.functional.cross_entropy(outputs, targets)
    return mean + WRONG * (len(outputs) > 6) * (mean - mean.detach())


fit(model=Cast, loss=loss)
"""
    found = {}
    for wrong in (0.0, 0.0015, 0.05):
        script = Script(text.replace("DRAWN", drawn).replace("WRONG", f"{wrong}"), "workers")
        (found[wrong],) = proof_of(script, tmp_path, stage).verdicts
    assert [verdict.status for verdict in found.values()] == ["holds", "not judged", "fails"], found
    assert "in float64" not in found[0.0].note
    assert "in step 1 the gradient of first.weight departs by 1." in found[0.0015].note
    assert "it could not be run in float64, where rounding and a small fault are told apart: " in found[0.0015].note
    assert "must have the same dtype" in found[0.0015].note, "with the reason"


def test_value_that_is_logged_and_no_mean_is_what_departs(tmp_path: Path, stage: LocalTrialRunner) -> None:
    text = (
        "def step(model, batch):\n"
        "    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])\n"
        "    return {'loss': loss, 'root': loss.detach().sqrt()}\n"
        "fit(loss=None, step=step)"
    )
    (verdict,) = proof_of(Script(text, "workers"), tmp_path, stage).verdicts
    assert verdict.departure is not None
    assert (verdict.departure.what, verdict.departure.name) == ("value", "root")
    assert verdict.cause is not None
    assert "'root' that the script logs is no mean over its samples" in verdict.cause.what


def test_a_script_that_fails_says_its_own_error(tmp_path: Path, stage: LocalTrialRunner) -> None:
    with pytest.raises(ScriptError, match="this is my own"):
        proof_of(Script("raise ValueError('this is my own')"), tmp_path, stage)
    with pytest.raises(ConfigError, match="without an optimizer step"):
        proof_of(Script("print('nothing to train')"), tmp_path, stage)
    with pytest.raises(ConfigError, match="batch_size is -3"):
        proof_of(Script("fit(batch_size=-3)"), tmp_path, stage)
    with pytest.raises(ConfigError, match="adds up what its samples cost"):
        proof_of(Script('fit(loss=nn.CrossEntropyLoss(reduction="sum"))'), tmp_path, stage)


def test_a_refusal_on_two_workers_is_told_as_it_is(tmp_path: Path, stage: LocalTrialRunner) -> None:
    (verdict,) = proof_of(Script("fit(strategy='single')", "workers"), tmp_path, stage).verdicts
    assert verdict.cause is not None
    assert "there are 2 workers" in verdict.cause.what


@pytest.mark.parametrize("strategy", ["mh.Pipeline()", "mh.PipeDream(versions='all')"])
def test_what_cannot_be_looked_at_is_untried_and_not_broken(
    strategy: str, tmp_path: Path, stage: LocalTrialRunner
) -> None:
    script = Script(f"fit(strategy={strategy}, micro_batch_size=4)", "ranks")
    proof = proof_of(script, tmp_path, stage)
    (verdict,) = proof.verdicts
    assert (verdict.status, verdict.cause) == ("not judged", None)
    assert verdict.note.startswith("with 2 workers it could not be tried, because ")
    assert "a stage of a pipeline has its own alone" in verdict.note
    assert not proof.holds, "it was asked for by name"


@pytest.mark.parametrize(
    ("strategy", "lost"),
    [("mh.ParameterServer()", ("workers", "micro", "resume")), ("mh.LocalSGD(sync_every=2)", ("workers", "ranks"))],
)
def test_promises_that_a_strategy_gives_up_are_named_and_not_held_against_the_script(
    strategy: str, lost: tuple[str, ...], tmp_path: Path, stage: LocalTrialRunner
) -> None:
    proof = proof_of(Script(f"fit(strategy={strategy}, micro_batch_size=4)"), tmp_path, stage)
    found = {verdict.promise: verdict for verdict in proof.verdicts}
    assert proof.given_up == lost
    assert all("does not keep this" in found[name].note for name in proof.given_up)
    assert all(verdict.status == "holds" for name, verdict in found.items() if name not in lost), found
    assert proof.holds
    screen = io.StringIO()
    print_proof(proof, screen)
    assert f"does not keep: {', '.join(lost)}" in " ".join(screen.getvalue().split())


def test_a_script_without_a_trainer_is_counted_by_its_optimizer(tmp_path: Path, stage: LocalTrialRunner) -> None:
    text = """
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rank, size = dist.get_rank(), dist.get_world_size()
for step in range(10**6):
    optimizer.zero_grad()
    own = torch.arange(12)[rank::size] + step % 4 * 12
    nn.functional.cross_entropy(model(inputs[own]), targets[own]).backward()
    optimizer.step()
"""
    proof = proof_of(Script(text), tmp_path, stage)
    found = {verdict.promise: verdict for verdict in proof.verdicts}
    assert proof.holds
    assert {name for name, verdict in found.items() if verdict.status == "holds"} == {"workers", "ranks"}
    diverging = proof_of(
        Script(text.replace("nn.parallel.DistributedDataParallel(network())", "network()")), tmp_path, stage
    )
    found = {verdict.promise: verdict for verdict in diverging.verdicts}
    assert found["ranks"].departure is not None
    assert found["ranks"].departure.name == "0.weight"


def test_the_command_prints_a_table_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BROKEN["own generator of torch in the dataset"].code)
    words = [sys.executable, "-m", "manyhosts.cli.main", "prove", "--workers", "1,2", "--steps", "4", "train.py"]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "scratch"), "PYTHONIOENCODING": "utf-8"}
    (tmp_path / "scratch").mkdir()
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    assert " ✗ same losses, gradients and weights on 1 and 2 workers" in done.stdout
    assert " ✓ each sample once" in done.stdout
    assert "the dataset draws from a generator of its own" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    left = [path.name for path in (tmp_path / "scratch").iterdir()]
    assert not [name for name in left if not name.startswith("torchinductor_")], left  # that one is PyTorch's
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "scratch"}
    dry = subprocess.run([*words[:4], "--dry-run", "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert dry.stdout.splitlines()[0] == "1 worker, 20 steps: train.py"


def test_other_children_of_the_caller_live_on(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    with subprocess.Popen(["sleep", "60"]) as other:
        make_stage(Asked(script=str(tmp_path / "script.py"), folder=tmp_path)).close()
        assert other.poll() is None
        other.kill()


def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import manyhosts, time\nopen('there', 'w').close()\ntime.sleep(1000)")
    process = subprocess.Popen(
        [sys.executable, "-m", "manyhosts.cli.main", "prove", "slow.py"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: (tmp_path / "there").exists() or process.poll() is not None, "the script has begun")
    family = descendants(psutil.Process(process.pid))
    assert family
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=120)
    assert process.returncode == 130, words
    wait_until(lambda: not alive(family), "all have ended")
    assert {path.name for path in tmp_path.iterdir()} - {"slow.py", "there"} <= {f"torchinductor_{getpass.getuser()}"}


_OWN_LOOP = """
def cost(batch):
    noisy = batch[0] + 0.1 * torch.randn(batch[0].shape)
    return nn.functional.cross_entropy(run.models["model"](noisy), batch[1]){factor}


def step(run):
    run.backward(cost)
    run.update()


run = mh.Run(
    models=network,
    optimizers=lambda params: torch.optim.SGD(params, lr=0.01),
    data=mh.Data(Plain(), batch_size=12),
    virtual_workers=2,
)
run.fit(step, "5 epochs")
"""


@pytest.mark.parametrize(("factor", "status"), [("", "holds"), (" * len(noisy)", "fails")])
def test_size_of_a_forward_pass_is_judged_where_each_draws_numbers_of_its_own(
    factor: str, status: str, tmp_path: Path, stage: LocalTrialRunner
) -> None:
    """Once more with all that is drawn at one value: a loss that is a sum over its micro-batch is then found."""
    proof = proof_of(Script(_OWN_LOOP.replace("{factor}", factor), "micro"), tmp_path, stage)
    (verdict,) = proof.verdicts
    assert verdict.status == status, proof.to_json()
    assert ("all that is drawn is one value" in verdict.note) == (status == "holds")
