"""The tags and texts of an HTML page, of turbohtml's tokenizer, with what is left open closed.

A tokenizer of the standard (WHATWG HTML, 13.2.5) takes all that follows an open comment, quote,
script or title for a part of it. Here the rest of the page is read all the same. Each character is
looked at a bounded number of times.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import NamedTuple

from turbohtml import Tokenizer, TokenType

#: Elements whose content is text to its end tag, whatever it looks like. That of the first ones is
#: not shown.
_UNSEEN_TEXT = ("script", "style", "noscript", "iframe", "noembed", "noframes")
_RAW_TEXT = (*_UNSEEN_TEXT, "title", "textarea", "xmp")
#: What the tokenizer reads otherwise than by tags.
_SPECIAL = re.compile(
    rf"<!--|<!\[CDATA\[|<(?:{'|'.join(_RAW_TEXT)}|plaintext)(?=[\s/>])", re.IGNORECASE
)
_CDATA = "[CDATA["
_REST_OF_TAG = re.compile(r"""(?:[^<>"']|"[^"]*"|'[^']*')*+>""")
_TAG_MARK = re.compile("[<>]")
_END_TAGS = {name: re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE) for name in _RAW_TEXT}
#: A tag that comes out as such where none is open, and what closes one whose quote is open.
_PROBE = "<z>"
_QUOTE_ENDS = ('">', "'>")


class Part(NamedTuple):
    """A text, or the name of a tag in small letters."""

    text: str
    tag: str = ""
    is_end: bool = False


def read_markup(page: str) -> Iterator[Part]:
    """Yield the tags and texts of a page in order, without comments."""
    rest = _close_open_parts(page)
    while rest:
        tokenizer = Tokenizer(capture_attributes=False, capture_source=True)
        for token in tokenizer.feed(rest):
            if token.type == TokenType.TEXT:
                yield Part(token.data or "")
            elif token.type == TokenType.START_TAG:
                yield Part("", token.tag or "")
            elif token.type == TokenType.END_TAG:
                yield Part("", token.tag or "", is_end=True)
            elif token.type == TokenType.COMMENT and (token.data or "").startswith(_CDATA):
                yield Part((token.data or "").removeprefix(_CDATA).removesuffix("]]"))
        swallowed = ""
        fed = ""
        for probe in (_PROBE, *_QUOTE_ENDS):
            fed += probe
            for token in tokenizer.feed(probe):
                if token.type == TokenType.TEXT:
                    yield Part(token.data or "")
                elif token.source != _PROBE:
                    swallowed = (token.source or "").removesuffix(fed)
                else:
                    return
            if swallowed:
                break
        # A quote that is never closed belongs to its tag alone.
        rest = swallowed.partition(">")[2]


def _close_open_parts(page: str) -> str:
    """Return the page without the content of scripts and the like, CDATA sections as text, and
    comments and raw text that never end closed where the next tag begins or ends."""
    pieces: list[str] = []
    absent: set[str] = set()
    copied = at = 0
    while special := _SPECIAL.search(page, at):
        begin = special[0].lower()
        at = special.end()
        if begin == "<!--":
            # `<!-->` is a whole comment.
            end = _find_mark(page, "-->", at - 2, absent)
            if end < 0:
                pieces.append(page[copied : special.start()])
                shown = _TAG_MARK.search(page, at)
                # It ends where it would without `--`.
                copied = at = shown.start() + (shown[0] == ">") if shown else len(page)
            else:
                at = end + 3
        elif begin == "<![cdata[":
            end = _find_mark(page, "]]>", at, absent)
            # A section that is never closed is part of the page.
            content = html.escape(page[at:end], quote=False) if end >= 0 else ""
            pieces += (page[copied : special.start()], content)
            copied = at = end + 3 if end >= 0 else at
        elif begin == "<plaintext":
            # It has no end tag at all.
            pieces += (page[copied : special.start()], "<pre")
            copied = at
        elif tag := _REST_OF_TAG.match(page, at):
            name = begin[1:]
            at = tag.end()
            # As XHTML has it, `<script/>` is empty.
            is_empty = page[at - 2] == "/"
            end = at if is_empty else _find_end_tag(page, name, at, absent)
            if is_empty or end < 0:
                end = at if is_empty else page.find("<", at)
                end = len(page) if end < 0 else end
                content = "" if name in _UNSEEN_TEXT else page[at:end]
                pieces += (page[copied:at], content, f"</{name}>")
                copied = end
            elif name in _UNSEEN_TEXT:
                pieces.append(page[copied:at])
                copied = end
            at = end
    return "".join((*pieces, page[copied:]))


def _find_mark(page: str, mark: str, at: int, absent: set[str]) -> int:
    """Return the place of a mark, -1 without one; an absent mark is not looked for again."""
    place = -1 if mark in absent else page.find(mark, at)
    if place < 0:
        absent.add(mark)
    return place


def _find_end_tag(page: str, name: str, at: int, absent: set[str]) -> int:
    tag = None if name in absent else _END_TAGS[name].search(page, at)
    if tag is None:
        absent.add(name)
        return -1
    return tag.start()
