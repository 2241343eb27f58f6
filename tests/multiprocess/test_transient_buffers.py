"""A worker that takes the place of a killed one has the buffers of the others, also those in no state_dict."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import summary
from launching import run
from runs import restarts

pytestmark = pytest.mark.multiprocess
SCRIPT = """
    import os, signal
    from pathlib import Path
    import torch
    from torch import nn
    import manyhosts as mh

    first = os.environ["RANK"] == "0"

    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 2)
            # Random ones, that another process makes otherwise.
            draw = torch.Generator().manual_seed(0 if first else os.getpid())
            self.register_buffer("directions", torch.randn(4, 8, generator=draw), persistent=False)

        def forward(self, x):
            return self.layer(torch.cos(x @ self.directions))

    class Deadly(torch.utils.data.TensorDataset):
        def __getitem__(self, index):
            if index == 30 and os.environ["KILL"] and not first and not Path("killed").exists():
                Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    torch.manual_seed(0)
    rows = torch.randn(48, 4)
    trainer = mh.Trainer(
        model=Features(),
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=mh.Data(train=Deadly(rows, rows[:, :2]), batch_size=8, shuffle=False),
        virtual_workers=int(os.environ["PARTS"]) or None,
    )
    trainer.fit("12 steps")
"""


@pytest.mark.parametrize("parts", [0, 4])
def test_transient_buffers_go_to_a_new_worker(parts: int, tmp_path: Path) -> None:
    reported = []
    for kill in ("", "1"):
        folder = tmp_path / f"killed {kill}"
        folder.mkdir()
        done = run(folder, SCRIPT, "--workers", "2", "--env", f"KILL={kill}", "--env", f"PARTS={parts}")
        assert done.code == 0, done.err
        assert len(restarts(folder / "run")) == len(kill), done.err
        reported.append(summary(folder / "run")["weights_sha256"])
    assert reported[0] == reported[1]
