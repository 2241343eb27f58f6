"""A page in one file: its parts, and the style that makes it legible on a screen, a telephone and paper."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_STYLE = """
:root { color-scheme: light; --ink: #1d2329; --soft: #5b6470; --line: #dfe3e8; --mark: #1f6fb4; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 76rem; color: var(--ink); background: #fff;
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; padding-top: .6rem; border-top: 1px solid var(--line); }
.under { color: var(--soft); margin: 0 0 1.2rem; }
.verdict { border-left: 4px solid var(--mark); padding: .2rem 0 .2rem 1rem; max-width: 62rem; }
.verdict p { margin: .5rem 0; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1.2rem; }
.plots figure { margin: 0; break-inside: avoid; }
.plots img { width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .35rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; }
pre { background: #f4f6f8; padding: .7rem .9rem; overflow-x: auto; font-size: .88rem; white-space: pre-wrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; }
summary { cursor: pointer; margin-top: .8rem; }
@media (max-width: 600px) { body { font-size: 15px; padding: 1rem .75rem 2rem; } th, td { padding: .3rem .45rem; }
  dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; } }
@media print { body { max-width: none; padding: 0; font-size: 11px; } .wide { overflow: visible; }
  .plots { grid-template-columns: 1fr 1fr; } h2 { break-after: avoid; } }
"""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page, in HTML."""

    title: str
    body: str


def page(title: str, under: str, sections: Sequence[Section]) -> str:
    """The whole page. `title` and `under` are text; what is empty is left out."""
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="under">{escape(under)}</p>']
    for section in sections:
        if section.body:
            heading = f"<h2>{escape(section.title)}</h2>" if section.title else ""
            parts.append(f"<section>{heading}{section.body}</section>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is its head; wider than the page, it is scrolled by itself. Empty without a row."""
    if len(rows) < 2:
        return ""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def picture(svg: bytes, words: str) -> str:
    """An SVG as an image that is part of the page; `words` for who cannot see it."""
    data = base64.b64encode(svg).decode()
    return f'<figure><img alt="{escape(words)}" src="data:image/svg+xml;base64,{data}"></figure>'


def pairs(values: Sequence[tuple[str, str]]) -> str:
    """Names with their values."""
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in values) + "</dl>"


def paragraphs(texts: Sequence[str]) -> str:
    """One below the other."""
    return "".join(f"<p>{escape(text)}</p>" for text in texts)


def as_typed(text: str) -> str:
    """As it was printed, or is to be typed."""
    return f"<pre>{escape(text)}</pre>"


def folded(title: str, body: str) -> str:
    """A part that is opened by a click."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"
