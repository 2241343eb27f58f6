"""The standard listeners together: what a run leaves behind, on a terminal, on a pipe and by way of an agent."""

from __future__ import annotations

import json
import os
import pty
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from screens import Screen
from stories import BEGIN, ended, epoch_done, record, started, stepped, validated, was_tested

from manyhosts.events import Event
from manyhosts.listeners.broadcast import Broadcast
from manyhosts.listeners.paint import bare
from manyhosts.listeners.standard import standard
from manyhosts.listeners.terminal import Fields
from manyhosts.records import metrics
from manyhosts.records.metrics import line_of
from manyhosts.records.run_directory import RunDirectory
from manyhosts.records.summary import Summary

ALL: list[Event] = [
    started(),
    *(stepped(step) for step in (1, 2, 3, 4)),
    epoch_done(4),
    validated(4, loss=0.5, accuracy=0.75),
    ended(4),
    was_tested(4, loss=0.25, accuracy=0.875),
]


class Silent:
    def say(self, text: str) -> None: ...
    def progress(self, fields: Fields) -> None: ...
    def close(self) -> None: ...


def tell_all(folder: Path, *events: Event) -> None:
    tell = Broadcast(standard(RunDirectory(folder), record(), Silent()))
    for event in events:
        tell(event)
    tell.close()


def test_run_leaves_its_metrics_its_summary_and_tensorboards_files(tmp_path: Path) -> None:
    tell_all(tmp_path, *ALL)
    run = RunDirectory(tmp_path)
    assert len(metrics.read(run.metrics)) == len(ALL)
    summary = Summary.read(run.summary)
    assert (summary.status, summary.steps, summary.test) == ("completed", 4, {"loss": 0.25, "accuracy": 0.875})
    assert list(run.tensorboard.glob("events.out.tfevents.*"))


def test_summary_stands_there_when_fit_is_over_before_any_test(tmp_path: Path) -> None:
    tell = Broadcast(standard(RunDirectory(tmp_path), record(), Silent()))
    for event in ALL[:-1]:
        tell(event)
    summary = Summary.read(RunDirectory(tmp_path).summary)
    assert (summary.steps, summary.test) == (4, {})
    assert summary.weights_sha256 == "ab" * 32
    tell.close()


def test_run_that_was_killed_and_gone_on_with_has_the_summary_of_a_whole_one_but_for_the_cost(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "broken")
    killed = Broadcast(standard(run, record(), Silent()))
    for event in [started(), stepped(1), stepped(2), stepped(3)]:
        killed(event)
    killed.flush()  # and then nothing more: the process is gone
    rest = [event for event in ALL if isinstance(event, type(stepped(1))) and event.step > 1]
    tell_all(run.path, started(1, time=BEGIN + 5), *rest, *ALL[5:])
    tell_all(tmp_path / "whole", *ALL)
    broken, whole = (json.loads(RunDirectory(tmp_path / name).summary.read_text()) for name in ("broken", "whole"))
    cost = {"restarts": 1, "steps_redone": 2, "samples_lost": 16, "seconds_lost": 4.0}
    assert {key: broken[key] for key in cost} == cost
    differ = {key for key in whole if whole[key] != broken[key]}
    assert differ <= {*cost, "seconds"}
    killed.close()


SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from stories import *
from test_standard import ALL
from manyhosts.listeners.broadcast import Broadcast
from manyhosts.listeners.standard import standard
from manyhosts.records.run_directory import RunDirectory

tell = Broadcast(standard(RunDirectory(Path(sys.argv[1])), record()))
for event in ALL:
    tell(event)
    if event is ALL[3]:
        time.sleep(0.6)
        print("printed by the script", flush=True)
        time.sleep(0.6)
        if "fail" in sys.argv:
            raise RuntimeError("the script fails")
