"""Workers that make different calls are told so by both: their exchanges would be paired, and give mixed numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.errors import ManyhostsError

pytestmark = pytest.mark.multiprocess
INPUTS = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS[:, 0] > 0).long()
ONE, OTHER = TensorDataset(INPUTS[:8]), TensorDataset(2 * INPUTS[:8])


def trainer(folder: Path) -> mh.Trainer:
    train, held_out = TensorDataset(INPUTS, LABELS), TensorDataset(3 * INPUTS[:12], LABELS[:12])
    return mh.Trainer(
        model=lambda: nn.Linear(3, 2),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, 0.1),
        data=mh.Data(train=train, validation=held_out, test=TensorDataset(INPUTS, LABELS), batch_size=10),
        run_dir=folder,
    )


def each_differs(rank: int, folder: Path) -> dict[str, str]:
    first = rank == 0
    one = trainer(folder / "one")
    one.fit("1 epoch")
    cases: dict[str, Callable[[], Any]] = {
        "validate and test": lambda: one.validate() if first else one.test(),
        "save and test": lambda: one.save(folder / "a.pt") if first else one.test(),
        "save and fit": lambda: one.save(folder / "a.pt") if first else one.fit("2 epochs"),
        "predict and fit": lambda: one.predict(ONE) if first else one.fit("2 epochs"),
        "best and last": lambda: one.test(weights="best" if first else "last"),
        "two datasets": lambda: one.predict(ONE if first else OTHER),
        "a trainer and fit": lambda: trainer(folder / "two") if first else one.fit("2 epochs"),
        "all alike": lambda: (one.validate(), one.save(folder / "b.pt"), one.predict(ONE), one.test()),
    }
    said = {}
    for name, call in cases.items():
        try:
            call()
            said[name] = ""
        except ManyhostsError as error:
            said[name] = f"{error.what} | {error.fix}"
    return said


def test_different_calls_are_refused_on_all_workers_alike(tmp_path: Path) -> None:
    said, other = run_ranks(2, each_differs, tmp_path)
    assert said == other
    assert said.pop("all alike") == ""
    assert "prediction set holds other samples on rank 1" in said.pop("two datasets")
    for name, words in said.items():
        first, second = name.split(" and ")
        first = {"a trainer": "mh.Trainer", "best": "test"}.get(first, first)
        second = {"last": r"test(weights='last')"}.get(second, second)
        assert f"rank 0 is in {first}" in words, name
        assert f"rank 1 in {second} at test_different_calls.py:" in words, name
        assert "outside of `if rank == 0` and is_main" in words, name


def own_loop(rank: int, folder: Path, kind: str, parts: int | None) -> str:
    run = mh.Run(
        models={"one": lambda: nn.Linear(3, 2), "other": lambda: nn.Linear(3, 2)},
        optimizers={name: lambda params: torch.optim.SGD(params, 0.1) for name in ("one", "other")},
        data=mh.Data(train=TensorDataset(INPUTS, LABELS), batch_size=10),
        run_dir=folder,
        virtual_workers=parts,
    )

    def passes(name: str) -> None:
        run.backward(lambda batch: nn.functional.cross_entropy(run.models[name](batch[0]), batch[1]), name)
        run.update(name)

    def step(run: mh.Run) -> None:
        passes("other" if rank and kind == "another optimizer" else "one")
        if not rank or kind != "a pass less":
            passes("other")

    try:
        run.fit(step, "3 steps")
    except ManyhostsError as error:
        return f"{error.what} | {error.fix}"
    return ""


@pytest.mark.parametrize("parts", [None, 4])
@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("another optimizer", "run.backward for 'one'", "run.backward for 'other'"),
        ("a pass less", "run.backward for 'other'", "the end of the step"),
        ("alike", "", ""),
    ],
)
def test_different_calls_in_a_step_are_refused_on_all_workers_alike(
    kind: str, first: str, second: str, parts: int | None, tmp_path: Path
) -> None:
    said, other = run_ranks(2, own_loop, tmp_path, kind, parts)
    assert said == other
    if kind == "alike":
        assert said == ""
    else:
        assert f"rank 0 is in {first} at test_different_calls.py:" in said
        assert f"and rank 1 in {second} at test_different_calls.py:" in said
        assert "and not by RANK" in said
