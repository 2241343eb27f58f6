"""`manyhosts report`: one HTML page of a run, a study or several runs; or the card of a model in Markdown."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from manyhosts.errors import ConfigError
from manyhosts.launchers.named_runs import directory_of
from manyhosts.records.atomic_file import write_atomically

_COMPARED, _CARD = "comparison.html", "MODEL_CARD.md"
_SEARCH = "tune.json"


@click.command()
@click.option("--markdown", is_flag=True, help="A card of the model of one run in Markdown, in place of a page.")
@click.option(
    "--output", metavar="FILE", help=f"Where to write the page.  [default: RUN/report.html, {_COMPARED} or {_CARD}]"
)
@click.option("--trace", is_flag=True, help="Show where in manyhosts an error was raised.")
@click.argument("directories", nargs=-1, required=True, metavar="RUN...")
def report(directories: tuple[str, ...], output: str | None, markdown: bool, trace: bool) -> int:
    """Write one self-contained HTML page of RUN: a directory, the handle that `run --detach` printed, or `last`.

    \b
    A run      what came out, curves, where the time went, what happened when, settings, how to do it again
    A study    verdict, plots, tables, why runs failed, and how to do it again
    Several    runs compared: what came out, which settings differ, their curves on the same axes

    With --markdown the card of a run's model, to be committed: data, preprocessing as far as it is known, architecture,
    settings, hosts, versions, results with intervals, and how to have it again.

    A run may be under way, over, or broken off: the page shows what there is.
    """
    folders = [directory_of(each) for each in directories]
    text = _card(folders) if markdown else _page(folders)
    name = _CARD if markdown else "report.html"
    default = folders[0] / name if len(folders) == 1 else Path(_COMPARED).absolute()
    place = Path(output) if output else default
    if place.is_dir():
        fix = f"name a file: --output {shlex.quote(str(place / default.name))}"
        raise ConfigError("the page would be a folder", where=str(place.absolute()), fix=fix)
    try:
        write_atomically(place, text.encode(errors="replace"))
    except OSError as cause:
        fix = "choose another place with --output FILE"
        raise ConfigError(f"cannot write the page: {cause.strerror}", where=str(place), fix=fix) from cause
    print(place)
    return 0


def _card(folders: list[Path]) -> str:
    from manyhosts.report.card import card
    from manyhosts.report.run import read_run

    if len(folders) > 1:
        raise ConfigError(f"{len(folders)} runs are named", where="--markdown", fix="a card is of one run: name one")
    return card(read_run(folders[0]))


def _page(folders: list[Path]) -> str:
    from manyhosts.report.comparison_page import comparison_page
    from manyhosts.report.run import read_run
    from manyhosts.report.run_page import run_page
    from manyhosts.report.study_page import study_page
    from manyhosts.study.study import NAME, in_folder

    searches = [folder for folder in folders if (folder / _SEARCH).exists()]
    if searches and len(folders) == 1:
        from manyhosts.tune.page import search_page

        return search_page(folders[0])
    if searches:
        fix = "give it alone, or give the directories of its runs, which are in its folder trials"
        raise ConfigError("a search cannot be compared with others on a page", where=str(searches[0]), fix=fix)
    studies = [folder for folder in folders if (folder / NAME).exists()]
    if len(folders) == 1:
        return study_page(in_folder(folders[0])) if studies else run_page(read_run(folders[0]))
    if studies:
        raise ConfigError(
            "a study cannot be compared with others on a page",
            where=str(studies[0]),
            fix="give it alone, or give the directories of its runs, which are in its folder points",
        )
    if twice := next((folder for folder in folders if folders.count(folder) > 1), None):
        raise ConfigError("this run is named twice", where=str(twice), fix="name each run once")
    return comparison_page([read_run(folder) for folder in folders])
