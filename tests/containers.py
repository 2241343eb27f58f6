"""Hosts of a lab that play the machines on which an engine runs containers: real addresses, real processes."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launching import MANYHOSTS, environment

from manyhosts.lab import Host, Lab

EXAMPLES = Path(__file__).parents[1] / "examples"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class Container:
    """What an image is on a host of a lab: its disk, its Python, and the processes that an engine starts there."""

    def __init__(self, host: Host) -> None:
        self.host, self.name, self.address = host, host.name, host.address

    def start(self, words: Sequence[str], folder: str, variables: Mapping[str, str], log: Path) -> Any:
        with log.open("ab") as out:
            return self.host.start(words, folder=folder, env={**ONE_THREAD, **variables}, stdout=out, stderr=out)

    def signal(self, process: Any, number: signal.Signals) -> None:
        """To the container's first process, as a kubelet does; SIGKILL takes all of the container with it."""
        if number != signal.SIGKILL:
            self.host.end(process, number)
            return
        for each in self.host.processes():
            subprocess.run(["kill", "-9", str(each)], capture_output=True)

    def write(self, path: str, content: bytes) -> None:
        self.host.path(path).write_bytes(content)

    def make(self, folder: str) -> None:
        self.host.path(folder).mkdir(parents=True, exist_ok=True)


def call(lab: Lab, names: Mapping[str, Host]) -> None:
    """Let all hosts of the lab know each other by these names too, as the engine's name server would."""
    with (lab.folder.path / "hosts").open("a") as file:
        file.writelines(f"{host.address} {name}\n" for name, host in names.items())


def digits(folder: Path, epochs: int = 30) -> None:
    """The example in `folder`, with as many epochs; each event takes PAUSE seconds, where that variable is set."""
    text = (EXAMPLES / "digits.py").read_text()
    pause = 'lambda _: __import__("time").sleep(float(__import__("os").environ.get("PAUSE", "0")))'
    for before, after in {
        "EPOCHS, BATCH = 30,": f"EPOCHS, BATCH = {epochs},",
        "trainer = mh.Trainer(\n": f"trainer = mh.Trainer(\n    listeners=[{pause}],\n",
    }.items():
        assert before in text, f"the example has no {before!r}"
        text = text.replace(before, after)
    (folder / "digits.py").write_text(text)


def users_folder(folder: Path) -> Path:
    """`folder`, with a short training and a script of which rank 1 fails."""
    digits(folder, epochs=3)
    (folder / "wrong.py").write_text("import os\nif os.environ['RANK'] == '1':\n    raise ValueError('a slip')\n")
    return folder


def weights_here(folder: Path, *options: str) -> str:
    """What `manyhosts run --nodes 2 digits.py` on this machine comes to."""
    words = [*MANYHOSTS, "run", "--nodes", "2", "--run-dir", "here", *options, "digits.py"]
    done = subprocess.run(words, cwd=folder, env={**environment(), **ONE_THREAD}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return weights(folder / "here")


def weights(run_dir: Path) -> str:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "completed" or summary["status"] == "stopped early", summary
    return str(summary["weights_sha256"])


def manyhosts(folder: Path, *words: str, **variables: str) -> Any:
    """One command at the user's desk, to its end."""
    return subprocess.run(
        [*MANYHOSTS, *words],
        cwd=folder,
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
