"""Which snapshots may go. No torch here: the command line prunes, too."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from manyhosts.records.manifest import NAME, Found, found_in


def surplus(folder: Path, *, keep: int, newest: int, bad: Collection[Path]) -> list[Path]:
    """What may go once the snapshot of step `newest` is complete: all but the last `keep` up to it, and the `bad` ones.

    What lies beyond `newest` is left alone: the run fell back before it, because it was damaged or of another model,
    and it will be written again or looked at by somebody.
    """
    complete, gone = [], []
    for found in found_in(folder):
        if found.step > newest or found.step < 0 or found.how == "half":
            continue
        if found.how or found.path in bad or not (found.path / NAME).exists():
            if found.step < newest:
                gone.append(found.path)
        else:
            complete.append(found.path)
    return complete[keep:] + gone


def older(listed: Sequence[Found], *, keep: int, newest: Found, step: int) -> list[Found]:
    """What may go from an object store once `newest`, of `step`, is complete there: the oldest first.

    For a `best` that is every other best. Else all but the last `keep` steps up to it, what else there is of that step,
    and what was broken off before it. What lies beyond is left alone, as on a disk.
    """
    others = [found for found in listed if found.path != newest.path]
    if newest.step < 0:
        return [found for found in others if found.step < 0]
    others = [found for found in others if 0 <= found.step <= step]
    complete = [found for found in others if not found.how and found.step < step]
    kept = {found.path for found in complete[: keep - 1]}
    return [found for found in reversed(others) if found.path not in kept]
