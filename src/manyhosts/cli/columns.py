"""Rows under heads, in columns: drawn on a terminal, plain text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence


def print_columns(heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Collection[str] = ()) -> None:
    """Print `rows` under `heads`; the columns whose heads are `numbers` end at the same place."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for place, head in enumerate(heads):  # the first is what a row is called by: never cut
            table.add_column(head, justify="right" if head in numbers else "left", no_wrap=place == 0)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
