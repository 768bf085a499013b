"""Headings are found as a reader sees them, and a passage lies under those that a reader would
name."""

from farspan.corpus.documents import cut_document
from farspan.corpus.sources import open_source
from farspan.domain.corpus import Document, Heading
from farspan.retrieval.outline import HeadingPaths, outline
from tests.retrieval.conftest import chunk_documents

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


def test_the_path_is_of_the_headings_above():
    document = Document(title="Tea", text=MARKDOWN, origin="tea.md")
    paths = HeadingPaths(outline(document))
    assert paths.at(MARKDOWN.index("Intro")) == ("Tea",)
    assert paths.at(MARKDOWN.index("Two leaves")) == ("Tea", "Plucking", "By hand")
    assert paths.at(MARKDOWN.index("A night")) == ("Tea", "Withering")
    assert paths.at(0) == ("Tea",) and HeadingPaths([]).at(5) == ()


def test_headings_are_those_of_the_source_where_it_knows_them():
    text = "# comment\n\nTitle\n=====\n"
    found = {
        origin: [heading.title for heading in outline(Document(title="", text=text, origin=origin))]
        for origin in ("a.md", "a.txt", "rows.jsonl:1", "torch.nn.Linear")
    }
    assert found.pop("a.md") == ["comment", "Title"]
    assert all(titles == ["Title"] for titles in found.values())
    own = (Heading(0, 1, "Its own"),)
    assert outline(Document(title="", text=text, origin="a.md", headings=own)) == own
    assert outline(Document(title="", text=text, origin="a.md", headings=())) == ()


PAGES = {
    "a.md": """# Guide

Intro words.

## Setup

```sh
# install it
Run
===
```

Then so.
""",
    "b.html": "<h1>Guide</h1><p>Intro words.<h2>Setup</h2>"
    "<pre># install it\nRun\n===</pre><p>Then so.",
    "c.rst": "Guide\n=====\n\nIntro.\n\nSetup\n-----\n\n::\n\n  # install it\n\nThen so.\n",
    "d.txt": "Guide\n\nIntro words.\n\nSetup\n\n# install it\n\nThen so.\n",
}


def test_no_passage_is_cited_below_a_comment_in_code(tmp_path):
    for name, text in PAGES.items():
        (tmp_path / name).write_text(text)
    documents = list(open_source(str(tmp_path)).documents())
    for document in documents:
        chunks = list(chunk_documents(cut_document(document), 8))
        paths = {chunk.headings for chunk in chunks}
        if document.origin.endswith(".txt"):
            assert paths == {()}
        else:
            assert paths <= {("Guide",), ("Guide", "Setup")}
            (last,) = {chunk.headings for chunk in chunks if "Then" in chunk.text}
            assert last == ("Guide", "Setup")


def test_passages_of_a_later_part_are_cited_below_the_headings_of_the_document(tmp_path):
    text = "# Book\n\n## Chapter\n\n" + "A sentence of the chapter.\n\n" * 12_000
    (tmp_path / "a.md").write_text(text)
    parts = [
        part
        for document in open_source(str(tmp_path)).documents()
        for part in cut_document(document)
    ]
    assert len(parts) == 2
    later = Document(
        title="part 2", text=parts[1].text[:500], origin="a.md", headings=parts[1].headings
    )
    assert {chunk.headings for chunk in chunk_documents([later], 64)} == {("Book", "Chapter")}


def test_passages_begin_at_headings_and_carry_their_line_and_heading_path():
    sections = [f"## Part {n}\n\n" + f"Sentence number {n} says this. " * 6 for n in range(8)]
    text = "# All\n\nFirst.\n\n" + "\n\n".join(sections)
    document = Document(title="All", text=text, origin="all.md", line=11)
    chunks = chunk_documents([document], 64)
    begins = [chunk for chunk in chunks if chunk.text.strip().startswith("## Part")]
    assert len(begins) >= 6
    lines = text.split("\n")
    for chunk in chunks:
        assert lines[chunk.line - 11] in chunk.text and chunk.headings[:1] == ("All",)
    for chunk in begins:
        assert chunk.headings == ("All", chunk.text.strip().split("\n")[0].removeprefix("## "))


def test_a_passage_is_on_the_page_that_its_first_word_is_on():
    text = "\f".join(f"Page {n}. " + "Words of it. " * 40 for n in range(3, 7))
    document = Document(title="t", text="Head\n" + text, origin="a.pdf", page=3)
    for chunk in chunk_documents([document], 48):
        before = document.text[: chunk.start + len(chunk.text) - len(chunk.text.lstrip())]
        assert (chunk.page, chunk.line) == (3 + before.count("\f"), 0)
