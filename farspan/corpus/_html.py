"""The readable text of an HTML page, its headings marked as in Markdown, with the standard
library's parser."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_SILENT = {"script", "style", "noscript", "template", "svg", "nav", "title"}
_INLINE = {
    "a",
    "abbr",
    "b",
    "bdi",
    "bdo",
    "cite",
    "code",
    "dfn",
    "em",
    "font",
    "i",
    "kbd",
    "mark",
    "q",
    "s",
    "samp",
    "small",
    "span",
    "strong",
    "sub",
    "sup",
    "time",
    "tt",
    "u",
    "var",
    "wbr",
}
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
_LINES = {"br", "dd", "div", "dt", "li", "option", "td", "th", "tr"}


def read_html(page: str) -> tuple[str, str]:
    """(title, text): the <title> or else the first <h1>; blocks on lines of their own, <pre> as it
    is written."""
    parser = _Parser()
    parser.feed(page)
    parser.close()
    text = re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", "".join(parser.text)))
    return " ".join("".join(parser.title or parser.heading).split()), text.strip()


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.title: list[str] = []
        self.heading: list[str] = []
        self._open: list[str] = []
        #: What goes before the first word of the heading that is open.
        self._mark = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in _SILENT or tag in ("pre", "h1"):
            self._open.append(tag)
        self._break(tag)
        self._mark = _HEADINGS.get(tag, self._mark)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:  # whatever was left open inside it ends with it
            del self._open[len(self._open) - 1 - self._open[::-1].index(tag) :]
        self._break(tag)
        if tag in _HEADINGS:
            self._mark = ""

    def _break(self, tag: str) -> None:
        if tag not in _INLINE:
            self.text.append("\n" if tag in _LINES else "\n\n")

    def handle_data(self, data: str) -> None:
        if "title" in self._open and "svg" not in self._open:  # a drawing's title is not the page's
            self.title.append(data)
        elif not _SILENT & {*self._open}:
            if "h1" in self._open:
                self.heading.append(data)
            if "pre" not in self._open:
                data = re.sub(r"\s+", " ", data)
                data = data.lstrip() if self.text and self.text[-1].endswith(("\n", " ")) else data
            if self._mark and data.strip():
                data, self._mark = self._mark + data.lstrip(), ""
            self.text.append(data)
