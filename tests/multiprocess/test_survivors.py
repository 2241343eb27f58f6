"""Workers that are killed while they train cost the others a step: same bits, no line twice, none missing."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from commands import alive_workers, finish, kill_all, start, steps_done, summary, wait_for_step
from launching import run, wait_until
from runs import CHANCY, Recipe, restarts, samples_by_step, step_lines, trained

from manyhosts.cluster.ports import Range, needed
from manyhosts.records.manifest import read

pytestmark = pytest.mark.multiprocess
STEPS = 120
RECIPE = replace(CHANCY, duration=f"{STEPS} steps", schedule=True, accuracy=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Runs that nothing happened to, by the number of workers."""
    folders = {workers: tmp_path_factory.mktemp(f"whole-{workers}") for workers in (2, 3)}
    for workers, folder in folders.items():
        trained(workers, RECIPE, folder)
    return folders


def kill(pids: Path, place: int) -> None:
    """SIGKILL to the worker that stands at `place` among those that run."""
    os.kill(alive_workers(pids)[place], signal.SIGKILL)


def sockets_of(process: int) -> tuple[list[int], int]:
    """The ports that it listens at, and how many connections it has."""
    found = psutil.Process(process).net_connections("tcp")
    listening = sorted(each.laddr.port for each in found if each.status == psutil.CONN_LISTEN)
    return listening, sum(each.status == psutil.CONN_ESTABLISHED for each in found)


def free_range(count: int) -> Range:
    """So many ports in a row, below those that systems choose; nobody else listens at them now."""
    for first in range(20000 + os.getpid() % 500 * 20, 32000, count):
        with ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return Range(first, first + count - 1)
    raise AssertionError("there is no such range")


def run_with_kills(
    folder: Path, recipe: Recipe, workers: int, places: list[int], steps: int = STEPS, *, options: Sequence[str] = ()
) -> str:
    process = start(workers, folder / "run", recipe, options, pids=folder / "pids")
    try:
        for number, place in enumerate(places):
            # In its first half: on a busy machine a run is some steps further when the kill comes.
            done, last = steps_done(folder / "run"), steps // 2 * (number + 1) // len(places)
            wait_for_step(process, folder / "run", random.randint(min(done + 1, last), last))
            kill(folder / "pids", place)
            wait_for_step(process, folder / "run", steps_done(folder / "run") + 1)
        output = finish(process)
    except BaseException:
        kill_all(process)
        raise
    assert process.returncode == 0, output
    return output


def assert_equal(broken: Path, undisturbed: Path, output: str, steps: int = STEPS) -> None:
    assert summary(broken)["status"] == "completed", output
    assert summary(broken)["weights_sha256"] == summary(undisturbed)["weights_sha256"], output
    assert [line["step"] for line in step_lines(broken)] == list(range(1, steps + 1))
    assert [line["loss"] for line in step_lines(broken)] == [line["loss"] for line in step_lines(undisturbed)]
    assert samples_by_step(broken) == samples_by_step(undisturbed)


@pytest.mark.parametrize(
    ("workers", "places"), [pytest.param(2, [1], marks=pytest.mark.slow), (2, [0]), (3, [1, 0, 2])], ids=str
)
def test_killed_workers_cost_a_step_each_and_no_bit(
    whole: dict[int, Path], workers: int, places: list[int], tmp_path: Path
) -> None:
    output = run_with_kills(tmp_path, RECIPE, workers, places)
    assert_equal(tmp_path / "run", whole[workers], output)
    reported = summary(tmp_path / "run")
    assert reported["restarts"] == len(places)
    assert isinstance(reported["steps_redone"], int)
    assert reported["steps_redone"] <= len(places), "only the step under way"
    assert output.count("was killed by SIGKILL") == len(places), "one line for each"
    assert "on host" in output


def test_line_says_that_what_own_batch_norm_layers_had_seen_is_lost(tmp_path: Path) -> None:
    lost = {}
    for layers in (True, False):
        recipe = replace(RECIPE, duration="60 steps", batch_norm=layers, trainer={"batch_norm": "local"})
        (folder := tmp_path / str(layers)).mkdir()
        run_with_kills(folder, recipe, 2, [1], 60)
        [line] = restarts(folder / "run")
        lost[layers] = line["lost"]
    assert lost == {True: "what a lost worker's BatchNorm layers had seen since their last mean", False: ""}


