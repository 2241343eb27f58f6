"""When a worker fails: its traceback once, one sentence with host and rank, the right exit code, the others ended."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from cgroups import cgroup_with, within
from launching import MANYHOSTS, Ended, environment, run, run_words, write_script

pytestmark = pytest.mark.multiprocess

OTHERS_WAIT = """
import os, signal, sys, time
def fail():
    {fail}
if os.environ["RANK"] == "1":
    while len(os.listdir("here")) < int(os.environ["WORLD_SIZE"]) - 1:
        time.sleep(0.01)
    fail()
open("here/" + os.environ["RANK"], "w").close()
time.sleep(600)
"""


def fail_on_rank_one(folder: Path, fail: str, *options: str) -> Ended:
    """Rank 1 does `fail` when the others are up; those would wait for ten minutes."""
    (folder / "here").mkdir()
    return run(folder, OTHERS_WAIT.format(fail=fail), *options)


def test_exception_shows_one_traceback_then_one_sentence(tmp_path: Path) -> None:
    ended = fail_on_rank_one(tmp_path, "raise ValueError('boom')", "--workers", "3")
    assert ended.code == 1
    assert ended.err.count("Traceback (most recent call last)") == 1
    lines = ended.err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "manyhosts/control" not in "".join(lines[: lines.index("ValueError: boom")]), (
        "our own frames are of no use to anyone"
    )
    assert lines[lines.index("ValueError: boom") + 1].startswith("manyhosts: rank 1 on host ")
    assert "failed with ValueError: boom; 2 other workers were ended" in ended.err


def test_traceback_is_in_the_log_of_its_worker(tmp_path: Path) -> None:
    ended = fail_on_rank_one(tmp_path, "raise ValueError('boom')", "--workers", "2")
    assert "ValueError: boom" in ended.log(1)
    assert "ValueError" not in ended.log(0)


def test_frames_of_native_code_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "message").write_text(
        "went wrong\nException raised from run at /x.cc:7 (most recent call first):\nframe #0: f + 0x1 (0x2 in c.so)"
    )
    ended = run(tmp_path, "raise RuntimeError(open('message').read())")
    assert "RuntimeError: went wrong" in ended.err
    assert "frame #0" not in ended.err
    assert "Exception raised from" not in ended.err


def test_exit_code_other_than_zero_is_a_failure_in_a_sentence(tmp_path: Path) -> None:
    ended = fail_on_rank_one(tmp_path, "sys.exit(3)", "--workers", "2", "--nodes", "2")
    assert ended.code == 1
    assert "manyhosts: rank 1 on host node0 ended with exit code 3; 3 other workers were ended" in ended.err
    assert "Traceback" not in ended.err


def test_text_given_to_exit_is_shown(tmp_path: Path) -> None:
    ended = run(tmp_path, "import sys; sys.exit('no data here')")
    assert (ended.code, ended.err.splitlines()[0]) == (1, "no data here")


@pytest.mark.parametrize(("name", "cause"), [("SIGKILL", "memory"), ("SIGSEGV", "native"), ("SIGBUS", "/dev/shm")])
def test_signal_is_named_with_its_likely_cause(tmp_path: Path, name: str, cause: str) -> None:
    ended = fail_on_rank_one(tmp_path, f"os.kill(os.getpid(), signal.{name})", "--workers", "2")
    assert ended.code == 1
    assert f"was killed by {name}; 1 other worker was ended" in ended.err
    assert "rank 1 on host" in ended.err
    assert cause in ended.err


def test_crash_in_native_code_shows_the_python_line(tmp_path: Path) -> None:
    ended = fail_on_rank_one(tmp_path, "import ctypes; ctypes.string_at(0)", "--workers", "2")
    assert 'script.py", line 4 in fail' in ended.log(1)


def test_worker_that_takes_the_others_with_it_is_the_one_that_is_blamed(tmp_path: Path) -> None:
    # Rank 1 tears the group down before its error reaches the launcher: rank 0 is heard of first.
    source = """
        import os, time, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        try:
            if dist.get_rank() == 1:
                raise ValueError("the cause")
            dist.all_reduce(torch.ones(1))
        finally:
            dist.destroy_process_group()
            if os.environ["RANK"] == "1":
                time.sleep(1)
    """
    ended = run(tmp_path, source, "--workers", "2")
    assert ended.code == 1
    assert "failed with ValueError: the cause; 1 other worker was ended" in ended.err
    assert ended.err.count("Traceback (most recent call last)") == 1


def test_consequence_without_a_cause_is_shown_itself(tmp_path: Path) -> None:
    source = """
        import os, time
        if os.environ["RANK"] == "0":
            raise RuntimeError("Connection reset by peer")
        time.sleep(600)
    """
    ended = run(tmp_path, source, "--workers", "2")
    assert ended.code == 1
    assert "rank 0" in ended.err
    assert "failed with RuntimeError: Connection reset by peer; 1 other worker was ended" in ended.err


def test_error_of_ours_comes_out_once_in_its_own_words_with_its_exit_code(tmp_path: Path) -> None:
    source = """
        from manyhosts.errors import SnapshotError
        raise SnapshotError("of another model", where="runs/x", fix="give another --run-dir")
