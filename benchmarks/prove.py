"""Does `manyhosts prove` accuse a right script, and does it name the cause in a broken one?

    python benchmarks/prove.py [--rounds N] [--quick]

Every right script of the tests and every example is proved N times over, with other numbers of workers and steps each
time; every broken script of the tests once. `--quick` leaves the examples out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from machine import describe  # noqa: E402  # lies beside this file
from prove_scripts import BROKEN, RIGHT, Script  # noqa: E402  # lies among the tests

from manyhosts.errors import ManyhostsError  # noqa: E402
from manyhosts.prove.prove import prove  # noqa: E402
from manyhosts.prove.trials import Asked, make_stage  # noqa: E402
from manyhosts.trials.forked import LocalTrialRunner  # noqa: E402

ANSWER = Path(__file__).with_suffix(".md")
WORKERS = ((1, 2), (1, 2, 3), (1, 3), (2, 3), (1, 4))
STEPS = (20, 10, 16, 12, 30)


@dataclass(frozen=True)
class Found:
    """What one proof said."""

    name: str
    is_right: bool
    right: bool
    """Whether it said what is so."""
    words: str
    seconds: float
    trials: int


def main() -> None:
    """Prove all of them and write the answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = list(_all(Path(folder), rounds=asked.rounds, examples=not asked.quick))
    ANSWER.write_text(_answer(found, asked.rounds))
    print(f"wrote {ANSWER}")


def _all(folder: Path, *, rounds: int, examples: bool) -> Iterator[Found]:
    path = folder / "script.py"
    path.write_text("import manyhosts")
    stage = make_stage(Asked(script=str(path), folder=folder))
    for number in range(rounds):
        workers, steps = WORKERS[number % len(WORKERS)], STEPS[number % len(STEPS)]
        for name, script in RIGHT.items():
            if (script.text.count("virtual_workers=3") and max(workers) > 3) or max(workers) > (
                os.cpu_count() or 1
            ) * 2:
                workers = (1, 3)
            yield _proved(name, script, path, stage, workers, steps)
    for name, script in BROKEN.items():
        yield _proved(name, script, path, stage, (1, 2), 8)
    stage.close()
    for example in sorted((ROOT / "examples").glob("*.py")) if examples else ():
        yield _proved(f"examples/{example.name}", Script(""), example, None, (1, 2, 3), 20)


def _proved(
    name: str, script: Script, path: Path, stage: LocalTrialRunner | None, workers: tuple[int, ...], steps: int
) -> Found:
    if stage is not None:
        path.write_text(script.code)
    promises = (script.promise,) if script.promise else ()
    asked = Asked(script=str(path), folder=path.parent, workers=workers, steps=steps, promises=promises)
    began = time.perf_counter()
    try:
        proof = prove(asked, lambda _: None, stage)
    except ManyhostsError as error:
        return Found(name, not script.promise, False, str(error.what), time.perf_counter() - began, 0)
    failed = [verdict for verdict in proof.verdicts if verdict.status == "fails"]
    causes = ", ".join(verdict.cause.kind for verdict in failed if verdict.cause is not None)
    right = causes == script.cause if script.promise else not failed
    found = Found(name, not script.promise, right, causes or "holds", proof.seconds, proof.trials)
    print(f"{'ok   ' if right else 'WRONG'} {name}, workers {workers}, {steps} steps: {found.words}", flush=True)
    return found


def _answer(found: list[Found], rounds: int) -> str:
    right, broken = [one for one in found if one.is_right], [one for one in found if not one.is_right]
    accused = [one for one in right if not one.right]
    named = [one for one in broken if one.right]
    lines = [
        "# Whom `manyhosts prove` accuses",
        "",
        "Written by `python benchmarks/prove.py`; its first lines say what is tried, and how.",
        "",
        describe(Path(sys.executable), ["torch", "manyhosts"]),
        f"{rounds} rounds of right scripts, each with other numbers of workers and steps.",
        "",
        f"* Proofs of right scripts: {len(right)}; accused of something: {len(accused)}.",
        *(f"  * {one.name}: {one.words}" for one in accused),
        f"* Broken scripts: {len(broken)}; cause named: {len(named)}.",
        *(f"  * {one.name}: {one.words}" for one in broken if not one.right),
        f"* Seconds for a right script: {_spread([one.seconds for one in right])};",
        f"  for a broken one, its promise alone: {_spread([one.seconds for one in broken])}.",
        "",
        "| broken script | cause named | trials | seconds |",
        "|---|---|---:|---:|",
        *(f"| {one.name} | {one.words} | {one.trials} | {one.seconds:.1f} |" for one in broken),
    ]
    return "\n".join(lines) + "\n"


def _spread(values: list[float]) -> str:
    if not values:
        return "none were tried"
    return f"{statistics.median(values):.1f} ({min(values):.1f} - {max(values):.1f})"


if __name__ == "__main__":
    main()
