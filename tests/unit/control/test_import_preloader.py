"""What a template may load for the workers to come: a child tries, and what leaves a trace is left to the script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PACKAGES = {
    "quiet": "import os; os.environ.get('HOME')",
    "broken": "raise ValueError",
    "talking": "import sys; sys.stderr.write('hello'); sys.stderr.flush()",
    "threaded": "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "forking": """
        import os, threading
        over = threading.Event()
        thread = threading.Thread(target=over.wait, daemon=True)
        thread.start()
        def end():
            over.set()
            thread.join()
        os.register_at_fork(before=end)
    """,
    "ranked": "import os; RANK = os.environ.get('RANK')",
    "asking": "import os; SET = 'RANK' in os.environ",
    "connected": "import socket; SOCKET = socket.socketpair()",
    "littering": "import tempfile; FOLDER = tempfile.mkdtemp()",
    "dying": "import os; os._exit(3)",
    "leaving": "raise SystemExit",
    "using": "import threaded",
}
TRIAL = """
    import json, os, sys
    from manyhosts.control.agent import import_preloader
    rounds, names, good = 0, sys.argv[1:], []
    while names:
        rounds += 1
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.close(reading)
            import_preloader.try_out(names, {"RANK"}, writing)
            os._exit(0)
        os.close(writing)
        assessment = import_preloader.assess(names, os.read(reading, 64))
        good += assessment.good
        names = list(assessment.rest)
    loaded = [name for name in sys.argv[1:] if name in sys.modules]
    print(json.dumps([good, rounds, loaded]))
"""


def tried(folder: Path, *names: str) -> tuple[list[str], int]:
    """What a child found good of packages that are installed, and how many children it took."""
    for name, source in PACKAGES.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "__init__.py").write_text(textwrap.dedent(source))
        (folder / name / "part.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(TRIAL), *names],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(folder)]), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "nobody is to see what is printed a second time"
    good, rounds, loaded = json.loads(done.stdout)
    assert not loaded, "only the child has imported anything"
    return good, rounds


def test_what_leaves_no_trace_may_be_loaded_at_once(tmp_path: Path) -> None:
    assert tried(tmp_path, "quiet", "quiet.part", "talking", "broken") == (
        ["quiet", "quiet.part", "talking", "broken"],
        1,
    )


@pytest.mark.parametrize("name", ["threaded", "ranked", "asking", "connected", "littering", "using"])
def test_package_that_leaves_a_trace_is_left_to_the_script_with_all_its_parts(name: str, tmp_path: Path) -> None:
    good, _ = tried(tmp_path, "quiet", name, f"{name}.part", "talking")
    assert good == ["quiet", "talking"]


def test_threads_that_end_for_a_fork_are_no_trace(tmp_path: Path) -> None:
    assert tried(tmp_path, "forking", "quiet") == (["forking", "quiet"], 1)


@pytest.mark.parametrize("name", ["dying", "leaving"])
def test_package_that_ends_the_process_leaves_all_to_the_script(name: str, tmp_path: Path) -> None:
    assert tried(tmp_path, "quiet", name, "talking") == ([], 1)


def test_installed_modules_are_told_in_order_and_the_script_and_what_lies_beside_it_are_not(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import wave")
    code = """
        import sys
        from manyhosts.control.agent import import_preloader
        before = set(sys.modules)
        import mine, click.testing, types
        sys.modules["made"] = types.ModuleType("made")
        found = import_preloader.imported_since(before)
        assert found.index("wave") < found.index("click") < found.index("click.testing"), found
        assert not {"mine", "made", "__main__"} & set(found), found
"""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
