"""`manyhosts run` gives a script what torchrun and Python give it, and takes nothing away."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import environment, run, run_words, write_script

pytestmark = pytest.mark.multiprocess

TORCHRUN_SCRIPT = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()} sums to {total.item()}, was given {sys.argv[1:]}", flush=True)
dist.destroy_process_group()
"""

CONTRACT = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
}

PRINT_ENVIRONMENT = """
import json, os
print(json.dumps(dict(os.environ)))
"""


def reported(out: str) -> list[dict[str, str]]:
    """What `PRINT_ENVIRONMENT` printed on each worker, by rank."""
    variables = [json.loads(line[line.index("{") :]) for line in out.splitlines() if "{" in line]
    return sorted(variables, key=lambda each: int(each["RANK"]))


def test_torchrun_script_prints_the_same_under_torchrun_and_here(tmp_path: Path) -> None:
    script = write_script(tmp_path, TORCHRUN_SCRIPT)
    theirs = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), "a", "--b"],
        env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    ours = run(tmp_path, TORCHRUN_SCRIPT, "--workers", "2", arguments=["a", "--b"])
    assert ours.code == 0, ours.err
    reported = re.findall(r"rank .*?\]", theirs.stdout)  # there two workers may write into one line
    assert sorted(line.partition("] ")[2] for line in ours.out.splitlines()) == sorted(reported)


def test_every_variable_of_torchrun_is_set(tmp_path: Path) -> None:
    ended = run(tmp_path, PRINT_ENVIRONMENT, "--nodes", "2", "--workers-per-node", "2", "--restarts", "3")
    workers = reported(ended.out)
    assert [CONTRACT - worker.keys() for worker in workers] == [set()] * 4
    assert [(w["RANK"], w["LOCAL_RANK"], w["GROUP_RANK"]) for w in workers] == [
        ("0", "0", "0"), ("1", "1", "0"), ("2", "0", "1"), ("3", "1", "1"),
    ]  # fmt: skip
    sizes = [(w["WORLD_SIZE"], w["LOCAL_WORLD_SIZE"], w["GROUP_WORLD_SIZE"], w["ROLE_WORLD_SIZE"]) for w in workers]
    assert sizes == [("4", "2", "2", "4")] * 4
    assert {w["TORCHELASTIC_MAX_RESTARTS"] for w in workers} == {"3"}
    assert len({w["TORCHELASTIC_ERROR_FILE"] for w in workers}) == 4


def test_no_worker_is_told_the_secret_of_the_run(tmp_path: Path) -> None:
    [worker] = reported(run(tmp_path, PRINT_ENVIRONMENT).out)
    assert [name for name in worker if "TOKEN" in name] == []


def test_env_and_run_dir_reach_the_workers(tmp_path: Path) -> None:
    [worker] = reported(run(tmp_path, PRINT_ENVIRONMENT, "--env", "COLOUR=red=ish").out)
    assert (worker["COLOUR"], worker["MANYHOSTS_RUN_DIR"]) == ("red=ish", str(tmp_path / "run"))


def test_threads_are_shared_out_unless_the_user_has_decided(tmp_path: Path) -> None:
    source = "import os, torch; print(os.environ['OMP_NUM_THREADS'], torch.get_num_threads())"
    shared = run(tmp_path, source, "--workers", "2").out.splitlines()
    decided = run(tmp_path, source, "--workers", "2", "--env", "OMP_NUM_THREADS=3").out.splitlines()
    assert {line.split()[1] for line in decided} == {"3"} == {line.split()[2] for line in decided}
    assert len({tuple(line.split()[1:]) for line in shared}) == 1
    assert shared[0].split()[1] == shared[0].split()[2]


def test_second_group_after_the_first_was_destroyed_works(tmp_path: Path) -> None:
    # Each under its own prefix: in one and the same, torch finds the addresses of the first group, here as in torchrun.
    source = """
        import os, torch, torch.distributed as dist
        from datetime import timedelta
        for turn in range(3):
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30))
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group("gloo", store=dist.PrefixStore(str(turn), store), rank=rank, world_size=size)
            total = torch.ones(1)
            dist.all_reduce(total)
            dist.destroy_process_group()
            print("turn", turn, total.item())
    """
    ended = run(tmp_path, source, "--workers", "2")
    assert (ended.code, ended.out.count("turn 2 2.0")) == (0, 2), ended.err


