"""What a result shows of its passage: the text around the query's first word, and marks on all of
them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from farspan.retrieval.text_cuts import whole_character_before
from farspan.retrieval.words import Words

SNIPPET_CHARS = 300
#: Characters in which a better place to cut is looked for: a long word of German, a few of Chinese.
_SLACK_CHARS = 40
#: The end of a sentence.
_SENTENCE_END = re.compile("[。！？｡．؟।॥…](?=.)|[.!?](?= )")


def find_marks(text: str, query: str, words: Words) -> Iterator[tuple[int, int]]:
    """Yield the spans of the query's content words in a text: first character, and the one after
    the last."""
    for match in words.matches(text, words.content_of(query)):
        yield match.start, match.stop


def make_snippet(text: str, query: str, words: Words) -> str:
    """Return about SNIPPET_CHARS of the text in one line.

    It begins shortly before the query's first content word where that is far inside.
    """
    line = " ".join(text.split())
    first = next((start for start, _ in find_marks(line, query, words)), 0)
    start = 0
    if first >= SNIPPET_CHARS // 2:
        start = _cut_before(line, first)
    stop = len(line)
    if stop - start > SNIPPET_CHARS:
        stop = _cut_behind(line, start + SNIPPET_CHARS)
    before = "… " if start else ""
    behind = " …" if stop < len(line) else ""
    return before + line[start:stop].strip() + behind


def _cut_before(line: str, word: int) -> int:
    """Return where a snippet begins whose word begins at `word`: with its sentence, or a few words
    before it, or more at the end of the line."""
    near = max(min(word - _SLACK_CHARS, len(line) - SNIPPET_CHARS), 0)
    most = min(near + _SLACK_CHARS, word)
    sentence = _SENTENCE_END.search(line, near, most)
    blank = line.find(" ", near, most)
    if sentence:
        return sentence.end()
    return blank + 1 if blank >= 0 else whole_character_before(line, near)


def _cut_behind(line: str, most: int) -> int:
    """Return where a snippet ends that has to end by `most`."""
    near = most - _SLACK_CHARS
    blank = line.rfind(" ", near, most + 1)
    if blank >= 0:
        return blank
    ends = [match.end() for match in _SENTENCE_END.finditer(line, near, most)]
    return ends[-1] if ends else whole_character_before(line, most)
