"""The headings of a text, found in one pass over its lines: what all formats share, and underlined
titles.

Every line is looked at once, so the work grows with the length of the text alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable

from msgspec.structs import replace

from farspan.domain.corpus import Heading

#: A longer text above a rule is a paragraph.
MAX_UNDERLINED_CHARS = 120
#: Of a longer heading the rest is left out: it stands with every passage below it.
MAX_HEADING_CHARS = 1000
#: The place of a heading that stands above the text, in an earlier part of its document.
ABOVE = -1

_BYTE_ORDER_MARK = "\ufeff"
_RULES = frozenset("=-~^\"'*+#`:.")
_MIN_RULE_CHARS = 3
#: Of a longer line no more is looked at.
_MAX_LINE_CHARS = 1 << 16
#: Lines of reStructuredText that are no titles, whatever stands below them.
_NO_TITLES = ("- ", "* ", "+ ", ".. ", ">>>")


class Sections:
    """The headings of a text in order, taken part by part."""

    def __init__(self, headings: Iterable[Heading] = ()) -> None:
        self._ahead = deque(headings)
        #: The headings that the next part stands under, outermost first.
        self._above: list[Heading] = []

    def add(self, heading: Heading) -> None:
        self._ahead.append(heading)

    def take(self, begin: int, end: int) -> tuple[Heading, ...]:
        """Return the headings between two places, counted from the first. Those that the part
        stands under come first, with the place ABOVE."""
        while self._ahead and self._ahead[0].start < begin:
            self._above = path((*self._above, self._ahead.popleft()))
        taken = [replace(heading, start=ABOVE) for heading in self._above]
        while self._ahead and self._ahead[0].start < end:
            heading = self._ahead.popleft()
            taken.append(replace(heading, start=heading.start - begin))
            self._above = path((*self._above, heading))
        return tuple(taken)


class Outline(ABC):
    """Headings of a text that comes in pieces, with Unix line ends."""

    def __init__(self) -> None:
        #: What the text names as its title, else the first heading.
        self.title = ""
        self._sections = Sections()
        #: The line that is not whole yet, and its place.
        self._partial_line = ""
        self._at = 0
        #: True if that line was read before its end, and if the one before it was blank.
        self._is_read = False
        self._is_blank = False

    def add(self, piece: str) -> None:
        """Read the next piece of the text; of a line that is too long its begin counts."""
        lines = (self._partial_line + piece).split("\n")
        self._partial_line = lines.pop()
        for line in lines:
            if not self._is_read and (line or not self._is_blank):
                self._begin_line(line)
            self._is_read = False
            self._at += len(line) + 1
        if self._is_read or len(self._partial_line) > _MAX_LINE_CHARS:
            self._read_partial_line()

    def take(self, begin: int, end: int) -> tuple[Heading, ...]:
        """Return the headings of the part of the text between two places, as of `Sections`."""
        if self._partial_line and self._at < end:
            self._read_partial_line()
        self._decide_pending()
        return self._sections.take(begin, end)

    def _read_partial_line(self) -> None:
        """Read the begin of a line, and what is known of the rest."""
        if not self._is_read:
            self._begin_line(self._partial_line)
        self._is_read = True
        self._at += len(self._partial_line)
        self._partial_line = ""

    def _begin_line(self, line: str) -> None:
        text = line.lstrip(_BYTE_ORDER_MARK) if self._at == 0 else line
        self._is_blank = not text
        self._read_line(text.rstrip(), self._at + len(line) - len(text))

    @abstractmethod
    def _read_line(self, line: str, start: int) -> None:
        """Look at a line, which has no blank space at its end."""

    @abstractmethod
    def _decide_pending(self) -> None:
        """Settle what depends on lines to come as if none came."""

    def _add_heading(self, start: int, level: int, title: str) -> None:
        title = title[:MAX_HEADING_CHARS]
        self._sections.add(Heading(start, level, title))
        self.title = self.title or title


def path(headings: Iterable[Heading]) -> list[Heading]:
    """Return the headings that apply below the last of them, outermost first."""
    above: list[Heading] = []
    for heading in headings:
        while above and above[-1].level >= heading.level:
            above.pop()
        above.append(heading)
    return above


def read_outline(text: str, outline: Outline) -> tuple[Heading, ...]:
    """Return all headings of a text, by an outline that has read nothing."""
    outline.add(text)
    return outline.take(0, len(text))


class UnderlinedOutline(Outline):
    """Titles with a line of one punctuation character below them, or above and below, as in
    reStructuredText. Each style is a level, in the order in which styles first appear."""

    def __init__(self) -> None:
        super().__init__()
        self._levels: dict[str, int] = {}
        #: The two lines before, and the place of the one before.
        self._second = self._before = ""
        self._before_at = 0

    def _read_line(self, line: str, start: int) -> None:
        if _is_rule(line) and self._is_title(line):
            is_overlined = self._second == line
            style = line[0] * (1 + is_overlined)
            level = self._levels.setdefault(style, len(self._levels) + 1)
            self._add_heading(self._before_at, level, self._before.strip())
            # The rule is the title's, and no overline of what comes.
            line = ""
        self._second = self._before
        self._before = line
        self._before_at = start + len(line) - len(line.lstrip())

    def _decide_pending(self) -> None:
        """Settle nothing: an underline is decided by the line above it."""

    def _is_title(self, rule: str) -> bool:
        """Return True if the line before is a title above this rule: a paragraph of its own."""
        title = self._before
        has_overline = self._second == rule
        if not has_overline and (self._second or title[:1].isspace()):
            return False
        if len(title) > min(MAX_UNDERLINED_CHARS, 2 * len(rule)):
            return False
        return any(map(str.isalnum, title)) and not title.startswith(_NO_TITLES)


def _is_rule(line: str) -> bool:
    if len(line) < _MIN_RULE_CHARS or line[0] not in _RULES:
        return False
    return line.count(line[0]) == len(line)
