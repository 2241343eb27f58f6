"""Real Open MPI starts the agents on four hosts, and mpirun starts a script by itself."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from engines import (
    FOLDER,
    MANYHOSTS,
    environment,
    equal_hashes,
    examined,
    furthest_from_one_process,
    hashes,
    lacks,
    recipe,
    run,
    run_alone,
    share,
)
from launching import wait_until
from testbed import needs

from manyhosts.lab import Lab

pytestmark = needs("mpirun", "sshd")


@pytest.fixture(autouse=True, scope="module")
def folder(four: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all hosts share."""
    shared = tmp_path_factory.mktemp("shared")
    share(four, shared)
    return shared


def test_four_hosts_by_mpi_train_to_the_weights_of_one_process(four: Lab, folder: Path, tmp_path: Path) -> None:
    order = "lab3,lab1,lab4,lab2"
    words = ["--on", "mpi", "--hosts", order, "--run-dir", f"{FOLDER}/run", "recipe_script.py"]
    done = run(four[0], words)
    assert done.returncode == 0, done.stderr
    found = hashes(done.stdout)
    assert [found[rank][0] for rank in range(4)] == order.split(",")
    assert len({digest for _, digest in found.values()}) == 1
    assert furthest_from_one_process(folder / "run" / "weights-0.npz", tmp_path) < 1e-5


@pytest.mark.parametrize(
    ("hosts", "on_each"),
    [(["lab2", "lab3"], 2), pytest.param(["lab1", "lab2", "lab3", "lab4"], 1, marks=pytest.mark.slow)],
    ids=str,
)
def test_unmodified_torchrun_script_runs_by_mpi(four: Lab, hosts: list[str], on_each: int) -> None:
    words = ["--hosts", ",".join(hosts), "--workers-per-node", str(on_each), "--run-dir", f"{FOLDER}/plain-{on_each}"]
    done = run(four[0], ["--on", "mpi", *words, "torchrun_script.py"])
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"sum 6 of 4 on (lab\d) sees \[\]", done.stdout)) == sorted(hosts * on_each)


@pytest.mark.slow  # such scripts on hosts: test_foreign_scripts
def test_script_with_accelerate_trains_by_mpi(four: Lab) -> None:
    words = ["--on", "mpi", "--hosts", "lab3,lab4", "--run-dir", f"{FOLDER}/library", "accelerate_script.py", "w.pt"]
    done = run(four[0], words)
    assert done.returncode == 0, done.stderr
    assert equal_hashes(done.stdout, workers=2), done.stdout


def test_host_that_mpirun_does_not_reach_ends_the_start_with_a_sentence(four: Lab) -> None:
    done = run(four[0], ["--on", "mpi", "--hosts", "lab1,nowhere", "torchrun_script.py"])
    assert (done.returncode, "nowhere does not resolve" in done.stderr) == (3, True), done.stderr


@pytest.mark.parametrize("gone", ["script", pytest.param("folder", marks=pytest.mark.slow)])
def test_host_of_mpi_that_does_not_share_the_folder_is_named_with_what_it_lacks(four: Lab, gone: str) -> None:
    done = run_alone(four, ["--on", "mpi", "--hosts", ",".join(four.names)], gone)
    assert done.returncode == 3, done.stderr
    assert lacks(gone) in done.stderr
    assert "host lab4, /root/alone" in done.stderr
    assert "here\n" not in done.stdout, "nothing has run"


def test_detached_run_by_mpi_is_asked_after_by_its_handle(four: Lab) -> None:
    words = ["--on", "mpi", "--hosts", "lab2,lab3", "--detach", "--run-dir", f"{FOLDER}/detached"]
    handle = run(four[0], [*words, "torchrun_script.py"]).stdout.strip()
    assert handle == f"mpi://{FOLDER}/detached"
    reported = four[0].run([*MANYHOSTS, "logs", "--follow", handle], env=environment(), timeout_s=160).stdout
    assert sorted(re.findall(r"sum 1 of 2 on (lab\d) sees \[\]", reported)) == ["lab2", "lab3"], reported
    status = four[0].run([*MANYHOSTS, "status", handle], env=environment()).stdout
    assert status.startswith("done · lab2,lab3 · "), status


def test_script_that_the_users_own_mpirun_starts_knows_its_place(four: Lab) -> None:
    variables = [f"{name}={value}" for name, value in environment(MANYHOSTS_RUN_DIR=f"{FOLDER}/own").items()]
    variables.append(recipe())
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, "recipe_script.py"]
    done = four[0].run(["env", *variables, *words], folder=FOLDER, timeout_s=120, check=False)
    assert done.returncode == 0, done.stderr
    found = hashes(done.stdout)
    assert len({digest for _, digest in found.values()}) == 1
    wait_until(lambda: "orted" not in str(four[0].processes()), "mpirun is gone")


def test_doctor_examines_the_hosts_that_mpirun_starts_it_on_and_names_the_one_it_does_not_reach(four: Lab) -> None:
    found = examined(four[0], ["--on", "mpi", "--hosts", "lab3,nowhere,lab2", "torchrun_script.py"])
    assert [host["name"] for host in found["hosts"]] == ["lab3", "lab2"]
    errors = [finding["what"] for finding in found["findings"] if finding["level"] == "error"]
    assert errors == ["the name nowhere of host nowhere does not resolve"]
    assert [host["run_dir"]["shared"] for host in found["hosts"]] == [True, True]
    assert (found["exit_code"], found["meeting"]["right"]) == (3, True)
    wait_until(lambda: "orted" not in str(four[0].processes()), "mpirun is gone")


def test_firewall_between_two_hosts_of_mpi_is_named_before_workers_start(four: Lab) -> None:
    words = ["--on", "mpi", "--hosts", "lab1,lab2,lab3", "--run-dir", f"{FOLDER}/walled", "torchrun_script.py"]
    four[1].block(four[2])
    try:
        done = run(four[0], words)
    finally:
        four[1].unblock(four[2])
    assert done.returncode == 4, done.stderr
    assert re.search(
        r"host lab[23] cannot open a connection to host lab[23] at 10\.77\.0\.[23] port \d+: ", done.stderr
    )
    assert "sum" not in done.stdout, "no worker ran"
    wait_until(lambda: "orted" not in str(four[0].processes()), "mpirun is gone")
