"""Pages of Markdown as programs: the blocks of a page, run from top to bottom in one empty folder.

python    first line `# name.py`: a file of that name; without one: all such blocks of the page are one program
bash      every line is run; a line with `make` is only asked whether Makefile knows the target
console   lines that begin with `$ ` are run, the lines below them are what must come out; `...` stands for anything
text, toml, json, ...  are shown and not run
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
TIMEOUT_S = 120


@dataclass(frozen=True)
class Block:
    """A fenced block and where it begins."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path, text: str | None = None) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text() if text is None else text
    found = re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(page, text[: match.start()].count("\n") + 1, match[1], match[2]) for match in found]


def run_page(blocks: list[Block], folder: Path, programs: Path = Path(sys.executable).parent) -> None:
    """Run what can be run of `blocks`, with the `python` and `manyhosts` that are in the folder `programs`.

    Raises AssertionError, with the place, for the first that fails.
    """
    shutil.copytree(ROOT / "examples", folder / "examples")
    program = ""
    for block in blocks:
        name = re.match(r"# (\w+\.py)\n", block.text)
        if block.language == "python" and name:
            (folder / name[1]).write_text(block.text)
        elif block.language == "python":
            program += block.text + "\n"
        elif block.language == "bash":
            for command in commands_in(block.text):
                _succeeds(command, folder, block.place, programs)
        elif block.language == "console":
            for command, wanted in dialogue_in(block.text):
                _says(command, wanted, folder, block.place, programs)
    if program:
        (folder / "page.py").write_text(program)
        _succeeds("python page.py", folder, f"python blocks of {blocks[0].page.relative_to(ROOT)}", programs)


def commands_in(text: str) -> list[str]:
    """The commands of a bash block: its lines without comments, those that end in a backslash joined."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def dialogue_in(text: str) -> list[tuple[str, str]]:
    """The commands of a console block, each with what must come out."""
    parts = re.split(r"^\$ (.*)\n", text, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def _run(command: str, folder: Path, programs: Path) -> subprocess.CompletedProcess:
    words = re.sub(r"\s+#.*", "", command)
    targets = re.match(r"make(( [\w-]+)+)$", words)
    if targets:
        return subprocess.run(
            ["make", "-n", *targets[1].split()], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
    variables = os.environ | {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "COLUMNS": "100",
    }
    return subprocess.run(
        ["bash", "-c", words], cwd=folder, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def _succeeds(command: str, folder: Path, place: str, programs: Path) -> None:
    done = _run(command, folder, programs)
    assert done.returncode == 0, f"{place}: {command}\nexit code {done.returncode}\n{done.stdout}\n{done.stderr}"


def _says(command: str, wanted: str, folder: Path, place: str, programs: Path) -> None:
    done = _run(command, folder, programs)
    pattern = ".*".join(re.escape(part) for part in re.split(r"\.\.\.", wanted.strip()))
    # A page shows what a terminal does: what a command says on the way may come before what it prints.
    orders = done.stdout + done.stderr, done.stderr + done.stdout
    is_said = any(re.fullmatch(pattern, said.strip(), re.DOTALL) for said in orders)
    assert is_said, f"{place}: {command}\nsaid\n{orders[0]}\nand not\n{wanted}"
