"""Hygiene: a test that leaves an environment variable, a process, a port or a process group behind fails, by name."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from forker import Forker, can_be
from hypothesis import HealthCheck, settings
from preloaded import Preloaded

SESSION = "MANYHOSTS_TEST_SESSION"  # inherited by everything that a test starts, also by what leaves its parent
GRACE_S = 30.0  # for processes that are just ending: a loader process looks every 5 s whether its worker is there
os.environ[SESSION] = str(os.getpid())

# Threads of OpenMP that wait for each other do so asleep. By themselves they spin for a while, and where several tests
# share the cores, that is what most of the time of a process with two threads goes into.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded

# The machine may be busy with something else: no example fails for the time it took. The same examples each time, so
# that a change fails for what it changes; `make test-all` looks for new ones.
settings.register_profile("manyhosts", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", settings.get_profile("manyhosts"), derandomize=False)
settings.load_profile("manyhosts")


SERVANTS: set[int] = set()
"""Processes of the tests themselves that live as long as the session."""
PROCESS_FOLDERS = ("multiprocess", "cluster", "docs")


@pytest.fixture(autouse=True, scope="module")
def fork_servers_are_forked(request: pytest.FixtureRequest) -> Iterator[Preloaded | None]:
    """See `preloaded`: tests that start runs by the hundred do not load torch by the hundred."""
    if not starts_processes(request):
        yield None
        return
    preloaded: Preloaded = request.getfixturevalue("preloaded")
    forker: Forker | None = request.getfixturevalue("forker")
    with preloaded.used(), forker.used() if forker else contextlib.nullcontext():
        yield preloaded


@pytest.fixture(scope="session")
def preloaded() -> Iterator[Preloaded]:
    """Forks the fork servers of what tests start; one for the session."""
    process = Preloaded()
    SERVANTS.add(process.process.pid)
    yield process
    process.close()


@pytest.fixture(scope="session")
def forker(preloaded: Preloaded) -> Iterator[Forker | None]:
    """Forks the commands and agents that tests start; one for the session."""
    if not can_be():
        yield None
        return
    with preloaded.used():
        process = Forker(os.environ["PYTHONPATH"])
    SERVANTS.add(process.process.pid)
    yield process
    process.close()


@pytest.fixture(autouse=True)
def starts_cold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that are about how a fork server starts, and what it has loaded, have it started as a user has."""
    if request.node.get_closest_marker("starts_cold"):
        monkeypatch.setenv("PYTHONPATH", os.environ["PYTHONPATH"].partition(os.pathsep)[2])


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compare what there is before a test with what there is after it, take down the rest, and say what it was.

    Processes and ports are looked for after each test of the folders that start some, elsewhere after each file: a look
    at every process of the machine takes longer than most unit tests.
    """
    variables = dict(os.environ)
    before = processes_and_ports() if starts_processes(request) else None
    yield
    left = [*variables_changed_since(variables), *process_groups_open()]
    left += left_since(before) if before is not None else []
    assert not left, "left behind: " + "; ".join(left)


@pytest.fixture(autouse=True, scope="module")
def file_leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """The same for the processes and ports of a whole file of tests."""
    before = None if starts_processes(request) else processes_and_ports()
    yield
    left = left_since(before) if before is not None else []
    assert not left, "left behind: " + "; ".join(left)
    assert servants_live(), "Python's resource tracker was ended, or the descriptor that leads to it was closed"


def starts_processes(request: pytest.FixtureRequest) -> bool:
    """Whether the test stands in a folder whose tests start processes."""
    return request.path.parent.name in PROCESS_FOLDERS


def processes_and_ports() -> tuple[dict[int, str], set[int]]:
    """What there is now."""
    return living_processes(), listening_ports()


def left_since(before: tuple[dict[int, str], set[int]]) -> list[str]:
    """Processes, ended now, and ports that were not there before."""
    processes, ports = before
    left = []
    for pid, words in still_there(lambda: living_processes().items() - processes.items()):
        left.append(f"process {pid}: {words}")
        psutil.Process(pid).kill()
    return [*left, *(f"listening port {port}" for port in still_there(lambda: listening_ports() - ports))]


def variables_changed_since(before: dict[str, str]) -> list[str]:
    """Environment variables that are new, gone or different; put back as they were."""
    after = dict(os.environ)
    changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    # pytest's own, and what torch sets when its compiler is first imported
    changed = [key for key in changed if key not in ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")]
    for key in changed:
        os.environ.pop(key, None)
        if key in before:
            os.environ[key] = before[key]
    return [f"environment variable {key}" for key in changed]


def process_groups_open() -> list[str]:
    """The process group of torch.distributed, if somebody has joined one and not left it; left now."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    words = f"process group of {distributed.get_world_size()} on {distributed.get_backend()}"
    distributed.destroy_process_group()
    return [words]


def living_processes() -> dict[int, str]:
    """Every process that this session started and that still runs, but for Python's own servants."""
    servants = SERVANTS | {
        multiprocessing.forkserver._forkserver._forkserver_pid,  # the fork server of `ranks`: lives for the session
        multiprocessing.resource_tracker._resource_tracker._pid,
        os.getpid(),
    }
    started = {process.pid: process for process in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        try:
            if process.environ().get(SESSION) == os.environ.get(SESSION):
                started[process.pid] = process
        except (psutil.Error, OSError):
            continue  # of another user, or gone while we looked
    found = {}
    for pid in started.keys() - servants:
        try:
            if started[pid].status() != psutil.STATUS_ZOMBIE:
                found[pid] = " ".join(started[pid].cmdline())[:200]
        except psutil.Error:
            continue
    return found


def servants_live() -> bool:
    """Whether Python's resource tracker, where one was started, still reads: the next test would start no process."""
    tracker = multiprocessing.resource_tracker._resource_tracker
    if tracker._fd is None or tracker._check_alive():
        return True
    tracker._fd = tracker._pid = None
    return False


def listening_ports() -> set[int]:
    """Ports that this process listens on. (Those of a process left behind are found with it.)"""
    return {c.laddr.port for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def still_there(look: Callable[[], set]) -> list:
    """What `look` finds, after those that are just ending had time to do so."""
    deadline = time.monotonic() + GRACE_S
    while (found := look()) and time.monotonic() < deadline:
        gc.collect()  # a loader's processes and a store's port go with the object that holds them
        time.sleep(0.05)
    return sorted(found)
