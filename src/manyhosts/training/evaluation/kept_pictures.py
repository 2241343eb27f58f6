"""Keeps some samples of the first batch for the page of a run, where they are pictures."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyhosts.records import first_batch

_LOG = logging.getLogger("manyhosts")


def keep_pictures(batch: Any, path: Path, most: int) -> None:
    """Put up to `most` pictures of `batch` (on the CPU) at `path`, unless some are there. Never fails."""
    tensors = [each for each in _members(batch) if isinstance(each, Tensor)]
    if not tensors or path.exists():
        return
    inputs, targets = (_array(each, most) for each in (tensors[0], tensors[1] if len(tensors) > 1 else None))
    found = first_batch.pictures_of(inputs, targets, most)
    if found is None:
        return
    try:
        first_batch.write(path, found)
    except OSError as refused:
        _LOG.warning("cannot keep pictures of the first batch in %s: %s", path, refused.strerror or refused)


def _members(batch: Any) -> list[Any]:
    """A batch's inputs and targets, in order; nothing of a batch of another form."""
    if isinstance(batch, Tensor):
        return [batch]
    return list(batch[:2]) if isinstance(batch, tuple | list) else []


def _array(tensor: Tensor | None, most: int) -> Any:
    """The first `most` rows for NumPy, which knows no bfloat16; None of what has no rows."""
    if tensor is None or tensor.dim() == 0 or tensor.is_complex() or tensor.layout is not torch.strided:
        return None
    rows = tensor[:most].detach().cpu()
    return (rows.float() if rows.is_floating_point() else rows).numpy()
