"""A process that the workers of many small scripts are forked from, for the tests of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from manyhosts.trials.forked import LocalTrialRunner


@contextmanager
def loaded(
    make: Callable[[str, Path], LocalTrialRunner], folders: pytest.TempPathFactory
) -> Iterator[LocalTrialRunner]:
    """What `make` makes of a script and its folder, with everything loaded that scripts of ours need."""
    folder = folders.mktemp("stage")
    script = folder / "script.py"
    script.write_text("import manyhosts")
    made = make(str(script), folder)
    made.load()
    yield made
    made.close()
