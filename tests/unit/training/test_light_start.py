"""What a script does not use is not loaded for it."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = ["torchmetrics", "torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "sympy", "pandas"]


def test_trainer_loads_nothing_that_a_plain_training_does_without() -> None:
    code = "import sys, json, manyhosts as mh\nmh.Trainer, mh.Run\nprint(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True, text=True, check=True)
    assert "torch" in json.loads(done.stdout)
    assert not set(HEAVY) & set(json.loads(done.stdout))
