"""What a line of `metrics.jsonl` says, as a sentence for a person."""

from __future__ import annotations

from collections.abc import Callable

from manyhosts.listeners.figures import amount, figure, figures
from manyhosts.records.line_file import Line
from manyhosts.units import bytes_in_words, seconds_in_words


def sentence(line: Line) -> str:
    """What happened; empty for what is reported by curves, and for what is not known here."""
    words = _WORDS.get(str(line.get("event")))
    return words(line) if words else ""


def is_trouble(line: Line) -> bool:
    """Whether it is something that went wrong."""
    slow = line["event"] == "slow" and line["factor"] > 1
    return line["event"] in ("restart", "skipped") or slow or line.get("status") == "failed"


def _start(line: Line) -> str:
    if not line["step"]:
        return "training begins"
    source = f" from {_last_word(line['resumed_from'])}" if line.get("resumed_from") else ""
    return f"continues after step {line['step']}{source}"


def _validation(line: Line) -> str:
    return f"validation: {figures(line['values'], ', ')}{' (the best)' if line['best'] else ''}"


def _snapshot(line: Line) -> str:
    size, seconds = bytes_in_words(line["bytes"]), seconds_in_words(line["seconds"])
    return f"snapshot of {size} in {seconds}: {_last_word(line['path'])}"


def _restart(line: Line) -> str:
    cost = f"{amount(line['steps_redone'], 'step')} redone, {seconds_in_words(line['seconds_lost'])} lost"
    also = f"; lost with it: {line['lost']}" if line.get("lost") else ""
    return f"continued {line['how']} after {line['reason']}: {cost}{also}"


def _end(line: Line) -> str:
    return f"{line['status']}: {line['reason']}" if line.get("reason") else str(line["status"])


def _last_word(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


_WORDS: dict[str, Callable[[Line], str]] = {
    "start": _start,
    "epoch": lambda line: f"epoch {line['epoch'] + 1}: {figure('loss', line['train_loss'])}",
    "validation": _validation,
    "snapshot": _snapshot,
    "copied": lambda line: f"copied to {line['address']}: {bytes_in_words(line['bytes'])}",
    "skipped": lambda line: f"snapshot {_last_word(line['path'])} is left out: {line['reason']}",
    "restart": _restart,
    "note": lambda line: str(line["text"]),
    "slow": lambda line: str(line["text"]),
    "compression": lambda line: f"compression {line['compression']}: {line['why']}",
    "end": _end,
    "test": lambda line: f"test: {figures(line['values'], ', ')}",
}
