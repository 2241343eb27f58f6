"""Nodes go and come while a run continues: with virtual workers not a bit of the result depends on it."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from commands import finish, kill_all, start, steps_done, summary, wait_for_step
from launching import agents, run, wait_until
from preloaded import children, descendants
from runs import CHANCY, Recipe, samples_by_step, step_lines, trained

pytestmark = pytest.mark.multiprocess
RARELY = {"virtual_workers": 4, "validate_every": "1000 steps", "snapshots": {"every": "1000 steps"}}


def recipe(steps: int) -> Recipe:
    return replace(CHANCY, duration=f"{steps} steps", accuracy=False, trainer=RARELY)


def reported(run_dir: Path) -> list[str]:
    """What the metrics tell beside steps."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line.get("text") or line.get("how") or "" for line in lines if line["event"] in ("note", "restart")]


def test_node_that_dies_is_dropped_and_taken_in_again_when_it_is_back(tmp_path: Path) -> None:
    process = start(1, tmp_path / "run", recipe(1_000_000), ["--nodes", "1:2"])
    try:
        wait_for_step(process, tmp_path / "run", 5)
        family = [psutil.Process(process.pid), *descendants(psutil.Process(process.pid))]
        [agent, *_] = agents(family)
        [template] = children(agent)
        agent.kill()
        # On a busy machine a worker that is forked again may be there before the other has continued alone.
        back = "continues with 2 workers, 1 of them new"
        wait_until(lambda: {"with 1 worker", back} & {*reported(tmp_path / "run")}, "the other continues")
        gone_on_from = steps_done(tmp_path / "run")
        wait_until(lambda: back in reported(tmp_path / "run"), "it is back")
        wait_for_step(process, tmp_path / "run", gone_on_from + 20)
        kept = [child for child in template.children() if "rank" in " ".join(child.cmdline())]
        process.send_signal(signal.SIGTERM)
        output = finish(process)
    except BaseException:
        kill_all(process)
        raise
    assert len(kept) == 1, "the new agent's worker is a fork of the template that was there, with torch loaded"
    ended = summary(tmp_path / "run")
    assert ended["status"] == "interrupted", output
    assert "rank 0 on host node0 was lost: its agent is gone: killed by SIGKILL" in output
    steps = ended["steps"]
    assert isinstance(steps, int)
    trained(1, recipe(steps), tmp_path / "whole")
    assert ended["weights_sha256"] == summary(tmp_path / "whole")["weights_sha256"]
    assert [line["step"] for line in step_lines(tmp_path / "run")] == list(range(1, steps + 1))
    assert samples_by_step(tmp_path / "run") == samples_by_step(tmp_path / "whole")


@pytest.mark.parametrize("words", ["2:1", "0:2", "a:b", "1:"])
def test_range_that_makes_no_sense_is_refused(tmp_path: Path, words: str) -> None:
    ended = run(tmp_path, "print('must not run')", "--nodes", words)
    assert (ended.code, ended.out) == (2, "")
    assert "--nodes" in ended.err
