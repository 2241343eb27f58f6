"""`manyhosts run --metrics-port`: metrics are fetched while a run trains, and what cannot be served is refused."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from launching import run

pytestmark = pytest.mark.multiprocess
parser = pytest.importorskip("prometheus_client.parser")

TRAIN = """
    import sys, urllib.request
    from pathlib import Path
    import torch
    from torch import nn
    import manyhosts as mh
    from manyhosts.events import StepDone
    from manyhosts.training.telemetry import pace

    pace.EVERY_S = 0.05

    def fetch(event):
        if isinstance(event, StepDone) and event.step == 30:
            with urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/metrics") as answer:
                Path("fetched").write_bytes(answer.read())

    trainer = mh.Trainer(
        model=nn.Linear(4, 1),
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=mh.Data(
            train=torch.utils.data.TensorDataset(torch.ones(64, 4), torch.ones(64, 1)), batch_size=8
        ),
        listeners=[fetch],
    )
    trainer.fit("40 steps")
"""


def test_metrics_of_both_workers_are_fetched_while_they_train(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    ended = run(tmp_path, TRAIN, "--workers", "2", "--metrics-port", port, arguments=[port])
    assert ended.code == 0, ended.out + ended.err
    families = {
        family.name: family for family in parser.text_string_to_metric_families((tmp_path / "fetched").read_text())
    }
    [steps] = [sample for sample in families["manyhosts_steps"].samples if sample.name == "manyhosts_steps_total"]
    assert 29 <= steps.value <= 30
    assert families["manyhosts_training"].samples[0].value == 1
    assert families["manyhosts_workers"].samples[0].value == 2
    assert {sample.labels["rank"] for sample in families["manyhosts_step_seconds"].samples} == {"0", "1"}


def test_port_that_is_taken_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        ended = run(tmp_path, TRAIN, "--workers", "2", "--metrics-port", port, arguments=[port])
    assert ended.code != 0
    assert f"cannot listen at 127.0.0.1:{port}" in ended.err
    assert "where: --metrics-port" in ended.err
    assert '"event": "step"' not in "".join(path.read_text() for path in tmp_path.rglob("metrics.jsonl"))
