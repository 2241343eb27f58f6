"""Errors carry what, where and fix, and keep them on the way between processes."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from manyhosts import errors
from manyhosts.errors import CommunicationError, ManyhostsError, RankLost

DOCS = Path(__file__).parents[2] / "docs"


def below(kind: type[ManyhostsError]) -> list[type[ManyhostsError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in below(child))]


OURS = [kind for kind in below(ManyhostsError) if kind.__module__ == "manyhosts.errors"]


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_error_survives_the_trip_between_processes(kind: type[ManyhostsError]) -> None:
    error = pickle.loads(pickle.dumps(kind("gone", where="node-2", fix="look")))
    assert (type(error), error.what, error.where, error.fix) == (kind, "gone", "node-2", "look")
    assert str(error) == "gone\n  where: node-2\n  fix:   look"


def test_error_without_place_or_remedy_is_one_line() -> None:
    assert str(ManyhostsError("gone")) == "gone"


def test_lost_rank_is_a_failure_of_communication() -> None:
    assert issubclass(RankLost, CommunicationError)
    assert RankLost.exit_code == 4


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_tree_in_the_docstring_tells_name_exit_code_and_meaning(kind: type[ManyhostsError]) -> None:
    line = next(line for line in (errors.__doc__ or "").splitlines() if re.search(rf"\b{kind.__name__}\b", line))
    if kind is ManyhostsError:
        return
    assert re.search(rf"{kind.__name__}\s+{kind.exit_code}\b", line), line
    assert line.split("  ")[-1].strip().lower() in (kind.__doc__ or "").lower()


def ended(source: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script of its own that speaks plainly."""
    begin = "from manyhosts.errors import ConfigError, speak_plainly\nspeak_plainly()\nspeak_plainly()\n"
    command = [sys.executable, "-c", begin + source]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120)


def test_script_that_nobody_launched_ends_with_the_sentence_and_the_exit_code() -> None:
    done = ended("import atexit\natexit.register(print, 'tidied up')\nraise ConfigError('no', where='here', fix='do')")
    assert (done.returncode, done.stderr) == (2, "manyhosts: no\n  where: here\n  fix:   do\n")
    assert done.stdout == "tidied up\n"


@pytest.mark.parametrize(
    ("source", "variables"),
    [("raise ConfigError('no')", {"MANYHOSTS_TRACE": "1"}), ("raise ValueError('theirs')", {})],
)
def test_traceback_is_shown_where_it_is_asked_for_and_for_errors_of_others(
    source: str, variables: dict[str, str]
) -> None:
    done = ended(source, **variables)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_calls_in_manyhosts_are_one_line_of_a_script_that_was_not_launched(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import manyhosts as mh\nfrom torch import nn\ndef network():\n    raise ValueError('theirs')\n"
        "mh.Trainer(model=network, loss=nn.MSELoss(), optimizer=lambda p: p,"
        " data=mh.Data(train=[(1, 1)], batch_size=1)).fit('1 step')\n"
    )
    for trace in ("", "1"):
        environment = {**os.environ, "MANYHOSTS_TRACE": trace, "MANYHOSTS_RUN_DIR": str(tmp_path / f"run{trace}")}
        done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
        assert "    raise ValueError('theirs')" in done.stderr
        assert ("calls in manyhosts; MANYHOSTS_TRACE=1 shows them" in done.stderr) == (not trace)
        assert ("training/session.py" in done.stderr) == bool(trace)


def test_error_before_any_trainer_is_told_in_a_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import manyhosts as mh\nmh.EarlyStopping('accuracy', mode='best')"],
        env={**os.environ, "MANYHOSTS_TRACE": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("manyhosts: ")
    assert "Traceback" not in done.stderr


def test_worker_of_an_agent_leaves_the_telling_to_it() -> None:
    code = "import sys, manyhosts as mh\nmh.EarlyStopping\nsys.exit(sys.excepthook is not sys.__excepthook__)"
    for environment, told_here in [({}, 1), ({"MANYHOSTS_AGENT": "/nowhere"}, 0)]:
        done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, timeout=120, check=False)
        assert done.returncode == told_here, environment
