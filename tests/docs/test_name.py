"""The name of the package that somebody else owns stands nowhere but in the list of changes."""

from __future__ import annotations

import re
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


def test_nobody_is_told_to_install_a_name_that_is_not_ours_yet() -> None:
    """Whoever registers `manyhosts` at the index of Python would be installed: only a wheel or a clone is named."""
    files = [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / "src").rglob("*.sh"),
    ]
    asks = re.compile(r"pip\s+install[^\n`]*[\s'\"]manyhosts(?![-\w*/]|\.)")
    found = [str(path.relative_to(ROOT)) for path in files if asks.search(path.read_text())]
    assert found == []
    assert asks.search("pip install 'manyhosts[objects]'")
    assert asks.search("RUN python3 -m pip install manyhosts\n")
    assert asks.search("pip install\nmanyhosts==1.0")
    assert not asks.search("pip install ./manyhosts-*.whl")
