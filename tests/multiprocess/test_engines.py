"""Engines whose programs start real processes here: what a plan shows is what they are told, and the job runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_engines
import fake_ray
import pytest
from launching import MANYHOSTS, environment, write_script
from plans import assert_sent, commands_in, files_in

from manyhosts.control.display import PlainDisplay
from manyhosts.control.job import Job
from manyhosts.launchers import local
from manyhosts.launchers.ray import Ray

pytestmark = pytest.mark.multiprocess

TESTS = Path(__file__).parents[1]
SOURCE = """
    import os
    tasks = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID", "LSF_PM_TASKID")
    left = [name for name in tasks if name in os.environ]
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ.get("KEY"), left)
"""
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": ",".join(fake_engines.HOSTS)}
LSF = {"LSB_JOBID": "7", "LSB_HOSTS": " ".join(fake_engines.HOSTS)}
LATER = ("ADDRESS:PORT", "FINGERPRINT", "ControlPath=SOCKET")
SHELL_LATER = ("MANYHOSTS_DISK=DISK", "ADDRESS", "INTERFACE", "PROCESS", "ADDRESS:PORT")


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """What a shell has that finds the engines' programs, and the package that brings LSF."""
    package = tmp_path / "site" / "lsf_plugin-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: lsf-plugin\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[manyhosts.launchers]\nlsf = lsf_plugin:Lsf\n")
    (tmp_path / "site" / "lsf_plugin.py").symlink_to(TESTS / "lsf_plugin.py")
    paths = [str(tmp_path / "site"), *filter(None, [environment().get("PYTHONPATH", "")])]
    return {**environment(), **fake_engines.install(tmp_path), "PYTHONPATH": ":".join(paths)}


def manyhosts(folder: Path, variables: dict[str, str], *words: str) -> Any:
    return subprocess.run([*MANYHOSTS, *words], cwd=folder, env=variables, capture_output=True, text=True, timeout=120)


def run(folder: Path, variables: dict[str, str], *words: str) -> tuple[str, Any]:
    """What `run --dry-run WORDS` prints, where it is to ask nobody; and how the same without `--dry-run` ended."""
    script = str(write_script(folder, SOURCE))
    own = [*words, "--env", "KEY=s3cret", "--run-dir", str(folder / "run"), script]
    shown = manyhosts(folder, variables, "run", "--dry-run", *own)
    assert (shown.returncode, fake_engines.reported(variables)) == (0, []), shown.stderr
    assert "s3cret" not in shown.stdout
    return shown.stdout.replace('  "--dry-run",\n', ""), manyhosts(folder, variables, "run", *own)


def lines(text: str) -> list[str]:
    """What the workers have said, without the prefix that shows who has."""
    return sorted(line.partition("] ")[2] or line for line in text.splitlines() if "rank" in line)


@pytest.mark.parametrize(
    ("target", "words", "inside"),
    [
        ("mpi", ["--hosts", ",".join(fake_engines.HOSTS)], {}),
        ("slurm", ["--nodes", "2"], SLURM),
        ("lsf", ["--nodes", "2"], LSF),
        ("ssh", ["--hosts", fake_engines.HOSTS[0]], {}),
    ],
)
def test_what_is_shown_is_what_the_engine_is_told(
    target: str, words: list[str], inside: dict[str, str], tmp_path: Path, variables: dict[str, str]
) -> None:
    printed, done = run(tmp_path, {**variables, **inside}, "--on", target, *words)
    assert done.returncode == 0, done.stderr
    count = 1 if target == "ssh" else 2
    assert lines(done.stdout) == [f"rank {rank} of {count} s3cret []" for rank in range(count)]
    _, *shown = commands_in(printed)
    reported = fake_engines.reported(variables)
    if target == "ssh":
        [(*before, there)] = shown
        *sent, words_there = next(each for each in reported if "manyhosts.control.agent.agent" in each[-1])
        assert_sent(before, sent, LATER)
        assert_sent(there.split(), words_there.split(), SHELL_LATER)
    elif target == "lsf":
        for one, other in zip(shown, sorted(reported, key=lambda each: each[2]), strict=True):
            assert_sent(one, other, LATER)
    else:
        assert_sent(shown[0], reported[0], LATER)
        assert len(reported) == 1


