"""A run whose workers, agents and launcher are killed again and again, at moments nobody chose, ends with its bits."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from commands import alive_workers, finish, kill_all, start, steps_done, summary, wait_for_step
from launching import agents, alive, family, wait_until
from runs import CHANCY, Recipe, samples_by_step, step_lines, trained

pytestmark = pytest.mark.multiprocess
SETTINGS = {"virtual_workers": 4, "validate_every": "50 steps", "snapshots": {"every": "40 steps"}}
OPTIONS = ["--nodes", "1:2", "--restarts", "3"]
LONGEST_PAUSE_S = 1.0


def recipe(steps: int) -> Recipe:
    return replace(CHANCY, duration=f"{steps} steps", schedule=True, trainer=SETTINGS)


def everything_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """What runs of a command that may end at this moment."""
    with suppress(psutil.Error):
        return family(process)
    return []


class Victim:
    """A run on two nodes of this machine, which is started again whenever it was brought down altogether."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, self.pids = folder / "run", folder / "pids"
        self.starts, self.outputs = 0, []
        self.begin()

    def begin(self) -> None:
        self.starts += 1
        self.process = start(1, self.run_dir, recipe(1_000_000), OPTIONS, pids=self.pids)

    def kill(self, kind: str, draw: random.Random) -> bool:
        """SIGKILL to one process of that kind; whether there was one."""
        all_of_it = everything_of(self.process)
        found = {
            "worker": lambda: alive_workers(self.pids),
            "agent": lambda: [each.pid for each in agents(alive(all_of_it))],
            "launcher": lambda: [self.process.pid],
        }[kind]()
        if not found:
            return False
        with suppress(ProcessLookupError):
            os.kill(draw.choice(found), signal.SIGKILL)
        if kind == "launcher":
            wait_until(lambda: not alive(all_of_it), "nothing outlives the launcher")
        return True

    def go_on(self) -> None:
        """Type the command again where it has ended."""
        if self.process.poll() is not None:
            self.outputs.append(finish(self.process))
            self.begin()

    def train(self, steps: int) -> None:
        """Wait until it has made so many steps more."""
        goal = steps_done(self.run_dir) + steps
        while steps_done(self.run_dir) < goal:
            self.go_on()
            wait_for_step(self.process, self.run_dir, goal)

    def stop(self) -> str:
        """Ask it to stop, once it trains."""
        self.train(5)
        self.process.send_signal(signal.SIGTERM)
        self.outputs.append(finish(self.process))
        return "\n".join(self.outputs)


def kill_again_and_again(folder: Path, kinds: list[str]) -> None:
    """Kill one of each of `kinds` at moments that a seed draws, and compare with a run that nothing happened to."""
    seed = random.SystemRandom().randrange(1 << 32)
    say(f"{len(kinds)} kills drawn from seed {seed}")
    draw = random.Random(seed)
    draw.shuffle(kinds)
    victim = Victim(folder)
    try:
        wait_for_step(victim.process, victim.run_dir, 5)
        while kinds:
            victim.train(draw.randint(1, 20) if draw.random() < 0.8 else 0)
            time.sleep(draw.uniform(0, LONGEST_PAUSE_S) ** 2)  # so some come while it recovers from the one before
            victim.go_on()
            if victim.kill(kinds[-1], draw):
                say(f"{time.strftime('%H:%M:%S')} {kinds.pop()} after step {steps_done(victim.run_dir)}")
        output = victim.stop()
    except BaseException:
        kill_all(victim.process)
        raise
    say(f"the command was typed {victim.starts} times; {steps_done(victim.run_dir)} steps")
    compare(victim.run_dir, folder / "whole", output)


def say(text: str) -> None:
    """Shown by pytest when the test fails."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def compare(run_dir: Path, undisturbed: Path, output: str) -> None:
    ended = summary(run_dir)
    assert ended["status"] == "interrupted", output
    steps = ended["steps"]
    assert isinstance(steps, int)
    trained(1, recipe(steps), undisturbed, timeout_s=600)
    assert [line["step"] for line in step_lines(run_dir)] == list(range(1, steps + 1)), output
    assert samples_by_step(run_dir) == samples_by_step(undisturbed), output
    assert [line["loss"] for line in step_lines(run_dir)] == [line["loss"] for line in step_lines(undisturbed)]
    assert ended["weights_sha256"] == summary(undisturbed)["weights_sha256"], output


def test_some_kills_at_random_moments_change_no_bit(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, ["worker", "worker", "agent", "launcher"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_kills_in_a_row_change_no_bit(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, ["worker"] * 70 + ["agent"] * 20 + ["launcher"] * 10)
