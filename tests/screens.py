"""A terminal made of text: what a person sees after the writes that a program made."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\x1b\[(?P<arguments>[0-9;?]*)(?P<command>[A-Za-z])|(?P<text>[^\x1b])", re.DOTALL)


class Screen:
    """Understands carriage return, newline, colours and "erase to the end of the line", and refuses everything else."""

    def __init__(self) -> None:
        self.lines = [""]
        self.column = 0
        self.colours = 0

    def feed(self, text: str) -> Screen:
        for token in _TOKEN.finditer(text):
            if token["command"] == "m":
                self.colours += 1
            elif token["command"] == "K":
                assert token["arguments"] in ("", "0"), f"erase {token['arguments']!r} is not known here"
                self.lines[-1] = self.lines[-1][: self.column]
            elif token["command"]:
                raise AssertionError(f"{token[0]!r} is not known here")
            else:
                self._put(token["text"])
        return self

    def _put(self, sign: str) -> None:
        if sign == "\n":
            self.lines.append("")
            self.column = 0
        elif sign == "\r":
            self.column = 0
        else:
            line = self.lines[-1].ljust(self.column)
            self.lines[-1] = line[: self.column] + sign + line[self.column + 1 :]
            self.column += 1

    @property
    def text(self) -> list[str]:
        """The lines without the empty ones at the end."""
        lines = list(self.lines)
        while lines and not lines[-1].strip():
            lines.pop()
        return lines
