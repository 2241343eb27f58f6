"""Do the promises hold in training loops that nobody here wrote? Eight of them, moved into `mh.Run` by a few lines.

    python benchmarks/foreign_loops.py                      # clones what it needs from GitHub
    python benchmarks/foreign_loops.py --sources DIR        # bare clones in DIR/OWNER+NAME/repo
    python benchmarks/foreign_loops.py --only DINO
    python benchmarks/foreign_loops.py --page               # only the page, from what is recorded

No line of theirs is kept here: foreign_loops_list.py names repository, commit, file and its sha256, and says which
lines by number leave and which of ours come in their place. Data are small and random, made by those lines. Each loop
is trained four times: by one worker, by two, by two of which one is killed after the first snapshot, and by two that
are all killed then, after which one continues. Losses of all steps and the hash of the weights at the end are to be
those of one worker. What came of it goes to foreign_loops.jsonl, and from there to foreign_loops.md. Needs gymnasium
for SAC, peft and transformers for AdaLoRA.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from foreign_loops_list import LOOPS, Loop
from machine import describe, recorded

HERE = Path(__file__).parent
RECORD, PAGE = HERE / "foreign_loops.jsonl", HERE / "foreign_loops.md"
LIMIT_S = 400.0
WAYS = {"1 worker": 1, "2 workers": 2, "one of 2 killed": 2, "all killed, resumed by 1": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sources", type=Path, help="a folder of bare clones: OWNER+NAME/repo")
    parser.add_argument("--url", default="https://github.com/", help="where to clone OWNER/NAME from")
    parser.add_argument("--work", type=Path, default=Path("foreign-loops"), help="a folder to work in")
    parser.add_argument("--only", default="", help="loops whose name holds these words")
    parser.add_argument("--page", action="store_true", help="write the page from the record, and run nothing")
    asked = parser.parse_args()
    for loop in LOOPS:
        if asked.only in loop.name and not asked.page:
            row = tried(loop, cloned(loop.repository, asked.work.absolute(), asked.sources, asked.url), asked.work)
            keep(row)
            print(json.dumps(row), flush=True)
    PAGE.write_text(page())


def cloned(repository: str, work: Path, sources: Path | None, url: str) -> Path:
    """The git directory of a clone of `repository` (OWNER/NAME)."""
    if sources is not None:
        place = sources / repository.replace("/", "+") / "repo"
        return place / ".git" if (place / ".git").exists() else place
    place = work / "clones" / repository.replace("/", "+")
    if not place.exists():
        words = ["git", "clone", "--quiet", "--bare", "--filter=blob:none", f"{url}{repository}", str(place)]
        subprocess.run(words, check=True)
    return place


def shown(clone: Path, commit: str, path: str) -> bytes:
    words = ["git", "--git-dir", str(clone), "show", f"{commit}:{path}"]
    return subprocess.run(words, check=True, capture_output=True).stdout


def edited(text: str, loop: Loop) -> str:
    """The script with lines of ours in the place of some of its own."""
    lines = text.splitlines()
    for first, last, ours in sorted(loop.edits, reverse=True):
        lines[first - 1 : last] = ours.splitlines()
    return "\n".join(lines) + "\n"


def written(loop: Loop, clone: Path, folder: Path) -> Path:
    """The edited script in `folder`, with the files that it imports beside it."""
    found = shown(clone, loop.commit, loop.path)
    assert hashlib.sha256(found).hexdigest() == loop.sha256, f"{loop.path} is not the file that the edits were made for"
    for path in loop.beside:
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(shown(clone, loop.commit, path))
    script = folder / loop.path
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(edited(found.decode(), loop))
    return script


def tried(loop: Loop, clone: Path, work: Path) -> dict[str, Any]:
    """Train the loop in all ways, and compare."""
    outcomes = {}
    for way, workers in WAYS.items():
        folder = work.absolute() / loop.name / way.replace(",", "").replace(" ", "-")
        shutil.rmtree(folder, ignore_errors=True)
        run = Training(loop, written(loop, clone, folder), folder)
        if way.startswith("all"):
            run.start(2)
            run.kill_after_first_snapshot(run.family)
            run.process.wait()
        run.start(workers)
        if way.startswith("one"):
            run.kill_after_first_snapshot(run.worker)
        outcomes[way] = run.outcome()
        print(loop.name, way, run.killed, outcomes[way]["sha256"][:10], outcomes[way]["error"], flush=True)
    first = outcomes["1 worker"]
    return {
        "name": loop.name,
        "repository": loop.repository,
        "commit": loop.commit,
        "path": loop.path,
        "ours": loop.ours,
        "data": loop.data_lines,
        "ways": {way: verdict(each, first) for way, each in outcomes.items()},
        "losses": first["losses"][:1] + first["losses"][-1:],
        "torch": version("torch"),
        "recorded": recorded(),
    }


def verdict(found: dict[str, Any], first: dict[str, Any]) -> str:
    """What came of one way of training, in the words of the page."""
    if found["error"]:
        return str(found["error"])
    if found["sha256"] == first["sha256"] and found["losses"] == first["losses"]:
        return f"{len(found['losses'])} steps" if found is first else "equal bits"
    most = max((abs(one - other) for one, other in zip(found["losses"], first["losses"], strict=False)), default=0.0)
    return f"{len(found['losses'])} steps, losses differ by at most {most:.1e}"


class Training:
    """One training of an edited script."""

    def __init__(self, loop: Loop, script: Path, folder: Path) -> None:
        self.loop, self.script, self.folder, self.run_dir = loop, script, folder, folder / "run"
        self.ended_early = False
        """Whether it was over before it could be killed."""
        self.killed = 0

    def start(self, workers: int) -> None:
        words = [sys.executable, "-P", "-m", "manyhosts.cli.main", "run", "--workers", str(workers)]
        words += ["--run-dir", str(self.run_dir), str(self.script), *self.loop.words]
        path = os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        with (self.folder / "output").open("ab") as output:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                words, cwd=self.script.parent, env=variables,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def family(self) -> list[psutil.Process]:
        try:
            command = psutil.Process(self.process.pid)
            return [*command.children(recursive=True), command]
        except psutil.NoSuchProcess:
            return []

    def worker(self) -> list[psutil.Process]:
        """The worker of rank 1."""
        return [each for each in self.family() if "rank 1 of 2" in _title(each)][:1]

    def kill_after_first_snapshot(self, victims: Callable[[], list[psutil.Process]]) -> None:
        """Kill `victims()` when a snapshot is there."""
        while self.process.poll() is None:
            if any(self.folder.glob("run/snapshots/step-*")):
                for each in victims():
                    os.kill(each.pid, signal.SIGKILL)
                    self.killed += 1
                return
            time.sleep(0.01)
        self.ended_early = True

    def outcome(self) -> dict[str, Any]:
        """The hash of the weights, the losses of all steps, or why there are none."""
        if self.ended_early:
            return {"error": "ended before it was killed", "losses": [], "sha256": ""}
        try:
            code = self.process.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            for each in self.family():
                os.kill(each.pid, signal.SIGKILL)
            return {"error": f"still running after {LIMIT_S:.0f} s", "losses": [], "sha256": ""}
        text = (self.folder / "output").read_text(errors="replace")
        if code:
            lines = [line for line in text.splitlines() if "rror" in line]
            return {"error": (lines or text.splitlines() or ["?"])[-1][:200], "losses": [], "sha256": ""}
        events = [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]
        losses = {each["step"]: each["loss"] for each in events if each["event"] == "step"}
        summary = json.loads((self.run_dir / "summary.json").read_text())
        return {"error": "", "losses": list(losses.values()), "sha256": summary["weights_sha256"]}


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


def rows_kept() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RECORD.read_text().splitlines()] if RECORD.exists() else []


def keep(row: dict[str, Any]) -> None:
    """Put a row into the record, in place of the one of the same loop."""
    order = [loop.name for loop in LOOPS]
    rows = [each for each in rows_kept() if each["name"] != row["name"] and each["name"] in order]
    rows = sorted([*rows, row], key=lambda each: order.index(each["name"]))
    RECORD.write_text("".join(json.dumps(each) + "\n" for each in rows))


def page() -> str:
    """The page with what came of all loops."""
    rows = {row["name"]: row for row in rows_kept()}
    packages = [name for name in ("torch", "manyhosts", "gymnasium", "peft", "transformers") if _has(name)]
    lines = [
        "# Loops that nobody here wrote",
        "",
        "Written by `python benchmarks/foreign_loops.py`; its first lines say what is done, and how.",
        "",
        f"{describe(Path(sys.executable), packages)}",
        "",
        "*Ours* counts the lines that come in the place of theirs, those that make data not included; *data*",
        "counts those. All have virtual workers, so that bits can be compared with those of one worker.",
        "",
        f"| loop | file | ours | data | {' | '.join(WAYS)} |",
        f"|---|---|---:|---:|{'---|' * len(WAYS)}",
    ]
    for loop in LOOPS:
        row = rows.get(loop.name)
        ways = ["not tried yet"] * len(WAYS) if row is None else [row["ways"].get(way, "-") for way in WAYS]
        place = f"{loop.repository} `{loop.commit[:10]}` {loop.path}"
        lines.append(f"| {loop.name} | {place} | {loop.ours} | {loop.data_lines} | {' | '.join(ways)} |")
    lines += ["", "What does not hold, and what was moved how:", ""]
    lines += [f"* **{loop.name}**: {loop.remark}" for loop in LOOPS]
    return "\n".join(lines) + "\n"


def _has(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