"""
    ended = run(tmp_path, source, "--workers", "3", "--restarts", "3")
    assert ended.code == 2
    assert ended.err == "manyhosts: of another model\n  where: runs/x\n  fix:   give another --run-dir\n"
    assert ended.out == "", "a wrong request is not tried again"


def test_workers_that_raise_one_error_together_each_come_to_their_last_line(tmp_path: Path) -> None:
    source = """
    import os, time
    from manyhosts.errors import TrainingError

    rank = int(os.environ["RANK"])
    try:
        raise TrainingError("the loss is NaN at step 3")
    finally:
        time.sleep(0.7 * (1 - rank))  # the first writes down more than the others
        print(f"last line of {rank}", flush=True)
    """
    ended = run(tmp_path, source, "--workers", "2")
    assert (ended.code, ended.err.splitlines()[0]) == (1, "manyhosts: the loss is NaN at step 3"), ended
    assert [ended.out.count(f"last line of {rank}") for rank in range(2)] == [1, 1], ended.out


def test_error_of_ours_on_one_worker_ends_one_that_does_not_end_by_itself(tmp_path: Path) -> None:
    source = """
    import os, time
    from manyhosts.errors import TrainingError

    if os.environ["RANK"] == "0":
        raise TrainingError("the loss is NaN at step 3")
    time.sleep(1000)
    """
    ended = run(tmp_path, source, "--workers", "2")
    assert (ended.code, ended.err.splitlines()[0]) == (1, "manyhosts: the loss is NaN at step 3"), ended


def test_worker_that_had_finished_counts_as_done_though_it_aborts_on_the_way_out(tmp_path: Path) -> None:
    ended = run(tmp_path, "import atexit, os; atexit.register(os.abort); print('all done')", "--workers", "2")
    assert (ended.code, ended.out.count("all done"), ended.err) == (0, 2, "")


def test_worker_that_aborts_before_it_has_finished_has_failed(tmp_path: Path) -> None:
    ended = run(tmp_path, "import os; os.abort()")
    assert ended.code == 1
    assert "was killed by SIGABRT" in ended.err


def test_worker_that_fails_and_then_lingers_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    source = """
        import os, threading, time
        if os.environ["RANK"] == "1":
            threading.Thread(target=time.sleep, args=(600,)).start()  # Python waits for it before it ends
            raise ValueError("boom")
        time.sleep(600)
    """
    ended = run(tmp_path, source, "--workers", "2")
    assert (ended.code, "ValueError: boom; 1 other worker was ended" in ended.err) == (1, True)


def test_worker_that_ignores_sigterm_is_ended_too(tmp_path: Path) -> None:
    source = """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(os.environ["RANK"], "w").close()
        while not os.path.exists("0"):
            time.sleep(0.01)
        if os.environ["RANK"] == "1":
            raise ValueError("boom")
        time.sleep(600)
    """
    assert run(tmp_path, source, "--workers", "2").code == 1


def test_last_restart_that_fails_is_the_end(tmp_path: Path) -> None:
    source = "import os; raise ValueError(os.environ['TORCHELASTIC_RESTART_COUNT'])"
    ended = run(tmp_path, source, "--restarts", "2")
    assert ended.code == 1
    assert ended.err.count("starting all workers again") == 2
    assert ended.err.count("Traceback") == 3, "one for each start"


def test_error_that_comes_again_at_the_same_step_is_not_restarted_once_more(tmp_path: Path) -> None:
    ended = run(tmp_path, "raise ValueError('always')", "--restarts", "20")
    assert ended.code == 1
    assert ended.err.count("starting all workers again") == 1
    assert "the same error at the same step as before" in ended.err
    assert "failed with ValueError: always" in ended.err


def test_syntax_error_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    ended = run(tmp_path, "def f(:\n    pass\n")
    assert ended.code == 1
    assert ended.err.splitlines()[0].endswith('script.py", line 1')
    assert "SyntaxError: invalid syntax" in ended.err


def test_hook_that_the_script_put_in_for_its_errors_is_called(tmp_path: Path) -> None:
    source = """
        import sys
        sys.excepthook = lambda kind, error, trace: print("my hook heard of", error)
        raise ValueError("boom")
    """
    assert run(tmp_path, source).out == "my hook heard of boom\n"


def test_set_that_nobody_heard_is_told(tmp_path: Path) -> None:
    ended = run(tmp_path, "print('no trainer')", "--set", "seed=3")
    assert ended.code == 0
    assert "--set had no effect" in ended.out + ended.err


def test_set_that_a_trainer_heard_is_not(tmp_path: Path) -> None:
    source = """
        from manyhosts.cluster.reports import Reporter
        reporter = Reporter.from_environment()
        reporter.send("trainer")
        reporter.close()
