"""Emacs' Org files: text with headings of stars."""

from __future__ import annotations

import re

from farspan.corpus.formats._format import Format
from farspan.corpus.formats._plain import plain_reader
from farspan.corpus.outline import Outline

_HEADING = re.compile(r"(\*+) +(?:(?:TODO|NEXT|WAITING|DONE|CANCELLED) +)?(?:\[#\w\] +)?(\S.*)")
_TAGS = re.compile(r"\s:[\w@#%:]+:$")
_TITLE = re.compile(r"#\+title: *(\S.*)", re.IGNORECASE)
#: Blocks in which stars are no headings, such as code; those of quotations too.
_BLOCK = re.compile(r"\s*#\+(begin|end)_(\S+)", re.IGNORECASE)


class OrgOutline(Outline):
    """Headings of Org: lines that begin with stars."""

    def __init__(self) -> None:
        super().__init__()
        #: The block that is open.
        self._block = ""

    def _read_line(self, line: str, start: int) -> None:
        block = _BLOCK.match(line)
        if block is not None:
            name = block[2].lower()
            if block[1].lower() == "begin":
                self._block = self._block or name
            elif name == self._block:
                self._block = ""
            return
        heading = None if self._block else _HEADING.fullmatch(line)
        title = _TITLE.fullmatch(line)
        if heading is not None:
            self._add_heading(start, len(heading[1]), _TAGS.sub("", heading[2]).strip())
        elif title is not None and not self.title:
            self.title = title[1]

    def _decide_pending(self) -> None:
        """Settle nothing: each line stands for itself."""


FORMATS = (Format((".org",), plain_reader(OrgOutline), packed=True),)
