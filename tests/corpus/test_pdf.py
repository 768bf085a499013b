"""PDF files: words that line ends break are whole, and what programs call them is no title."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.corpus._pdf import is_default_title, join_broken_words, pdf_title
from farspan.corpus.sources import open_source
from tests.corpus.test_sources import pdf_with_text


@pytest.mark.parametrize(
    ("broken", "whole"),
    [
        (
            "The harbour was re-\npaired after the thunder-\nstorm of autumn.",
            "The harbour was repaired\nafter the thunderstorm\nof autumn.",
        ),
        ("an inter-\nnatio-\nnal treaty, signed", "an international\ntreaty, signed"),
        ("Thunder- \n  storm, again", "Thunderstorm,\nagain"),
        ("soft re\u00ad\npaired and uni\u2010\ncode", "soft repaired\nand unicode"),
        ("a word at the page re-\fpaired here", "a word at the page repaired\fhere"),
        ("the page re-\n\fpaired\nnext", "the page repaired\f\nnext"),
        ("the end re-\npaired", "the end repaired"),
        ("the end re-\fpaired", "the end repaired\f"),
        # Hyphens of their own.
        ("a long-\nterm plan; the plan is long-term", "a long-term\nplan; the plan is long-term"),
        ("a short-\nterm plan", "a short-term\nplan"),
        ("self-\nattention and DNA-\nbased", "self-attention\nand DNA-based"),
        ("state-of-the-\nart, and the rest", "state-of-the-art,\nand the rest"),
        ("non-govern-\nmental bodies", "non-governmental\nbodies"),
        ("co-\noperate, as they cooperate", "cooperate,\nas they cooperate"),
        ("co-\noperate, as they co-operate", "co-operate,\nas they co-operate"),
        ("Jean-\nPierre of 1914-\n1918", "Jean-\nPierre of 1914-\n1918"),
        ("pre- and post-\nand so on", "pre- and post-\nand so on"),
        ("see https://a.example/some-\nthing", "see https://a.example/some-\nthing"),
        ("a list\n- one\n- two\n\nre-\n\npaired", "a list\n- one\n- two\n\nre-\n\npaired"),
        ("the run --dry-\nrun option", "the run --dry-run\noption"),
        ("the \ufb01rst e\ufb03cient", "the first efficient"),
        ("no break at all", "no break at all"),
        ("", ""),
    ],
)
def test_words_broken_at_the_end_of_a_line_are_joined(broken: str, whole: str) -> None:
    assert join_broken_words(broken) == whole


@given(st.text(alphabet="abE1 -\n\f\u00ad.", max_size=60))
def test_joining_keeps_every_letter_and_page(text: str) -> None:
    joined = join_broken_words(text)
    assert joined.count("\f") == text.count("\f")
    assert "".join(filter(str.isalnum, joined)) == "".join(filter(str.isalnum, text))
    # Lines stay, but for those that would be blank behind a joined word.
    assert joined.count("\n") <= text.count("\n")


def test_any_word_broken_anywhere_is_found_whole() -> None:
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyzäöüéßжшя"
    for _ in range(300):
        words = ["".join(rng.choices(letters, k=rng.randrange(6, 14))) for _ in range(12)]
        lines = []
        for word in words:
            at = rng.randrange(2, len(word) - 2)
            lines.append(rng.choice([word, f"{word[:at]}-\n{word[at:]}"]))
        assert join_broken_words(" ".join(lines)).split() == words


def test_words_are_joined_in_one_pass() -> None:
    """Twice the text takes twice the work: a line of letters, hyphens or blanks alone ends."""
    for piece in ("a", "-", " ", "a-", "a-\n", "-\n", "a- ", "ab-\ncd ", "\u00ad\n"):
        text = piece * (200_000 // len(piece))
        assert join_broken_words(text).count("\f") == 0


@pytest.mark.parametrize(
    "title",
    [
        "Microsoft Word - final_v3.doc",
        "Microsoft PowerPoint - Lecture 3",
        "Microsoft Word",
        "untitled",
        "Untitled-1",
        "Untitled Document",
        "Document1",
        "Dokument 2",
        "Slide 1",
        "Folie 1",
        "PowerPoint Presentation",
        "PowerPoint-Präsentation",
        "Presentation1",
        "Book1",
        "final report v3.docx",
        "thesis.dvi",
        "index.html",
        "C:\\Users\\me\\paper",
        "https://example.org/page",
        "doi:10.1016/j.cell.2005.01.001",
        "---",
    ],
)
def test_default_of_a_program_is_no_title(title: str) -> None:
    assert is_default_title(title)
    assert pdf_title(title, "A study of harbours\nby two authors", "name") == "A study of harbours"
    assert pdf_title(title, "\n12\n", "name") == "name"


@pytest.mark.parametrize(
    "title",
    [
        "A study of harbours",
        "Microsoft Word 2019 for lawyers",
        "The untitled country",
        "Documents of the Union",
        "1984",
        "Sliding scales",
        "How robots.txt is read",
        "Books that changed us",
        "港の壁",
    ],
)
def test_title_that_a_person_gave_stays(title: str) -> None:
    assert pdf_title(title, "Another line of text", "name") == title


def test_file_without_a_title_is_called_by_its_name() -> None:
    assert pdf_title(None, "A study of harbours", "name") == "name"
    assert pdf_title("  ", "A study of harbours", "name") == "name"


def with_title(folder: Path, name: str, title: str, *, password: str | None = None) -> None:
    pypdf = pytest.importorskip("pypdf")
    plain = folder / "plain"
    plain.write_bytes(pdf_with_text(r"The harbour was re-\)"[:-2] + ") Tj 0 -14 Td (paired here"))
    writer = pypdf.PdfWriter(clone_from=str(plain))
    writer.add_metadata({"/Title": title})
    if password is not None:
        writer.encrypt(password, algorithm="RC4-128")
    writer.write(folder / name)
    plain.unlink()


def test_pdf_files_are_read_with_whole_words_and_real_titles(tmp_path: Path) -> None:
    with_title(tmp_path, "a.pdf", "Microsoft Word - final_v3.doc")
    with_title(tmp_path, "b.pdf", "Häfen of the north")
    with_title(tmp_path, "c.pdf", "untitled")
    with_title(tmp_path, "d.pdf", "Locked", password="secret")
    source = open_source(str(tmp_path))
    documents = list(source.documents())
    assert [" ".join(document.text.split()) for document in documents] == [
        "The harbour was repaired here"
    ] * 3
    assert [document.title for document in documents] == [
        "The harbour was repaired",
        "Häfen of the north",
        "The harbour was repaired",
    ]
    assert list(map(str, source.skipped.entries())) == [f"{tmp_path}/d.pdf: needs a password"]
