"""The headings of Markdown, line by line, as CommonMark 0.31 has them.

Fenced and indented code, HTML blocks, list items and paragraphs above a rule are distinguished.
Front matter is no part of the text, and headings in quotations are left out.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from farspan.corpus.outline import MAX_UNDERLINED_CHARS, Outline

#: Front matter is looked for in so much of a text: it usually has some hundred characters.
MAX_FRONT_CHARS = 1 << 16

_TAB_COLUMNS = 4
#: A line that is indented so far is code (CommonMark 4.4).
_CODE_INDENT = 4
#: Marks of a fence or a rule, at least.
_MIN_MARKS = 3
#: List items that begin on one line, at most: what is deeper says nothing of sections.
_MAX_NESTED_ITEMS = 20

_LIST_MARKER = re.compile(r"(?:[-+*]|([0-9]{1,9})[.)])(?=[ \t]|$)")
_LINK_DEFINITION = re.compile(r"\[[^\[\]]+\]:")
#: What ends front matter, YAML or TOML, by what begins it.
_FRONT_ENDS = {"---": ("---", "..."), "+++": ("+++",)}
#: Its first line is a key, which text between two rules does not begin with.
_FRONT_KEYS = {"---": re.compile(r"[\w-]+[ \t]*:"), "+++": re.compile(r"[\w.-]+[ \t]*=|\[")}
#: A title on one line; `>` and `|` begin one of several lines.
_FRONT_TITLE = re.compile(r"title[ \t]*[:=][ \t]*([^\s>|].*)")
_QUOTED = re.compile(r"\".*\"|'.*'")
#: Kinds 1 to 5 of HTML blocks (CommonMark 4.6): how they begin, and what ends them.
_RAW_ENDS = ("</pre>", "</script>", "</style>", "</textarea>")
_HTML_ENDS = (
    (re.compile(r"<(?:pre|script|style|textarea)(?=[\s>]|$)", re.IGNORECASE), _RAW_ENDS),
    (re.compile(r"<!--"), ("-->",)),
    (re.compile(r"<\?"), ("?>",)),
    (re.compile(r"<!\[CDATA\["), ("]]>",)),
    (re.compile(r"<![A-Za-z]"), (">",)),
)
#: Kind 6, which ends at a blank line, as does kind 7: a line that is a tag.
_HTML_BLOCK = re.compile(
    r"</?(?:address|article|aside|base|basefont|blockquote|body|caption|center|col|colgroup|dd"
    r"|details|dialog|dir|div|dl|dt|fieldset|figcaption|figure|footer|form|frame|frameset|h[1-6]"
    r"|head|header|hr|html|iframe|legend|li|link|main|menu|menuitem|nav|noframes|ol|optgroup"
    r"|option|p|param|search|section|summary|table|tbody|td|tfoot|th|thead|title|tr|track|ul)"
    r"(?=[\s>]|/>|$)",
    re.IGNORECASE,
)
_HTML_TAG = re.compile(r"</?[A-Za-z][A-Za-z0-9-]*(?:[ \t/][^<>]*)?>$")


class _Fence(NamedTuple):
    """An open fenced block: its character, how often it stands there, and the column that the list
    item around it begins at."""

    mark: str
    length: int
    column: int


class MarkdownOutline(Outline):
    """Headings of Markdown: lines that begin with `#`, and paragraphs above a rule."""

    def __init__(self) -> None:
        super().__init__()
        #: Lines that may be front matter, until its end is found or it has become too long.
        self._front: list[tuple[str, int]] | None = []
        #: The columns that the open list items begin at.
        self._items: list[int] = []
        #: True behind an item's mark without text, whose item a blank line ends.
        self._is_item_empty = False
        self._fence: _Fence | None = None
        #: What ends the open HTML block; nothing where a blank line does.
        self._html_ends: tuple[str, ...] | None = None
        #: The lines of the open paragraph, while they are few enough for a heading, and its begin.
        self._paragraph: list[str] = []
        self._paragraph_at = 0
        self._has_long_paragraph = False
        #: True below a quoted paragraph, which lines without a mark continue.
        self._is_quoted = False

    def _read_line(self, line: str, start: int) -> None:
        if self._is_in_paragraph and line[:1].isalpha():
            # Most lines: nothing but a paragraph begins so.
            self._add_paragraph(line, start)
        elif self._front is None:
            self._read_block(line, start)
        elif self._front:
            self._front.append((line, start))
            opening, _ = self._front[0]
            if line in _FRONT_ENDS[opening]:
                self._end_front(opening)
            elif start > MAX_FRONT_CHARS:
                self._decide_pending()
        elif line in _FRONT_ENDS:
            self._front.append((line, start))
        elif line:
            self._decide_pending()
            self._read_block(line, start)

    def _end_front(self, opening: str) -> None:
        """Take the lines so far for front matter, if a key is the first of them."""
        inner = [line for line, _ in (self._front or ())[1:-1]]
        # Comments may come before the first key.
        first = next((line for line in inner if not line.startswith("#")), "")
        if not _FRONT_KEYS[opening].match(first):
            self._decide_pending()
            return
        self._front = None
        for line in inner:
            title = _FRONT_TITLE.match(line)
            if title and not self.title:
                self.title = title[1]
                if _QUOTED.fullmatch(self.title):
                    self.title = self.title[1:-1]

    def _decide_pending(self) -> None:
        lines = self._front or ()
        self._front = None
        for line, start in lines:
            self._read_block(line, start)

    def _read_block(self, line: str, start: int) -> None:
        column, text = _split_indent(line)
        start += len(line) - len(text)
        if text and column < self._item_column:
            if self._is_in_paragraph and self._is_plain(column, text):
                # It continues the paragraph in the list item.
                self._add_paragraph(text, start)
                return
            # What is open within a list item ends with it.
            self._end_paragraph()
            self._fence = self._html_ends = None
            self._is_item_empty = False
            while column < self._item_column:
                self._items.pop()
        if self._fence is not None:
            if self._ends_fence(column, text):
                self._fence = None
        elif self._html_ends is not None:
            if _contains_any(text, self._html_ends) if self._html_ends else not text:
                self._html_ends = None
        elif text:
            self._is_item_empty = False
            self._read_leaf(column, text, start)
        else:
            self._end_paragraph()
            if self._is_item_empty:
                self._items.pop()
                self._is_item_empty = False

    def _read_leaf(self, column: int, text: str, start: int) -> None:
        """Look at what a line holds behind its indent, also within list items that begin on it."""
        for _ in range(_MAX_NESTED_ITEMS):
            if column - self._item_column >= _CODE_INDENT:
                if self._is_in_paragraph:
                    self._add_paragraph(text, start)
                return
            if self._read_rule(text):
                return
            marker = _LIST_MARKER.match(text)
            if marker is None or not self._begins_item(text, marker):
                break
            self._end_paragraph()
            width, rest = _split_indent(text[marker.end() :])
            column += marker.end()
            is_code = width > _CODE_INDENT or not rest
            self._items.append(column + 1 if is_code else column + width)
            column += width
            text = rest
            if not text:
                self._is_item_empty = True
                return
        heading = _parse_atx(text) if text[0] == "#" else None
        length = _fence_length(text) if text[0] in "`~" else 0
        if heading is not None:
            self._end_paragraph()
            if heading.title:
                self._add_heading(start, heading.level, heading.title)
        elif length:
            self._end_paragraph()
            self._fence = _Fence(text[0], length, self._item_column)
        elif text[0] == "<" and self._begins_html(text):
            self._end_paragraph()
        elif text[0] == ">":
            self._end_paragraph()
            inner = text.lstrip("> \t")
            self._is_quoted = inner != "" and not inner.startswith(("#", "```", "~~~"))
        elif not self._is_quoted:
            self._add_paragraph(text, start)

    def _read_rule(self, text: str) -> bool:
        """Take a line for what underlines the paragraph above, or parts two of them."""
        mark = text[0]
        if mark in "=-" and self._is_in_paragraph and text.count(mark) == len(text):
            if self._paragraph:
                level = 1 if mark == "=" else 2
                self._add_heading(self._paragraph_at, level, " ".join(self._paragraph))
            self._end_paragraph()
            return True
        if _is_break(text):
            self._end_paragraph()
            return True
        return False

    def _is_plain(self, column: int, text: str) -> bool:
        """Return True for a line that begins nothing but a paragraph."""
        outer = max((item for item in self._items if item <= column), default=0)
        if column - outer >= _CODE_INDENT:
            return True
        if _LIST_MARKER.match(text) or _is_break(text) or _parse_atx(text):
            return False
        if text[0] in "`~":
            return not _fence_length(text)
        if text[0] == "<":
            return not (_HTML_BLOCK.match(text) or _html_ends(text))
        return text[0] != ">"

    def _begins_item(self, text: str, marker: re.Match[str]) -> bool:
        """Return False for a number or an empty mark that continues a paragraph (CommonMark
        5.2)."""
        may_interrupt = marker.end() < len(text) and marker[1] in (None, "1")
        return may_interrupt or not self._is_in_paragraph

    def _begins_html(self, text: str) -> bool:
        """Open the HTML block that begins with this line, if one does."""
        ends = _html_ends(text)
        if ends and _contains_any(text[2:], ends):
            return True
        begins = bool(ends or _HTML_BLOCK.match(text))
        if not (begins or self._is_in_paragraph or self._is_quoted):
            begins = _HTML_TAG.match(text) is not None
        if begins:
            self._html_ends = ends
        return begins

    def _ends_fence(self, column: int, text: str) -> bool:
        assert self._fence is not None
        if column - self._fence.column >= _CODE_INDENT or len(text) < self._fence.length:
            return False
        return text.count(self._fence.mark) == len(text)

    @property
    def _item_column(self) -> int:
        """The column that the innermost list item begins at."""
        return self._items[-1] if self._items else 0

    @property
    def _is_in_paragraph(self) -> bool:
        return bool(self._paragraph) or self._has_long_paragraph

    def _add_paragraph(self, text: str, start: int) -> None:
        if self._has_long_paragraph:
            return
        if not self._paragraph:
            if _LINK_DEFINITION.match(text):
                return
            self._paragraph_at = start
        self._paragraph.append(text)
        if start + len(text) - self._paragraph_at > MAX_UNDERLINED_CHARS:
            self._paragraph = []
            self._has_long_paragraph = True

    def _end_paragraph(self) -> None:
        self._paragraph = []
        self._has_long_paragraph = False
        self._is_quoted = False


def _html_ends(text: str) -> tuple[str, ...]:
    """Return the ends of the HTML block of kinds 1 to 5 that this line begins; () without one."""
    return next((ends for begin, ends in _HTML_ENDS if begin.match(text)), ())


def _contains_any(text: str, marks: tuple[str, ...]) -> bool:
    small = text.lower()
    return any(mark in small for mark in marks)


def _is_break(text: str) -> bool:
    """Return True for three or more of one of these marks, and blanks."""
    mark = text[0]
    return mark in "-*_" and text.count(mark) >= _MIN_MARKS and not text.strip(f"{mark} \t")


class _Atx(NamedTuple):
    level: int
    title: str


def _parse_atx(text: str) -> _Atx | None:
    """Return a heading of one to six `#`; its title is empty where nothing follows them."""
    level = len(text) - len(text.lstrip("#"))
    if level > 6 or text[level : level + 1].strip(" \t"):
        return None
    title = text[level:].strip()
    # The marks that close a heading stand behind a blank: `C#` is a name.
    body = title.rstrip("#")
    if not body or body[-1] in " \t":
        title = body.rstrip()
    return _Atx(level, title)


def _fence_length(text: str) -> int:
    """Count the marks of a line that opens a fenced block; 0 for another line."""
    mark = text[0]
    info = text.lstrip(mark)
    length = len(text) - len(info)
    # The language of a block in backticks has none of these.
    is_code_span = mark == "`" and mark in info
    return 0 if length < _MIN_MARKS or is_code_span else length


def _split_indent(line: str) -> tuple[int, str]:
    """Return the column that the text of a line begins at, and that text."""
    text = line.lstrip(" \t")
    indent = line[: len(line) - len(text)]
    return len(indent.expandtabs(_TAB_COLUMNS)), text
