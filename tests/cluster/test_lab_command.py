"""`manyhosts lab`: one command makes a cluster, a second terminal does things to its hosts, and nothing is left."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from launching import MANYHOSTS

from manyhosts.lab.folder import PLACE

COMMAND = shlex.join(MANYHOSTS)


def lab(folder: Path, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run([*MANYHOSTS, "lab", *words], cwd=folder, capture_output=True, text=True, timeout=120)


def test_script_runs_on_the_hosts_of_a_lab_and_its_exit_code_is_that_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, socket; print(socket.gethostname(), 'of', os.environ['WORLD_SIZE'])"
    )
    done = lab(tmp_path, "--hosts", "2", "--", *MANYHOSTS, "run", "--hosts", "lab1,lab2", "script.py")
    assert done.returncode == 0, done.stderr
    assert {"[lab1 0] lab1 of 2", "[lab2 1] lab2 of 2"} <= set(done.stdout.splitlines())
    assert list(tmp_path.glob("runs/*/logs/lab2-1.log"))
    assert lab(tmp_path, "--hosts", "1", "--", "sh", "-c", "exit 7").returncode == 7


def test_hosts_are_cut_mended_and_slowed_from_another_terminal(tmp_path: Path) -> None:
    script = f"""
        {COMMAND} lab hosts
        {COMMAND} lab cut lab2 && (timeout 2 ssh lab2 hostname || echo cut)
        {COMMAND} lab mend lab2 && until ssh lab2 hostname 2>/dev/null; do sleep 0.1; done
        {COMMAND} lab slow lab2 50mbit && echo slow
        {COMMAND} lab freeze lab9; {COMMAND} lab slow lab1 soon
    """
    done = lab(tmp_path, "--hosts", "2", "--", "sh", "-c", script)
    assert done.stdout.split() == ["lab1", "10.77.0.1", "lab2", "10.77.0.2", "cut", "lab2", "slow"]
    assert "this lab has no host 'lab9'" in done.stderr
    assert "'soon' is no bandwidth" in done.stderr


def test_what_cannot_be_is_said_in_a_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    before = set(PLACE.glob("*"))
    done = lab(tmp_path, "--hosts", "0")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "manyhosts: --hosts is 0")
    nowhere = lab(tmp_path, "cut", "lab1", "--lab", "none")
    assert nowhere.returncode == 2
    assert "there is no lab" in nowhere.stderr
    as_nobody = ["setpriv", "--reuid=65534", "--clear-groups"]
    done = subprocess.run([*as_nobody, *MANYHOSTS, "lab"], cwd="/", capture_output=True, text=True)
    assert "only root may make the hosts of a lab" in done.stderr or "Permission denied" in done.stderr
    assert set(PLACE.glob("*")) <= before
