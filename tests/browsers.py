"""A browser for tests, and what is looked for on a page: nothing over anything else, cut off, empty, or too small."""

from __future__ import annotations

import json
from typing import Any

OVERLAPS = """
const boxes = [];
for (const each of document.querySelectorAll(
    "h1, h2, p, dt, dd, th, td, pre, summary, figcaption, .name, .note, .ends span, .legend span, svg.chart, " +
    "svg.strip, img, progress")) {
  const box = each.getBoundingClientRect();
  // What is folded away has a box all the same.
  if (box.width > 0 && box.height > 0 && each.checkVisibility()) boxes.push([each, box]);
}
for (const chart of document.querySelectorAll("svg.chart")) {
  for (const text of chart.querySelectorAll("text")) boxes.push([text, text.getBoundingClientRect()]);
}
const found = [];
for (let a = 0; a < boxes.length; a++) for (let b = a + 1; b < boxes.length; b++) {
  const [one, p] = boxes[a], [other, q] = boxes[b];
  if (one.contains(other) || other.contains(one)) continue;
  const across = Math.min(p.right, q.right) - Math.max(p.left, q.left);
  const down = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
  const words = each => each.tagName + ": " + (each.textContent || each.alt || "").slice(0, 60);
  if (across > 1 && down > 1) found.push([words(one), words(other)]);
}
return found;
"""
"""Pairs of things that lie on each other, by more than the pixel that rounding takes."""

CUT_OFF = """
const found = [];
for (const chart of document.querySelectorAll("svg.chart")) {
  const box = chart.getBoundingClientRect();
  for (const text of chart.querySelectorAll("text")) {
    const inner = text.getBoundingClientRect();
    const across = Math.max(box.left - inner.left, inner.right - box.right);
    if (Math.max(across, box.top - inner.top, inner.bottom - box.bottom) > 1) found.push(text.textContent);
  }
}
return found;
"""
"""Words of plots that reach beyond them."""

EMPTY = """
return [...document.querySelectorAll("svg.chart, .strips, .pictures")].filter(each => {
  const drawn = each.querySelectorAll("polyline, circle, rect, img");
  return ![...drawn].some(one => {
    const box = one.getBoundingClientRect();
    return box.width > 0 || box.height > 0;
  });
}).map(each => each.getAttribute("aria-label") || each.className);
"""
"""Plots that show nothing."""

PALE = """
return [...document.querySelectorAll(".plots img")].filter(image => {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const dots = context.getImageData(0, 0, canvas.width, canvas.height).data;
  let coloured = 0;
  for (let at = 0; at < dots.length; at += 4) {
    const [red, green, blue, seen] = dots.slice(at, at + 4);
    coloured += seen > 128 && Math.max(red, green, blue) - Math.min(red, green, blue) > 60;
  }
  return coloured < 100;
}).map(image => image.alt);
"""
"""Pictures of plots in which next to nothing has a colour, as curves and bars have."""

SMALL = """
const found = [];
for (const each of document.querySelectorAll("body *")) {
  const says = [...each.childNodes].some(part => part.nodeType === 3 && part.data.trim());
  if (each.closest("script, style, title") || !says) continue;
  const box = each.getBoundingClientRect();
  if (!box.width) continue;
  let size = parseFloat(getComputedStyle(each).fontSize);
  const chart = each.closest("svg.chart");
  if (chart) size *= chart.getBoundingClientRect().width / chart.viewBox.baseVal.width;
  if (size < 10) found.push(size.toFixed(1) + " " + each.textContent.slice(0, 40));
}
return found;
"""
"""Words below 10 pixels."""

SCROLLED = """
return [...document.querySelectorAll(".wide")].filter(each => each.scrollWidth > each.clientWidth + 1)
    .map(each => each.textContent.slice(0, 60));
"""
"""Tables of which a part is not seen."""
BROKEN = """
const found = [];
for (const cell of document.querySelectorAll("th, td")) {
  const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) for (const word of texts.currentNode.data.matchAll(/[^\\s-]{2,12}(?![^\\s-])/g)) {
    if (/[^\\s-]/.test(texts.currentNode.data[word.index - 1] || " ")) continue;
    const range = document.createRange();
    range.setStart(texts.currentNode, word.index);
    range.setEnd(texts.currentNode, word.index + word[0].length);
    if (new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1) found.push(word[0]);
  }
}
return found;
"""
"""Short words in tables of which a part stands on the next line."""
_SCREEN = 1000
"""From this width on a page is on a screen, where nothing is to be scrolled sideways."""


class Browser:
    """One window. What it asks of any network is known."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str, width: int) -> None:
        """Show `address` in a window whose page is `width` pixels wide, as a telephone does where it is narrow."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.get("about:blank")  # the page before asks for nothing more
        self.requests(), self.complaints()
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get(address)
        assert self.ask("return innerWidth") == width

    def ask(self, script: str, *given: Any) -> Any:
        """What a function body in JavaScript returns."""
        return self.driver.execute_script(script, *given)

    def requests(self) -> list[str]:
        """The addresses outside the browser itself that were asked for since the page was opened."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
            and not message["params"]["request"]["url"].startswith(("chrome:", "data:", "about:"))
        ]

    def complaints(self) -> list[str]:
        """What the browser itself has to say, such as what the page's own policy has stopped."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


def see_in_order(browser: Browser, width: int) -> None:
    """See that the page is legible as it lies, and that the browser has nothing to complain of."""
    wide = browser.ask("return document.documentElement.scrollWidth")
    found = {
        "wider than the window": wide if wide > width else None,
        "lie on each other": browser.ask(OVERLAPS),
        "cut off": browser.ask(CUT_OFF),
        "seen in part": browser.ask(SCROLLED) if width >= _SCREEN else None,
        "empty": browser.ask(EMPTY),
        "broken words": browser.ask(BROKEN),
        "too small": browser.ask(SMALL),
        "broken images": browser.ask("return [...document.images].filter(image => !image.naturalWidth).length"),
        "the browser says": browser.complaints(),
    }
    assert not any(found.values()), {name: what for name, what in found.items() if what}
