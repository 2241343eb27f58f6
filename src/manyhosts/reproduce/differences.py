"""What is not as it was: code, data, versions and hardware of a run, compared with those of another."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from manyhosts.records.provenance import NAME, Provenance
from manyhosts.units import bytes_in_words

_FIRST = ("python", "torch", "manyhosts", "numpy")
_MOST = 12


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is another than it was."""

    kind: Literal["code", "data", "versions", "hardware"]
    what: str


def differences(run_dir: Path, then: Provenance, now: Provenance) -> list[Difference]:
    """What of `now` is not as it was `then`, for the run in `run_dir`: the code first."""
    found = [
        *(Difference("code", what) for what in _of_code(run_dir, then, now)),
        *(Difference("data", what) for what in _of_data(then, now)),
        *(Difference("versions", what) for what in _of_packages(then.packages, now.packages)),
        *(Difference("hardware", what) for what in _of_hardware(then.hardware, now.hardware)),
    ]
    return list(dict.fromkeys(found))


def _of_code(run_dir: Path, then: Provenance, now: Provenance) -> Iterator[str]:
    for name, digest in then.code.files.items():
        if name not in now.code.files:
            yield f"{name} is gone, or was not imported"
        elif now.code.files[name] != digest:
            before = run_dir / NAME / "sources" / name.lstrip("/")
            yield f"{name} is another: {_lines(before, Path(now.code.root, name))}"
    for name in sorted(now.code.files.keys() - then.code.files.keys()):
        yield f"{name} was not imported then"
    for name in then.code.left_out:
        yield f"{name} was not committed, and is too large for the record: it is taken as it is now"


def _lines(before: Path, now: Path) -> str:
    """The first line that differs, and how many more do."""
    try:
        old, new = (path.read_text(errors="replace").splitlines() for path in (before, now))
    except OSError:
        return "its text of then is not on record"
    blocks = [
        block for block in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if block[0] != "equal"
    ]
    if not blocks:
        return "the ends of its lines"
    _, old_from, old_to, new_from, new_to = blocks[0]
    was = f"`{old[old_from].strip()}`" if old_to > old_from else "nothing"
    is_now = f"`{new[new_from].strip()}`" if new_to > new_from else "nothing"
    count = sum(max(block[2] - block[1], block[4] - block[3]) for block in blocks)
    more = f", and {count - 1} more line{'s' * (count > 2)}" if count > 1 else ""
    return f"line {new_from + 1} was {was} and is {is_now}{more}"


def _of_data(then: Provenance, now: Provenance) -> Iterator[str]:
    for name, before in then.data.items():
        found = now.data.get(name)
        if found is None:
            yield f"{name} is gone, or was not read"
        elif found.size != before.size:
            yield f"{name} has {bytes_in_words(found.size)} ({found.size:,} bytes), and had {before.size:,} bytes"
        elif found.sha256 != before.sha256:
            yield f"{name} holds something else: sha256 {found.sha256[:12]}…, and had {before.sha256[:12]}…"


def _of_packages(then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    names = [name for name in (*_FIRST, *sorted(then.keys() - set(_FIRST))) if name in then]
    changed = [name for name in names if now.get(name) != then[name]]
    for name in changed[:_MOST]:
        yield f"{name} is {now[name]}, and was {then[name]}" if name in now else f"{name} {then[name]} is gone"
    if len(changed) > _MOST:
        yield f"{len(changed) - _MOST} more packages have other versions"


def _of_hardware(then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name, before in then.items():
        if now.get(name, before) != before:
            yield f"{name}: {now[name] or 'none'}, and was {before or 'none'}"