"""
    ended = run(tmp_path, source, "--set", "seed=3")
    assert (ended.code, ended.out, ended.err) == (0, "", "")


def test_last_words_of_a_worker_are_heard(tmp_path: Path) -> None:
    source = """
        import os
        from manyhosts.cluster.reports import Reporter
        reporter = Reporter.from_environment()
        for number in range(200):
            reporter.send("say", text=f"word {number}")
        reporter.close()
        os._exit(0)
"""
    assert run(tmp_path, source).out.splitlines() == [f"word {number}" for number in range(200)]


def test_run_directory_of_another_script_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"script": "/elsewhere/other.py"}')
    ended = run(tmp_path, "print('must not run')")
    assert (ended.code, ended.out) == (2, "")
    assert "this is the run directory of /elsewhere/other.py" in ended.err


def test_executable_that_cannot_start_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "broken").write_text("#!/no/such/interpreter\n")
    (tmp_path / "broken").chmod(0o755)
    ended = run_words(tmp_path, "--run-dir", "run", "--workers", "2", "--no-python", "./broken")
    assert ended.code == 2
    assert ended.err.count("cannot start './broken'") == 1


def test_run_directory_that_cannot_be_made_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "script.py").write_text("print('must not run')")
    ended = run_words(tmp_path, "--run-dir", "file/run", "script.py")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("manyhosts: cannot make the run directory: Not a directory\n")


def test_logs_that_a_host_cannot_keep_are_told_with_host_and_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").touch()
    ended = run(tmp_path, "print('must not run')", "--nodes", "2")
    assert (ended.code, ended.out) == (3, "")
    assert ended.err.startswith("manyhosts: cannot make the folder for logs")
    assert "host node" in ended.err
    assert str(tmp_path / "run" / "logs") in ended.err


ASKS_FOR_A_GPU = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import manyhosts as mh

def step(model, batch):
    inputs, targets = batch
    if torch.distributed.get_rank() == 1:
        inputs = inputs.cuda()
    return nn.functional.mse_loss(model(inputs), targets)

mh.Trainer(
    model=lambda: nn.Linear(2, 1), step=step, optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    data=mh.Data(train=TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), batch_size=4),
).fit("1 epoch")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="it asks for a GPU where there is none")
def test_worker_that_asks_for_a_gpu_is_told_the_line_on_the_screen_and_in_the_summary(tmp_path: Path) -> None:
    """The leader waits for it then, and does not live to write a summary itself."""
    ended = run(tmp_path, ASKS_FOR_A_GPU, "--workers", "2")
    assert ended.code == 1
    assert "Traceback" not in ended.err
    assert "Gloo" not in ended.err
    headline = next(line for line in ended.err.splitlines() if line.startswith("manyhosts: "))
    assert headline.endswith("and the script asks for one: inputs = inputs.cuda()")
    assert f"where: {tmp_path / 'script.py'}, line 10\n" in ended.err
    assert "leave that out: the trainer moves the model and its batches to each worker's device" in ended.err
    summary = json.loads((ended.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("failed", headline.removeprefix("manyhosts: "))


def test_worker_that_the_kernel_kills_for_want_of_memory_is_told_as_such(tmp_path: Path) -> None:
    script = write_script(tmp_path, "x = [bytes([7]) * (1 << 20) for _ in range(2000)]")
    with cgroup_with(400 << 20) as group:
        words = within(group, [*MANYHOSTS, "run", "--run-dir", str(tmp_path / "run"), str(script)])
        done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    said = re.search(
        r"rank 0 on host \S+ was killed by the kernel for want of memory"
        r" \(it had (\d+)\.\d MB, and all of its cgroup may have 419\.4 MB\)",
        done.stderr,
    )
    assert said, done.stderr
    assert 200 < int(said[1]) < 420


def test_script_that_its_loaders_run_again_is_told_what_to_write(tmp_path: Path) -> None:
    """They would wait for workers that they are none of, and it for them."""
    script = """
import torch
import manyhosts as mh

torch.multiprocessing.set_start_method("spawn", force=True)
mh.Trainer(
    model=lambda: torch.nn.Linear(4, 4),
    step=lambda model, batch: model(batch[0]).square().mean(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    data=mh.Data(train=torch.utils.data.TensorDataset(torch.ones(64, 4)), batch_size=8, loader_workers=1),
).fit("3 steps")
"""
    ended = run(tmp_path, script, "--workers", "2")
    assert ended.code != 0
    assert "was started with the method 'spawn', for a DataLoader say, runs this script again" in ended.err + ended.log(
        0
    )
    assert 'below `if __name__ == "__main__":`' in ended.err + ended.log(0)
