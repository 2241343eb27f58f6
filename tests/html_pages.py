"""A page as a browser reads it: whether every element is closed, what it would fetch, and its words."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Sees that every element is closed, and collects what a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.images = 0
        self.svgs = 0
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.images += tag == "img"
        self.svgs += tag == "svg"
        assert tag != "script"
        assert tag != "link"
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
