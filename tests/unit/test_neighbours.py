"""Whoever takes cores beside a run is found; the run's own processes are not."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from studies import make_study

from manyhosts.cluster import neighbours
from manyhosts.cluster.neighbours import Neighbours
from manyhosts.records.run_directory import RunDirectory
from manyhosts.study.points import Asked
from manyhosts.study.study import known


class Machine:
    """A /proc of two moments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[int, tuple[int, str, str]] = {
            1: (0, "init", "init"),
            10: (1, "python", "/x/bin/manyhosts\0study\0train.py"),
            11: (10, "python", "python"),
            os.getpid(): (11, "python", "python"),
            76: (1, "bash", "bash"),
            77: (1, "blender", "blender"),
        }

    def show(self, busy_s: float, taken_s: dict[int, float]) -> None:
        (self.folder / "stat").write_text(f"cpu  {busy_s * 100:.0f} 0 0 5000 10 0 0 0 0 0\n")
        for pid, (parent, name, line) in self.processes.items():
            place = self.folder / str(pid)
            place.mkdir(exist_ok=True)
            ticks = round(100 * taken_s.get(pid, 0.0))
            place.joinpath("stat").write_text(f"{pid} ({name}) R {parent} {' 0' * 9} {ticks} 0 0 0 0\n")
            place.joinpath("cmdline").write_bytes(line.encode())


def seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch, busy_s: float, taken_s: dict[int, float], ended_s: float = 0.0
) -> str:
    """What is said after ten seconds; a child of bash had taken `ended_s` before them, and ends in them."""
    machine, now = Machine(folder), itertools.chain([100.0], itertools.repeat(110.0))
    monkeypatch.setattr(neighbours, "_PROC", folder)
    clock = SimpleNamespace(monotonic=lambda: next(now))  # only its own: other threads ask for the time, too
    monkeypatch.setattr(neighbours, "time", clock)
    monkeypatch.setattr(neighbours.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(neighbours.os, "sysconf", lambda _: 100)
    if ended_s:
        machine.processes[78] = (76, "make", "make")
    machine.show(0.0, {78: ended_s})
    beside = Neighbours()
    if ended_s:
        del machine.processes[78]
        shutil.rmtree(folder / "78")
    machine.show(busy_s, taken_s)
    return beside.in_words()


def test_neighbour_that_takes_a_core_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported = seen(tmp_path, monkeypatch, 19.0, {os.getpid(): 7.0, 11: 1.0, 10: 1.0, 77: 10.0})
    assert reported.startswith(
        "other programs took 1.0 of the 2 cores of this host meanwhile, most of it blender (process 77"
    )


def test_processes_of_the_same_command_are_no_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen(tmp_path, monkeypatch, 20.0, {os.getpid(): 10.0, 11: 9.0, 10: 0.9}) == ""


def test_what_an_ended_child_took_before_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken_s = {os.getpid(): 9.0, 76: 500.0 + 0.4, 77: 10.0}  # bash has inherited the life of its child
    reported = seen(tmp_path, monkeypatch, 19.4, taken_s, ended_s=500.0)
    assert "took 1.0 of the 2 cores" in reported
    assert "most of it blender (process 77, 1.0)" in reported


def test_the_busiest_of_many_is_not_called_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported = seen(tmp_path, monkeypatch, 19.0, {os.getpid(): 9.0, 77: 3.0})
    assert "the busiest of them blender (process 77, 0.3)" in reported


def test_machine_without_such_accounts_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_PROC", tmp_path / "none")
    assert Neighbours().in_words() == ""


def test_verdict_names_who_was_beside(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    asked = Asked(script=str(script), workers=(1, 2))
    study = make_study(tmp_path / "S", asked)
    assert "others used the machine" not in study.verdict()
    path = RunDirectory(study.rows[1].place.run.path).metrics
    lines = path.read_text().splitlines()
    text = "other programs took 1.0 of the 2 cores of this host meanwhile, most of it blender (process 77, 1.0): steps"
    lines.insert(-1, json.dumps({"event": "note", "step": 40, "time": 1001.0, "text": text}))
    path.write_text("\n".join(lines) + "\n")
    reported = known(asked, tmp_path / "S", 0.5).verdict()
    assert "CAREFUL: in 1 of 2 runs others used the machine (with 2 workers, other programs took 1.0" in reported
    assert "blender (process 77" in reported
