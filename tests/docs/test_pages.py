"""What the documents say is true: their blocks run, their links lead somewhere, and nothing is left out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from pages import PAGES, ROOT, blocks_of, run_page

from manyhosts import errors, events
from manyhosts.config.overrides import known_keys

WITH_BLOCKS = [page for page in PAGES if {"python", "bash", "console"} & {b.language for b in blocks_of(page)}]

LONG = (
    "docs/tour.md",
    "docs/plan.md",
    "docs/large-models.md",
    "docs/doctor.md",
    "docs/study.md",
    "docs/reproduce.md",
    "docs/analyse.md",
    "docs/tune.md",
    "docs/activation-checkpointing.md",
    "docs/serving.md",
    "docs/fine-tuning.md",
)
"""Slow. What the tour has typed, README.md and docs/report.md have; what is typed on the others, tests of commands."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def words_of(page: str) -> str:
    return (ROOT / page).read_text()


@pytest.mark.multiprocess
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow) if name_of(page) in LONG else page for page in WITH_BLOCKS],
    ids=name_of,
)
def test_every_block_of_the_page_runs(page: Path, tmp_path: Path) -> None:
    run_page(blocks_of(page), tmp_path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```bash\nfalse\n```", "exit code 1"),
        ("```bash\nmake nonsense\n```", "No rule to make target"),
        ("```python\nraise SystemExit(3)\n```", "exit code 3"),
        ("```console\n$ echo yes\nno\n```", "said"),
        ("```console\n$ echo one; echo two\none\n```", "said"),
    ],
)
def test_block_that_is_untrue_is_found(text: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=complaint):
        run_page(blocks_of(ROOT / "README.md", text + "\n"), tmp_path)


def test_true_blocks_pass(tmp_path: Path) -> None:
    text = "```python\n# one.py\nprint('one')\n```\n\n```console\n$ python one.py\none\n$ echo a b c\na...c\n```\n"
    run_page(blocks_of(ROOT / "README.md", text), tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_the_page_lead_to_files(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", prose):
        if not re.match(r"(https?|mailto):", target):
            path, _, anchor = target.partition("#")
            file = (page.parent / path) if path else page
            assert file.exists(), f"{name_of(page)} links to {target}"
            if anchor:
                titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
                anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
                assert anchor in anchors, f"{name_of(page)} links to {target}"


def test_readme_fits_in_150_lines() -> None:
    assert len(words_of("README.md").splitlines()) < 150


def test_every_setting_is_explained() -> None:
    text = words_of("docs/settings.md")
    assert not [key for key in known_keys() if f"| `{key}`" not in text]


def test_no_setting_is_explained_that_does_not_exist() -> None:
    explained = re.findall(r"^\| `([\w.]+)`", words_of("docs/settings.md"), re.MULTILINE)
    assert set(explained) <= set(known_keys())


def test_every_error_is_explained_with_its_exit_code() -> None:
    text = words_of("docs/errors.md")
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.ManyhostsError) and kind is not errors.ManyhostsError:
            assert re.search(rf"^## {name}, exit code {kind.exit_code}$", text, re.MULTILINE), name


def test_every_event_is_on_the_page_of_events() -> None:
    text = words_of("docs/events.md")
    assert not [kind.__name__ for kind in events.Event.__args__ if kind.__name__ not in text]


def test_every_field_of_every_event_is_on_the_page_of_events() -> None:
    sections = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", words_of("docs/events.md"), re.MULTILINE))
    for kind in events.Event.__args__:
        named = set(re.findall(r"`(\w+)`", sections[kind.__name__]))
        assert named == set(kind.__dataclass_fields__) - {"time"}, kind.__name__


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_example_is_short_and_mentioned(example: Path) -> None:
    assert len(example.read_text().splitlines()) < 80
    ast.parse(example.read_text())
    everywhere = "".join(page.read_text() for page in PAGES)
    assert f"examples/{example.name}" in everywhere, f"no page mentions examples/{example.name}"


def test_every_decision_is_in_the_list_of_decisions() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = set(re.findall(r"\]\((\d{4}[\w-]+\.md)\)", (folder / "README.md").read_text()))
    assert listed == {path.name for path in folder.glob("0*.md")}


def test_every_recorded_benchmark_is_in_the_list_of_benchmarks() -> None:
    folder = ROOT / "benchmarks"
    listed = (folder / "README.md").read_text()
    asks = [path for path in folder.glob("*.py") if "__main__" in path.read_text()]
    assert not [path.name for path in asks if f"`{path.name}`" not in listed]
