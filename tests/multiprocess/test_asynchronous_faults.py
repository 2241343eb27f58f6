"""Workers and servers that die, and hosts that stand still, where updates wait for nobody: the run goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from commands import alive_workers, finish, kill_all, start, steps_done, summary, wait_for_step
from launching import agents, family
from preloaded import descendants
from runs import Recipe, restarts, samples_by_step, step_lines

pytestmark = pytest.mark.multiprocess
SLOW = pytest.mark.slow
SCRIPT = Path(__file__).with_name("plain_sgd_script.py")
STEPS, SAMPLES = 90, 600
HANDED_OUT = Recipe(samples=SAMPLES, batch=160, accuracy=False, duration=f"{STEPS} steps", schedule=True)
"""Its schedule takes the learning rate to zero, where two runs are as near each other as they will be."""

SERVERS = ["strategy=parameter-server", "servers=1"]
WAYS = {
    "in step": [*SERVERS, "staleness=0"],
    "bounded": [*SERVERS, "staleness=1", "micro_batch_size=20"],
    "no bound": [*SERVERS, "micro_batch_size=20"],
    "hogwild": ["strategy=hogwild", "micro_batch_size=20"],
    "stages": ["strategy=pipedream", "micro_batch_size=20", "snapshots.every=2 steps"],
}


def kill_worker(process, pids: Path) -> None:
    """One that keeps nothing."""
    os.kill(alive_workers(pids)[-1], signal.SIGKILL)


def kill_server(process, pids: Path) -> None:
    """The one that keeps all parameters, and hands out."""
    os.kill(alive_workers(pids)[0], signal.SIGKILL)


def freeze_host(process, pids: Path) -> None:
    """All of the second host stands still; the run gives it up."""
    last = agents(family(process))[-1]
    for each in (last, *descendants(last)):
        with suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGSTOP)


def freeze_worker(process, pids: Path) -> None:
    """One of one host, whose agent sees that it gets no further."""
    os.kill(alive_workers(pids)[-1], signal.SIGSTOP)


FAULTS: dict[str, tuple[Callable[..., None], Sequence[str]]] = {
    "worker": (kill_worker, []),
    "server": (kill_server, []),
    "host": (freeze_host, ["--nodes", "1:2", "--hang-timeout", "4"]),
    "frozen worker": (freeze_worker, ["--hang-timeout", "4"]),
}


def run(way: str, folder: Path, options: Sequence[str] = (), fault: Callable[..., None] | None = None) -> str:
    settings = [word for setting in WAYS[way] for word in ("--set", setting)]
    workers = 1 if "--nodes" in options else 2
    process = start(workers, folder / "run", HANDED_OUT, [*options, *settings], pids=folder / "pids", script=SCRIPT)
    everything = []
    try:
        if fault is not None:
            wait_for_step(process, folder / "run", 10)
            everything = family(process)
            fault(process, folder / "pids")
            wait_for_step(process, folder / "run", steps_done(folder / "run") + 1)
        output = finish(process)
    except BaseException:
        kill_all(process)
        raise
    finally:
        for each in everything:
            with suppress(psutil.NoSuchProcess):
                each.kill()
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], float]:
    """The loss at the end of a run of such a way to which nothing happens."""
    found: dict[str, float] = {}

    def loss(way: str) -> float:
        if way not in found:
            folder = tmp_path_factory.mktemp("whole")
            run(way, folder)
            found[way] = summary(folder / "run")["validation"]["loss"]  # type: ignore[index]
        return found[way]

    return loss


@pytest.mark.parametrize(
    ("way", "fault"),
    [
        pytest.param(way, fault, marks=() if (way, fault) == ("no bound", "server") else SLOW)
        for way in WAYS
        for fault in FAULTS
        if (way == "hogwild") == (fault == "frozen worker") or fault in ("worker", "server")  # it is of one host
    ],
)
def test_run_goes_on_and_says_how_many_samples_were_computed_for_nothing(
    way: str, fault: str, undisturbed: Callable[[str], float], tmp_path: Path
) -> None:
    happens, options = FAULTS[fault]
    restarts_all = ["--restarts", "1"] if way == "stages" else []  # of which no worker holds the entire model
    output = run(way, tmp_path, [*options, *restarts_all], happens)
    reported = summary(tmp_path / "run")
    assert reported["restarts"] == 1, output
    assert [line["step"] for line in step_lines(tmp_path / "run")] == list(range(1, STEPS + 1))
    taken = list(samples_by_step(tmp_path / "run").values())
    assert sorted(sample for step in taken[:4] for sample in step) == list(range(SAMPLES))
    assert sorted(sample for step in taken[8:12] for sample in step) == list(range(SAMPLES)), "no sample is left out"
    lost = reported["samples_lost"]
    assert isinstance(lost, int)
    most = 3 if way == "stages" else 1  # which all begin again from a snapshot
    assert lost <= most * HANDED_OUT.batch, "no more than the step under way"
    if lost and way != "stages":
        assert f"{lost} samples computed again" in output
        assert f"{lost} samples, which are trained on again" in restarts(tmp_path / "run")[0]["lost"]
    loss = reported["validation"]["loss"]  # type: ignore[index]
    assert abs(loss / undisturbed(way) - 1) <= 0.02, f"{loss:.4f}, {lost} samples again"
