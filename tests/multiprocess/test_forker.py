"""What `forker` forks is as what `subprocess` starts, as far as the program that runs there can tell."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forker
import psutil
import pytest
from launching import agents, descendants, start, wait_until

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(not forker.can_be(), reason="this system forks no child for the parent of a process"),
]

SHOWS = """
import json, os, resource, signal, sys, threading

descriptors = {int(n): os.path.exists(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")}
own = sys.modules["__main__"]
seen = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "flags": list(sys.flags),
    "path": sys.path,
    "main": [own.__spec__.name, own.__file__, own.__package__],
    "names": sorted(set(vars(own)) - {"__annotations__"}),
    "variables": dict(os.environ),
    "folder": os.getcwd(),
    "descriptors": sorted(n for n, is_open in descriptors.items() if is_open and n < 200),
    "inherited": [os.get_inheritable(n) for n, is_open in descriptors.items() if is_open and n < 200],
    "terminals": [each.isatty() for each in (sys.stdin, sys.stdout, sys.stderr)],
    "buffers": [[o.line_buffering, o.write_through, o.encoding, o.errors] for o in (sys.stdout, sys.stderr)],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "handlers": {int(n): str(signal.getsignal(n)).split(" at 0x")[0] for n in signal.valid_signals()},
    "caught": [line for line in open("/proc/self/status") if line[:6] in ("SigBlk", "SigIgn", "SigCgt")],
    "limits": [resource.getrlimit(n) for n in range(16)],
    "cores": sorted(os.sched_getaffinity(0)),
    "nice": os.getpriority(os.PRIO_PROCESS, 0),
    "umask": os.umask(0),
    "cgroup": open("/proc/self/cgroup").read(),
    "parent": os.getppid(),
    "leads": [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()],
    "group": [os.getpgid(0), os.getsid(0)] if os.getpgid(0) != os.getpid() else None,
    "threads": len(os.listdir("/proc/self/task")),
    "bytecode": sys.dont_write_bytecode,
}
print(json.dumps(seen), flush=True)
print(sys.stdin.read() + str(os.getpid()), file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture
def shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command of a program that is forked as commands are, and prints what it was given."""
    (tmp_path / "shows.py").write_text(SHOWS)
    monkeypatch.setattr(forker, "FORKED", [*forker.FORKED, "shows", "stops"])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    return [sys.executable, "-P", "-m", "shows", "--a-word", "two words", ""]


def truly(monkeypatch: pytest.MonkeyPatch, start: Callable[[], Any]) -> Any:
    """What `start` gives where Python itself is started."""
    with monkeypatch.context() as context:
        context.setattr(subprocess.Popen, "_execute_child", forker.started_truly)
        return start()


@pytest.mark.parametrize(
    "more",
    [
        {},
        {
            "start_new_session": True,
            "env": {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "OF_THIS": "\u00e9"},
        },
        {"process_group": 0, "cwd": "elsewhere", "pass_fds": 2},
    ],
    ids=["as it is", "session and variables", "group, folder and descriptors"],
)
def test_fork_has_what_a_start_would_give(
    shows: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    handed = os.pipe()
    more = {**more, "env": {**os.environ, **more.get("env", {})}, "cwd": tmp_path / more.get("cwd", "")}
    more["pass_fds"] = handed[: more.get("pass_fds", 0)]

    def shown() -> tuple[dict[str, Any], int]:
        process = subprocess.Popen(
            shows, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
        )
        out, err = process.communicate("said ", timeout=120)
        assert (process.returncode, err) == (7, f"said {process.pid}\n")
        return json.loads(out), process.pid

    before = [os.umask(0o027), resource.getrlimit(resource.RLIMIT_CORE), os.sched_getaffinity(0)]
    ignored = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        os.sched_setaffinity(0, {min(before[2])})
        resource.setrlimit(resource.RLIMIT_CORE, (0, before[1][1]))
        started, _ = truly(monkeypatch, shown)
        forked, pid = shown()
    finally:
        os.umask(before[0])
        resource.setrlimit(resource.RLIMIT_CORE, before[1])
        os.sched_setaffinity(0, before[2])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        signal.signal(signal.SIGUSR2, ignored)
        for each in handed:
            os.close(each)
    assert forked == started
    assert forked["parent"] == os.getpid()
    assert not psutil.pid_exists(pid)  # it was waited for


def test_what_cannot_be_forked_the_same_is_started(
    shows: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    as_python_does = forker.started_truly

    def started(*given: Any) -> None:
        seen.append(True)
        as_python_does(*given)

    def forked(**more: Any) -> bool:
        seen.clear()
        subprocess.run(shows, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False, **more)
        return not seen

    monkeypatch.setattr(forker, "started_truly", started)
    (tmp_path / "hides").mkdir()
    (tmp_path / "hides" / "click.py").touch()
    path = os.environ["PYTHONPATH"]
    assert forked()
    assert not forked(env={**os.environ, "PYTHONHASHSEED": "1"})
    assert not forked(env={**os.environ, "PYTHONPATH": f"{tmp_path / 'hides'}{os.pathsep}{path}"})
    assert not forked(env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert not forked(preexec_fn=lambda: None)
    assert not forked(close_fds=False)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Tests that a shell has started in its background ignore SIGINT, and so does all that they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_signal_that_ends_it_is_what_its_caller_sees(shows: list[str], tmp_path: Path) -> None:
    (tmp_path / "stops.py").write_text("import signal; print(flush=True); signal.pause()")
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        process = subprocess.Popen(
            [*shows[:3], "stops"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, process_group=0
        )
        assert process.stdout is not None
        process.stdout.readline()
        os.killpg(process.pid, number)
        process.communicate(timeout=120)
        assert process.returncode == -number


@pytest.mark.usefixtures("interruptible")
def test_agents_are_children_of_their_command_and_are_shown_as_agents(tmp_path: Path) -> None:
    process = start(tmp_path, "import signal; signal.pause()", "--nodes", "2")
    command = psutil.Process(process.pid)
    try:
        wait_until(lambda: len(agents(descendants(command))) == 2, "two agents")
        assert {each.ppid() for each in agents(descendants(command))} == {process.pid}
        assert command.ppid() == os.getpid()
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=120)
    assert process.returncode == 130
