"""Four workers on one host or one on each of four: what a plan advises on hosts of a lab is what is faster there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import MANYHOSTS, write_script
from remote import run

from manyhosts.lab import Lab

SOURCE = """
    import fcntl, os, time
    from pathlib import Path
    import torch
    from torch import nn
    import manyhosts as mh

    SHARED, WIDTH, SECONDS = bool(int(os.environ["SHARED"])), int(os.environ["WIDTH"]), float(os.environ["SECONDS"])

    class Device(torch.autograd.Function):
        # Takes its time for each sample; the workers of a host take turns where it has one such device for all.
        @staticmethod
        def forward(ctx, values):
            with open("/tmp/device", "w") as device:
                if SHARED:
                    fcntl.flock(device, fcntl.LOCK_EX)
                time.sleep(SECONDS * len(values))
            return values.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, values):
            return self.layer(Device.apply(values))

    inputs = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
    trainer = mh.Trainer(
        model=Model,
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
        data=mh.Data(train=torch.utils.data.TensorDataset(inputs, inputs), batch_size=16),
    )
    trainer.fit("12 steps")
"""
UP = {"SHARED": "0", "WIDTH": "1024", "SECONDS": "0.01"}
"""4 MB of gradients for 40 ms of computing: over cables of 100 Mbit/s they take half a second."""
OUT = {"SHARED": "1", "WIDTH": "32", "SECONDS": "0.02"}
"""Workers of one host wait for each other's device."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("variables", "faster"), [(UP, "up"), (OUT, "out")], ids=["up", "out"])
def test_up_or_out_is_the_one_that_is_faster(variables: dict[str, str], faster: str, make_lab, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    lab: Lab = make_lab(4, bandwidth="100mbit")
    hosts = ",".join(lab.names)
    said = [word for item in variables.items() for word in ("--env", "=".join(item))]
    script = write_script(tmp_path, SOURCE)
    words = [*MANYHOSTS, "plan", "--json", "--seconds", "6", "--hosts", hosts, "--nodes", "1,4"]
    words += [*said, "--workers-per-node", "1,4", script.name]
    planned = lab.desk.run(words, folder=str(tmp_path), timeout_s=400, check=False)
    assert planned.returncode == 0, planned.stderr
    advice = json.loads(planned.stdout)["recommendation"]
    seconds = {}
    for name in ("up", "out"):
        way = advice[name]
        words = ["--hosts", ",".join(lab.names[: way["nodes"]]), "--run-dir", name]
        words += ["--workers-per-node", str(way["workers"] // way["nodes"])]
        ended = run(lab, tmp_path, SOURCE, *said, *words, "--set", f"compression={way['compression']}")
        assert ended.code == 0, ended.err
        steps = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        taken = sorted(step["seconds"] for step in steps if step["event"] == "step")
        seconds[name] = taken[len(taken) // 2]
    reported = {name: (advice[name]["step_seconds"], taken) for name, taken in seconds.items()}
    assert min(seconds, key=seconds.__getitem__) == faster, reported
    assert f"Scale {faster}: " in advice["why"], (reported, advice["why"])
