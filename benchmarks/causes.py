"""Asks whether a study names what was put in to slow training down, and how much it cannot account for.

    python benchmarks/causes.py [--only loader,link]

One cause after another is put into a training of one worker and of two: a loader that sleeps for each batch, a worker
that takes four times as long, one with a quarter of a processor, an evaluation that cannot be shared out, a snapshot
after every step, and, on two hosts of a lab (root on Linux), a link of 100 Mbit/s. `manyhosts study` says what was lost
to which cause. Writes `causes.md`, and ends with 1 where another cause comes first, or `other` is more than 5 points.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import describe

from manyhosts.lab import lab
from manyhosts.lab.lab import why_not
from manyhosts.study.times import CAUSES

EXPECTED = {
    "loader": "data_wait",
    "worker": "straggler",
    "processor": "straggler",
    "evaluation": "evaluation",
    "snapshot": "snapshot",
    "link": "communication_exposed",
}
"""What is put in, and the cause that is to be named first."""
PUT_IN = {
    "loader": "a loader that sleeps 0.2 s for each batch, whatever its size",
    "worker": "one of two workers takes four times as long for its samples",
    "processor": "one of two workers has a quarter of a processor",
    "evaluation": "an evaluation of 2 s every 10 steps, of one sample",
    "snapshot": "a snapshot after every step",
    "link": "two hosts on a link of 100 Mbit/s, 4 MB of gradients",
}
MOST_OTHER = 0.05
SCRIPT = Path(__file__).with_name("causes_train.py")
RESULTS = Path(__file__).with_suffix(".md")
MANYHOSTS = [sys.executable, "-m", "manyhosts.cli.main"]


@dataclass(frozen=True)
class Found:
    cause: str
    efficiency: float
    lost: dict[str, float]
    limit: str | None
    """What the verdict names."""

    @property
    def is_right(self) -> bool:
        first = max(self.lost, key=lambda cause: self.lost[cause])
        return first == self.limit == EXPECTED[self.cause] and abs(self.lost["other"]) <= MOST_OTHER


def studied(cause: str, folder: Path, steps: int) -> Found:
    """The study of a training of so many steps with `cause` in it, of one worker and of two."""
    words = [*MANYHOSTS, "study", "--env", f"CAUSE={cause}", "--env", "OMP_NUM_THREADS=1", "--run-dir", str(folder)]
    words += ["--budget", f"{steps} steps"]
    if cause != "link":
        done = subprocess.run(
            [*words, "--workers", "1,2", str(SCRIPT)], cwd=SCRIPT.parent, capture_output=True, text=True
        )
        return _found(cause, folder, done)
    # The desk sees the disk that the hosts share where they see it, as a login node does.
    shared = folder.with_name("shared")
    with lab(2, bandwidth="100mbit", shared={str(shared): [0, 1]}, shown=(str(SCRIPT.parent),)) as hosts:
        shared.symlink_to(hosts.folder.path / "disk0")
        words[words.index(str(folder))] = str(shared / folder.name)
        done = hosts.desk.run(
            [*words, "--hosts", ",".join(hosts.names), "--nodes", "1,2", "causes_train.py"],
            folder=str(_alone(folder.with_name("script"))), timeout_s=600, check=False,
        )  # fmt: skip
        return _found(cause, shared / folder.name, done)


def _alone(folder: Path) -> Path:
    """A folder that holds the script and nothing else, for it is brought to the hosts."""
    folder.mkdir()
    (folder / SCRIPT.name).write_text(SCRIPT.read_text())
    return folder


def _found(cause: str, folder: Path, done: subprocess.CompletedProcess[str]) -> Found:
    assert done.returncode == 0, done.stdout + done.stderr
    study: dict[str, Any] = json.loads((folder / "study.json").read_text())
    large = study["points"][-1]
    assert large["workers"] == 2, study["points"]
    assert abs(sum(large["causes"].values()) - (1 - large["efficiency"])) < 1e-9, "the causes add up"
    return Found(cause, large["efficiency"], large["causes"], study["advice"][0]["limit"])


def table(found: Sequence[Found]) -> str:
    lines = ["| put in | named first | efficiency | " + " | ".join(f"`{cause}`" for cause in CAUSES) + " |"]
    lines.append("|---" * (3 + len(CAUSES)) + "|")
    for one in found:
        shares = " | ".join(f"{100 * one.lost[cause]:.1f}" for cause in CAUSES)
        mark = "" if one.is_right else " (wrong)"
        lines.append(f"| {PUT_IN[one.cause]} | `{one.limit}`{mark} | {100 * one.efficiency:.0f} % | {shares} |")
    return "\n".join(lines)


def page(found: Sequence[Found], steps: int) -> str:
    return f"""# Is what slows training down named, and how much is left over?

`python benchmarks/causes.py` wrote this. Shares of the ideal speed that two workers lost, in points: they add up to
what efficiency lacks of 100 %. {steps} steps of 16 samples at 8 ms each. A row is one study, of one run of each size.

{table(found)}

{describe(Path(sys.executable), ["torch", "manyhosts"])} Load when it ended: {os.getloadavg()[0]:.0f}.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(EXPECTED), help="some of the causes")
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--record", type=Path, default=RESULTS)
    words = parser.parse_args()
    causes = words.only.split(",")
    if "link" in causes and (reason := why_not()):
        print(f"the link is left out: {reason.what}", file=sys.stderr)
        causes.remove("link")
    found = []
    for cause in causes:
        with tempfile.TemporaryDirectory() as folder:
            found.append(studied(cause, Path(folder).resolve() / "S", words.steps))
        print(table(found[-1:]), flush=True)
    if len(found) == len(EXPECTED):
        words.record.write_text(page(found, words.steps))
    return 0 if all(one.is_right for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
