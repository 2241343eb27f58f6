"""What `manyhosts prove` shows: a line while a trial runs, then one line per promise, then why one does not hold."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from manyhosts.listeners.paint import Colour, paint, writable
from manyhosts.units import seconds_in_words

if TYPE_CHECKING:
    from manyhosts.prove.promises import Verdict
    from manyhosts.prove.prove import Proof

_WIDTH = 80
_SIGNS: dict[str, tuple[str, Colour]] = {
    "holds": ("✓", "green"), "fails": ("✗", "red"), "not judged": ("-", "yellow")
}  # fmt: skip
_PLAIN = {"✓": "ok  ", "✗": "FAIL"}


def print_proof(proof: Proof, stream: TextIO) -> None:
    """Print everything, in colours on a terminal."""
    from manyhosts.prove.promises import PROMISES

    colour = stream.isatty()
    numbers = [str(count) for count in proof.asked.workers]
    counted = f"{', '.join(numbers[:-1])} and {numbers[-1]}" if numbers[1:] else numbers[0]
    lines = [f"{proof.asked.script}: {proof.trials} trials of {proof.asked.steps} steps, "
             f"{seconds_in_words(proof.seconds)}", ""]  # fmt: skip
    lines += busy(proof, os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, os.cpu_count() or 1)
    if lost := [verdict.promise for verdict in proof.verdicts if verdict.promise in proof.given_up]:
        asked = ", ".join(verdict.promise for verdict in proof.verdicts)
        text = f"asked for: {asked}; of these the script's strategy does not keep: {', '.join(lost)}"
        lines += [*textwrap.wrap(text, _WIDTH - 2, initial_indent=" ", subsequent_indent=" "), ""]
    for verdict in proof.verdicts:
        lines += _line(verdict, PROMISES[verdict.promise][0].format(workers=counted), colour=colour)
    for verdict in proof.verdicts:
        if verdict.status == "fails":
            lines += _why(verdict, colour=colour)
    text = "\n".join(lines) + "\n"
    encoding = stream.encoding
    if writable("✓", encoding) != "✓":
        for sign, word in _PLAIN.items():
            text = text.replace(sign, word)
    stream.write(writable(text, encoding))


def busy(proof: Proof, load: float, cores: int) -> list[str]:
    """That the machine was busy, where something fails: what waits for a core looks like what waits for a worker."""
    most = max(proof.asked.workers) + 1  # a trial of our own is among them
    if load <= cores + most or all(each.status != "fails" for each in proof.verdicts):
        return []
    text = (
        f"careful: {load:.0f} processes wanted the {cores} cores in the minute before; a trial that waits for a core "
        "may look like one that hangs in a collective. Prove it again when the machine is quiet."
    )
    return [*textwrap.wrap(text, _WIDTH - 2, initial_indent=" ", subsequent_indent=" "), ""]


def _line(verdict: Verdict, promise: str, *, colour: bool) -> list[str]:
    sign, painted = _SIGNS[verdict.status]
    lines = [f" {paint(sign, painted) if colour else sign} {promise}"]
    note = textwrap.wrap(verdict.note, _WIDTH - 4)
    return [*lines, *(f"   {paint(line, 'dim') if colour else line}" for line in note)]


def _why(verdict: Verdict, *, colour: bool) -> list[str]:
    lines = [
        "",
        paint(f"{verdict.promise}: {verdict.where}", "bold") if colour else f"{verdict.promise}: {verdict.where}",
    ]
    if verdict.departure is not None:
        lines += _wrapped("first:", str(verdict.departure))
    if verdict.cause is not None:
        lines += _wrapped("cause:", verdict.cause.what)
        lines += _wrapped("seen:", verdict.cause.evidence)
        lines += _wrapped("fix:", verdict.cause.fix)
    return lines


def _wrapped(word: str, text: str) -> Sequence[str]:
    """`text` behind `word`, in lines that stand below each other."""
    parts = textwrap.wrap(text, _WIDTH - 10, break_long_words=False, break_on_hyphens=False)
    return [f"  {word if not number else '':<7} {part}" for number, part in enumerate(parts)]
