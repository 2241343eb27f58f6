"""The path of a step is as short as docs/architecture.md says, for every strategy; what that page names is there."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import manyhosts as mh

PACKAGE = Path(mh.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
MOST_HOPS = 6
STEPS_ALONE = ("local-sgd", "diloco")
"""Strategies of two hops: the one below computes a gradient as if there was one worker."""
MOST_FILES = {"Trainer": 22, "Run": 24}
"""That a reader needs for one step: those whose code runs in it. Listeners hear its news, and change nothing."""
LISTENERS = ("listeners/", "records/")
Frame = tuple[str, str]
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "virtual": {"virtual_workers": 2},
    "fsdp": {"strategy": "fsdp"},
    "local-sgd": {"strategy": "local-sgd"},
    "diloco": {"strategy": "diloco"},
    "tensor": {"strategy": "tensor"},
    "parameter-server": {"strategy": "parameter-server", "micro_batch_size": 2},
    "parameter-server in step": {"strategy": mh.ParameterServer(staleness=0)},
    "hogwild": {"strategy": "hogwild", "micro_batch_size": 2},
}


class Remembers(nn.Linear):
    """Notes by which of our calls it was reached, from `fit` on."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.paths: list[list[Frame]] = []

    def forward(self, input: Tensor) -> Tensor:
        path, frame = [], sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(PACKAGE):
                path.append((str(file.relative_to(PACKAGE)), frame.f_code.co_qualname))
        calls = [call for _, call in path]
        if "Session.fit" in calls and "Loop.train" in calls and self.training:
            self.paths.append(path[: calls.index("Session.fit") + 1][::-1])
        return super().forward(input)


def last_path(run_dir: Path, **options: Any) -> list[Frame]:
    """The one of the last forward pass of a run of four steps; the first step is looked at before it is taken."""
    first = Remembers()
    model = nn.Sequential(first, nn.Linear(1, 4), nn.Linear(4, 1))  # one module alone cannot be cut
    data = torch.utils.data.TensorDataset(torch.ones(16, 4), torch.ones(16, 1))
    mh.Trainer(
        model=model,
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        data=mh.Data(train=data, batch_size=4),
        listeners=(),
        run_dir=run_dir,
        **options,
    ).fit("4 steps")
    return first.paths[-1] if first.paths else []  # whoever was slow may have been given no micro-batch


class Counted(nn.Linear):
    """Notes which of our files run between two forward passes: one step, with all that surrounds it."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.passes = 0
        self.files: set[str] = set()

    def forward(self, input: Tensor) -> Tensor:
        self.passes += 1
        if self.passes == 12:  # the first steps are looked at
            frame = sys._getframe()
            while (frame := frame.f_back) and frame.f_code.co_qualname != "Session.fit":  # type: ignore[assignment]
                self.note(frame, "call", None)
            self.note(frame, "call", None)
            sys.setprofile(self.note)
        elif self.passes == 13:
            sys.setprofile(None)
        return super().forward(input)

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE):
            self.files.add(str(file.relative_to(PACKAGE)))


def files_of_a_step(face: str, run_dir: Path) -> set[str]:
    """Those whose code runs in one step of one process, listeners left out."""
    model, loss = Counted(), nn.MSELoss()
    data = torch.utils.data.TensorDataset(torch.ones(256, 4), torch.ones(256, 1))
    given: dict[str, Any] = {"data": mh.Data(train=data, batch_size=4), "run_dir": run_dir}
    if face == "Trainer":
        mh.Trainer(model=model, loss=loss, optimizer=torch.optim.SGD, **given).fit("20 steps")
    else:
        run = mh.Run(models=model, optimizers=torch.optim.SGD, **given)

        def step(run: mh.Run) -> None:
            run.backward(lambda batch: loss(model(batch[0]), batch[1]))
            run.update()

        run.fit(step, "20 steps")
    return {file for file in model.files if not file.startswith(LISTENERS)}


@pytest.mark.parametrize("face", sorted(MOST_FILES))
def test_step_needs_few_files_and_the_page_lists_them(face: str, tmp_path: Path) -> None:
    found = files_of_a_step(face, tmp_path)
    assert {"training/loop/step.py", "training/fit.py", "data/steps.py", "strategies/uncut_model.py"} <= found
    assert len(found) <= MOST_FILES[face], f"{len(found)}: {sorted(found)}"
    section = PAGE.split("### The files of a step", 1)[1].split("\n### ", 1)[0]
    listed = set(re.findall(r"`((?:\w+/)*\w+\.py)`", section))
    assert not found - listed, f"docs/architecture.md does not list {sorted(found - listed)}"


def paths_of_all(rank: int, folder: str) -> list[list[Frame]]:
    return [last_path(Path(folder) / name, **options) for name, options in STRATEGIES.items()]


def rows_of(page: str) -> set[Frame]:
    """Every file and what is named in the same row of a table."""
    rows = re.findall(r"^\|.*?`([\w/]+\.py)` \| `([\w.]+)`", page, re.MULTILINE)
    return {(file, name) for file, name in rows}


@pytest.mark.multiprocess
def test_step_has_six_hops_through_the_files_of_the_page(tmp_path: Path) -> None:
    found = {"single": last_path(tmp_path / "single")}
    first, second = run_ranks(2, paths_of_all, str(tmp_path))
    assert all(one == other for one, other in zip(first, second, strict=True) if one and other)
    found |= dict(zip(STRATEGIES, [one or other for one, other in zip(first, second, strict=True)], strict=True))
    documented = rows_of(PAGE)
    for name, path in found.items():
        assert len(path) - 1 <= MOST_HOPS + (name in STEPS_ALONE), f"{name}: {path}"
        assert path[0][1] == "Session.fit"
        assert not set(path) - documented, f"{name} takes a way that docs/architecture.md does not show"
    on_the_page = {row for row in documented if row[1].endswith((".forward_backward", ".__call__"))}
    assert on_the_page <= {frame for path in found.values() for frame in path}, "a way that no strategy takes"


@pytest.mark.parametrize("method", ["fit", "train", "train_step"])
def test_loop_and_step_are_on_one_screen_each(method: str) -> None:
    files = {"fit": "fit", "train": "loop/loop", "train_step": "loop/step"}
    source = (PACKAGE / "training" / f"{files[method]}.py").read_text().splitlines()
    begin = source.index(next(line for line in source if line.startswith(f"    def {method}(")))
    body = next(n for n, line in enumerate(source[begin + 1 :], 1) if re.match(r"    (def|@|#)", line))
    assert body <= 50, f"{method} has {body} lines"


def test_every_file_and_name_of_the_page_is_in_the_program() -> None:
    files = set(re.findall(r"`((?:\w+/)+\w+\.py)`", PAGE))
    assert files
    assert not [file for file in files if not (PACKAGE / file).exists()]
    rows = rows_of(PAGE)
    rows |= set(re.findall(r"^\| `([\w/]+\.py)` \| (?:[^|]*?)`(\w+)`:", PAGE, re.MULTILINE))
    assert len(rows) > 20
    for file, name in rows:
        found: Any = importlib.import_module(f"manyhosts.{file.removesuffix('.py').replace('/', '.')}")
        for part in name.split("."):
            found = getattr(found, part)