def test_survivors_keep_no_socket_of_the_groups_that_broke_and_stay_in_the_range_of_ports(tmp_path: Path) -> None:
    ports = free_range(needed(workers=3))
    recipe, options = replace(RECIPE, duration="100000 steps"), ["--ports", str(ports)]

    def counts() -> list[tuple[int, int]]:
        found = [sockets_of(worker) for worker in survivors]
        assert {port for listening, _ in found for port in listening} <= set(ports.numbers())
        return [(len(listening), connections) for listening, connections in found]

    process = start(3, tmp_path / "run", recipe, options, pids=tmp_path / "pids")
    try:
        wait_for_step(process, tmp_path / "run", 5)
        survivors = alive_workers(tmp_path / "pids")[:2]
        before = counts()
        assert [listening for listening, _ in before] == [1, 1], "Gloo's"
        for _ in range(3):
            kill(tmp_path / "pids", -1)
            wait_for_step(process, tmp_path / "run", steps_done(tmp_path / "run") + 5)
            wait_until(lambda: counts() == before, f"as many as {before}")
        assert alive_workers(tmp_path / "pids")[:2] == survivors
    finally:
        kill_all(process)


def test_killed_worker_costs_no_bit_in_the_exact_beginning_of_local_steps(
    whole: dict[int, Path], tmp_path: Path
) -> None:
    """It is data parallelism: of two workers, to the last bit."""
    local = ["--set", "strategy=local-sgd", "--set", f"sync_warmup={STEPS + 1}"]
    output = run_with_kills(tmp_path, RECIPE, 2, [1], options=local)
    assert_equal(tmp_path / "run", whole[2], output)
    assert summary(tmp_path / "run")["restarts"] == 1


def test_kills_while_every_step_is_validated_and_saved_lose_nothing(tmp_path: Path) -> None:
    steps, often = 60, {"validate_every": "1 step"}
    busy = replace(RECIPE, duration=f"{steps} steps", accuracy=True, trainer=often)
    trained(2, busy, tmp_path / "whole")
    busy = replace(busy, trainer={**often, "snapshots": {"every": "1 step"}})
    output = run_with_kills(tmp_path, busy, 2, [0, 1], steps)
    assert_equal(tmp_path / "run", tmp_path / "whole", output, steps)
    assert summary(tmp_path / "run")["best"] == summary(tmp_path / "whole")["best"]
    assert summary(tmp_path / "run")["validation"] == summary(tmp_path / "whole")["validation"]