tell.close()
"""
LAST_LINES = [
    "epoch 1/3   loss 0.5000   validation: accuracy 75.00 %, loss 0.5000  ★ best",
    "",
    "completed ─ all done ─────────────────────────────────────────── 2 workers · ddp",
    "  validation  accuracy 75.00 %   loss 0.5000",
    "  best        accuracy 75.00 %   at step 4",
    "  time        4.0 s   1 epoch, 4 steps   8 samples/s",
]


def command(tmp_path: Path, *words: str) -> list[str]:
    return [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), str(Path(__file__).parent), *words]


def environment(**changes: str) -> dict[str, str]:
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONIOENCODING": "utf-8", **changes}
    variables.pop("NO_COLOR", None)
    return variables


def test_pipe_shows_the_story_in_plain_lines(tmp_path: Path) -> None:
    ran = subprocess.run(
        command(tmp_path), env=environment(), cwd=tmp_path, capture_output=True, encoding="utf-8", check=True
    )
    lines = ran.stdout.split("\n")
    assert lines[:2] == ["train.py  2 workers (ddp) · batch 8 · 3 epochs", "printed by the script"]
    assert lines[2 : 2 + len(LAST_LINES)] == LAST_LINES
    assert lines[-3:] == ["  run         run", "  test        accuracy 87.50 %   loss 0.2500", ""]
    assert ran.stdout == bare(ran.stdout)
    assert ran.stderr == ""


def on_terminal(words: list[str], cwd: Path) -> tuple[str, int]:
    owner, program = pty.openpty()
    with subprocess.Popen(
        words, stdin=program, stdout=program, stderr=program, cwd=cwd, env=environment(TERM="xterm")
    ) as process:
        os.close(program)
        seen = b""
        while True:
            try:
                part = os.read(owner, 1 << 16)
            except OSError:  # Linux says so when the last writer is gone
                break
            if not part:
                break
            seen += part
    os.close(owner)
    return seen.decode().replace("\r\n", "\n"), process.returncode


def test_terminal_shows_a_live_line_and_leaves_the_same_story_in_colours(tmp_path: Path) -> None:
    output, code = on_terminal(command(tmp_path), tmp_path)
    assert code == 0
    screen = Screen().feed(output)
    assert screen.text[:2] == ["train.py  2 workers (ddp) · batch 8 · 3 epochs", "printed by the script"]
    assert screen.text[2 : 2 + len(LAST_LINES)] == LAST_LINES
    assert screen.text[-1] == "  test        accuracy 87.50 %   loss 0.2500"
    assert "step 3/12" in output
    assert screen.colours > 10


def test_script_that_fails_leaves_no_live_line_behind(tmp_path: Path) -> None:
    output, code = on_terminal(command(tmp_path, "fail"), tmp_path)
    assert code == 1
    assert "step 3/12" in output
    assert Screen().feed(output).text[-1] == "RuntimeError: the script fails"


def test_worker_of_an_agent_sends_everything_there_and_prints_nothing_itself(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(tmp_path / "agent"))
        agent.listen()
        agent.settimeout(60)
        variables = environment(MANYHOSTS_AGENT=str(tmp_path / "agent"), LOCAL_RANK="0")
        with subprocess.Popen(command(tmp_path), stdout=subprocess.PIPE, env=variables, cwd=tmp_path) as worker:
            connection, _ = agent.accept()
            with connection, connection.makefile("r", encoding="utf-8") as lines:
                reports = [json.loads(line) for line in lines]
            assert worker.stdout is not None
            assert worker.stdout.read() == b"printed by the script\n"
    said = "\n".join(bare(report["fields"]["text"]) for report in reports if report["kind"] == "say").split("\n")
    assert said[1 : 1 + len(LAST_LINES)] == LAST_LINES
    progress = [report["fields"] for report in reports if report["kind"] == "progress"]
    assert progress[0]["step"] == 3
    assert progress[-1] == {"ended": True}


def test_telling_a_step_costs_the_loop_less_than_writing_its_line_would(tmp_path: Path) -> None:
    tell = Broadcast(standard(RunDirectory(tmp_path), record(), Silent()))
    step, rounds = stepped(1), []
    for _ in range(15):
        begin = time.perf_counter()
        for _ in range(200):
            tell(step)
        reported = time.perf_counter()
        for _ in range(200):
            json.dumps(line_of(step))
        rounds.append((reported - begin) / (time.perf_counter() - reported))
    tell.close()
    assert sorted(rounds)[len(rounds) // 2] < 0.2


def test_listeners_are_made_without_torch_rich_or_tensorboard() -> None:
    code = (
        "import sys, manyhosts.listeners.standard;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'rich', 'tensorboard', 'numpy')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_listener_that_cannot_write_stops_neither_training_nor_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDirectory(tmp_path)
    run.tensorboard.write_text("a file in the way")
    tell_all(run.path, *ALL)
    assert "WriteTensorBoard failed at " in caplog.text
    assert Summary.read(run.summary).steps == 4
