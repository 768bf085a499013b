"""Chunks cover their document, in order, within bounds, and their spans are the document's own tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer

from farspan.domain.corpus import Document
from farspan.retrieval.chunk import Chunking, chunk_documents, head_length

SAMPLE = (
    "Return the sum.\n\nArgs:\n    x: the first number.\n    y: the second. Both may be floats!\n\n"
    "Example::\n\n    >>> add(1, 2)\n    3\n\nSee also the naïve sum; π and 日本語 are text too. "
)


class Bpe:
    """A real byte-level BPE trained on a few lines."""

    def __init__(self) -> None:
        self.tokenizer = ByteLevelBPETokenizer()
        self.tokenizer.train_from_iterator([SAMPLE * 5], vocab_size=400, show_progress=False)

    def encode_batch(self, texts):
        return [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]


BPE = Bpe()
words = st.sampled_from([*SAMPLE.split(" "), "\n\n", "\n", "  ", " ", ".", "x" * 90, "日本語" * 30, "🙂" * 20])
texts = st.lists(words, max_size=60).map(" ".join)
chunkings = st.tuples(st.integers(8, 60), st.floats(0, 0.5)).map(
    lambda p: Chunking(size=p[0], overlap=int(p[0] * p[1]))
)


def document(text: str, title: str = "t") -> Document:
    return Document(title=title, text=text, origin="o")


@given(texts, chunkings)
@settings(max_examples=150, deadline=None)
def test_chunks_cover_the_document_in_order_within_bounds(text, chunking):
    chunks = list(chunk_documents([document(text)], BPE, chunking))
    assert bool(chunks) == bool(text.strip())
    assert [chunk.ordinal for chunk in chunks] == list(range(len(chunks)))
    end = 0
    for before, chunk in zip([None, *chunks], chunks, strict=False):
        assert text[chunk.start_char :].startswith(chunk.text)
        assert chunk.start_char <= end, "a character lies in no chunk"
        assert 0 < chunk.stop - chunk.start <= chunking.size
        if before is not None:
            assert before.start < chunk.start <= before.stop < chunk.stop
            assert before.stop - chunk.start <= chunking.overlap
            assert chunk.start_char > before.start_char
        end = chunk.start_char + len(chunk.text)
    assert end == (len(text) if chunks else 0)


@given(texts.filter(lambda text: "x" * 90 not in text and "日本語" * 30 not in text and "🙂" not in text), chunkings)
@settings(max_examples=100, deadline=None)
def test_spans_are_the_documents_own_tokens(text, chunking):
    whole = BPE.encode_batch([text])[0]
    for chunk in chunk_documents([document(text)], BPE, chunking):
        assert BPE.encode_batch([chunk.text])[0] == whole[chunk.start : chunk.stop]


def test_cuts_fall_at_paragraphs_where_one_is_near():
    text = "\n\n".join(f"Paragraph {i} says this and that about a number of things." for i in range(12))
    chunks = list(chunk_documents([document(text)], BPE, Chunking(size=60, overlap=0)))
    assert len(chunks) > 2
    assert all(chunk.text.lstrip().startswith("Paragraph") and chunk.text.endswith(".") for chunk in chunks)


def test_ids_count_over_documents_and_a_limit_keeps_the_first_chunks():
    documents = [document(SAMPLE * 4, "a"), document("  \n ", "empty"), document("short", "b")]
    every = list(chunk_documents(documents, BPE, Chunking(size=40, overlap=8)))
    first = list(chunk_documents(documents, BPE, Chunking(size=40, overlap=8, per_document=2)))
    assert [chunk.id for chunk in first] == list(range(len(first)))
    assert [(c.document, c.title, c.ordinal) for c in first] == [(0, "a", 0), (0, "a", 1), (2, "b", 0)]
    assert [c.text for c in first] == [c.text for c in every if c.ordinal < 2]


def test_an_overlap_of_more_than_half_is_refused():
    with pytest.raises(ValueError, match="overlap 9 is more than half"):
        Chunking(size=16, overlap=9)


@pytest.mark.parametrize(
    ("title", "text", "head"),
    [
        ("a.b", "Return b.\n\nMore.", "Return b."),
        ("Assignments", "Assignments\n***********\n\nFirst line.\nSecond.", "Assignments\n***********\n\nFirst line."),
        ("Notes on X", "# Notes, on X\nOnly line.\n\n", "# Notes, on X\nOnly line.\n\n"),
        ("t", "one line", "one line"),
        ("t", "---\n***", "---\n***"),
        ("t", "", ""),
    ],
)
def test_the_head_is_the_first_line_and_a_repeated_title(title, text, head):
    assert text[: head_length(document(text, title))] == head


def test_head_and_body_are_cut_apart_and_the_head_goes_with_its_title():
    chunks = list(chunk_documents([document("First line.\nThe rest.", "name")], BPE, Chunking(size=60)))
    assert [(c.head, c.text, c.indexed) for c in chunks] == [
        (True, "First line.", "name\nFirst line."),
        (False, "\nThe rest.", "\nThe rest."),
    ]
