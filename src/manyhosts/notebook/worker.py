"""Calls the function that a notebook has sent, on a worker, and keeps what it returns."""

from __future__ import annotations

import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

from manyhosts.errors import ConfigError
from manyhosts.records.atomic_file import write_atomically
from manyhosts.records.run_directory import VARIABLE

FUNCTION, RESULT = "function.pkl", "result.pt"


def main(program: str, digest: str) -> None:
    """Call the function next to `program`, which is the program that was started here: its sha256 is `digest`.

    Raises:
        ConfigError: it is another one, or it returns what cannot be given back.
    """
    packed = Path(program).with_name(FUNCTION).read_bytes()
    if hashlib.sha256(packed).hexdigest() != digest:
        raise ConfigError("this is not the function that was sent", where=FUNCTION, fix="run the cell again")
    task, arguments = pickle.loads(packed)  # noqa: S301  # the user's own program, just sent, known by its hash
    is_rank_0, path = os.environ.get("RANK", "0") == "0", Path(os.environ[VARIABLE]) / RESULT
    if is_rank_0:
        path.unlink(missing_ok=True)  # of a call before, on a disk that the caller does not see
    result = task(*arguments)
    if is_rank_0 and result is not None:
        _keep(result, path)


def _keep(result: Any, path: Path) -> None:
    from io import BytesIO

    import torch

    file = BytesIO()
    try:
        torch.save(result, file)
        torch.load(BytesIO(file.getvalue()), weights_only=True, map_location="cpu")
    except Exception as cause:
        raise ConfigError(
            f"the function returns a {type(result).__name__} that cannot be given back",
            where="rank 0",
            fix="return tensors, numbers, texts, or lists, tuples and dicts of them; save the rest to a file",
        ) from cause
    write_atomically(path, file.getvalue())
