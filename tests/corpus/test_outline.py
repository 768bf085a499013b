"""Headings of Markdown are those of a reference parser; comments and code are none."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from farspan.corpus.documents import cut_document
from farspan.corpus.markdown import MarkdownOutline
from farspan.corpus.outline import MAX_HEADING_CHARS, UnderlinedOutline, read_outline
from farspan.corpus.sources import open_source
from farspan.domain.corpus import Document, Heading

#: Lines whose meaning hangs on those around them.
LINES = (
    *("", "", "# one", "## two ##", "   # three", "    # code", "\t# tab", "#tag", "# C#", "# "),
    *("text", "more text", "a | b", "===", "---", "-", "***", "> quote", "> # quoted", "[a]: /u"),
    *("- item", "  - nested", "1. one", "2. two", "10. ten", "- # in item", "  in", "* star"),
    *("```", "```sh", "~~~", "````", "   ```", "    ```", "`` a` b", "<!-- c", "c -->", "<pre>"),
    *("</pre>", "<div>", "</div>", "<b>", "<?x", "<!A", "<script>", "</script> x", "    deep"),
)


def markdown(text: str) -> list[tuple[int, str]]:
    return [(heading.level, heading.title) for heading in read_outline(text, MarkdownOutline())]


def reference(text: str) -> list[tuple[int, str]]:
    """Headings outside quotations that say something."""
    headings = []
    quotes = 0
    tokens = MarkdownIt("commonmark").parse(text)
    for token, after in zip(tokens, [*tokens[1:], tokens[-1]] if tokens else [], strict=True):
        quotes += {"blockquote_open": 1, "blockquote_close": -1}.get(token.type, 0)
        title = " ".join(line.strip() for line in after.content.split("\n"))
        if token.type == "heading_open" and not quotes and title:
            headings.append((int(token.tag[1]), title))
    return headings


def test_headings_of_markdown_are_those_of_commonmark() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        # Front matter is looked for at the top alone.
        text = "x\n\n" + "\n".join(rng.choices(LINES, k=rng.randint(1, 9))) + "\n"
        assert markdown(text) == reference(text), text


def test_pieces_of_a_text_have_the_headings_of_the_whole() -> None:
    rng = random.Random(1)
    for make in (MarkdownOutline, UnderlinedOutline):
        for _ in range(200):
            text = "\n".join(rng.choices(LINES, k=30))
            outline = make()
            at = 0
            while at < len(text):
                size = rng.randint(1, 40)
                outline.add(text[at : at + size])
                at += size
            assert outline.take(0, len(text)) == read_outline(text, make())


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("```sh\n# not a heading\n```\n\n# Real Title\ntext", "Real Title"),
        ("~~~~\n# no\n~~~\n# no\n~~~~\n# Real", "Real"),
        ("<!--\n# no\n-->\n# Real", "Real"),
        ("<pre>\n# no\nno\n==\n</pre>\n\n# Real", "Real"),
        ("    # code\n\n# Real", "Real"),
        ("1. Run:\n\n   ```sh\n   # no\n   ```\n\n# Real", "Real"),
        ("- a\n---\n# Real", "Real"),
        ("+++\ntitle = 'Foo'\n# made by hand\n+++\n# Real", "Foo"),
        ("---\ntitle: Foo\nnever closed\n\n# Real", "Real"),
        ("# C# ##\n", "C#"),
        ("```\n# no heading", "a"),
    ],
)
def test_code_and_comments_name_no_document(text: str, title: str, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(text)
    (document,) = open_source(str(tmp_path)).documents()
    assert document.title == title


@pytest.mark.parametrize(
    ("text", "headings"),
    [
        ("Tea\n===\n\nLeaves\n------\nA night.\n", [(1, "Tea"), (2, "Leaves")]),
        ("===\nTea\n===\n\nTea\n===\n", [(1, "Tea"), (2, "Tea")]),
        ("# comment\n\n## more\n", []),
        ("- item\n------\n", []),
        (">>> x = 1\n---------\n", []),
        ("end of a paragraph\nof lines\n--------\n", []),
        ("A long sentence that ends in a full stop.\n---\n", []),
        ("    code\n    ----\n", []),
        ("\n\n====\n\n", []),
    ],
)
def test_underlined_titles(text: str, headings: list[tuple[int, str]]) -> None:
    found = read_outline(text, UnderlinedOutline())
    assert [(heading.level, heading.title) for heading in found] == headings
    assert all(text[heading.start :].startswith(heading.title) for heading in found)


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_headings_lie_in_the_parts_of_a_file_where_they_say(line_end: str, tmp_path: Path) -> None:
    lines = ["\ufeff  # Book", "", "word " * 40, "```", "# no heading", "```"]
    for number in range(2000):
        lines += [f"## Chapter {number}", "", "word " * 60, "", f"Section {number}", "---", "word"]
    (tmp_path / "a.md").write_bytes(line_end.join(lines).encode())
    parts = [
        part
        for document in open_source(str(tmp_path)).documents()
        for part in cut_document(document)
    ]
    assert len(parts) > 2 and parts[0].title == "Book"
    titles = []
    for part in parts:
        for heading in inner(part):
            line = part.text[heading.start :].split("\n")[0]
            assert line.lstrip("# ") == heading.title
            titles.append(heading.title)
    assert titles == [
        "Book",
        *(f"{kind} {n}" for n in range(2000) for kind in ("Chapter", "Section")),
    ]
    for part in parts[1:]:
        above = [heading.title for heading in part.headings or () if heading.start < 0]
        assert above[0] == "Book" and 2 <= len(above) <= 2


def inner(document: Document) -> list[Heading]:
    return [heading for heading in document.headings or () if heading.start >= 0]


def test_text_files_have_no_headings_in_markdown(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("# comment\n\n## comment\n\ntext")
    (document,) = open_source(str(tmp_path)).documents()
    assert document.title == "a" and not document.headings


def test_long_headings_are_cut_and_long_paragraphs_are_none() -> None:
    ((level, title),) = markdown(f"x\n\n# {'word ' * 1000}")
    assert level == 1 and len(title) == MAX_HEADING_CHARS
    assert not markdown("x\n\n" + "word " * 40 + "\n===\n")
