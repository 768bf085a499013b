"""Headings are found as a reader sees them, and a passage lies under those that a reader would
name."""

import pytest

from farspan.corpus.tokenizer import train
from farspan.domain.corpus import Document
from farspan.retrieval.chunk import chunk_documents
from farspan.retrieval.outline import outline, path

MARKDOWN = """# Tea

Intro.

## Plucking

```
# no heading: code
```

Leaves.

### By hand

Two leaves.

## Withering ##

A night.
"""
RST = """Tea
===

Plucking
--------

Leaves.

| a | b |
=========

Withering
---------
A night.
"""


@pytest.mark.parametrize(
    ("text", "headings"),
    [
        (MARKDOWN, [(1, "Tea"), (2, "Plucking"), (3, "By hand"), (2, "Withering")]),
        (RST, [(1, "Tea"), (2, "Plucking"), (1, "| a | b |"), (2, "Withering")]),
        ("a paragraph\n\n---\n\nanother", []),
        ("#hashtag and\n####### seven\n# \n", []),
        ("~~~\n# in a fence that is open", []),
        ("x" * 200 + "\n=====", []),
        ("", []),
    ],
)
def test_headings(text: str, headings: list[tuple[int, str]]):
    found = outline(text)
    assert [(heading.level, heading.title) for heading in found] == headings
    assert all(text[heading.start :].lstrip("# ").startswith(heading.title) for heading in found)


def test_the_path_is_of_the_headings_above():
    found = outline(MARKDOWN)
    assert path(found, MARKDOWN.index("Intro")) == ("Tea",)
    assert path(found, MARKDOWN.index("Two leaves")) == ("Tea", "Plucking", "By hand")
    assert path(found, MARKDOWN.index("A night")) == ("Tea", "Withering")
    assert path(found, 0) == ("Tea",) and path([], 5) == ()


def test_passages_begin_at_headings_and_carry_their_line_and_heading_path():
    sections = [f"## Part {n}\n\n" + f"Sentence number {n} says this. " * 6 for n in range(8)]
    text = "# All\n\nFirst.\n\n" + "\n\n".join(sections)
    words = train([text] * 3, 400)
    document = Document(title="All", text=text, origin="all.md", line=11)
    chunks = [chunk for chunk in chunk_documents([document], words, 64) if not chunk.head]
    begins = [chunk for chunk in chunks if chunk.text.strip().startswith("## Part")]
    assert len(begins) >= 6
    lines = text.split("\n")
    for chunk in chunks:
        assert lines[chunk.line - 11] in chunk.text and chunk.headings[:1] == ("All",)
    for chunk in begins:
        assert chunk.headings == ("All", chunk.text.strip().split("\n")[0].removeprefix("## "))


def test_a_passage_is_on_the_page_that_its_first_word_is_on():
    text = "\f".join(f"Page {n}. " + "Words of it. " * 40 for n in range(3, 7))
    words = train([text], 300)
    document = Document(title="t", text="Head\n" + text, origin="a.pdf", page=3)
    for chunk in chunk_documents([document], words, 48):
        before = document.text[: chunk.start + len(chunk.text) - len(chunk.text.lstrip())]
        assert (chunk.page, chunk.line) == (3 + before.count("\f"), 0)
