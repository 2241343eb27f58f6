"""Is anything false in what `manyhosts prove` says of sixty scripts: right ones, wrong ones, and ones nobody can judge?

    python benchmarks/prove_answers.py

Each is trained on one worker and on two, and the weights are compared; where a look refuses it, it is trained without
looks. Then `prove` says whether workers change the answer. Each line goes to prove_answers.jsonl, the answer to
prove_answers.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from machine import origin, origins  # noqa: E402  # lies beside this file
from prove_answers_scripts import ANSWERS, apart, is_false  # noqa: E402  # lies among the tests

RECORD, REPORT = Path(__file__).with_suffix(".jsonl"), Path(__file__).with_suffix(".md")
SAID = {"holds": "✓", "fails": "✗", "not judged": "not judged"}


def main() -> None:
    """Prove all of them and write the answer."""
    from manyhosts.prove.prove import prove
    from manyhosts.prove.trials import Asked, make_stage

    lines, names = [], list(ANSWERS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "script.py"
        path.write_text("import manyhosts")
        stage = make_stage(Asked(script=str(path), folder=folder))
        for begin in range(0, len(names), 10):
            chunk = names[begin : begin + 10]
            distances = apart(chunk, folder / str(begin), timeout_s=600)
            for each in chunk:
                path.write_text(ANSWERS[each].code)
                asked = Asked(script=str(path), folder=folder, workers=(1, 2), steps=12, promises=("workers",))
                [verdict] = prove(asked, lambda _: None, stage).verdicts
                cause = "" if verdict.cause is None else verdict.cause.kind
                lines.append(line(each, distances[each], verdict.status, cause))
        stage.close()
    RECORD.write_text("".join(json.dumps(each) + "\n" for each in lines))
    REPORT.write_text(answer(lines))


def line(name: str, distance: float, status: str, cause: str) -> dict[str, Any]:
    return {"name": name, "apart": distance, "status": status, "cause": cause, "recorded": origin()}


def answer(lines: list[dict[str, Any]]) -> str:
    """The page."""
    false = [each["name"] for each in lines if is_false(each["status"], each["apart"])]
    counts = Counter(each["status"] for each in lines)
    rows = [
        f"| {each['name']} | {each['apart']:.0e} | {SAID[each['status']]} | {each['cause']} |".replace("nan", "-")
        for each in lines
    ]
    return "\n".join(
        [
            "# What `manyhosts prove` says of sixty scripts",
            "",
            "Written by `python benchmarks/prove_answers.py`; its first lines say what is compared, and how.",
            "",
            f"{origins(lines, 'scripts')}, under the load that this page names: other programs ran meanwhile.",
            "",
            f"* Scripts: {len(lines)}; ✓ of {counts['holds']}, ✗ of {counts['fails']}, "
            f"not judged, with the reason: {counts['not judged']}.",
            f"* False: {len(false)}{': ' * bool(false)}{', '.join(false)}.",
            "",
            "The first word says as what a script was written. Weights are apart by the largest difference of one "
            "number; -: it does not run on two workers.",
            "",
            "| script | weights of one worker and two apart by | prove | cause |",
            "|---|---:|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    main()
