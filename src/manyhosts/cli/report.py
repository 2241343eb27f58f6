"""`manyhosts report`: one HTML page of a study, which a browser shows without a network."""

from __future__ import annotations

from pathlib import Path

import click

from manyhosts.errors import ConfigError
from manyhosts.records.whole_file import write_whole


@click.command()
@click.option("--output", metavar="FILE", help="Where to write the page.  [default: DIR/report.html]")
@click.option("--trace", is_flag=True, help="Show where in manyhosts an error was raised.")
@click.argument("directory", metavar="DIR")
def report(directory: str, output: str | None, trace: bool) -> int:
    """Write one self-contained HTML page of the study in DIR: verdict, plots, tables, and how to do it again."""
    from manyhosts.report.study_page import study_page
    from manyhosts.study.study import NAME, in_folder

    folder = Path(directory).absolute()
    if not (folder / NAME).exists():
        what = "is the directory of a run" if (folder / "run.json").exists() else f"has no {NAME}"
        raise ConfigError(
            f"{directory} {what}, and a page is made of a study",
            where=str(folder),
            fix="give the folder of a study: manyhosts study SCRIPT --workers 1,2 makes one",
        )
    place = Path(output) if output else folder / "report.html"
    try:
        write_whole(place, study_page(in_folder(folder)).encode())
    except OSError as cause:
        fix = "choose another place with --output FILE"
        raise ConfigError(f"cannot write the page: {cause.strerror}", where=str(place), fix=fix) from cause
    print(place)
    return 0
