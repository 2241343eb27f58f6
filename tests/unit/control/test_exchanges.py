"""The MPI backend: passed through where torch has it and mpirun knows all workers, else refused in a sentence."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from manyhosts.control.agent import script_patches
from manyhosts.errors import ConfigError


def torch_with(mpi: bool, known: int) -> Any:
    """A `distributed_c10d` that has the MPI backend or has not, and whose mpirun knows so many processes."""
    made: list[Any] = []
    return SimpleNamespace(
        is_mpi_available=lambda: mpi,
        init_process_group=lambda backend=None, **named: made.append(backend),
        destroy_process_group=lambda group=None: None,
        get_world_size=lambda: known,
        made=made,
    )


@pytest.mark.parametrize(
    ("mpi", "known", "refused"),
    [(True, 2, ""), (False, 2, "this torch has no MPI backend"), (True, 1, "mpirun knows 1 of the 2 workers")],
)
def test_mpi_backend_is_had_where_torch_and_mpirun_have_it(
    mpi: bool, known: int, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed = torch_with(mpi, known)
    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace())
    monkeypatch.setenv("WORLD_SIZE", "2")
    script_patches.watch_groups(distributed)
    if refused:
        with pytest.raises(ConfigError) as caught:
            distributed.init_process_group("mpi")
        assert caught.value.what.startswith(refused)
        assert "gloo" in caught.value.fix
    else:
        distributed.init_process_group("mpi")
    distributed.init_process_group("gloo")
    assert distributed.made == [*(["mpi"] if mpi else []), "gloo"], (
        "nothing but the backend that is refused is left out"
    )