def test_all_workers_start_again_after_a_failure_and_are_told_so(tmp_path: Path) -> None:
    source = """
        import os, sys, time
        count = os.environ["TORCHELASTIC_RESTART_COUNT"]
        if os.environ["RANK"] == "0":
            print("start", count)
            open("rank-0-was-here", "w").close()
        while not os.path.exists("rank-0-was-here"):
            time.sleep(0.01)
        if os.environ["RANK"] == "1":
            print("start", count)
        if count == "0":
            if os.environ["RANK"] == "1":
                raise RuntimeError("not yet")
            time.sleep(60)
    """
    ended = run(tmp_path, source, "--workers", "2", "--restarts", "2")
    assert ended.code == 0
    assert sorted(line for line in ended.out.splitlines() if line.startswith("[")) == [
        "[0] start 0", "[0] start 1", "[1] start 0", "[1] start 1",
    ]  # fmt: skip
    assert "rank 1" in ended.err
    assert "restart 1 of 2" in ended.err


def test_store_of_a_restart_knows_nothing_of_the_one_before(tmp_path: Path) -> None:
    source = """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise RuntimeError("once")
        print("sum", total.item())
    """
    ended = run(tmp_path, source, "--workers", "2", "--restarts", "1")
    assert (ended.code, ended.out.count("sum 2.0")) == (0, 2), ended.err


def test_error_file_holds_what_torchelastic_would_write(tmp_path: Path) -> None:
    ended = run(tmp_path, "raise ValueError('boom')")
    [path] = (ended.run_dir / "logs").glob("*-0-error-0.json")
    message = json.loads(path.read_text())["message"]
    assert message["message"] == "ValueError: boom"
    assert "script.py" in message["extraInfo"]["py_callstack"]


def test_script_that_uses_torchelastic_record_is_understood(tmp_path: Path) -> None:
    source = """
        from torch.distributed.elastic.multiprocessing.errors import record
        @record
        def main():
            raise ValueError("recorded")
        main()
    """
    ended = run(tmp_path, source, "--workers", "2")
    assert ended.code == 1
    assert ended.err.count("ValueError: recorded") == 2, "once in the traceback, once in the sentence"


