"""Names and words that nobody would search for do not come back: in the code, its messages and its documents."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

NO_NAMES = """
reunion wishes telling second_place passengers lanes vigil witness nursery warmth crew roster outpost latecomer
elsewhere riders parcel aside skeleton shelf holder calls marks keeping station desk reception afar likeness
drifting freight freights ticket ghostly stood standing knock door open_door meeting mark seat seats together apart
judge aboard tell tells stretch stretches meet meets meetings beside behind leader
"""
"""No file, class or function is called one of these."""

NO_WORDS = {
    "outpost": "remote probe",
    "nursery": "fork server",
    "vigil": "hang monitor",
    "latecomer": "deferred agent",
    "roster": "group state",
    "parcel": "chunk",
    "shelf": "location",
    "crew": "worker group",
    "knock": "connect",
    "knocks": "connects",
    "riders": "control flags",
    "passengers": "packed metadata",
    "torn": "half-written, or inconsistent",
    "second place": "remote copy",
    "reunion": "rendezvous",
    "seat": "place",
    "seats": "places",
    "aboard": "packed",
    "ticket": "exchange under way",
    "freight": "bucket, or chunk",
    "afar": "the name of the file",
    "drifting": "moving apart",
    "warmth": "what stays for the next run",
    "skeleton": "nested state",
    "likeness": "description",
    "witness": "fingerprint",
    "telling": "event, or report",
    "reception": "acceptor",
}
"""Words that documents and messages do without, and what they say instead."""

RARE_WORDS = {
    "apart": (11, "separate, or flattened"),
    "stand|stands|stood": (19, "is, was"),
    "beside": (17, "next to, or meanwhile"),
    "behind": (15, "after"),
    "tell|tells": (23, "send, report, emit or distinguish"),
    "stretch|stretches": (8, "segment, range or period"),
    "once more": (3, "again"),
    "meeting|meetings|meet|meets": (13, "rendezvous, synchronise or resync"),
    "leader": (11, "rank 0"),
    "whoever": (9, "name who it is"),
    "nobody": (25, "no worker"),
    "goes on|go on|gone on": (24, "continue or resume"),
    "anew": (4, "again"),
    "told": (52, "reported, given or sent"),
    "held": (35, "kept, saved or contained"),
}
"""Words that the code, its comments too, uses no more often than that: here and there they are plain English."""


def names_in(path: Path) -> Iterator[str]:
    yield from path.relative_to(ROOT / "src").with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


def words_of(path: Path) -> str:
    """A document without what is quoted from code, or all strings of a file of code."""
    text = path.read_text()
    if path.suffix == ".md":
        return re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    strings = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    return "\n".join(string for string in strings if isinstance(string, str))


def test_nothing_has_a_name_that_nobody_would_search_for() -> None:
    bad = set(NO_NAMES.split())
    found = {(path.name, name) for path in SOURCES for name in names_in(path) if name.lower().strip("_") in bad}
    assert not found


def test_documents_and_messages_use_the_words_of_the_field() -> None:
    pattern = re.compile(rf"\b({'|'.join(NO_WORDS)})\b", re.IGNORECASE)
    found = {
        (path.name, word, f"say {NO_WORDS[word.lower()]}")
        for path in [*SOURCES, *DOCUMENTS]
        for word in pattern.findall(words_of(path))
    }
    assert not found


def test_words_of_a_private_language_stay_rare() -> None:
    code = "\n".join(path.read_text() for path in SOURCES)
    found = {words: len(re.findall(rf"\b({words})\b", code, re.IGNORECASE)) for words in RARE_WORDS}
    assert not {words: count for words, count in found.items() if count > RARE_WORDS[words][0]}, "say another word"


def test_the_search_finds_what_it_looks_for(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("The crew rests. `crew` is code.\n```\nvigil\n```\n")
    assert words_of(document).split() == ["The", "crew", "rests.", "is", "code."]
