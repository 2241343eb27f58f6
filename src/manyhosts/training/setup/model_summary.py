"""A model in a table: its modules, their parameters, and how many of these are trained."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def summary(model: nn.Module, *, depth: int = 2) -> str:
    """One row for each module down to `depth`, with what is below it; tied parameters count once, where they are first.

    Shape of a row: name, class, parameters, how many are trained. The last row is the whole, with its bytes.
    """
    rows = [("module", "class", "parameters", "trained"), *_rows(model, "", depth, set())]
    every = list(model.parameters())
    total, trained = sum(each.numel() for each in every), sum(each.numel() for each in every if each.requires_grad)
    held = sum(each.numel() * each.element_size() for each in (*every, *model.buffers()))
    rows.append(("all", f"{held / 1e6:.3g} MB with buffers", f"{total:,}", f"{trained:,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {count:>{widths[2]}}  {of_it:>{widths[3]}}"
        for name, kind, count, of_it in rows
    )


def _rows(module: nn.Module, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, str, str, str]]:
    for name, child in module.named_children():
        new = [each for each in child.parameters() if id(each) not in seen]
        below = f"{path}{name}"
        count, trained = sum(e.numel() for e in new), sum(e.numel() for e in new if e.requires_grad)
        yield below, type(child).__name__, f"{count:,}", f"{trained:,}"
        if depth > 1:
            yield from _rows(child, f"{below}.", depth - 1, seen)
        seen |= {id(each) for each in new}
