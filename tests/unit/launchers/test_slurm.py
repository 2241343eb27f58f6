"""What Slurm is told, and what is made of what it answers."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from manyhosts.control import job_file
from manyhosts.control.display import PlainDisplay
from manyhosts.control.job import Job
from manyhosts.errors import ConfigError, LaunchError
from manyhosts.launchers.commands import run_command
from manyhosts.launchers.slurm import batch
from manyhosts.launchers.slurm import slurm as slurm_engine
from manyhosts.launchers.slurm.slurm import Slurm

INSIDE = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-4]"}
RUNNING = "JobId=4711 JobName=x JobState=RUNNING Reason=None ExitCode=0:0 NodeList=n[1-2] StdOut={log}\n"


class FakeSlurm:
    """Answers as Slurm does, and remembers what it was told. An answer that is an error is raised."""

    def __init__(self, **answers: str | Exception | list[str]) -> None:
        self.answers, self.reported = answers, []

    def __call__(self, command: Sequence[str]) -> str:
        self.reported.append(list(command))
        answer = self.answers.get("sinfo", "") if command[0] == "sinfo" else self.answers[command[0]]
        if isinstance(answer, list):
            return answer.pop(0) if len(answer) > 1 else answer[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def slurm(present: dict[str, str] | None = None, **answers: str | Exception | list[str]) -> Slurm:
    return Slurm(present or {}, FakeSlurm(**answers), lambda _: None)


def job(folder: Path = Path("/work"), **more: object) -> Job:
    return Job(program="train.py", folder=folder, **{"run_dir": folder / "run", "nodes": 2, **more})


def test_batch_script_is_this_text() -> None:
    options = {"partition": "gpu", "time": "2:00:00", "gpus": "a100:4", "account": "lab one", "mem": "0"}
    assert slurm_engine.batch_script(job(options=options, workers_per_node=4)) == (
        "#!/bin/bash\n"
        "#SBATCH --job-name=run\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=1\n"
        "#SBATCH --chdir=/work\n"
        "#SBATCH --output=/work/run/logs/slurm-%j.log\n"
        "#SBATCH --open-mode=append\n"
        "#SBATCH --signal=B:USR1@90\n"
        "#SBATCH --partition=gpu\n"
        '#SBATCH --account="lab one"\n'
        "#SBATCH --time=2:00:00\n"
        "#SBATCH --gpus-per-node=a100:4\n"
        "#SBATCH --mem=0\n"
        "#SBATCH --requeue\n"
        f"exec {shlex.quote(sys.executable)} -P -m manyhosts.launchers.slurm.batch /work/run/job.json\n"
    )


def test_every_option_is_explained_and_reaches_slurm() -> None:
    known = [key for key in slurm_engine.OPTIONS if not key.startswith("container")]  # for srun: see test_containers
    values = dict.fromkeys(known, "7") | {"requeue": "no", "exclusive": "yes", "python": "/opt/python"}
    wished = job(options=values, workers_per_node=7)
    slurm().check(wished)
    text = slurm_engine.batch_script(wished)
    assert text.count("=7\n") == 13
    assert all(part in text for part in ("--no-requeue\n", "--exclusive\n", "B:USR1@7\n", "exec /opt/python "))


def test_values_of_env_are_for_the_owner_of_the_job_alone(tmp_path: Path) -> None:
    fake = FakeSlurm(sbatch="4711\n")
    words = ("run", "--env", "KEY=s3cret", "--env", "NAME", "train.py")
    wished = job(tmp_path, environment={"KEY": "s3cret", "NAME": "s3cret"}, hidden=("KEY", "NAME"), words=words)
    plan = Slurm({}, fake, lambda _: None).plan(wished)
    assert "s3cret" not in str(plan)
    assert "KEY=…hidden" in str(plan)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.json").write_text("of a run before")
    Slurm({}, fake, lambda _: None).send(plan)
    kept = tmp_path / "run" / "job.json"
    assert kept.stat().st_mode & 0o777 == 0o600
    assert job_file.load(kept) == plan.job


def test_plan_touches_nothing_and_dry_run_shows_files_and_command(tmp_path: Path) -> None:
    fake = FakeSlurm()
    plan = Slurm({}, fake).plan(job(tmp_path))
    assert (fake.reported, list(tmp_path.iterdir())) == ([], [])
    assert f"$ sbatch --parsable {tmp_path}/run/job.sbatch" in str(plan)
    assert "#SBATCH --nodes=2" in str(plan)


def test_sending_writes_the_plan_and_returns_the_number(tmp_path: Path) -> None:
    engine = slurm(sbatch="4711;cluster-a\n")
    plan = engine.plan(job(tmp_path, environment={"A": "1"}))
    assert engine.send(plan) == "4711"
    assert (tmp_path / "run" / "job.sbatch").read_text() == plan.files[str(tmp_path / "run" / "job.sbatch")]
    assert job_file.load(tmp_path / "run" / "job.json") == plan.job


def test_inside_an_allocation_srun_starts_an_agent_on_every_node_of_it() -> None:
    plan = slurm(INSIDE).plan(job(nodes=1, nodes_are_chosen=False))
    assert plan.hosts == ("n1", "n2", "n3", "n4")
    assert " ".join(plan.command) == (
        "srun --nodes 4 --ntasks 4 --ntasks-per-node 1 --nodelist n1,n2,n3,n4 --cpu-bind none --kill-on-bad-exit=0"
        f" --overlap --unbuffered --quit-on-interrupt {sys.executable} -P -m manyhosts.control.agent.node"
        " --head ADDRESS:PORT --certificate FINGERPRINT --number SLURM_PROCID"
        f" --forget {','.join(Slurm.TASK_VARIABLES)} --nodes 0,1,2,3"
    )


def test_inside_an_allocation_some_of_its_nodes_can_be_asked_for() -> None:
    assert slurm(INSIDE).plan(job(nodes=2)).hosts == ("n1", "n2")


@pytest.mark.parametrize(
    ("present", "more", "what"),
    [
        ({}, {"options": {"requeue": "maybe"}}, "requeue is 'maybe'"),
        ({}, {"options": {"warning": "soon"}}, "warning is 'soon'"),
        ({}, {"options": {"gpus": "4"}}, "4 GPUs, and one worker"),
        ({}, {"run_dir": Path("/work/run\n#SBATCH --uid=0")}, "the run directory is .* cannot be written in a batch"),
        ({}, {"folder": Path('/work" --uid=0')}, "the working directory is .* cannot be written in a batch"),
        (INSIDE, {"nodes": 5}, "has 4 nodes, and --nodes is 5"),
        ({**INSIDE, "SLURM_STEP_ID": "0"}, {}, "a task that srun has started"),
    ],
)
def test_request_that_makes_no_sense_is_refused_before_it_waits_in_a_queue(
    present: dict[str, str], more: dict[str, object], what: str
) -> None:
    with pytest.raises(ConfigError, match=what):
        slurm(present).plan(job(**more))


def test_interactive_shell_of_an_allocation_is_no_task() -> None:
    assert slurm({**INSIDE, "SLURM_STEP_ID": "4294967290"}).plan(job()).hosts == ("n1", "n2")


@pytest.mark.parametrize(
    ("said", "state", "code"),
    [
        ("JobState=PENDING Reason=Priority ExitCode=0:0", "waiting", 0),
        ("JobState=RUNNING Reason=None ExitCode=0:0", "running", 0),
        ("JobState=COMPLETED Reason=None ExitCode=0:0", "done", 0),
        ("JobState=FAILED Reason=NonZeroExitCode ExitCode=4:0", "failed", 4),
        ("JobState=TIMEOUT Reason=TimeLimit ExitCode=0:0", "failed", 1),
        ("JobState=CANCELLED Reason=None ExitCode=0:15", "cancelled", 130),
    ],
)
def test_states_of_slurm_in_our_words(said: str, state: str, code: int) -> None:
    status = slurm(scontrol=f"JobId=4711 {said} NodeList=n1\n").status("4711")
    assert (status.state, status.exit_code) == (state, code)
    assert (status.code is None) == (not status.over), "one that continues has no exit code yet"


def test_job_that_is_long_over_is_looked_up_in_the_accounts() -> None:
    gone = LaunchError("scontrol refused: slurm_load_jobs error: Invalid job id specified")
    found = slurm(scontrol=gone, sacct="CANCELLED by 1000|0:0|n[1-2]\n").status("4711")
    assert (found.state, found.hosts) == ("cancelled", "n[1-2]")
    assert slurm(scontrol=gone, sacct=LaunchError("no accounts")).status("4711").state == "unknown"


def test_cancelling_a_job_that_is_over_is_no_error_and_one_that_never_was_is_named() -> None:
    """scancel itself ends with 0, and without a word, where there is no such job."""
    known, unknown = RUNNING.format(log="log"), LaunchError("scontrol refused: Invalid job id specified")
    completing = LaunchError("scancel refused: Job/step already completing or completed")
    slurm(scontrol=known, scancel=completing).cancel("4711")
    slurm(scontrol=unknown, scancel="", sacct="COMPLETED|0:0|n1\n").cancel("4711")
    for accounts in ("", LaunchError("no accounts")):
        with pytest.raises(LaunchError, match="Slurm knows no job 4711: it has long been over, or there never was one"):
            slurm(scontrol=unknown, scancel="", sacct=accounts).cancel("4711")
    with pytest.raises(LaunchError, match="Access denied"):
        slurm(scontrol=known, scancel=LaunchError("scancel refused: Access denied")).cancel("4711")


@pytest.mark.parametrize(
    ("nodes", "options", "refused"),
    [
        (3, {}, ""),
        (4, {}, "Slurm's default partition has 3 nodes, and --nodes is 4: the job would wait for ever"),
        (9, {"partition": "small"}, "the partition small has 5 nodes, and --nodes is 9"),
        (9, {"partition": "small,large"}, ""),
        (99, {"partition": "unknown"}, ""),
    ],
)
def test_more_nodes_than_the_partition_has_are_refused_and_do_not_wait_for_ever(
    nodes: int, options: dict[str, str], refused: str, tmp_path: Path
) -> None:
    fake = FakeSlurm(sinfo="debug* 3\nsmall 2\nsmall 3\nlarge 40\n", sbatch="7\n")
    engine = Slurm({}, fake, lambda _: None)
    plan = engine.plan(job(tmp_path, nodes=nodes, options=options))
    if not refused:
        assert engine.send(plan) == "7"
        return
    with pytest.raises(ConfigError, match=refused):
        engine.send(plan)
    assert [words[0] for words in fake.reported] == ["sinfo"], "nothing was queued"
    assert not (tmp_path / "run").exists()


DOWN = LaunchError("sinfo refused: slurm_load_partitions: Unable to contact slurm controller (connect failure)")


def test_controller_that_is_down_is_said_as_that(tmp_path: Path) -> None:
    engine = slurm(sinfo=DOWN, scontrol=DOWN, scancel=DOWN)
    plan = engine.plan(job(tmp_path))
    for act in (lambda: engine.send(plan), lambda: engine.status("4711"), lambda: engine.cancel("4711")):
        with pytest.raises(LaunchError, match="Slurm's controller does not answer: slurm_load"):
            act()
    assert slurm(sinfo=LaunchError("sinfo refused: Access denied"), sbatch="7\n").send(plan) == "7"


def test_name_that_is_no_number_never_reaches_slurm() -> None:
    with pytest.raises(ConfigError, match="no number of a job"):
        slurm().cancel("-u root")


def test_log_is_followed_until_the_job_is_over(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\ntw")
    running = RUNNING.format(log=log)
    engine = slurm(scontrol=[running, running, running.replace("RUNNING", "COMPLETED")])
    lines = engine.logs("4711", follow=True)
    first = next(lines)
    with log.open("a") as file:
        file.write("o\nlast")
    assert [first, *lines] == ["one", "two", "last"]


def test_waiting_for_a_batch_job_shows_its_words_and_ends_with_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_text("epoch 1\n")
    over = RUNNING.format(log=tmp_path / "log").replace("RUNNING", "FAILED").replace("0:0", "4:0")
    waits = "JobState=PENDING Reason=Resources StdOut=\n"
    engine = slurm(sbatch="4711\n", scontrol=[waits, waits, over])
    assert engine.submit(engine.plan(job(tmp_path)), PlainDisplay(sys.stdout, sys.stderr)) == 4
    out, err = capsys.readouterr()
    assert out.splitlines() == ["manyhosts: sent as slurm://4711", "epoch 1"]
    assert err.splitlines()[0] == "manyhosts: the job waits: PENDING (Resources)"
    assert err.splitlines()[1] == "manyhosts: the job has failed"


def test_job_that_is_waited_for_is_named_where_slurm_answers_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = slurm(sbatch="4711\n", scontrol=DOWN)
    with pytest.raises(LaunchError, match="Slurm's controller does not answer"):
        engine.submit(engine.plan(job(tmp_path)), PlainDisplay(sys.stdout, sys.stderr))
    said = "manyhosts: this does not end the job: ask after it with `manyhosts status slurm://4711`\n"
    assert capsys.readouterr().err == said


def test_launcher_that_is_ended_cancels_the_job_that_it_waits_for(tmp_path: Path) -> None:
    fake = FakeSlurm(sbatch="4711\n", scontrol="JobState=PENDING Reason=Priority StdOut=\n", scancel="")
    engine = Slurm({}, fake, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert engine.submit(engine.plan(job(tmp_path)), PlainDisplay(sys.stdout, sys.stderr)) == 130
    assert fake.reported[-1] == ["scancel", "4711"]
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("asked", ["sbatch", "scontrol"])
def test_launcher_that_is_ended_while_slurm_is_asked_leaves_no_job(
    number: signal.Signals, asked: str, tmp_path: Path
) -> None:
    """Between sbatch and the first look at the job, say."""
    fake = FakeSlurm(sbatch="4711\n", scontrol="JobState=PENDING Reason=Priority StdOut=\n", scancel="")

    def run(command: Sequence[str]) -> str:
        if command[0] == asked:
            os.kill(os.getpid(), number)
        return fake(command)

    engine = Slurm({}, run, lambda _: None)
    assert engine.submit(engine.plan(job(tmp_path)), PlainDisplay(sys.stdout, sys.stderr)) == 130
    assert fake.reported[-1] == ["scancel", "4711"]


def test_second_interrupt_does_not_wait_for_an_engine_that_does_not_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: Sequence[str]) -> str:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the second one has ended the wait")

    engine = Slurm({}, run, lambda _: None)
    assert engine.submit(engine.plan(job(tmp_path)), PlainDisplay(sys.stdout, sys.stderr)) == 130
    assert "before slurm had answered" in capsys.readouterr().err


@pytest.mark.parametrize(("saves", "requeued"), [(True, True), (False, False)])
def test_job_that_saved_no_step_is_not_queued_again(
    saves: bool, requeued: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be so for ever. What a script without our trainer keeps is not known, so it is queued again."""
    run_dir, reported = tmp_path / "run", []
    (run_dir / "snapshots" / "step-00000010").mkdir(parents=True)
    (run_dir / "run.json").write_text("{}")
    job_file.write_hidden(job_file.text_of(job(tmp_path)), run_dir / "job.json")

    class Warned(Slurm):
        def plan(self, job: Job) -> Any:
            return job

        def submit(self, plan: Any, display: Any) -> int:
            monkeypatch.setattr(os, "kill", lambda *_: None)  # the head is not there to hear it
            signal.raise_signal(signal.SIGUSR1)
            if saves:
                (run_dir / "snapshots" / "step-00000020").mkdir()
            return 143

    monkeypatch.setattr(batch, "Slurm", Warned)
    monkeypatch.setattr(batch, "run_command", reported.append)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    before = signal.getsignal(signal.SIGUSR1)
    try:
        assert batch.main([str(run_dir / "job.json")]) == 143
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert bool(reported) == requeued


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [("a", "a"), ("n[1-3],m", "n1 n2 n3 m"), ("g[08-10,12]-x", "g08-x g09-x g10-x g12-x"), ("", "")],
)
def test_lists_of_hosts_as_slurm_writes_them(nodes: str, hosts: str) -> None:
    assert slurm_engine.hosts_of(nodes) == hosts.split()


def test_program_that_is_not_there_is_a_sentence() -> None:
    with pytest.raises(LaunchError, match="there is no no-such-program on this machine"):
        run_command(["no-such-program"])


def test_what_a_program_says_last_is_the_reason() -> None:
    with pytest.raises(LaunchError, match="sh refused: no such partition"):
        run_command(["sh", "-c", "echo usage >&2; echo no such partition >&2; exit 1"])


def test_job_file_of_another_version_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps({"program": "x"}))
    with pytest.raises(ConfigError, match="cannot read what to run"):
        job_file.load(tmp_path / "job.json")


def test_log_of_a_run_directory_with_a_space_is_found() -> None:
    engine = slurm(scontrol=RUNNING.format(log="/home/me/my runs/slurm-4711.log"))
    found = engine.status("4711")
    assert (found.log, found.hosts, found.state) == ("/home/me/my runs/slurm-4711.log", "n[1-2]", "running")


def test_job_that_is_refused_leaves_no_run(tmp_path: Path) -> None:
    engine = slurm(sbatch=LaunchError("sbatch refused: no such partition"))
    with pytest.raises(LaunchError, match="sbatch refused"):
        engine.send(engine.plan(job(tmp_path)))
    assert not (tmp_path / "run").exists()