def test_worker_that_dies_of_the_same_step_again_and_again_ends_the_run(tmp_path: Path) -> None:
    source = """
        import os, signal, torch, manyhosts as mh
        class Deadly(torch.utils.data.Dataset):
            def __len__(self):
                return 64
            def __getitem__(self, index):
                if index == 40:
                    os.kill(os.getpid(), signal.SIGKILL)
                return torch.randn(4), torch.tensor(index % 2)
        mh.Trainer(
            model=lambda: torch.nn.Linear(4, 2), loss=torch.nn.CrossEntropyLoss(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            data=mh.Data(train=Deadly(), batch_size=8, shuffle=False),
        ).fit("1 epoch")
"""
    ended = run(tmp_path, source, "--workers", "2")
    assert ended.code == 1
    assert "was killed by SIGKILL, failure 4 in a row without one more step" in ended.err
    assert [line["step"] for line in step_lines(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_step_that_kills_its_worker_each_time_ends_the_run_whoever_hears_of_it_first(tmp_path: Path) -> None:
    """The others notice within the step, and may ask to continue before the launcher knows whom they have lost."""
    source = """
        import os, signal, torch, manyhosts as mh
        inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        def step(run):
            def loss(batch):
                if run.steps_done == 3 and os.environ["RANK"] == "1":
                    os.kill(os.getpid(), signal.SIGKILL)
                return run.models["net"](batch[0]).square().mean()
            run.backward(loss)
            run.update()
        run = mh.Run(
            models={"net": lambda: torch.nn.Linear(4, 2)}, optimizers=lambda params: torch.optim.SGD(params, lr=0.1),
            data=mh.Data(train=torch.utils.data.TensorDataset(inputs), batch_size=8),
        )
        run.fit(step, "2 epochs")
"""
    ended = run(tmp_path, source, "--workers", "2")
    assert ended.code == 1
    sentence = (
        "rank 1 on host .* was killed by SIGKILL, failure 4 in a row without one more step; 1 other worker was ended"
    )
    assert re.search(rf"^manyhosts: {sentence}\n  where: .*\n  fix:   .*dmesg", ended.err, re.MULTILINE), ended.err
    assert [line["step"] for line in step_lines(tmp_path / "run")] == [1, 2, 3]
    assert len(restarts(tmp_path / "run")) == 4, "the first comes after steps that were finished"


def test_error_in_the_script_is_no_death_to_go_on_from(tmp_path: Path) -> None:
    source = """
        import torch, manyhosts as mh
        class Wrong(torch.utils.data.Dataset):
            def __len__(self):
                return 64
            def __getitem__(self, index):
                if index == 40:
                    raise ValueError("sample 40 is broken")
                return torch.randn(4), torch.tensor(index % 2)
        mh.Trainer(
            model=lambda: torch.nn.Linear(4, 2), loss=torch.nn.CrossEntropyLoss(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            data=mh.Data(train=Wrong(), batch_size=8, shuffle=False),
        ).fit("1 epoch")
"""
    ended = run(tmp_path, source, "--workers", "2")
    assert ended.code == 2
    assert "sample 40 of the train set cannot be read" in ended.err
    assert "continued" not in ended.out


def test_script_that_knows_nothing_of_us_is_started_again_as_under_torchrun(tmp_path: Path) -> None:
    source = """
        import os, signal, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
        print("done in start", os.environ["TORCHELASTIC_RESTART_COUNT"])
        dist.destroy_process_group()
    """
    ended = run(tmp_path, source, "--workers", "2", "--restarts", "1")
    assert (ended.code, ended.out.count("done in start 1")) == (0, 2)


def test_best_model_whose_writer_dies_is_written_again_or_its_loss_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 dies when all parts of the first best model are there and it is about to give it its name."""
    monkeypatch.setenv("DYING", "0")
    busy = replace(RECIPE, duration="40 steps", accuracy=True, trainer={"validate_every": "7 steps"})
    first_is_best = ["--set", "early_stopping.metric=loss", "--set", "early_stopping.mode=max"]
    first_is_best += ["--set", "early_stopping.patience=1000"]
    dies_at = "manyhosts.snapshot.writing:put_in_place:1:before"
    process = start(3, tmp_path / "run", busy, first_is_best, pids=tmp_path / "pids", dies_at=dies_at)
    output = finish(process)
    assert process.returncode == 0, output
    [restart] = restarts(tmp_path / "run")
    best = summary(tmp_path / "run")["best"]["step"]
    is_told = f"the model of step {best}" in restart["lost"]
    assert is_told or read(tmp_path / "run" / "best").facts.step == best, output


def test_leader_that_dies_while_a_new_worker_comes_leaves_no_step_unwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one, alone with the state, writes the lines of steps that were made before it was there."""
    monkeypatch.setenv("DYING", "0")
    monkeypatch.setenv("WRITES_LATE", "yes")
    recipe = replace(RECIPE, sample_s=0.01, trainer={"virtual_workers": 4, "snapshots": {"every": "40 steps"}})
    dies_at = "manyhosts.elastic.rendezvous:Rendezvous._report:1:newcomers"
    process = start(2, tmp_path / "run", recipe, pids=tmp_path / "pids", dies_at=dies_at)
    wait_for_step(process, tmp_path / "run", 40)
    kill(tmp_path / "pids", 1)
    output = finish(process)
    assert process.returncode == 0, output
    assert "rank 0" in restarts(tmp_path / "run")[-1]["reason"], output
    trained(1, recipe, tmp_path / "whole")
    assert [line["step"] for line in step_lines(tmp_path / "run")] == list(range(1, STEPS + 1)), output
    assert [line["loss"] for line in step_lines(tmp_path / "run")] == [
        line["loss"] for line in step_lines(tmp_path / "whole")
    ]
