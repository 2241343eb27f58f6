"""What forks from `preloaded` has everything loaded and is otherwise as it would be started; what cannot is started."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from launching import run

pytestmark = pytest.mark.multiprocess

SHOWS = """
import json, os, sys
loaded = "sklearn.datasets" in sys.modules
import multiprocessing, resource, torch
print(json.dumps({
    "loaded": loaded,
    "here": os.getcwd(),
    "path": [each for each in sys.path if "preloaded-" not in each],
    "variables": {name: value for name, value in os.environ.items() if name.startswith("OF_")},
    "flags": list(sys.flags),
    "daemon": [multiprocessing.current_process().daemon, multiprocessing.parent_process() is None],
    "limits": [resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_CORE)],
    "cores": sorted(os.sched_getaffinity(0)),
    "threads": torch.get_num_threads(),
    "main": [sys.modules["__main__"].__file__, sys.argv],
}))
"""


def shown(folder: Path) -> dict:
    ended = run(folder, SHOWS, "--no-prefix", "--env", "OF_THIS_RUN=1")
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


def test_forked_run_is_as_one_that_starts_python_but_for_what_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked = shown(tmp_path)
    with monkeypatch.context() as started:  # another module by the name of one that is loaded: it must be found
        (tmp_path / "hides").mkdir()
        (tmp_path / "hides" / "torchmetrics.py").touch()
        paths = os.environ["PYTHONPATH"] + os.pathsep + str(tmp_path / "hides")
        started.setenv("PYTHONPATH", paths)
        hidden = shown(tmp_path)
    assert (forked.pop("loaded"), hidden.pop("loaded")) == (True, False)
    hidden["path"].remove(str(tmp_path / "hides"))
    assert forked == hidden


@pytest.mark.starts_cold
def test_what_is_marked_starts_python(tmp_path: Path) -> None:
    assert not shown(tmp_path)["loaded"]
