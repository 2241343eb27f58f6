"""Workers on this machine that get no further: who is to blame is said with rank and line, within the time asked."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from launching import Ended, run

pytestmark = pytest.mark.multiprocess
PATIENCE_S = 5
SCRIPT = """
    import os, signal, sys, time
    import torch, torch.distributed as dist
    from torch import nn

    def spin():
        while True:
            pass

    class Stuck(torch.utils.data.Dataset):
        def __len__(self):
            return 40
        def __getitem__(self, index):
            while index == 30 and sys.argv[1] == "load" and os.environ["RANK"] == "1":
                pass
            return torch.ones(8)

    def main(what):
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(Stuck(), num_workers=1 if what == "load" else 0)
        for step, batch in enumerate(loader, start=1):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            if step == 20 and dist.get_rank() == 1:
                match what:
                    case "spin": spin()
                    case "stop": os.kill(os.getpid(), signal.SIGSTOP)
                    case "sleep": time.sleep(1000)
                    case "gather": dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.zeros(1))
                    case "leave": return

    main(sys.argv[1] if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else "continue")
"""


def line_of(words: str, source: str = SCRIPT) -> int:
    return next(number for number, line in enumerate(source.splitlines(), start=1) if words in line)


def hung(folder: Path, what: str, *options: str, code: int = 4) -> Ended:
    options = ("--workers", "2", "--hang-timeout", str(PATIENCE_S), "--env", "OMP_NUM_THREADS=1", *options)
    ended = run(folder, SCRIPT, *options, arguments=[what])
    assert ended.code == code, ended.err
    # The script gives every rank the same samples, which is said, too.
    said = [line for line in ended.err.splitlines() if "manyhosts: " in line and "on the same samples" not in line]
    assert code == 0 or len(said) == 1, ended.err
    return ended


@pytest.mark.parametrize(
    ("what", "doing"),
    [
        ("spin", rf"computes without end at script.py:({line_of('while True')}|{line_of('pass')}) in spin"),
        pytest.param("stop", r"is stopped by a signal \(process state T\)", marks=pytest.mark.slow),
        pytest.param("sleep", rf"is idle at script.py:{line_of('time.sleep')} in main", marks=pytest.mark.slow),
    ],
)
def test_worker_that_keeps_the_other_waiting_is_named_with_what_it_does(tmp_path: Path, what: str, doing: str) -> None:
    ended = hung(tmp_path, what)
    said = rf"manyhosts: rank 1 on host \S+ {doing}, and has got no further for \d+ s \(after step 20\)"
    assert re.search(rf"{said}; 1 other waits for it; 1 other worker was ended\n", ended.err), ended.err


def test_loader_that_gives_no_more_is_named_with_the_line_where_it_stands(tmp_path: Path) -> None:
    ended = hung(tmp_path, "load")
    found = re.search(
        r"rank 1 on host \S+ waits for its data at script.py:(\d+) in main, "
        r"whose loader process is at script.py:(\d+) in __getitem__, and has got no further for \d+ s",
        ended.err,
    )
    assert found, ended.err
    assert int(found[1]) == line_of("for step, batch")


def test_dead_lock_between_two_exchanges_is_named_with_both(tmp_path: Path) -> None:
    ended = hung(tmp_path, "gather")
    backward, gather = line_of("backward()"), line_of("dist.all_gather")
    assert re.search(
        rf"dead-lock: rank 0 on host \S+ waits in backward at script.py:{backward} in main, "
        rf"rank 1 on host \S+ waits in all_gather at script.py:{gather} in main, "
        r"and no worker has got further for \d+ s",
        ended.err,
    ), ended.err


def test_worker_that_leaves_early_is_named_and_not_those_that_still_waited_for_it(tmp_path: Path) -> None:
    ended = hung(tmp_path, "leave", code=1)
    assert re.search(r"rank 1 on host \S+ came to its end while others still waited for it: rank 0", ended.err), (
        ended.err
    )
    assert "Traceback" not in ended.err
    assert "leave a loop after the same number of steps on all" in ended.err


def test_run_that_hangs_is_started_again_where_that_was_asked_for(tmp_path: Path) -> None:
    ended = hung(tmp_path, "spin", "--restarts", "1", code=0)
    assert "computes without end" in ended.err
    assert "starting all workers again (restart 1 of 1)" in ended.err


TRAINER = """
    import os
    import torch
    from pathlib import Path
    from torch import nn
    import manyhosts as mh

    class Trap(torch.utils.data.Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, index):
            trap = Path("trap")
            if os.environ["RANK"] == "1" and index == 40 and trap.exists():
                trap.unlink()
                while True:
                    pass
            return torch.full((8,), index / 64), torch.tensor(index % 4)

    trainer = mh.Trainer(
        model=lambda: nn.Linear(8, 4),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=mh.Data(train=Trap(), batch_size=16),
        virtual_workers=2,
    )
    trainer.fit("100 steps")
"""


def test_hanging_worker_of_a_trainer_is_replaced_and_the_bits_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "trap").touch()
    options = ("--workers", "2", "--hang-timeout", str(PATIENCE_S), "--env", "OMP_NUM_THREADS=1")
    caught = run(tmp_path, TRAINER, *options)
    assert caught.code == 0, caught.err
    assert re.search(
        rf"continued .* after rank 1 on host \S+ waits for its data at script.py:({line_of('while True', TRAINER)}|"
        rf"{line_of('                    pass', TRAINER)}) in __getitem__, and has got no further for \d+ s",
        caught.out,
    ), caught.out
    undisturbed = run(tmp_path, TRAINER, *options, "--run-dir", str(tmp_path / "undisturbed"))
    assert undisturbed.code == 0, undisturbed.err
    ends = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "undisturbed")]
    assert ends[0]["weights_sha256"] == ends[1]["weights_sha256"]
    assert (ends[0]["restarts"], ends[1]["restarts"]) == (1, 0)
