"""Which snapshots may go. No torch here: the command line prunes, too."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from manyhands.records.manifest import NAME, found_in


def surplus(folder: Path, *, keep: int, newest: int, bad: Collection[Path]) -> list[Path]:
    """What may go once the snapshot of step `newest` is whole: all but the last `keep` up to it, and the `bad` ones.

    What lies beyond `newest` is left alone: the run fell back behind it, because it was damaged or of another model,
    and it will be written anew or looked at by somebody.
    """
    whole, gone = [], []
    for found in found_in(folder):
        if found.step > newest or found.step < 0 or found.how == "half":
            continue
        if found.how or found.path in bad or not (found.path / NAME).exists():
            if found.step < newest:
                gone.append(found.path)
        else:
            whole.append(found.path)
    return whole[keep:] + gone