def test_local_starts_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from manyhosts.control.job import Job

    started: list[tuple[list[str], dict[str, str]]] = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, words: Any, **more: Any) -> None:
            started.append((list(words), more["env"]))
            super().__init__(words, **more)

    monkeypatch.setattr(local.subprocess, "Popen", Popen)
    script = write_script(tmp_path, "print('here')")
    engine = local.Local()
    plan = engine.plan(Job(program=str(script), folder=tmp_path, run_dir=tmp_path / "run", nodes=2))
    assert engine.submit(plan, PlainDisplay(sys.stdout, sys.stderr)) == 0
    monkeypatch.undo()
    _, *shown = commands_in(str(plan))
    for one, (other, given) in zip(shown, started, strict=True):
        assert assert_sent(one, other, ("fd:NUMBER", "PROCESS"))[1] == str(os.getpid())
        assert plan.environment.items() <= given.items()


def test_ray_is_asked_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ray = fake_ray.install(monkeypatch)
    script = write_script(tmp_path, "import os\nprint('rank', os.environ['RANK'])")
    engine = Ray({"RAY_ADDRESS": "127.0.0.1:6379"})
    job = Job(program=str(script), folder=tmp_path, run_dir=tmp_path / "run", nodes=2, options={"cpus": "2"})
    plan = engine.plan(job)
    assert engine.submit(plan, PlainDisplay(sys.stdout, sys.stderr)) == 0
    assert lines(capsys.readouterr().out) == ["rank 0", "rank 1"]
    shown = {name: json.loads(text) for name, text in files_in(str(plan)).items()}
    assert shown["ray.init"].items() <= ray.asked["ray.init"].items()
    assert shown["ray.util.placement_group"] == ray.asked["ray.util.placement_group"]
    for node, (words, (agent, _)) in enumerate(ray.asked["tasks"]):
        place = {"placement_group_bundle_index": node}
        assert words == {**shown["ray.remote, for each node"], "scheduling_strategy": place}
        assert_sent(commands_in(str(plan))[1 + node], agent, LATER)


def test_batch_job_of_slurm_is_the_script_that_is_shown(tmp_path: Path, variables: dict[str, str]) -> None:
    printed, done = run(tmp_path, variables, "--on", "slurm", "--nodes", "2", "--detach")
    assert (done.returncode, done.stdout) == (0, "slurm://4711\n"), done.stderr
    shown = files_in(printed)
    script, job = str(tmp_path / "run" / "job.sbatch"), str(tmp_path / "run" / "job.json")
    assert list(shown) == [script, job]
    assert shown[script] + "\n" == Path(script).read_text()
    later = assert_sent(json.loads(shown[job]), json.loads(Path(job).read_text()), ("…hidden", "KEY=…hidden"))
    assert later == ["s3cret", "KEY=s3cret"]
    assert commands_in(printed)[1:] == fake_engines.reported(variables)
    assert Path(job).stat().st_mode & 0o777 == 0o600


def test_lsf_is_added_by_another_package_with_jobs_that_are_queued_read_and_ended(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    printed, done = run(tmp_path, variables, "--on", "lsf", "--nodes", "2", "-o", "queue=gpu")
    assert done.returncode == 0, done.stderr
    assert "manyhosts: sent as lsf://101" in done.stdout
    assert lines(done.stdout) == ["rank 0 of 2 s3cret []", "rank 1 of 2 s3cret []"]
    assert commands_in(printed)[1] == fake_engines.reported(variables)[0]
    assert manyhosts(tmp_path, variables, "status", "lsf://101").stdout.startswith("done · DONE · 127.0.0.1:127.0.0.2")
    assert lines(manyhosts(tmp_path, variables, "logs", "lsf://101").stdout) == lines(done.stdout)
    assert manyhosts(tmp_path, variables, "cancel", "lsf://101").returncode == 0
    refused = manyhosts(tmp_path, variables, "run", "--on", "lsf", "-o", "quue=gpu", "script.py")
    assert (refused.returncode, "did you mean 'queue'?" in refused.stderr) == (2, True)


def test_doctor_looks_at_the_hosts_of_an_engine_that_another_package_brings(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    done = manyhosts(tmp_path, variables, "doctor", "--on", "lsf", "--nodes", "2", "--json")
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert (found["target"], [host["name"] for host in found["hosts"]]) == ("lsf", list(fake_engines.HOSTS)), (
        done.stderr
    )
    assert found["pairs"], "each was tried from each"
    assert [each["what"] for each in found["findings"] if each["check"] in ("reach", "connection", "versions")] == []
    assert fake_engines.reported(variables)[0][:5] == ["bsub", "-n", "2", "-R", "span[ptile=1]"]
