"""Chunks cover their document, in order, within bounds, and their spans are the document's own
tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.corpus.tokenizer import train_bpe_tokenizer
from farspan.domain.corpus import Document
from farspan.retrieval.chunk import head_length
from tests.retrieval.conftest import chunk_documents

SAMPLE = (
    "Return the sum.\n\nArgs:\n    x: the first number.\n    y: the second. Both may be floats!\n\n"
    "Example::\n\n    >>> add(1, 2)\n    3\n\nSee also the naïve sum; π and 日本語 are text too. "
)


BPE = train_bpe_tokenizer([SAMPLE * 5], 400)
words = st.sampled_from(
    [*SAMPLE.split(" "), "\n\n", "\n", "  ", " ", ".", "x" * 90, "日本語" * 30, "🙂" * 20]
)
texts = st.lists(words, max_size=60).map(" ".join)
sizes = st.integers(8, 60)


def document(text: str, title: str = "t") -> Document:
    return Document(title=title, text=text, origin="o")


def tokens(text: str) -> int:
    return len(BPE.encode(text))


@given(texts, sizes)
def test_chunks_cover_the_document_in_order_within_bounds(text, size):
    chunks = list(chunk_documents([document(text)], BPE, size))
    assert bool(chunks) == bool(text.strip())
    end = 0
    for before, chunk in zip([None, *chunks], chunks, strict=False):
        assert text[chunk.start :].startswith(chunk.text)
        assert chunk.start <= end, "a character lies in no chunk"
        assert 0 < tokens(chunk.text) <= size
        assert tokens(text[chunk.start : end]) <= size // 8
        if before is not None:
            assert chunk.start > before.start and chunk.start + len(chunk.text) > end
        end = chunk.start + len(chunk.text)
    assert end == (len(text) if chunks else 0)


@given(
    texts.filter(
        lambda text: "x" * 90 not in text and "日本語" * 30 not in text and "🙂" not in text
    ),
    st.integers(30, 60),
)
def test_cuts_leave_the_documents_own_tokens(text, size):
    for chunk in chunk_documents([document(text)], BPE, size):
        parts = text[: chunk.start], chunk.text, text[chunk.start + len(chunk.text) :]
        assert [token for part in parts for token in BPE.encode(part)] == BPE.encode(text)


def test_cuts_fall_at_paragraphs_where_one_is_near():
    text = "\n\n".join(
        f"Paragraph {i} says this and that about a number of things." for i in range(12)
    )
    chunks = list(chunk_documents([document(text)], BPE, 60))
    assert len(chunks) > 2
    ends = [chunk.start + len(chunk.text) for chunk in chunks]
    assert all(text[end : end + 2] == "\n\n" for end in ends[:-1])


def test_without_paragraphs_cuts_fall_at_sentences():
    text = " ".join(
        f"Sentence {i} says this, and that too, about a number of things." for i in range(12)
    )
    chunks = list(chunk_documents([document("Head.\n" + text)], BPE, 60))
    assert len(chunks) > 2
    assert all(chunk.text.endswith(".") for chunk in chunks)


def test_chunks_carry_the_number_and_title_of_their_document():
    documents = [document(SAMPLE * 4, "a"), document("  \n ", "empty"), document("short", "b")]
    chunks = list(chunk_documents(documents, BPE, 40))
    assert [(c.document, c.title) for c in chunks] == [(0, "a")] * (len(chunks) - 1) + [(2, "b")]


@pytest.mark.parametrize(
    ("title", "text", "head"),
    [
        ("a.b", "Return b.\n\nMore.", "Return b."),
        (
            "Assignments",
            "Assignments\n***********\n\nFirst line.\nSecond.",
            "Assignments\n***********\n\nFirst line.",
        ),
        ("Notes on X", "# Notes, on X\nOnly line.\n\n", "# Notes, on X\nOnly line.\n\n"),
        ("t", "one line", "one line"),
        ("t", "---\n***", "---\n***"),
        ("t", "", ""),
    ],
)
def test_the_head_is_the_first_line_and_a_repeated_title(title, text, head):
    assert text[: head_length(document(text, title))] == head


def test_head_and_body_are_cut_apart_and_the_head_goes_with_its_title():
    chunks = list(chunk_documents([document("First line.\nThe rest.", "name")], BPE, 60))
    assert [(c.head, c.text, c.indexed) for c in chunks] == [
        (True, "First line.", "name\nFirst line."),
        (False, "\nThe rest.", "\nThe rest."),
    ]
