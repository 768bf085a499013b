"""Copies are dropped for training alone: whoever reads the text of a corpus is given every text
once, with each of its places."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from farspan.corpus import prepare as corpus
from farspan.corpus.distinct_texts import Text
from farspan.corpus.documents import read_documents
from farspan.domain.config import DataConfig, TokenizerConfig
from farspan.domain.corpus import CorpusManifest, Document, copies_line
from tests.corpus.test_dedup import planted, true_jaccard

WORDS = TokenizerConfig(vocab=400)


def written(folder: Path, texts: list[str]) -> Path:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_text(text)
    return folder


def prepared(data: DataConfig, root: Path) -> tuple[Path, CorpusManifest]:
    return corpus.prepare_corpus(data, WORDS, root, workers=1, write_line=lambda line: None)


def read(data: DataConfig, folder: Path, root: Path) -> tuple[Text, list[str]]:
    said: list[str] = []
    return corpus.read_text(data, WORDS, folder.name, root, workers=1, write_line=said.append), said


def check(text: Text, texts: list[str], kept: list[Document], train: int) -> None:
    """Every text is there once, in its places, and those that are kept come first as they are."""
    found = [document.text for document in text.documents]
    assert sorted(found) == sorted(set(texts))
    for number, document in enumerate(text.documents):
        places = text.copies.places.get(number, ())
        named = sorted([document.title, *(place.title for place in places)])
        assert named == [f"{n:03}" for n, one in enumerate(texts) if one == document.text]
        assert all(place.line == 1 and place.origin.endswith(".txt") for place in places)
    distinct = list({document.text: document for document in reversed(kept)}.values())[::-1]
    assert sorted(d.text for d in distinct) == sorted(found[: text.copies.kept])
    assert text.train == len({document.text for document in kept[:train]})
    for number, first in enumerate(text.copies.clusters):
        assert text.copies.clusters[first] == first
        if number >= text.copies.kept:
            assert first < text.copies.kept
    assert text.copies.near == len(found) - text.copies.kept
    assert text.copies.exact == len(texts) - len(found)


@pytest.mark.parametrize("dedup", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_every_text_of_a_source_is_read_once_with_its_places(
    seed: int, dedup: bool, tmp_path: Path
) -> None:
    texts = planted(seed, 60)
    texts += random.Random(seed).sample(texts, 10)
    data = DataConfig(source=str(written(tmp_path / "text", texts)), val="20%", dedup=dedup)
    folder, manifest = prepared(data, tmp_path / "root")
    kept = list(read_documents(folder))
    text, said = read(data, folder, tmp_path / "root")
    check(text, texts, kept, manifest.train.documents)
    assert said == []
    if dedup:
        assert text.documents[: text.copies.kept] == kept
        assert text.copies.near == manifest.near_duplicates > 0
        assert text.copies.exact == manifest.exact_duplicates > 0
    first = {document.text: number for number, document in enumerate(text.documents)}
    for one, number in first.items():
        for other, its in first.items():
            if true_jaccard(one, other) >= 0.8:
                assert text.copies.clusters[number] == text.copies.clusters[its]
    # Of another corpus the same text is read from its source.
    again, said = read(data, tmp_path / "elsewhere", tmp_path / "root")
    assert again == text and said[0].startswith("the text has changed since the corpus was made")


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        ((5, 0, 0), ""),
        ((30, 29, 0), "30 documents: 29 are near copies of others, searched and not trained on"),
        (
            (2_000, 1, 1),
            "2,000 documents: 1 is a near copy of another, searched and not trained on; "
            "1 more place with exactly the text of another",
        ),
    ],
)
def test_copies_are_counted_in_one_line(counts: tuple[int, int, int], line: str) -> None:
    assert copies_line(*counts) == line