def test_module_runs_with_dash_m(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    write_script(package, "import sys, pack\nprint(__name__, pack.__name__, sys.argv[1:])", "part.py")
    ended = run_words(tmp_path, "--run-dir", "run", "-m", "pack.part", "--flag")
    assert (ended.code, ended.out) == (0, "__main__ pack ['--flag']\n"), ended.err


def test_executable_runs_as_it_is(tmp_path: Path) -> None:
    shell = ["--no-python", "sh", "-c", "echo $RANK of $WORLD_SIZE"]
    ended = run_words(tmp_path, "--run-dir", "run", "--workers", "2", *shell)
    assert (ended.code, sorted(ended.out.splitlines())) == (0, ["[0] 0 of 2", "[1] 1 of 2"])


def test_executable_python_meets_at_the_store_that_the_launcher_keeps(tmp_path: Path) -> None:
    script = write_script(tmp_path, TORCHRUN_SCRIPT)
    ended = run_words(tmp_path, "--run-dir", "run", "--workers", "2", "--no-python", sys.executable, str(script))
    assert (ended.code, ended.out.count("sums to 3.0")) == (0, 2), ended.err


def test_main_module_is_what_python_makes_of_a_script(tmp_path: Path) -> None:
    source = """
        import json, os, pickle, sys
        class Thing: pass
        main = sys.modules["__main__"]
        print(json.dumps({
            "name": __name__, "file": __file__, "spec": str(__spec__), "package": str(__package__), "doc": str(__doc__),
            "argv": sys.argv, "path": sys.path[0], "same": main.Thing is Thing, "cwd": os.getcwd(),
            "pickled": type(pickle.loads(pickle.dumps(Thing()))) is Thing, "stdin": sys.stdin.read(),
            "ours": sorted(name for name in vars(main) if not name.startswith("__")),
        }))
    """
    script = write_script(tmp_path, source)
    plain = subprocess.run(
        [sys.executable, str(script), "x"], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, check=True
    )
    ended = run(tmp_path, source, arguments=["x"])
    assert json.loads(ended.out) == json.loads(plain.stdout), ended.err


def test_modules_beside_the_script_are_found_and_the_working_folder_is_not_searched(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "neighbour.py").write_text("NAME = 'beside the script'")
    (tmp_path / "json.py").write_text("raise ImportError('a file of the working folder was taken for the library')")
    ended = run(tmp_path, "import json, neighbour\nprint(neighbour.NAME)", name="inner/script.py")
    assert (ended.code, ended.out) == (0, "beside the script\n"), ended.err


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_processes_of_a_script_start_in_every_way(tmp_path: Path, method: str) -> None:
    source = f"""
        import multiprocessing
        def double(number):
            return 2 * number
        if __name__ == "__main__":
            with multiprocessing.get_context("{method}").Pool(2) as pool:
                print(pool.map(double, [1, 2, 3]))
    """
    ended = run(tmp_path, source)
    assert (ended.code, ended.out) == (0, "[2, 4, 6]\n"), ended.err


def test_data_loader_with_processes_works(tmp_path: Path) -> None:
    source = """
        import torch
        from torch.utils.data import DataLoader, Dataset
        class Numbers(Dataset):
            def __len__(self): return 8
            def __getitem__(self, index): return torch.tensor(index)
        print([batch.tolist() for batch in DataLoader(Numbers(), batch_size=4, num_workers=2)])
    """
    ended = run(tmp_path, source, "--workers", "2")
    assert (ended.code, ended.out.count("[[0, 1, 2, 3], [4, 5, 6, 7]]")) == (0, 2), ended.err


def test_workers_draw_different_random_numbers(tmp_path: Path) -> None:
    source = "import random, numpy, torch; print('drew', random.random(), numpy.random.rand())"
    ended = run(tmp_path, source, "--workers", "2")
    [first, second] = [line.split()[2:] for line in ended.out.splitlines()]
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_sets_have_one_order_on_all_workers_and_in_each_start(tmp_path: Path) -> None:
    words = ["cat", "dog", "bird", "fish", "horse", "cow", "hen", "pig"]
    source = f"print('order', *set({words}))"
    starts = [run(tmp_path, source, "--nodes", "2") for _ in range(2)]
    orders = [line.partition("order ")[2] for each in starts for line in each.out.splitlines()]
    assert len(orders) == 4, starts[0].err
    assert len(set(orders)) == 1, orders


def test_what_a_script_leaves_open_is_written_and_its_last_wishes_are_carried_out(tmp_path: Path) -> None:
    source = """
        import atexit, threading, time
        def late():
            time.sleep(0.3)
            print("thread ended")
        threading.Thread(target=late).start()
        atexit.register(print, "at exit")
        kept = open("left-open.txt", "w")
        kept.write("all of it")
        print("no line break", end="")
    """
    ended = run(tmp_path, source)
    assert (ended.code, ended.out) == (0, "no line breakthread ended\nat exit\n"), ended.err
    assert (tmp_path / "left-open.txt").read_text() == "all of it"


def test_rank_that_ends_early_and_well_leaves_the_others_alone(tmp_path: Path) -> None:
    source = """
        import os, time
        if os.environ["RANK"] == "1":
            time.sleep(1)
            print("still here")
    """
    ended = run(tmp_path, source, "--workers", "2")
    assert (ended.code, ended.out) == (0, "[1] still here\n")


@pytest.mark.parametrize("workers", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_script_that_init_writes_trains(tmp_path: Path, workers: str) -> None:
    subprocess.run([sys.executable, "-P", "-m", "manyhosts.cli.main", "init", str(tmp_path)], check=True)
    ended = run_words(tmp_path, "--run-dir", "run", "--workers", workers, "--set", "seed=1", "train.py")
    assert (ended.code, "'accuracy'" in ended.out) == (0, True), ended.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["workers"] == int(workers)


def test_group_that_a_script_takes_down_does_not_hold_it_up(tmp_path: Path) -> None:
    """Gloo's destructor waits for threads that wait for peers: without care every second such run hung."""
    script = tmp_path / "takes_down.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "def main():\n"
        "    dist.init_process_group('gloo')\n"
        "    model = DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
        "    dist.destroy_process_group()\n"
        "main()\n"
        "print('continued')\n"
    )
    for _ in range(3):
        command = [sys.executable, "-m", "manyhosts.cli.main", "run", "--workers", "2", str(script)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("continued") == 2
