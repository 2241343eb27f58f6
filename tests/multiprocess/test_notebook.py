"""A notebook from its first cell to its last: two workers train, a rank fails, a cell is interrupted."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from launching import MANYHOSTS, environment, wait_until
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from manyhosts.errors import ConfigError
from manyhosts.notebook import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("notebook")]

TRAIN = """
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset
    import manyhosts as mh

    width = 8

    def net():
        return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def train(rate):
        inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
        trainer = mh.Trainer(
            model=net,
            loss=nn.MSELoss(),
            optimizer=lambda params: torch.optim.SGD(params, lr=rate),
            data=mh.Data(train=TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16),
        )
        result = trainer.fit("3 epochs")
        mh.print("trained")
        return {"workers": trainer.world.size, "weights": trainer.model.state_dict()["0.weight"]}

    found = mh.launch.run(train, [0.1], workers=2, run_dir="one")
    print(found["workers"], tuple(found["weights"].shape))
"""
FAIL = """
    import os

    def fail():
        if os.environ["RANK"] == "1":
            raise ValueError("no such thing")

    mh.launch.run(fail, workers=2, run_dir="two")
"""
WAIT = """
    def wait():
        import time
        from pathlib import Path
        Path("waits-" + os.environ["RANK"]).write_text(str(os.getpid()))
        while True:
            time.sleep(0.1)

    mh.launch.run(wait, workers=2, run_dir="three")
"""
AFTER = "print(mh.launch.run(lambda: os.environ['WORLD_SIZE'], workers=2, run_dir='four'))"


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Any]:
    """Runs cells one after another in a kernel: `cell(source)` gives what is below it."""
    book = nbformat.v4.new_notebook()
    client = NotebookClient(book, timeout=180, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})

    def cell(source: str) -> list[Any]:
        book.cells.append(nbformat.v4.new_code_cell(textwrap.dedent(source).strip()))
        client.execute_cell(book.cells[-1], len(book.cells) - 1)
        return list(book.cells[-1].outputs)

    cell.client, cell.book = client, book  # type: ignore[attr-defined]
    with client.setup_kernel(env=dict(os.environ)):
        yield cell
    if place := os.environ.get("MANYHOSTS_KEEP_NOTEBOOK"):
        nbformat.write(book, place)


def text_of(outputs: list[Any]) -> str:
    return "".join(
        each.get("text", "") + "".join(each.get("traceback", [])) + each.get("data", {}).get("text/plain", "")
        for each in outputs
    )


def test_cells_train_on_two_workers_fail_once_and_end_cleanly_when_interrupted(notebook: Any, tmp_path: Path) -> None:
    out = text_of(notebook(TRAIN))
    assert "2 (8, 4)" in out
    assert out.count("trained\n") == 1
    assert "epoch 3/3" in out
    assert (tmp_path / "one" / "summary.json").exists()

    with pytest.raises(CellExecutionError):
        notebook(FAIL)
    outputs = list(notebook.book.cells[-1].outputs)
    assert text_of(outputs).count("ValueError: no such thing") == 1, text_of(outputs)
    [error] = [each for each in outputs if each.output_type == "error"]
    assert "rank 1" in "".join(error.traceback)
    assert '    raise ValueError("no such thing")' in error.traceback, "the line of the cell is shown"
    assert "/manyhosts/" not in "".join(error.traceback), "our own stack helps nobody"

    pids: list[int] = []

    def interrupt() -> None:
        wait_until(lambda: all((tmp_path / f"waits-{rank}").exists() for rank in (0, 1)), "both workers run")
        time.sleep(0.1)
        pids.extend(int((tmp_path / f"waits-{rank}").read_text()) for rank in (0, 1))
        os.kill(notebook.client.km.provisioner.pid, 2)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(CellExecutionError):
        notebook(WAIT)
    helper.join()
    assert notebook.book.cells[-1].outputs[-1].ename == "Interrupted"
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the workers have ended")

    assert "2" in text_of(notebook(AFTER)), "the kernel continues"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(("train-", "fail-", "wait-"))]


def test_function_that_cannot_travel_is_refused_before_anything_starts(tmp_path: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot be sent to workers: TypeError: cannot pickle"):
        launch.run(lambda: lock, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("given", [2, "abc", {"lr": 0.1}], ids=str)
def test_arguments_that_are_no_list_are_refused(given: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="and not a list of what the script or function is given") as caught:
        launch.run(print, given, run_dir=tmp_path / "run")
    assert "how many workers is workers=" in caught.value.fix


BESIDE = """
from pathlib import Path

import own_module

import manyhosts as mh


def doubled(number):
    Path("was-called").touch()
    return own_module.twice(number)


def nothing():
    return None


if __name__ == "__main__":
    first, other = mh.launch.run(doubled, [4], run_dir="one"), mh.launch.run(own_module.twice, [5])
    print(first, other, mh.launch.run(nothing, run_dir="one"))
"""


def test_module_next_to_the_program_is_found_and_each_call_gives_back_its_own_result(tmp_path: Path) -> None:
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "own_module.py").write_text("def twice(number):\n    return 2 * number\n")
    (folder / "program.py").write_text(BESIDE)
    for place, program in ((folder, "program.py"), (tmp_path, "programs/program.py")):
        words = [sys.executable, program]
        done = subprocess.run(words, cwd=place, env=environment(), capture_output=True, text=True, timeout=120)
        assert done.stdout.splitlines()[-1:] == ["8 10 None"], done.stdout + done.stderr
        assert (place / "was-called").exists()


def test_worker_starts_no_workers_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "nested.py").write_text("import manyhosts as mh\nmh.launch.run(print, [1], workers=2)\n")
    words = [*MANYHOSTS, "run", "--workers", "2", "nested.py"]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, "this is a worker of a run already" in done.stderr) == (2, True), done.stderr
    assert "`python PROGRAM`" in done.stderr


def test_argument_by_another_name_is_answered() -> None:
    with pytest.raises(ConfigError) as caught:
        launch.run(print, [1], nprocs=2)  # type: ignore[call-arg]
    assert (caught.value.what, caught.value.fix) == ("mh.launch.run has no argument 'nprocs'", "workers=2")
