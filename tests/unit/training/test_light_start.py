"""What a script does not use is not loaded for it."""

from __future__ import annotations

import subprocess
import sys


def test_trainer_without_metrics_does_without_torchmetrics() -> None:
    code = "import sys, manyhosts as mh\nmh.Trainer\nsys.exit('torchmetrics' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
