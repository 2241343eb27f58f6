"""The name of the package that somebody else owns stands nowhere but in the list of changes."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
OLD = "many" + "hands"  # in two parts, or this file would be the first to be found


def test_old_name_is_in_no_file_but_the_changelog() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    names = [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]
    assert len(names) > 400, f"git lists {len(names)} files here"
    found = [name for name in names if OLD in name.lower() or OLD.encode() in (ROOT / name).read_bytes().lower()]
    assert found == ["CHANGELOG.md"]
