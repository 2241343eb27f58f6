"""Stacks as a worker's faulthandler writes them."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from pathlib import Path

from manyhosts.control.agent import inspection
from manyhosts.control.head import diagnosis
from manyhosts.control.head.diagnosis import Frame

TWO_THREADS = """\
Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/venv/site-packages/tensorboard/writer.py", line 9 in run

Current thread 0x00007f2 (most recent call first):
  File "/home/me/train.py", line 8 in spin
  File "/home/me/train.py", line 14 in <module>
"""


def test_stack_is_that_of_the_thread_that_heard_the_signal() -> None:
    assert diagnosis.parse(TWO_THREADS) == (
        Frame("/home/me/train.py", 8, "spin"),
        Frame("/home/me/train.py", 14, "<module>"),
    )
    other, own = TWO_THREADS.split("\n\n")
    assert diagnosis.parse(f"{own}\n{other}\n") == diagnosis.parse(TWO_THREADS)
    assert diagnosis.parse("") == ()


def test_frames_that_start_the_script_are_left_out() -> None:
    start = (
        f'  File "{Path(diagnosis.__file__).parent}/worker.py", line 50 in be\n  File "<string>", line 1 in <module>\n'
    )
    assert diagnosis.parse(TWO_THREADS + start) == diagnosis.parse(TWO_THREADS)


def test_what_watches_a_script_does_not_hide_the_line_that_it_stands_in() -> None:
    folder = Path(diagnosis.__file__).parents[1] / "agent"
    stack = f"""\
Current thread 0x00007f2 (most recent call first):
  File "/venv/site-packages/torch/nn/parallel/distributed.py", line 1600 in _pre_forward
  File "{folder}/script probe.py", line 9 in look_and_prepare
  File "/home/me/train.py", line 14 in <module>
  File "{folder}/worker.py", line 50 in run_main
  File "{folder}/worker.py", line 40 in be
  File "<string>", line 1 in <module>
"""
    found = diagnosis.parse(stack)
    assert [frame.function for frame in found] == ["_pre_forward", "<module>"]
    assert str(diagnosis.in_script(found)) == "train.py:14"


def test_place_is_the_innermost_line_of_the_users_own() -> None:
    library = Frame("/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", 125, "forward")
    ours = Frame(str(Path(diagnosis.__file__).parents[2] / "training" / "loop" / "loop.py"), 9, "take")
    own = Frame("/home/me/model.py", 3, "forward")
    assert diagnosis.in_script((library, own, ours)) == own
    assert diagnosis.in_script((library, ours)) == library
    assert diagnosis.in_script(()) is None


def test_our_own_exchanges_count_as_such() -> None:
    ours = str(Path(diagnosis.__file__).parents[2] / "communication" / "compression" / "int8.py")
    assert diagnosis.exchange((Frame(ours, 3, "exchange"),)) == "exchange"
    assert diagnosis.exchange((Frame("/home/me/train.py", 3, "all_reduce"),)) == ""


def test_accounts_of_several_processes_are_told_apart() -> None:
    other = 'Current thread 0x00007f9 (most recent call first):\n  File "/home/me/data.py", line 3 in __getitem__\n'
    first, second = inspection.split(TWO_THREADS + other)
    assert diagnosis.parse(first)[0].function == "spin"
    assert diagnosis.parse(second) == (Frame("/home/me/data.py", 3, "__getitem__"),)
    assert inspection.split("") == []


def test_a_worker_answers_where_it_stands_whatever_it_does() -> None:
    reading, writing = os.pipe()
    inspection.answer_on(writing)
    try:
        signal.pthread_kill(
            threading.get_ident(), inspection.SIGNAL
        )  # to this thread: it has answered when it continues
        found = diagnosis.parse(os.read(reading, 1 << 16).decode())
    finally:
        faulthandler.unregister(inspection.SIGNAL)
        os.close(reading)
        os.close(writing)
    assert found[0].function == "test_a_worker_answers_where_it_stands_whatever_it_does"
    assert threading.current_thread() is threading.main_thread()
