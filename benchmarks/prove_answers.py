"""Is anything false in what `manyhosts prove` says of sixty scripts that were written to mislead it?

    python benchmarks/prove_answers.py [PART OF A NAME...]

All promises of each are tried on one worker and on two. What holds is known beforehand (`prove_answers_list.py`). A `✓`
of a promise that is broken is false, and a `✗` of one that holds. Each line goes to prove_answers.jsonl in place of the
one of before, the answer to prove_answers.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks")]

from machine import origin, origins, recorded  # noqa: E402  # lies beside this file
from prove_answers_list import SCRIPTS, Script  # noqa: E402  # likewise

from manyhosts.errors import ManyhostsError  # noqa: E402
from manyhosts.prove.prove import prove  # noqa: E402
from manyhosts.prove.trials import Asked, make_stage  # noqa: E402
from manyhosts.trials.forked import LocalTrialRunner  # noqa: E402

RECORD, REPORT = Path(__file__).with_suffix(".jsonl"), Path(__file__).with_suffix(".md")
SAID = {"holds": "✓", "fails": "✗", "not judged": "-"}
STEPS, ALIKE = 16, 10
"""Optimizer steps of a trial, and scripts that are forked from one process."""
MENDED = (
    "Found by them, and mended before this record: `✓` of a loss that compares samples by what is drawn for them, of a "
    "gradient too small for float32, and (`micro`) of a term that grows slowly; `✗` of RReLU, of samples in an order "
    "of the script's that repeats some, of promises that a refusal on two workers leaves untried, and of a pipeline; a "
    "cause that named what `prove` itself keeps."
)


def main(wanted: list[str]) -> None:
    """Prove those that are wanted, or all, and write the answer."""
    names = [name for name in SCRIPTS if not wanted or any(each in name for each in wanted)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        for begin in range(0, len(names), ALIKE):
            path.write_text("import manyhosts")
            stage = make_stage(Asked(script=str(path), folder=path.parent))
            for name in names[begin : begin + ALIKE]:
                keep({"name": name, **tried(SCRIPTS[name], path, stage), "recorded": {**origin(), "when": recorded()}})
            stage.close()
    REPORT.write_text(answer(lines()))


def tried(script: Script, path: Path, stage: LocalTrialRunner) -> dict[str, Any]:
    """What is said of each promise, and what of that is false."""
    path.write_text(script.code)
    asked = Asked(script=str(path), folder=path.parent, workers=(1, 2), steps=STEPS)
    try:
        verdicts = prove(asked, lambda _: None, stage).verdicts
    except ManyhostsError as error:  # by itself it ends so, on one worker
        return {"said": {}, "why": error.what, "false": []}
    said = {each.promise: SAID[each.status] for each in verdicts}
    false = [f"✓ {name}" for name in script.broken if said[name] == "✓" and name not in script.unsure]
    false += [
        f"✗ {name}" for name, mark in said.items() if mark == "✗" and name not in (*script.broken, *script.unsure)
    ]
    first = min(verdicts, key=lambda each: "✗-✓".index(SAID[each.status]))
    why = first.cause.what if first.cause is not None else first.note * (first.status != "holds")
    return {"said": said, "why": why, "false": false}


def lines() -> list[dict[str, Any]]:
    """What is recorded, in the order of the scripts."""
    kept = [json.loads(text) for text in RECORD.read_text().splitlines()] if RECORD.exists() else []
    by_name = {each["name"]: each for each in kept}
    return [by_name[name] for name in SCRIPTS if name in by_name]


def keep(line: dict[str, Any]) -> None:
    """Add a line."""
    print(line["name"], "".join(line["said"].values()), line["false"] or "", flush=True)
    with RECORD.open("a") as file:
        file.write(json.dumps(line) + "\n")


def answer(found: list[dict[str, Any]]) -> str:
    """The page."""
    marks = Counter(mark for each in found for mark in each["said"].values())
    false = [f"{each['name']} ({', '.join(each['false'])})" for each in found if each["false"]]
    kinds = Counter(each["name"].partition(":")[0] for each in found)
    rows = [
        f"| {each['name']} | {', '.join(SCRIPTS[each['name']].broken) or '-'} | {' | '.join(marks_of(each))} |"
        f" {short(each['why'])} |"
        for each in found
    ]
    return "\n".join(
        [
            "# What `manyhosts prove` says of sixty scripts that were written to mislead it",
            "",
            "Written by `python benchmarks/prove_answers.py`; its first lines say what is compared, and how.",
            "",
            f"{origins(found, 'scripts')}, {found[-1]['recorded']['when'].rpartition(', ')[2]}: other programs ran "
            "meanwhile.",
            "",
            f"* Scripts, n = {len(found)}: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}. Promises "
            f"of them: ✓ {marks['✓']}, ✗ {marks['✗']}, not judged, with the reason: {marks['-']}.",
            f"* False: {len(false)}{': ' * bool(false)}{'; '.join(false)}.",
            "",
            MENDED,
            "",
            "Which promises do not hold was known before. A script that is refused on two workers breaks the first of "
            "them; its samples and ranks could not be tried.",
            "",
            "| script | broken | workers | micro | resume | samples | ranks | the first reason |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def marks_of(line: dict[str, Any]) -> list[str]:
    """One for each promise; none where the script ends by itself."""
    return list(line["said"].values()) or [""] * 5


def short(text: str) -> str:
    """A cell of a table."""
    words = text.replace("|", "/").replace("\n", " ")
    return words if len(words) < 140 else words[:137] + "…"


if __name__ == "__main__":
    main(sys.argv[1:])
