"""Workers that joined have the rates that a run was begun with, also where none of the first ones is left."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import run
from runs import step_lines

from manyhosts.records.manifest import read

pytestmark = pytest.mark.multiprocess
SCRIPT = """
    import os, signal, torch
    from pathlib import Path
    import manyhosts as mh

    random = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(256, 8, generator=random), torch.randint(0, 2, (256,), generator=random)
    inputs[0] = float("nan")  # which is in step 16

    class Kill(mh.Callback):
        def after_step(self, moment):
            killed = Path(f"killed-{{moment.step}}")
            if trainer.world.rank == 0 and moment.step in {kills} and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    trainer = mh.Trainer(
        model=lambda: torch.nn.Linear(8, 2),
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        schedule={schedule},
        data=mh.Data(train=torch.utils.data.TensorDataset(inputs, targets),
                     validation=torch.utils.data.TensorDataset(inputs[1:], targets[1:]), batch_size_per_worker=8),
        lr_scaling="linear", warmup="5 steps", on_bad_step="rewind", callbacks=[Kill()], validate_every="4 steps",
    )
    trainer.fit({steps!r})
"""
SCHEDULES = {
    "function": "lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)",
    "plateau": "lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=9)",
}


def rates(run_dir: Path) -> dict[int, float]:
    return {line["step"]: line["lr"] for line in step_lines(run_dir)}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rate_that_follows_the_workers_outlives_the_first_ones(schedule: str, tmp_path: Path) -> None:
    asked = {"schedule": SCHEDULES[schedule]}
    (tmp_path / "whole").mkdir()
    whole = run(tmp_path / "whole", SCRIPT.format(**asked, kills=(), steps="30 steps"), "--workers", "2")
    assert whole.code == 0, whole.err
    options = read(tmp_path / "whole" / "run" / "snapshots" / "step-00000030").facts.run["options"]
    for steps in ("24 steps", "30 steps"):
        ended = run(tmp_path, SCRIPT.format(**asked, kills=(2, 4), steps=steps), "--workers", "2")
        assert ended.code == 0, ended.err
        assert "changed since the snapshot" not in ended.out + ended.err
        assert (steps == "24 steps") == ("continued from the snapshot of step 0" in ended.out), ended.out
    assert (tmp_path / "killed-4").exists(), "no worker is left that began the run"
    assert rates(tmp_path / "run") == rates(tmp_path / "whole" / "run")
    assert read(tmp_path / "run" / "snapshots" / "step-00000030").facts.run["options"] == options
