"""What a script does not use is not loaded for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import manyhosts

NOT_NEEDED = {"torch._dynamo", "torch.distributed.tensor", "sympy", "torchmetrics", "http.server", "torch.onnx"}
"""Two seconds of imports, for what is compiled, kept in parts, measured or served."""
SCRIPT = """
import json, sys
import torch
from torch import nn
import manyhosts as mh

def step(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])

def optimizer(params):
    return torch.optim.AdamW(params, lr=0.1)

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 2))
trainer = mh.Trainer(
    model=lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 2)), optimizer=optimizer, step=step,
    data=mh.Data(train=data, batch_size=8), micro_batch_size=4,
)
result = trainer.fit("2 steps")
weights = torch.cat([each.detach().flatten() for each in trainer.model.parameters()]).tolist()
json.dump([sorted(sys.modules), weights], open(sys.argv[1], "w"))
"""
AT_EXIT = """
import atexit, os, sys

def note():
    with open(os.path.join(os.environ["NOTED"], str(os.getpid())), "w") as file:
        file.write("\\n".join([open("/proc/self/cmdline").read().replace("\\0", " "), *sys.modules]))

atexit.register(note)
"""


def test_trainer_without_metrics_does_without_torchmetrics() -> None:
    code = "import sys, manyhosts as mh\nmh.Trainer\nsys.exit('torchmetrics' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_import_alone_does_without_what_takes_longer_than_itself() -> None:
    long = {"pathlib", "urllib", "torch", "dataclasses", "inspect", "socket"}
    code = f"import sys, manyhosts\nsys.exit(not {long}.isdisjoint(sys.modules))"
    found = {**os.environ, "PYTHONPATH": str(Path(manyhosts.__file__).parents[1])}
    # Without site, which may load anything for other packages.
    assert subprocess.run([sys.executable, "-S", "-c", code], env=found, timeout=120).returncode == 0


def trained(tmp_path: Path, name: str, before: str = "") -> tuple[set[str], list[float]]:
    """The modules and the weights after two steps, of a script that begins with `before`."""
    script, found = tmp_path / "train.py", tmp_path / name
    script.write_text(before + SCRIPT)
    environment = {**os.environ, "MANYHOSTS_RUN_DIR": str(tmp_path / f"run of {name}")}
    subprocess.run([sys.executable, str(script), str(found)], env=environment, check=True, timeout=120)
    modules, weights = json.loads(found.read_text())
    return set(modules), weights


def test_run_does_without_the_compiler_and_has_the_weights_of_one_with_it(tmp_path: Path) -> None:
    modules, weights = trained(tmp_path, "light")
    assert not modules & NOT_NEEDED
    before, known = trained(tmp_path, "loaded", "import torch._dynamo\n")
    assert "torch._dynamo" in before
    assert weights == known


def test_no_process_of_a_run_loads_what_it_does_not_need(tmp_path: Path) -> None:
    script, noted = tmp_path / "train.py", tmp_path / "noted"
    noted.mkdir()
    (tmp_path / "sitecustomize.py").write_text(AT_EXIT)
    script.write_text(SCRIPT)
    words = ["run", "--workers", "2", "--run-dir", str(tmp_path / "run"), str(script), str(tmp_path / "found")]
    found = {**os.environ, "PYTHONPATH": str(tmp_path), "NOTED": str(noted)}
    started = [sys.executable, "-m", "manyhosts.cli.main", *words]
    subprocess.run(started, env=found, check=True, timeout=120, capture_output=True)
    with_torch = set()
    for title, *modules in (each.read_text().splitlines() for each in noted.iterdir()):
        assert not NOT_NEEDED.intersection(modules), title
        with_torch |= {title.split(":")[0].strip()} if "torch" in modules else set()
    assert with_torch == {"manyhosts fork server of the workers", "manyhosts rank 0 of 2", "manyhosts rank 1 of 2"}


def test_compiler_that_is_loaded_later_has_optimizers_as_pytorch_made_them() -> None:
    code = """
import sys, torch
from manyhosts.model.uncompiled import step_without_compiler
step_without_compiler()
weight = torch.nn.Parameter(torch.ones(3))
made = torch.optim.SGD([weight], lr=0.1)
weight.grad = torch.ones(3)
made.step()
assert "torch._dynamo" not in sys.modules
import torch._dynamo
assert not hasattr(torch.optim.Optimizer.add_param_group.__wrapped__, "__dynamo_disable")
torch.compile(made.step, backend="eager")()
made.zero_grad()
assert torch.allclose(weight, torch.full((3,), 0.8)) and weight.grad is None
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_step_of_an_optimizer_has_its_span_in_a_profile_and_calls_the_hooks_that_wait_for_it() -> None:
    code = """
import torch
from torch.optim import optimizer
from torch.profiler import profile
from manyhosts.model.uncompiled import step_without_compiler
step_without_compiler()
weight = torch.nn.Parameter(torch.ones(3))
made = torch.optim.SGD([weight], lr=0.1)
assert "own" in type(made).step.__code__.co_name
weight.grad = torch.ones(3)
with profile() as seen:
    made.step()
assert [each.key for each in seen.key_averages()].count("Optimizer.step#SGD.step") == 1
with profile() as seen:
    pass
called = []
for place, add in enumerate([made.register_step_pre_hook, made.register_step_post_hook,
        optimizer.register_optimizer_step_pre_hook, optimizer.register_optimizer_step_post_hook]):
    handle = add(lambda *given, place=place: called.append(place))
    made.step()
    handle.remove()
    made.step()
assert called == [0, 1, 2, 3], called
assert torch.allclose(weight, torch.full((3,), 0.1)), weight
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
