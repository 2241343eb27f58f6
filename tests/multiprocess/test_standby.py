"""A template whose agent was killed: the next agent finds it, strangers do not, and it ends with the launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launching import alive, wait_until

from manyhosts.control.agent import standby
from manyhosts.control.agent.fork_server import ForkServer
from manyhosts.control.loop import Loop

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.starts_cold,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux alone has what this takes"),
]

AGENT = """
import json, os, sys
from pathlib import Path
from manyhosts.control.agent.fork_server import ForkServer
from manyhosts.control.loop import Loop
name, launcher, scratch = sys.argv[1:]
loop = Loop()
nothing = lambda *_: None
fork_server = ForkServer(
    loop, preload=["json"], environment=dict(os.environ), folder="/", scratch=Path(scratch), stdin=False, name=name,
    launcher=int(launcher), on_event=nothing, on_warm=nothing, on_end=nothing, on_words=nothing,
)
loop.run(until=lambda: fork_server.ready)
print(fork_server.pid, flush=True)
loop.run(until=lambda: False)
"""
FROM_ANOTHER = """
import os, sys
from pathlib import Path
from manyhosts.control.agent import standby
os.setuid(65534)
if sys.argv[2] == "asks":
    print(standby.adopt(sys.argv[1], {}, [], Path("/nowhere")))
else:
    waiting = standby.Waiting(sys.argv[1], os.getppid())
    print("waits", flush=True)
    print(waiting.next_agent())
"""


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[bytes]]:
    """Stands for the one that all of a run on this host ends with."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.fixture
def template(launcher: subprocess.Popen[bytes], tmp_path: Path) -> Iterator[psutil.Process]:
    """One whose agent has been killed."""
    (tmp_path / "scratch").mkdir()
    words = [name_of(tmp_path), str(launcher.pid), str(tmp_path / "scratch")]
    with subprocess.Popen([sys.executable, "-c", AGENT, *words], stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        found = psutil.Process(int(agent.stdout.readline()))
        assert standby.adopt(name_of(tmp_path), {}, [], tmp_path) is None, "it has an agent"
        agent.kill()
    yield found
    if found.is_running():
        found.kill()


def name_of(folder: Path) -> str:
    return f"manyhosts-{folder}"


def new_nursery(loop: Loop, folder: Path, events: list[object]) -> ForkServer:
    (folder / "next").mkdir()
    return ForkServer(
        loop,
        preload=["json", "colorsys"],
        environment={**os.environ, "OF_THE_NEXT": "1"},
        folder="/",
        scratch=folder / "next",
        stdin=False,
        name=name_of(folder),
        launcher=os.getpid(),
        on_event=events.append,
        on_warm=events.append,
        on_end=lambda: events.append("end"),
        on_words=events.append,
    )


def test_next_agent_finds_the_template_with_what_it_has_loaded_and_ends_it(
    template: psutil.Process, launcher: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    loop, events = Loop(), []
    fork_server = new_nursery(loop, tmp_path, events)
    loop.run(until=lambda: fork_server.ready)
    assert fork_server.pid == template.pid
    assert not (tmp_path / "scratch").exists(), "that of the agent that was killed"
    watch = (tmp_path / "colors.py", tmp_path / "out")
    watch[0].write_text(f"import os, sys; open({str(watch[1])!r}, 'w').write(os.environ['OF_THE_NEXT'])")
    pipes = [os.pipe() for _ in range(4)]
    command = {"kind": "script", "program": str(watch[0]), "arguments": [], "folder": str(tmp_path)}
    fork_server.ask("worker", [writing for _, writing in pipes], name="w", environment={}, stdin=False, **command)
    loop.run(until=lambda: len(events) == 2)
    assert [event["event"] for event in events] == ["started", "ended"]
    assert watch[1].read_text() == "1"
    launcher.kill()  # there is an agent: it decides
    assert alive([template])
    fork_server.close()
    wait_until(lambda: not alive([template]), "it ends with its agent")
    assert events[2:] == []
    for ends in pipes:
        for end in ends:
            os.close(end)
    loop.close()


def test_template_does_not_outlive_the_launcher(template: psutil.Process, launcher: subprocess.Popen[bytes]) -> None:
    launcher.kill()
    wait_until(lambda: not alive([template]), "it ends with the launcher")


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="needs root, to be another user")
def test_other_users_neither_get_a_template_nor_are_taken_for_one(template: psutil.Process, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FROM_ANOTHER, name_of(tmp_path), "asks"], capture_output=True, text=True
    )
    assert done.stdout == "None\n", done.stderr
    assert alive([template])
    other = f"{name_of(tmp_path)}-other"
    words = [sys.executable, "-c", FROM_ANOTHER, other, "waits"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "waits\n"
        assert standby.adopt(other, {"SECRET": "1"}, [], tmp_path) is None
        stranger.kill()


def test_name_is_that_of_one_host_of_one_start_with_one_environment() -> None:
    here = {"A": "1", "SSH_CONNECTION": "10.0.0.1 4711 10.0.0.2 22"}
    name = standby.name_for(1, "start", here, "/w", stdin=False)
    assert name == standby.name_for(1, "start", {**here, "SSH_CONNECTION": "another"}, "/w", stdin=False)
    others = {
        standby.name_for(2, "start", here, "/w", stdin=False),
        standby.name_for(1, "again", here, "/w", stdin=False),
        standby.name_for(1, "start", {**here, "OMP_NUM_THREADS": "1"}, "/w", stdin=False),
        standby.name_for(1, "start", here, "/elsewhere", stdin=False),
        standby.name_for(1, "start", here, "/w", stdin=True),
    }
    assert len(others - {name}) == 5
