"""What a script does not use is not loaded for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import manyhosts


def test_trainer_without_metrics_does_without_torchmetrics() -> None:
    code = "import sys, manyhosts as mh\nmh.Trainer\nsys.exit('torchmetrics' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_import_alone_does_without_what_takes_longer_than_itself() -> None:
    code = "import sys, manyhosts\nsys.exit(not {'pathlib', 'urllib', 'torch'}.isdisjoint(sys.modules))"
    found = {**os.environ, "PYTHONPATH": str(Path(manyhosts.__file__).parents[1])}
    # Without site, which may load anything for other packages.
    assert subprocess.run([sys.executable, "-S", "-c", code], env=found, timeout=120).returncode == 0
