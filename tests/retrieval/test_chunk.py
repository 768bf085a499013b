"""Chunks cover their document, in order, within bounds, and are cut between characters."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from farspan.corpus.tokenizer import train_bpe_tokenizer
from farspan.domain.corpus import Document
from farspan.retrieval.chunk import count_pieces, head_length
from farspan.retrieval.text_cuts import is_inside_character
from tests.retrieval.conftest import chunk_documents

SAMPLE = (
    "Return the sum.\n\nArgs:\n    x: the first number.\n    y: the second. Both may be floats!\n\n"
    "Example::\n\n    >>> add(1, 2)\n    3\n\nSee also the naïve sum; π and 日本語 are text too. "
)
HARD = [
    "x" * 90,
    "日本語" * 30,
    "🙂" * 20,
    "👩\u200d🔬" * 9,
    "e\u0301" * 40,
    "हिन्दी",
    "한국어",
    " " * 300,
    " " + "\r\n" * 150,
]

words = st.sampled_from([*SAMPLE.split(" "), "\n\n", "\n", "  ", " ", ".", "。", *HARD])
texts = st.lists(words, max_size=60).map(" ".join)
sizes = st.integers(8, 60)


def document(text: str, title: str = "t") -> Document:
    return Document(title=title, text=text, origin="o")


@given(texts, sizes)
@example("Return " + " " * 300, 8)
@example("a\r\n" + " " * 5000 + "\u0301b" + "\r\n" * 999, 9)
def test_chunks_cover_the_document_in_order_within_bounds(text, size):
    chunks = list(chunk_documents([document(text)], size))
    assert bool(chunks) == bool(text.strip())
    end = 0
    for before, chunk in zip([None, *chunks], chunks, strict=False):
        assert text[chunk.start :].startswith(chunk.text)
        assert chunk.start <= end, "a character lies in no chunk"
        assert count_pieces(chunk.text) <= size
        assert count_pieces(text[chunk.start : end]) <= size // 8
        if before is not None:
            assert chunk.start > before.start and chunk.start + len(chunk.text) > end
        end = chunk.start + len(chunk.text)
    assert end == (len(text) if chunks else 0)


@given(texts, st.integers(40, 60))
@example("\n " + "👩\u200d🔬" * 9 + " " + "x" * 90, 40)
def test_cuts_fall_between_characters(text, size):
    for chunk in chunk_documents([document(text)], size):
        assert not is_inside_character(text, chunk.start)
        assert not is_inside_character(text, chunk.start + len(chunk.text))


def test_pieces_are_about_the_tokens_of_a_trained_tokenizer():
    words = [
        f"word{number} of many others, and numbers such as {number}. " for number in range(400)
    ]
    text = "".join(words)
    tokens = len(train_bpe_tokenizer(words, 400).encode(text))
    assert 0.7 * tokens < count_pieces(text) < 1.4 * tokens
    assert count_pieces("港の壁") == 3 and count_pieces("กินข้าว") == 5 and count_pieces("항구") == 2
    assert (
        count_pieces("हिन्दी") == 1 and count_pieces("tokens") == 1 and count_pieces("(x, 12)") == 5
    )


def test_text_without_spaces_is_cut_behind_sentences():
    text = "港の壁のそばに木が生えている。「古い」と言う人もいる。" * 20
    chunks = chunk_documents([document(text)], 40)
    assert len(chunks) > 10
    assert all(chunk.text.endswith("。") for chunk in chunks)
    quoted = "彼は「壁のそばに木が生えている。」と言って歩いた。" * 20
    for chunk in chunk_documents([document(quoted)], 40):
        assert not chunk.text.endswith("生えている。")


def test_cuts_fall_at_paragraphs_where_one_is_near():
    text = "\n\n".join(
        f"Paragraph {i} says this and that about a number of things." for i in range(12)
    )
    chunks = list(chunk_documents([document(text)], 60))
    assert len(chunks) > 2
    ends = [chunk.start + len(chunk.text) for chunk in chunks]
    assert all(text[end : end + 2] == "\n\n" for end in ends[:-1])


def test_without_paragraphs_cuts_fall_at_sentences():
    text = " ".join(
        f"Sentence {i} says this, and that too, about a number of things." for i in range(12)
    )
    chunks = list(chunk_documents([document("Head.\n" + text)], 60))
    assert len(chunks) > 2
    assert all(chunk.text.endswith(".") for chunk in chunks)


def test_chunks_carry_the_number_and_title_of_their_document():
    documents = [document(SAMPLE * 4, "a"), document("  \n ", "empty"), document("short", "b")]
    chunks = list(chunk_documents(documents, 40))
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


@pytest.mark.parametrize(
    ("title", "origin", "text", "is_added"),
    [
        ("Barges", "a/barges.md", "On the Rhine.\n\nThey float.", True),
        ("Barges", "a/barges.md", "# Barges\n\nThey float.", False),
        ("Barges", "a/barges.md", "\n---\nBARGES!\nThey float.", False),
        ("barges", "a/barges.txt", "On the Rhine.", True),
        ("scan-0034", "a/scan-0034.txt", "On the Rhine.", False),
        ("IMG_2041", "IMG_2041.pdf", "On the Rhine.", False),
        ("2041 A Space Odyssey", "book.epub", "On the Rhine.", True),
        ("rivers.csv:7", "a/rivers.csv:7", "On the Rhine.", False),
    ],
)
def test_a_title_is_embedded_once_and_names_of_places_are_not(title, origin, text, is_added):
    document = Document(title=title, origin=origin, text=text)
    first = chunk_documents([document], 32)[0]
    assert first.indexed == (f"{title}\n{first.text}" if is_added else first.text)


def test_the_first_chunk_goes_with_its_title():
    chunks = list(chunk_documents([document("First line.\n\n" + "The rest. " * 30, "name")], 60))
    assert [chunk.first for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert chunks[0].indexed == f"name\n{chunks[0].text}" and chunks[1].indexed == chunks[1].text
