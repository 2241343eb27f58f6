"""A worker that takes the place of a killed one finds loaded what the first one had to import."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from launching import family, start, templates, wait_until

pytestmark = [pytest.mark.multiprocess, pytest.mark.starts_cold]
SCRIPT = """
    import os, sys, time
    from pathlib import Path
    started = Path("started", str(os.getpid()))
    started.write_text("warm" if "scipy.optimize" in sys.modules else "cold")
    import scipy.optimize  # scikit-learn brings pandas where that is installed, which begins threads
    import torch
    import manyhosts as mh

    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, index):
            time.sleep(0.01)
            return torch.randn(4), torch.randn(2)

    trainer = mh.Trainer(
        model=lambda: torch.nn.Linear(4, 2),
        loss=torch.nn.MSELoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=mh.Data(train=Slow(), batch_size=8, loader_workers=0),
        virtual_workers=4,
    )
    trainer.fit("1000000 steps")
"""


def loaded(process: psutil.Process) -> bool:
    """Whether the libraries of scipy.optimize are in a process."""
    return any("_lbfgsb" in mapped.path for mapped in process.memory_maps())


def test_replacement_finds_loaded_what_the_script_imports(tmp_path: Path) -> None:
    (tmp_path / "started").mkdir()
    head = start(tmp_path, SCRIPT, "--workers", "2", "--env", "OMP_NUM_THREADS=1")
    try:
        wait_until(lambda: len(list((tmp_path / "started").iterdir())) == 2, "both workers")
        assert {path.read_text() for path in (tmp_path / "started").iterdir()} <= {"cold", ""}
        [template] = templates(family(head))
        wait_until(lambda: loaded(template), "the template has loaded it, too")
        before = {path.name for path in (tmp_path / "started").iterdir()}
        victim = min(int(name) for name in before if psutil.pid_exists(int(name)))
        os.kill(victim, signal.SIGKILL)
        new = lambda: [path for path in (tmp_path / "started").iterdir() if path.name not in before]  # noqa: E731
        wait_until(lambda: bool(new()) and new()[0].read_text() != "", "the one in its place")
        assert new()[0].read_text() == "warm"
        assert template.num_threads() == 1, "what is forked must not lack threads that it counts on"
        head.send_signal(signal.SIGTERM)
        assert head.wait(timeout=120) == 130
    finally:
        for process in family(head) if head.poll() is None else []:
            process.kill()
        head.communicate()
