"""`manyhosts plan` on small scripts with real workers: what it measures, what it leaves alone, what it refuses."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import stages
from launching import MANYHOSTS
from prove_scripts import Script

from manyhosts.cli.main import main
from manyhosts.control.job import Job
from manyhosts.errors import ConfigError, LaunchError, ManyhostsError, ScriptError
from manyhosts.measure.measure import Asked, Found, Where, make_stage, measure, measure_on_hosts
from manyhosts.planner.catalog import Machines
from manyhosts.planner.measured import Measured, Network
from manyhosts.planner.predict import predict, ways
from manyhosts.trials.forked import LocalTrialRunner

SECONDS = 3.0
PARAMETERS = 4 * (8 * 16 + 16 + 16 * 4 + 4)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTrialRunner]:
    with stages.loaded(lambda *place: make_stage(Asked(script=place[0], folder=place[1])), tmp_path_factory) as made:
        yield made


def measured(text: str, folder: Path, stage: LocalTrialRunner, **changes: object) -> Found:
    path = folder / "script.py"
    path.write_text(Script(text).code)
    asked = Asked(script=str(path), folder=folder, seconds=SECONDS, **changes)  # type: ignore[arg-type]
    return measure(asked, lambda _: None, stage)


def test_everything_of_a_training_is_measured_and_nothing_left_behind(tmp_path: Path, stage: LocalTrialRunner) -> None:
    text = """
from pathlib import Path

told = []
fit(
    optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), listeners=[lambda event: Path("told").touch()],
    data={"validation": Plain()}, validate_every="7 steps", run_dir="mine",
)
Path("after").touch()
"""
    found = measured(text, tmp_path, stage, workers=(1, 2), workers_per_node=(1, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"], "nobody heard of it, nothing ran after fit"
    facts = found.measured
    assert {6, 12} <= {each.samples for each in facts.compute}, "the parts of a batch of 12 for one worker and for two"
    assert facts.parameter_bytes == PARAMETERS
    assert facts.gradient_bytes == PARAMETERS + 4 * 4, "and for each parameter how many workers used it"
    assert facts.optimizer_bytes == 2 * PARAMETERS + 4 * 4
    assert (facts.samples, facts.global_batch, facts.batch_grows, facts.micro_batch) == (64, 12, False, None)
    assert (facts.validation_samples, facts.validation_parts, facts.validate_every_steps) == (64, 6, 7)
    assert facts.validation_s_per_sample > 0
    assert facts.update_s > 0
    assert facts.loader_processes == 0
    if sys.platform == "linux":
        assert 20e6 < facts.process_bytes < 2e9, "interpreter and torch, partly shared with what it was forked from"
    assert facts.device == "cpu"
    assert {"bf16", "fp16"} <= facts.compression.keys() or facts.compression.keys() == {"fp16"}
    assert found.strategy["name"] == "ddp"
    assert facts.contention.keys() == {2}
    assert facts.contention[2] >= 1
    [together] = facts.tried
    assert (together.nodes, together.workers_per_node, together.network) == (1, 2, found.within)
    assert together.steps.keys() >= {"none", "powersgd"}
    assert all(0 < seconds < 10 for seconds in together.steps.values())
    assert found.within is not None
    assert 1e6 < found.within.bytes_per_second < 1e12
    assert 0 < found.within.processor_s_per_message < 1
    assert 0 <= found.within.processor_s_per_byte < 1e-3
    assert found.between is None


def test_workers_whose_loaders_share_the_cores_take_some_complete_steps(
    tmp_path: Path, stage: LocalTrialRunner
) -> None:
    found = measured('fit(data={"loader_workers": 1})', tmp_path, stage, workers=(1, 2), workers_per_node=(1, 2))
    [together] = found.measured.tried
    assert found.measured.loader_processes == 1
    assert 0 < together.full_step_s < 10


def test_what_limits_a_batch_is_known(tmp_path: Path, stage: LocalTrialRunner) -> None:
    found = measured("fit(micro_batch_size=5, virtual_workers=4, batch_size=16)", tmp_path, stage).measured
    assert (found.global_batch, found.micro_batch, found.virtual_workers, found.threads) == (16, 5, 4, 1)
    assert max(each.samples for each in found.compute) == 4, "a part of the batch"
    assert not found.compression, "virtual workers add every bit"


def test_a_batch_that_grows_and_layers_that_share_theirs_are_known(tmp_path: Path, stage: LocalTrialRunner) -> None:
    text = """
model = lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
fit(model=model, batch_size=None, data={"batch_size_per_worker": 10})
"""
    found = measured(text, tmp_path, stage).measured
    assert (found.global_batch, found.batch_grows) == (10, True)
    assert (found.batch_norm_layers, found.batch_norm_bytes) == (1, 4 * 33)
    assert found.buffer_bytes == 2 * 4 * 16 + 8


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("raise ValueError('this is my own')", ScriptError, "this is my own"),
        ("print('nothing to train')", ConfigError, "trains without mh.Trainer"),
        ("mh.Trainer.fit = lambda *_: None\nfit()", ConfigError, "ends without calling fit"),
        ("fit(model=lambda: nn.Linear(8, -4))", ScriptError, "Trying to create tensor with negative dimension"),
        ("fit(batch_size=-3)", ConfigError, "batch_size is -3"),
        ("fit(train=[(inputs[0], targets[0])] * 64, model=lambda: nn.Linear(5, 4))", ScriptError, "shapes cannot be"),
        ("raise SystemExit(2)", ScriptError, "rank 0 ended with code 2"),
        (
            "run = mh.Run(models=network, optimizers=lambda params: torch.optim.SGD(params, 0.1),\n"
            "    evaluate=lambda *_: 0,\n"
            "    data=mh.Data(train=torch.utils.data.TensorDataset(inputs, targets), batch_size=8))\n"
            "run.fit(lambda run: None, '1 step')",
            ConfigError,
            "a step of mh.Run is the script's own code",
        ),
        (
            "model = network()\nsgd = torch.optim.SGD(model.parameters(), lr=0.1)\n"
            "while True:\n    model(inputs).sum().backward()\n    sgd.step()",
            ConfigError,
            "trains without mh.Trainer",
        ),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_sentence(
    text: str, kind: type[ManyhostsError], said: str, tmp_path: Path, stage: LocalTrialRunner
) -> None:
    with pytest.raises(kind, match=said) as caught:
        measured(text, tmp_path, stage)
    if kind is ScriptError:
        assert "manyhosts run " in caught.value.fix
    if kind is ScriptError and "ended with" not in said:
        assert re.search(r"script\.py, line \d+, rank 0$", caught.value.where), caught.value.where


def test_a_fit_that_never_comes_is_not_waited_for(tmp_path: Path, stage: LocalTrialRunner) -> None:
    with pytest.raises(ConfigError, match="not come to fit in 2 seconds"):
        measured("while True:\n    print('still preparing')\n    time.sleep(0.1)", tmp_path, stage, patience_s=2.0)


BLOCKS = """
class Noisy(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.add_(torch.randn_like(parameter), alpha=1e-3)
        return super().step(closure)


blocks = lambda: nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)], nn.Linear(8, 4))
fit(model=blocks, optimizer=lambda p: OPTIMIZER(p, lr=0.1))
"""


def test_parts_are_not_planned_where_they_cannot_be_had(tmp_path: Path, stage: LocalTrialRunner) -> None:
    """An optimizer that draws random numbers for each part is refused in a run, too."""
    asked = {"workers": (1, 2), "workers_per_node": (1, 2)}
    usual = measured(BLOCKS.replace("OPTIMIZER", "torch.optim.SGD"), tmp_path, stage, **asked)
    assert usual.measured.in_parts is not None
    assert usual.measured.in_parts.passes_s > 0
    assert "fsdp" in {way.strategy for way in ways(usual.measured)}
    found = measured(BLOCKS.replace("OPTIMIZER", "Noisy"), tmp_path, stage, **asked).measured
    assert (found.in_parts, found.unit_bytes) == (None, ())
    assert "fsdp" not in {way.strategy for way in ways(found)}


MODEL = Path(__file__).with_name("language_model.py")


def test_memory_of_a_language_model_is_as_predicted_on_one_two_and_four_workers(
    tmp_path: Path, stage: LocalTrialRunner
) -> None:
    asked = Asked(script=str(MODEL), folder=tmp_path, workers=(1, 2, 4), seconds=SECONDS)
    found = measure(asked, lambda _: None, stage).measured
    network = Network(latency_s=0.0, bytes_per_second=1e9)
    machine = Machines(name="", count=1, workers=4, between=network, within=network)
    for workers in (1, 2, 4):
        memory = predict(found, machine, machine.group(1, workers), ways(found)[0]).memory
        folder = tmp_path / str(workers)
        folder.mkdir()
        job = Job(
            program=str(MODEL),
            folder=tmp_path,
            run_dir=tmp_path / f"run-{workers}",
            workers_per_node=workers,
            environment={"HELD": str(folder)},
        )
        error, output = stage.run(job, hang_s=120)
        assert error is None, output
        for rank in range(workers):
            held = json.loads((folder / f"{rank}.json").read_text())
            for name, predicted in asdict(memory).items():
                if name in held:
                    assert predicted == pytest.approx(held[name], rel=0.05), f"{name} on {workers} workers"
            assert held.keys() == {"parameters", "gradients", "optimizer", "activations"}


def test_a_plan_is_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(Script("fit()").code)
    assert main(["plan", "--json", "--workers", "1,2", "--seconds", "5", "--price", "2", str(script)]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {"measured", "predictions", "recommendation", "seconds"} <= plan.keys()
    asked = (
        "workers nodes strategy compression step_seconds epoch_seconds efficiency communication_exposed memory_bytes"
    )
    for each in plan["predictions"]:
        assert {*asked.split(), "price", "fits"} <= each.keys()
    assert {each["workers"] for each in plan["predictions"]} == {1, 2}
    assert {each["compression"] for each in plan["predictions"]} >= {"none", "fp16"}
    assert plan["recommendation"]["why"]
    assert Measured.from_json(plan["measured"]).global_batch == 12


def test_on_several_nodes_the_network_between_them_is_measured_too(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(Script('assert os.environ["OWN"] == "given"\nfit()').code)
    asked = Asked(
        script="script.py", folder=tmp_path, workers=(1, 2), nodes=(1, 2), seconds=SECONDS, environment={"OWN": "given"}
    )
    where = Where(program=MANYHOSTS, words=["--on", "local"], hosts=())
    found = measure_on_hosts(asked, where, lambda _: None)
    assert found.measured.parameter_bytes == PARAMETERS
    assert found.between is not None
    assert 1e6 < found.between.bytes_per_second < 1e12
    assert 0 < found.between.latency_s < 1
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]
    (tmp_path / "script.py").write_text("raise ValueError('this is my own')")
    with pytest.raises(LaunchError, match="this is my own"):
        measure_on_hosts(asked, where, lambda _: None)
