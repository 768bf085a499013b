"""AsciiDoc: text with headings of equals signs."""

from __future__ import annotations

import re

from farspan.corpus.formats._format import Format
from farspan.corpus.formats._plain import plain_reader
from farspan.corpus.outline import Outline

#: Up to six marks, as of a section; AsciiDoc takes Markdown's too.
_HEADING = re.compile(r"(={1,6}|#{1,6})[ \t]+(\S.*)")
#: What a block of code, of literal text, of a comment or of what is passed on begins and ends with.
_FENCE = re.compile(r"(-{4,}|\.{4,}|/{4,}|\+{4,}|`{3,})\S*")


class AsciidocOutline(Outline):
    """Headings of AsciiDoc: lines that begin with `=`, outside blocks of code."""

    def __init__(self) -> None:
        super().__init__()
        #: The mark of the open block.
        self._fence = ""

    def _read_line(self, line: str, start: int) -> None:
        fence = _FENCE.fullmatch(line)
        if fence is not None:
            if not self._fence:
                self._fence = fence[1]
            elif fence[1] == self._fence:
                self._fence = ""
            return
        heading = None if self._fence else _HEADING.fullmatch(line)
        if heading is not None:
            self._add_heading(start, len(heading[1]), heading[2].strip())

    def _decide_pending(self) -> None:
        """Settle nothing: each line stands for itself."""


FORMATS = (Format((".adoc", ".asciidoc"), plain_reader(AsciidocOutline), packed=True),)
