"""From what is seen of workers that get no further to one sentence about who is to blame."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhosts.control.head.diagnosis import Diagnosis, Frame, Sight, diagnose
from manyhosts.control.head.diagnosis import exchange as exchange_of

DISTRIBUTED = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
AUTOGRAD = "/venv/lib/python3.11/site-packages/torch/autograd/graph.py"
LOADER = "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py"
SPIN = (Frame("/home/me/train.py", 12, "spin"), Frame("/home/me/train.py", 20, "<module>"))


def exchange(name: str, line: int) -> tuple[Frame, ...]:
    return (
        Frame(DISTRIBUTED, 2800, name),
        Frame(DISTRIBUTED.replace("distributed_c10d", "c10d_logger"), 80, "wrapper"),
        Frame("/home/me/train.py", line, "main"),
    )


REDUCE, GATHER = exchange("all_reduce", 38), exchange("all_gather", 40)
BACKWARD = (Frame(AUTOGRAD, 979, "_engine_run_backward"), Frame("/home/me/train.py", 30, "main"))


def sight(rank: int, stack: tuple[Frame, ...] = REDUCE, **more: Any) -> Sight:
    fields: dict[str, Any] = {"step": 7, "still_s": 30.0, "state": "S", "stack": stack, **more}
    return Sight(member=100 + rank, rank=rank, host=f"n{rank}", **fields)


def judged(*sights: Sight, gone: tuple[str, ...] = ()) -> Diagnosis:
    return diagnose(sights, 30, gone)


@pytest.mark.parametrize("backward", [BACKWARD, (Frame("/venv/manyhosts/device.py", 228, "backward_from"), SPIN[1])])
def test_one_that_computes_while_the_others_wait_is_the_culprit(backward: tuple[Frame, ...]) -> None:
    diagnosis = judged(sight(0), sight(1, SPIN, state="R", busy=1.0), sight(2, backward))
    assert diagnosis.guilty == (101,)
    assert diagnosis.what == (
        "rank 1 on host n1 computes without end at train.py:12 in spin, and has got no further for 30 s (after step 7);"
        " 2 others wait for it"
    )
    assert diagnosis.stack.splitlines()[-1] == '  File "/home/me/train.py", line 12, in spin'


def test_one_that_is_stopped_is_the_culprit_also_where_another_computes() -> None:
    diagnosis = judged(sight(0, SPIN, state="R"), sight(1, (), state="T"), sight(2))
    assert diagnosis.guilty == (101,)
    assert diagnosis.what.startswith(
        "rank 1 on host n1 is stopped by a signal (process state T), and has got no further"
    )


def test_one_that_waits_for_its_loader_is_told_with_what_the_loader_does() -> None:
    waiting = (Frame("/usr/lib/python3.11/queue.py", 180, "get"), Frame(LOADER, 1100, "_get_data"), SPIN[1])
    reading = (Frame("/home/me/data.py", 3, "__getitem__"),)
    diagnosis = judged(sight(0), sight(1, waiting, loader=reading))
    assert diagnosis.guilty == (101,)
    assert "waits for its data at train.py:20, whose loader process is at data.py:3 in __getitem__" in diagnosis.what


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"state": "D"}, "waits for a disk or a network file system at train.py:12 in spin"),
        ({"state": "S"}, "is idle at train.py:12 in spin"),
        ({"state": "S", "stack": ()}, "does not say what it does"),
        ({"state": "S", "stack": REDUCE, "busy": 0.9}, "computes without end at train.py:38 in main"),
        ({"state": "t", "stack": ()}, "is stopped by a debugger"),
    ],
)
def test_what_a_culprit_does_is_said(more: dict[str, Any], words: str) -> None:
    diagnosis = judged(sight(0), sight(1, **{"stack": SPIN, **more}))
    assert diagnosis.guilty == (101,)
    assert f"rank 1 on host n1 {words}" in diagnosis.what


def test_all_waiting_in_two_exchanges_is_a_dead_lock_that_blames_nobody() -> None:
    diagnosis = judged(sight(0), sight(1, GATHER), sight(2), sight(3))
    assert diagnosis.guilty == ()
    assert diagnosis.what == (
        "dead-lock: rank 1 on host n1 waits in all_gather at train.py:40 in main, the others wait in all_reduce at "
        "train.py:38 in main, and no worker has got further for 30 s (after step 7)"
    )


def test_all_waiting_in_one_exchange_are_said_to_do_so() -> None:
    diagnosis = judged(sight(0), sight(1))
    assert (diagnosis.guilty, diagnosis.what) == (
        (),
        "all 2 workers wait in all_reduce at train.py:38 in main, and no worker has got further for 30 s"
        " (after step 7)",
    )


def test_one_that_left_early_is_who_the_others_wait_for() -> None:
    diagnosis = judged(sight(0), sight(2), gone=("rank 1 on host n1",))
    assert diagnosis.what.startswith(
        "rank 1 on host n1 has come to its end, but all 2 workers wait for it in all_reduce"
    )


def test_several_culprits_are_named_together_where_they_do_the_same() -> None:
    diagnosis = judged(sight(0, SPIN, state="R"), sight(1), sight(2, SPIN, state="R"))
    assert diagnosis.guilty == (100, 102)
    assert diagnosis.what.startswith("rank 0 on host n0 (so does rank 2) computes without end")


STACKS = st.sampled_from([(), REDUCE, GATHER, BACKWARD, SPIN])


@given(
    st.lists(st.tuples(STACKS, st.sampled_from(["R", "S", "D", "T", "t", ""]), st.floats(0, 2)), min_size=1, max_size=9)
)
def test_whoever_is_blamed_is_stopped_or_outside_every_exchange_and_is_named_with_host_and_seconds(seen: Any) -> None:
    sights = [
        sight(rank, stack, state=state, busy=0.0 if state in ("T", "t") else busy)
        for rank, (stack, state, busy) in enumerate(seen)
    ]
    diagnosis = judged(*sights)
    blamed = [each for each in sights if each.member in diagnosis.guilty]
    assert all(each.is_stopped or not each.exchange for each in blamed)
    assert bool(blamed) == any(each.is_stopped or not each.exchange for each in sights)
    named = blamed or sights
    assert any(each.name in diagnosis.what for each in named) or "all " in diagnosis.what
    assert "for 30 s (after step 7)" in diagnosis.what
    assert diagnosis.fix


def test_what_is_around_all_of_a_script_is_no_exchange() -> None:
    around = Frame("/x/site-packages/torch/distributed/elastic/multiprocessing/errors/__init__.py", 1, "wrapper")
    saving = Frame("/x/lib/python3.11/site-packages/torch/distributed/checkpoint/state_dict_saver.py", 1, "save")
    within = Frame("/x/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 1, "all_reduce")
    assert exchange_of([Frame("/home/me/train.py", 88, "upload"), around]) == ""
    assert exchange_of([saving, around]) == ""
    assert exchange_of([within, around]) == "all_reduce"
