"""What scripts take for granted because torchrun, or plain Python, gives it to them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import psutil
import pytest
from launching import MANYHOSTS, environment, run, run_words, wait_until, write_script

pytestmark = pytest.mark.multiprocess


@pytest.mark.starts_cold
def test_script_knows_its_place_its_input_and_its_name_in_ps(tmp_path: Path) -> None:
    source = """
        import os, sys, psutil
        words = [" ".join(each.cmdline()) for each in psutil.Process().parents()[:3]]
        print(__file__, sys.argv[0], repr(sys.stdin.read()), psutil.Process().cmdline(), words)
    """
    write_script(tmp_path, source)
    done = subprocess.run(
        [*MANYHOSTS, "run", "--workers", "2", "--run-dir", "run", "script.py"],
        cwd=tmp_path,
        env=environment(),
        input="typed\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    first, second = sorted(done.stdout.splitlines())
    assert first.startswith(
        f"[0] {tmp_path / 'script.py'} script.py 'typed\\n' ['manyhosts', 'rank', '0', 'of', '2:', 's"
    )
    assert f"{tmp_path / 'script.py'} script.py '' " in second, "one reads, and the other finds the end"
    parents = [
        "manyhosts fork server of the workers",
        "manyhosts agent of node 0: script.py",
        "manyhosts run --workers 2",
    ]
    for title in parents:
        assert title in first


@pytest.mark.starts_cold
def test_process_that_a_script_leaves_behind_goes_on_and_is_named(tmp_path: Path) -> None:
    source = """
        import subprocess, sys
        wait = "[time.sleep(0.02) for _ in iter(lambda: os.path.exists('continues'), True)]"
        left = f"import os, time; {wait}; print('uploaded', flush=True); open('uploaded', 'w')"
        subprocess.Popen([sys.executable, "-c", left])
    """
    ended = run(tmp_path, source)
    assert ended.code == 0
    found = re.search(r"manyhosts: .* \(process (\d+)\) was started by the script and is still running", ended.err)
    (tmp_path / "continues").touch()
    assert found, ended.err
    wait_until((tmp_path / "uploaded").exists, "what was left behind has done its work")
    wait_until(lambda: "uploaded" in ended.log(0), "what it prints is in the log")
    wait_until(lambda: not psutil.pid_exists(int(found[1])), "it has ended")


def test_child_that_a_script_forks_reports_nothing_for_its_worker(tmp_path: Path) -> None:
    source = """
        import multiprocessing, os, signal, sys
        def pipes():
            names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd") if int(name) > 2]
            links = {os.readlink(name) for name in names if os.path.islink(name)}
            return {link for link in links if link.startswith("pipe:")}
        mine = pipes()
        with multiprocessing.get_context("fork").Pool(1) as pool:
            lost = len(mine - pool.apply(pipes))
        child = os.fork()
        if child == 0 and sys.argv[1] == "raise":
            raise ValueError("of the child")
        if child == 0:
            sys.exit(7 if sys.argv[1] == "exit" else 0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print("child ended with", status, "and had", lost, "pipe to the agent less")
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    """
    for word, status in (("exit", 7), ("raise", 1), ("killed", 0)):
        ended = run(tmp_path, source, arguments=[word])
        assert ended.out == f"child ended with {status} and had 1 pipe to the agent less\n", ended.err
        assert ended.code == (1 if word == "killed" else 0)
        assert ("ValueError: of the child" in ended.err) == (word == "raise")
        assert ("was killed by SIGKILL" in ended.err) == (word == "killed")


SPAWNS = """
    import os, torch, torch.distributed as dist, torch.multiprocessing as mp

    def train(rank, count, port):
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
        dist.init_process_group("gloo", rank=rank, world_size=count)
        total = torch.ones(1)
        dist.all_reduce(total)
        print("rank", rank, "sum", int(total), flush=True)
        dist.destroy_process_group()

    if __name__ == "__main__":
        import socket
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.start_processes(train, args=(2, port), nprocs=2, start_method=os.environ.get("METHOD", "spawn"))
"""


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow), "fork"])
def test_processes_of_a_script_meet_at_a_port_of_its_own(method: str, tmp_path: Path) -> None:
    ended = run(tmp_path, SPAWNS, "--env", f"METHOD={method}")
    assert (ended.code, sorted(ended.out.splitlines())) == (0, ["rank 0 sum 2", "rank 1 sum 2"]), ended.err


def test_variables_of_the_launcher_can_be_overruled_but_not_those_in_which_workers_differ(tmp_path: Path) -> None:
    source = "import os; print(os.environ['TORCHELASTIC_USE_AGENT_STORE'], os.environ['MASTER_PORT'])"
    chosen = ["--env", "TORCHELASTIC_USE_AGENT_STORE=False", "--env", "MASTER_PORT=29999"]
    assert run(tmp_path, source, *chosen).out == "False 29999\n"
    refused = run(tmp_path, source, "--env", "RANK=1")
    assert (refused.code, "RANK differs from worker to worker" in refused.err) == (2, True)


def test_output_of_one_rank_alone_is_shown_and_without_prefix(tmp_path: Path) -> None:
    source = "import os, sys; print('rank', os.environ['RANK']); print('bad', file=sys.stderr)"
    ended = run(tmp_path, source, "--workers", "3", "--show", "1", "--no-prefix")
    assert (ended.code, ended.out, ended.err) == (0, "rank 1\n", "bad\n")
    assert "rank 2" in ended.log(2), "the logs keep all"
    refused = run(tmp_path, source, "--workers", "2", "--show", "2")
    assert (refused.code, "there is no rank 2 among 2 workers" in refused.err) == (2, True)
    assert run(tmp_path, source, "--show", "all").code == 2


def test_failure_says_the_whole_of_the_error_and_the_cause_in_another_process(tmp_path: Path) -> None:
    source = """
        import os, sys, torch
        if sys.argv[1] == "exit":
            sys.exit(9)
        def fail(rank):
            raise KeyError("no such column")
        if __name__ == "__main__":
            if sys.argv[1] == "load":
                torch.nn.Linear(2, 3).load_state_dict({"weight": torch.ones(3, 2), "last": torch.ones(1)})
            torch.multiprocessing.spawn(fail)
    """
    script = str(write_script(tmp_path, source))

    def reported(word: str) -> str:
        ended = run_words(tmp_path, "--run-dir", "run", "--workers", "1", script, word)
        assert ended.code == 1
        return next(line for line in ended.err.splitlines() if line.startswith("manyhosts: "))

    assert 'Missing key(s) in state_dict: "bias". Unexpected key(s) in state_dict: "last".' in reported("load")
    assert reported("spawn").endswith("Process 0 terminated with the following error: KeyError: 'no such column'")
    assert reported("exit").endswith("ended with exit code 9")


def test_shapes_that_differ_between_ranks_are_told_from_steps_that_do(tmp_path: Path) -> None:
    source = """
        import os, sys, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        rank, what = dist.get_rank(), sys.argv[1]
        if what == "sum":
            dist.all_reduce(torch.ones(3 + rank))
        elif what == "gather":
            dist.all_gather([torch.zeros(3 + rank) for _ in range(2)], torch.ones(3 + rank))
        for _ in range(1 + rank if what == "steps" else 0):
            dist.all_reduce(torch.ones(3))
    """
    for what in ("sum", "gather"):
        ended = run(tmp_path, source, "--workers", "2", arguments=[what])
        assert (ended.code, "tensors of different shapes" in ended.err) == (1, True), ended.err
        assert "same number of steps" not in ended.err
    ended = run(tmp_path, source, "--workers", "2", arguments=["steps"])
    assert (ended.code, "same number of steps" in ended.err) == (1, True), ended.err


def test_backend_that_the_wheel_does_not_have_is_refused_in_a_sentence(tmp_path: Path) -> None:
    ended = run(tmp_path, "import torch; torch.distributed.init_process_group('mpi')", "--workers", "2")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("manyhosts: this torch has no MPI backend")


def test_what_a_script_sets_before_it_imports_torch_counts(tmp_path: Path) -> None:
    source = """
        import os
        os.environ["OMP_NUM_THREADS"] = "2"
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        os.environ["PYTORCH_JIT"] = "0"
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        enabled = torch.jit._state._enabled
        print(torch.get_num_threads(), dist.get_debug_level().name, bool(enabled), flush=True)
        dist.destroy_process_group()
    """
    ended = run(tmp_path, source, "--workers", "2", "--no-prefix")
    assert (ended.code, ended.out.splitlines()) == (0, ["2 DETAIL False"] * 2), ended.err
