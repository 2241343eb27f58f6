"""A page in one file: its parts, and the style that makes it legible on a screen, a telephone and paper."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_STYLE = """
:root { color-scheme: only light; --ink: #1d2329; --soft: #5b6470; --line: #dfe3e8; --mark: #1f6fb4; }
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
.plots figcaption { display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin-bottom: .2rem; }
.chart { width: 100%; height: auto; display: block; }
.chart text { font-size: 15px; fill: var(--ink); } .chart .axis { fill: var(--soft); }
.chart .rule { stroke: var(--line); } .chart .curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: .3rem 0; color: var(--soft); font-size: .92rem; }
.key { width: 1.4em; height: .7em; margin-right: .35em; stroke-width: 3; }
.strips { display: grid; grid-template-columns: fit-content(30%) 1fr fit-content(26%); gap: .3rem .8rem;
  align-items: center; margin: .6rem 0; font-size: .92rem; break-inside: avoid; }
.strip { width: 100%; height: 1.3rem; background: #f4f6f8; display: block; } .thin .strip { height: 1.1rem; }
.strips .note, .ends { color: var(--soft); } .thin { row-gap: 2px; }
.ends { display: flex; justify-content: space-between; gap: 1rem; }
progress { width: 100%; height: 1.1rem; accent-color: var(--mark); }
#lost { border-left: 4px solid #b3273a; padding-left: 1rem; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(5.5rem, 1fr)); gap: .6rem; }
.pictures figure { margin: 0; text-align: center; break-inside: avoid; }
.pictures img { width: 100%; image-rendering: pixelated; border: 1px solid var(--line); display: block; }
.wide { overflow-x: auto; background: linear-gradient(90deg, #fff 1.5rem, #fff0) 0 / 3rem 100% local,
  linear-gradient(270deg, #fff 1.5rem, #fff0) 100% / 3rem 100% local,
  linear-gradient(90deg, #0003, #0000) 0 / .7rem 100%, linear-gradient(270deg, #0003, #0000) 100% / .7rem 100%;
  background-repeat: no-repeat; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .35rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; }
.named td:first-child, .named th:first-child { text-align: left; white-space: normal; min-width: 6rem;
  max-width: 16rem; overflow-wrap: break-word; }
.dense { font-size: .84rem; } .dense th, .dense td { padding: .35rem; }
.wrapped td { white-space: normal; min-width: 5rem; overflow-wrap: anywhere; }
.told td:last-child, .told th:last-child { text-align: left; white-space: normal; min-width: 12rem;
  overflow-wrap: anywhere; }
pre { background: #f4f6f8; padding: .7rem .9rem; overflow-x: auto; font-size: .88rem; white-space: pre-wrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; }
summary { cursor: pointer; margin-top: .8rem; }
@media (max-width: 600px) { body { font-size: 15px; padding: 1rem .75rem 2rem; } .chart text { font-size: 19px; }
  th, td { padding: .3rem .45rem; }
  dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; } }
@media print { * { print-color-adjust: exact; } html { font-size: 11px; }
  body { max-width: none; padding: 0; font-size: 1rem; }
  .wide { overflow: visible; background: none; } th, td { white-space: normal; padding: .2rem .35rem; }
  .told td:not(:last-child) { white-space: nowrap; } tr { break-inside: avoid; }
  details::details-content { content-visibility: visible; block-size: auto; }
  .plots { grid-template-columns: 1fr 1fr; } h2 { break-after: avoid; } }
"""
_WIDE, _GAP = 125, 2.6
"""Letters next to each other from which on a table is set closer; how many a gap between two columns takes up."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page, in HTML."""

    title: str
    body: str
    name: str = ""
    """By which a script finds it: such a section is on the page also while it is empty."""
    hidden: bool = False

    @property
    def html(self) -> str:
        """All of it; empty where there is nothing to show, now or later."""
        if not (self.body or self.name):
            return ""
        heading = f"<h2>{escape(self.title)}</h2>" if self.title else ""
        if not self.name:
            return f"<section>{heading}{self.body}</section>"
        hidden = " hidden" if self.hidden or not self.body else ""
        return f'<section id="{self.name}"{hidden}>{heading}<div class="body">{self.body}</div></section>'


def page(title: str, under: str, sections: Sequence[Section], *, script: str = "") -> str:
    """The entire page. `title` and `under` are text; what is empty is left out.

    It forbids itself to fetch anything. `script` alone may run, and may ask the server of the page.
    """
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="under">{escape(under)}</p>']
    parts += [html for section in sections if (html := section.html)]
    allowed = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        allowed += f"; script-src 'sha256-{digest}'; connect-src 'self'"
        parts.append(f"<script>{script}</script>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{allowed}">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def table(rows: Sequence[Sequence[str]], *, kind: str = "") -> str:
    """A table whose first row is its head; wider than the page, it is scrolled by itself. Empty without a row.

    `kind`: `told` for one whose last column holds sentences, `named` for one whose first holds names.
    """
    if len(rows) < 2:
        return ""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    letters = sum(max(map(len, column)) + _GAP for column in zip(*rows, strict=True))
    if letters > _WIDE and not kind:
        kind = "dense"
    opened = f'<table class="{kind}">' if kind else "<table>"
    return f'<div class="wide" tabindex="0">{opened}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


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
