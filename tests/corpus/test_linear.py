"""No document takes more than its share: the steps of every parser grow with the text alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import farspan
from farspan.corpus.documents import cut_document
from farspan.corpus.sources import open_source
from farspan.domain.corpus import Document
from farspan.retrieval.chunk import chunk_document
from farspan.retrieval.queries import body_of, questions_of
from farspan.retrieval.snippets import make_snippet
from farspan.retrieval.words import Words

PACKAGE = str(Path(farspan.__file__).parent)
#: Twice the text takes twice the steps, and some to begin with.
MOST = 2.2
SIZE = 4_000

#: What is repeated in a file of this ending, behind some beginning.
HOSTILE = [
    *((".html", "", piece) for piece in ("<a ", "<", "<!--", "<![CDATA[", "</p>", "<a href='")),
    *((".html", "", piece) for piece in ("<script>", "<script ", "<title>", "<pre>", "<pre> ")),
    *((".html", "", piece) for piece in ("<nav>", "<svg><p>", "<h1>a", "<h2><nav>", "<div>")),
    *(
        (".html", "", piece)
        for piece in ("<nav><h2>a</h2></nav>", "<pre><h1>a</h1></pre>", "&#13;")
    ),
    *((".html", "<pre>", piece) for piece in (" ", "\n ", "<b", "a ")),
    *((".html", "<h1>", piece) for piece in ("a<br>", "<b>", "<h2>")),
    *((".md", "", piece) for piece in ("# ####", "# a\n", "#", "- ", "* + ", "a\n", "a\n===\n")),
    *((".md", "", piece) for piece in ("> ", "```\n", "<!-- \n", "- a\n  ", "\n", "<b>\n", "[a]:")),
    *((".md", "# a", piece) for piece in (" ", " #", "\t")),
    *((".md", "---\n", piece) for piece in ("a: b\n", "---\n", "title: \n", "\n", "# a\n")),
    *((".md", "---\na: b\n", piece) for piece in ("a: b\n", "title:\n", "#\n", "title: a")),
    *((".rst", "", piece) for piece in ("a\n=", "===\n", "a\n===\n", "=\n", "\n", "# ")),
    *((".txt", "", piece) for piece in (" ", "a\n", "\f", "\r")),
    *((".jsonl", '{"text": "', piece) for piece in ('\\"', "a", "\\")),
    *((".jsonl", "", piece) for piece in ("[", '"', "[]", '{"a":', '{"text": "a"}\n')),
]


#: Those whose cost hides in a pattern or a library, where no step of Python shows it.
HOSTILE_TO_PATTERNS = [
    *((".html", "", piece) for piece in ("<a ", "<a", "<!--", "<![CDATA[", "<?", "<a href='")),
    *((".html", "", piece) for piece in ("<script ", "<script '", "&", "&#")),
    *((".html", "<pre>", piece) for piece in (" ", "\t")),
    *((".html", "<p>", piece) for piece in ("<b", "</b")),
    *((".md", "", piece) for piece in ("# ####", "# #", "# \t", "* + ", "[a", "> ")),
    *((".md", "# a", piece) for piece in (" ", " #", "\t", "#")),
    *((".md", "---\na: b\n", piece) for piece in ("# ", "# #")),
    *((".rst", "# a", piece) for piece in (" ", " #", "=")),
    *((".rst", "a\n====", piece) for piece in (" ", "\t")),
    *((".jsonl", '{"text": "', piece) for piece in ('\\"', "\\", '"')),
]


def steps(function: Callable[[], object]) -> int:
    """Lines of the package that a call goes through."""
    count = 0

    def within(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return within

    def entered(frame: FrameType, event: str, argument: Any) -> Any:
        return within if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def read(file: Path) -> list[Document]:
    return [
        part for document in open_source(str(file)).documents() for part in cut_document(document)
    ]


def repeated(begin: str, piece: str, size: int) -> str:
    """The end makes patterns try all that they may try."""
    return begin + piece * (size // len(piece)) + "x"


@pytest.mark.parametrize(("ending", "begin", "piece"), HOSTILE)
def test_twice_the_text_takes_twice_the_steps(
    ending: str, begin: str, piece: str, tmp_path: Path
) -> None:
    file = tmp_path / f"a{ending}"
    # The first time loads what it needs.
    file.write_text(repeated(begin, piece, 100), newline="")
    read(file)
    counts = []
    for size in (SIZE, 2 * SIZE):
        file.write_text(repeated(begin, piece, size), newline="")
        counts.append(steps(partial(read, file)))
    assert counts[1] <= MOST * counts[0]


@pytest.mark.parametrize(("ending", "begin", "piece"), HOSTILE_TO_PATTERNS)
def test_patterns_and_libraries_look_at_a_text_once(
    ending: str, begin: str, piece: str, tmp_path: Path
) -> None:
    """Where they look at it again from each of its places, this takes minutes to hours, and the
    time that a test may hang ends it."""
    # Markdown is read by parts: what a pattern is to look at whole is shorter than one.
    text = repeated(begin, piece, 200_000 if ending in (".md", ".rst") else 1_000_000)
    (tmp_path / f"a{ending}").write_text(text, newline="")
    documents = read(tmp_path)
    assert sum(len(document.text) for document in documents) <= len(text)


TEXTS = (
    " ",
    "\n",
    " \n",
    "a ",
    "aA",
    "a.",
    "_",
    "# a?\n",
    "a?\n===\n",
    "===\n",
    "- ",
    "港",
    "e\u0301",
    "\u0301",
    "👩\u200d",
    "a-",
    "a'",
    "한",
    "\u200b",
)


@pytest.mark.parametrize("piece", TEXTS)
def test_passages_and_words_of_a_hostile_text_take_steps_by_its_length(
    piece: str,
) -> None:
    def passages(document: Document) -> None:
        words = Words()
        list(chunk_document(document, 0, 64))
        questions_of(document)
        words.of_text(body_of(document))
        words.of_query(document.text)
        make_snippet(document.text, "a b c", words)

    counts = []
    for size in (SIZE // 2, SIZE):
        text = f"a\n\nb{piece * (size // len(piece))}c"
        document = Document(title="t", text=text, origin="a.md")
        counts.append(steps(partial(passages, document)))
    assert counts[1] <= MOST * counts[0]


@pytest.mark.parametrize("piece", TEXTS)
def test_the_longest_part_of_a_hostile_text_is_cut_in_passages(
    piece: str,
) -> None:
    text = f"a\n\nb{piece * (50_000 // len(piece))}c"
    document = Document(title="t", text=text, origin="a.md")
    chunks = list(chunk_document(document, 0, 64))
    assert chunks[-1].text.endswith("c")
