"""Under mpirun and srun: who listens learns no secret, and a command that is killed and typed again takes over."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from alone import SOURCE, WAITS_AT_THE_END, undisturbed
from commands import summary
from eavesdropping import recorded, told_by_processes
from engines import FOLDER, MANYHOSTS, environment, share
from launching import wait_until, write_script
from runs import restarts, step_lines
from slurms import start_slurm
from testbed import needs

from manyhosts.lab import Lab
from manyhosts.records import run_directory

STEPS = 400
PASSWORD = "a-password-that-nobody-else-is-to-read"


class Run:
    """A training of three workers that the first of three hosts starts; they do not end before `let_go`."""

    def __init__(self, hosts: Lab, folder: Path, engine: list[str], variables: dict[str, str]) -> None:
        self.hosts, self.folder, self.run_dir = hosts, folder, folder / "many"
        self.variables = environment(PASSWORD=PASSWORD, **variables)
        self.words = [*MANYHOSTS, "run", *engine, "--run-dir", f"{FOLDER}/many", "--env", "PASSWORD"]
        self.words += ["--env", f"DURATION={STEPS} steps", "--env", "SLOW=0.01", "script.py"]
        self.commands: list[subprocess.Popen[str]] = []
        write_script(folder, SOURCE + WAITS_AT_THE_END)

    def type(self) -> subprocess.Popen[str]:
        said = self.folder / f"said-{len(self.commands)}"
        with said.open("w") as file:
            words: Any = {"folder": FOLDER, "env": self.variables, "stdout": file, "stderr": file}
            self.commands.append(self.hosts[0].start(self.words, process_group=0, **words))
        return self.commands[-1]

    def said(self, number: int) -> str:
        return (self.folder / f"said-{number}").read_text()

    def wait_for_step(self, step: int, what: str) -> None:
        metrics, command, alive = self.run_dir / "metrics.jsonl", self.commands[-1], self.commands[-1].poll() is None

        def there() -> bool:
            return metrics.exists() and len(step_lines(self.run_dir)) >= step

        wait_until(lambda: there() or (alive and command.poll() is not None), what)
        assert there(), (what, self.said(len(self.commands) - 1))

    def kill(self) -> None:
        self.hosts[0].end(self.commands[-1], signal.SIGKILL)
        self.commands[-1].communicate(timeout=120)

    def let_go(self) -> None:
        (self.folder / "continue").touch()

    def is_uncut(self) -> None:
        """Every step once, with the bits of a run to which nothing happened; every line of every log once."""
        assert [line["step"] for line in step_lines(self.run_dir)] == list(range(1, STEPS + 1))
        ended, wanted = summary(self.run_dir), undisturbed(self.folder, STEPS)
        assert (ended["weights_sha256"], ended["status"]) == (wanted["weights_sha256"], "completed")
        for rank in range(3):
            [log] = (self.run_dir / "logs").glob(f"*-{rank}.log")
            assert log.read_text().count(f"the end of {rank}\n") == 1, log.read_text()


def mpi(hosts: Lab) -> tuple[list[str], dict[str, str]]:
    return ["--on", "mpi", "--hosts", ",".join(hosts.names)], {}


def slurm(hosts: Lab) -> tuple[list[str], dict[str, str]]:
    """As typed in the shell of an allocation, which continues when the command is killed."""
    start_slurm(hosts)
    reported = hosts[0].run(["salloc", "--no-shell", "--nodes", "3"]).stderr
    [job] = re.findall(r"Granted job allocation (\d+)", reported)
    return ["--on", "slurm"], {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": ",".join(hosts.names)}


@pytest.mark.slow  # taking over: test_takeover; secrets: test_ssh, tests/unit/control/test_acceptor.py
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(mpi, marks=needs("mpirun", "sshd")),
        pytest.param(slurm, marks=[needs("slurmctld", "slurmd", "munged"), pytest.mark.slow]),
    ],
)
def test_engine_carries_no_secret_and_the_run_outlives_the_command_that_began_it(
    engine: Callable[[Lab], tuple[list[str], dict[str, str]]], make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    hosts = make_lab(3, prefix="eng")
    share(hosts, tmp_path)
    run = Run(hosts, tmp_path, *engine(hosts))
    with recorded(hosts[0], tmp_path / "wire") as wire:
        run.type()
        run.wait_for_step(10, "it trains")
    token = json.loads((run.run_dir / run_directory.HEAD).read_text())["token"]
    heard = wire.read_bytes()
    assert len(heard) > 10_000, "the agents and the head have talked"
    for secret in (token, PASSWORD):
        assert secret.encode() not in heard
        assert [told_by_processes(host, secret, "cmdline") for host in hosts] == [[], [], []]
    assert [told_by_processes(host, token, "environ") for host in hosts] == [[], [], []]
    for host in hosts:
        for process in told_by_processes(host, PASSWORD, "environ"):
            assert re.match(r"manyhosts (run|rank|template|store|loader)|.* -m manyhosts.cli.main run ", process), (
                process
            )
    run.kill()
    run.wait_for_step(len(step_lines(run.run_dir)) + 5, "workers make steps without a head")
    heir = run.type()
    wait_until(lambda: "takes it over" in run.said(1) or heir.poll() is not None, "it is taken over")
    run.let_go()
    assert heir.wait(timeout=120) == 0, run.said(1)
    run.is_uncut()
    assert (summary(run.run_dir)["restarts"], restarts(run.run_dir)) == (0, [])
    assert not (run.run_dir / run_directory.HEAD).exists()
    wait_until(lambda: not re.search("orted|srun|mpirun|agent", str(hosts[0].processes())), "all are gone")
