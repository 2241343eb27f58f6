"""How long do many workers take to meet through the channel of their agents, and does that grow with their number?

    python benchmarks/meeting_of_many.py [--rounds 5]

Workers are threads that ask what Gloo's workers ask before they are connected; agents, TLS, the head's board and its
file, which is on the disk before anybody is answered, are real (tests/swarm.py). For comparison some meet in the old
way, by which each asks for each other one by itself. By turns; the answer is written to meeting_of_many.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from machine import describe

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from swarm import Meeting, swarm

REPORT = Path(__file__).with_suffix(".md")
SIZES = ((10, 1), (25, 3), (50, 5), (100, 10), (100, 100), (200, 20))
"""Workers and hosts."""
ONE_BY_ONE = ((10, 1), (25, 3), (50, 5))


def measure(rounds: int) -> dict[tuple[int, int, bool], list[Meeting]]:
    found: dict[tuple[int, int, bool], list[Meeting]] = {}
    for turn in range(rounds + 1):
        for together, sizes in ((True, SIZES), (False, ONE_BY_ONE)):
            for workers, hosts in sizes:
                with tempfile.TemporaryDirectory() as folder, swarm(Path(folder), workers, hosts) as made:
                    meeting = made.meet(0, together=together)
                if turn:  # the first is a warm-up
                    found.setdefault((workers, hosts, together), []).append(meeting)
    return found


def report(found: dict[tuple[int, int, bool], list[Meeting]], rounds: int) -> str:
    rows = []
    for (workers, hosts, together), meetings in sorted(found.items(), key=lambda each: (not each[0][2], each[0])):
        seconds = [meeting.seconds for meeting in meetings]
        questions = statistics.median(meeting.questions for meeting in meetings)
        writes = statistics.median(meeting.writes for meeting in meetings)
        way = "all at once" if together else "one by one"
        rows.append(
            f"| {workers} | {hosts} | {way} | {statistics.median(seconds):.2f} s |"
            f" {min(seconds):.2f} s | {max(seconds):.2f} s | {questions:.0f} | {writes:.0f} |"
        )
    lines = "\n".join(rows)
    return f"""# How long many workers take to meet

Written by `python benchmarks/meeting_of_many.py --rounds {rounds}`, whose first lines say what is done.

{describe(Path(sys.executable), ["torch", "manyhosts"])}

n = {rounds} each, by turns:

| workers | hosts | each asks for the others | median | least | most | questions to the head | writes of its file |
|---:|---:|---|---:|---:|---:|---:|---:|
{lines}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    REPORT.write_text(report(measure(asked.rounds), asked.rounds))
    print(REPORT.read_text())


if __name__ == "__main__":
    main()
