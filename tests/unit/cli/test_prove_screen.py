"""A proof that fails on a busy machine says that the machine was busy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from manyhosts.cli.prove import busy


@pytest.mark.parametrize(
    ("load", "status", "said"), [(20.0, "fails", True), (20.0, "holds", False), (3.0, "fails", False)]
)
def test_load_is_said_beside_what_it_may_have_caused(load: float, status: str, said: bool) -> None:
    proof: Any = SimpleNamespace(asked=SimpleNamespace(workers=(1, 2, 3)), verdicts=[SimpleNamespace(status=status)])
    lines = busy(proof, load, 2)
    assert ("careful: 20 processes wanted the 2 cores" in " ".join(lines)) is said
    assert all(len(line) <= 80 for line in lines)
