"""Subtitles, SubRip and WebVTT: what is spoken, on the lines on which it stands in the file."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from farspan.corpus.formats._format import Format
from farspan.corpus.formats._plain import plain_reader

_TIME = r"(?:\d{1,3}:)?\d{1,2}:\d{2}[.,]\d{1,3}"
_TIMES = re.compile(rf"\s*{_TIME}\s*-->\s*{_TIME}.*")
#: Marks of speakers, fonts and places: `<v Ann>`, `<i>`, `<00:01.000>`, `{\an8}`.
_MARKS = re.compile(r"</?[a-zA-Z0-9][^<>]{0,200}>|\{\\[^{}]{0,100}\}")
#: Blocks of a WebVTT file that are not spoken; each ends at a blank line.
_UNSPOKEN = re.compile(r"\ufeff?(?:WEBVTT|NOTE|STYLE|REGION)\b.*")
#: Of a longer line the marks stay.
_MAX_LINE_CHARS = 1 << 16


def keep_spoken(pieces: Iterator[str]) -> Iterator[str]:
    """Yield the spoken lines, with a blank line for each line of numbers, times and notes."""
    cues = _Cues()
    rest = ""
    for piece in pieces:
        lines = (rest + piece).split("\n")
        rest = lines.pop()
        if len(rest) > _MAX_LINE_CHARS:
            yield "".join(f"{cues.spoken(line)}\n" for line in lines) + rest
            rest = ""
        else:
            yield "".join(f"{cues.spoken(line)}\n" for line in lines)
    yield cues.spoken(rest)


class _Cues:
    """Where in a file of subtitles a line stands."""

    def __init__(self) -> None:
        self._is_spoken = False

    def spoken(self, line: str) -> str:
        """Return the words on the next line of a file, if they are spoken."""
        if not line.strip():
            self._is_spoken = False
            return ""
        if _TIMES.fullmatch(line):
            self._is_spoken = True
            return ""
        if not self._is_spoken or _UNSPOKEN.fullmatch(line):
            # Numbers and names of cues, notes and styles stand before the times.
            return ""
        return html.unescape(_MARKS.sub("", line)).replace("\n", " ").strip()


FORMATS = (Format((".srt", ".vtt"), plain_reader(transform=keep_spoken), packed=True),)
