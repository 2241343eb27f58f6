"""The fixture in conftest.py sees what a test leaves behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
LEAKS = {
    "environment variable MANYHOSTS_LEAK": "import os; os.environ['MANYHOSTS_LEAK'] = '1'",
    "process *sleep 60*": "import subprocess; globals()['kept'] = subprocess.Popen(['sleep', '60'])",
    # the shell ends only when its child is in a session of its own: in between it is nobody's that could be found
    "process *sleep 61*": "import os; os.system('setsid sleep 61 >/dev/null 2>&1 & sleep 0.2')",
    "listening port *": "import socket; globals()['kept'] = socket.create_server(('127.0.0.1', 0))",
    "process group of 1 on gloo": (
        "import torch.distributed as dist\n"
        "    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
    ),
}


@pytest.fixture(autouse=True)
def _finds_what_lies_beside_conftest(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(CONFTEST.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.mark.parametrize("leak", LEAKS)
def test_leak_fails_the_test_and_is_named(leak: str, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST.read_text().replace("GRACE_S = 30.0", "GRACE_S = 0.2"))
    pytester.makepyfile(f"def test_leaks():\n    {LEAKS[leak]}\n\ndef test_clean():\n    pass")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines([f"*left behind: *{leak}*"])


def test_process_that_ends_by_itself_is_no_leak(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile("import subprocess\ndef test_short():\n    subprocess.Popen(['sleep', '0.3']).wait()")
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)
