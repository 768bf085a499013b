"""What is held out for validation: the same as ever where the share by hash gives both sides, and
never nothing."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.corpus import dedup
from farspan.corpus.distinct_texts import CLUSTERS
from farspan.corpus.documents import PART_CHARS, divide_document, read_copies, read_documents
from farspan.corpus.prepare import prepare_corpus
from farspan.corpus.split import below_share, of_least_hash, place_to_cut
from farspan.domain.config import DataConfig, TokenizerConfig
from farspan.domain.corpus import CorpusManifest, Document, Heading
from tests.corpus.test_dedup import planted, true_jaccard

HASHES = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=30)


def made(source: Path, root: Path, **data: Any) -> tuple[Path, CorpusManifest]:
    config = DataConfig(source=str(source), **data)
    return prepare_corpus(
        config, TokenizerConfig(vocab=400), root, workers=1, write_line=lambda line: None
    )


def splits(folder: Path, manifest: CorpusManifest) -> tuple[list[Document], list[Document]]:
    documents = list(read_documents(folder))
    return documents[: manifest.train.documents], documents[manifest.train.documents :]


def prose(seed: int, chars: int) -> str:
    """Paragraphs of sentences, some over several lines."""
    rng = random.Random(seed)
    pieces: list[str] = []
    size = 0
    while size < chars:
        words = " ".join(f"w{rng.randrange(3000)}" for _ in range(rng.randrange(3, 30)))
        pieces.append(words + rng.choice([". ", ".\n", ".\n\n"]))
        size += len(pieces[-1])
    return "".join(pieces)[:chars].strip()


@given(HASHES, st.floats(0.001, 0.5))
def test_both_sides_have_a_document_whatever_the_hashes_are(
    hashes: list[int], share: float
) -> None:
    keys = np.array(hashes, np.uint64)
    today = np.array([key < np.uint64(share * 2.0**64) for key in keys])
    assert (below_share(keys, share) == today).all()
    least = of_least_hash(keys)
    if len(set(hashes)) > 1:
        assert least.any() and not least.all()
        assert {*keys[least].tolist()} == {min(hashes)}
    else:
        assert not least.any()


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("dedup_on", [True, False])
def test_few_documents_are_split_by_hash_or_else_the_least_is_held_out(
    seed: int, dedup_on: bool, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    texts = planted(seed, rng.randrange(2, 14))
    (tmp_path / "text").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "text" / f"{number:03}.txt").write_text(text)
    folder, manifest = made(tmp_path / "text", tmp_path / "root", dedup=dedup_on)
    train, val = ([document.text for document in side] for side in splits(folder, manifest))
    assert train and val
    keys = least_hashes(texts)
    if len({*keys.values()}) == 1:
        return  # Such a text is cut in two.
    threshold = {text for text in texts if keys[text] < 0.05 * 2**64}
    least = {text for text in texts if keys[text] == min(keys.values())}
    held = threshold if threshold and threshold != {*texts} else least
    assert {*val} <= held and not {*train} & held
    if not dedup_on:
        assert sorted([*train, *val]) == sorted(texts)


def least_hashes(texts: list[str]) -> dict[str, int]:
    """Of each text the least hash of the texts that near duplicates lead to from it."""
    keys = {text: dedup.text_hash(text) for text in texts}
    near = [pair for pair in itertools.permutations(keys, 2) if true_jaccard(*pair) >= 0.8]
    for _ in texts:
        for one, other in near:
            keys[one] = min(keys[one], keys[other])
    return keys


def test_split_of_twenty_small_files_is_never_refused(tmp_path: Path) -> None:
    for seed in range(12):
        source = tmp_path / f"text-{seed}"
        source.mkdir()
        for number in range(20):
            (source / f"{number}.txt").write_text(prose(seed * 100 + number, 300))
        folder, manifest = made(source, tmp_path / "root")
        hashes = {text.text: dedup.text_hash(text.text) for text in read_documents(folder)}
        held = {text for text, key in hashes.items() if key < 0.05 * 2**64}
        least = {min(hashes, key=lambda text: hashes[text])}
        assert {d.text for d in splits(folder, manifest)[1]} == (held or least)


@pytest.mark.parametrize("chars", [200, 20_000, 60_000])
def test_end_of_a_single_text_is_held_out_from_a_paragraph_on(chars: int, tmp_path: Path) -> None:
    text = prose(5, chars)
    (tmp_path / "small.txt").write_text(text)
    folder, manifest = made(tmp_path / "small.txt", tmp_path / "root")
    (head,), (tail,) = splits(folder, manifest)
    assert text.startswith(head.text) and text.endswith(tail.text)
    between = text[len(head.text) : len(text) - len(tail.text)]
    assert not between.strip(), "nothing is lost"
    assert 0.02 < len(tail.text) / len(text) < 0.08
    if chars > 200:
        assert between.startswith("\n\n")
    assert (head.title, tail.title) == ("small", "small (end)")
    assert tail.text.split("\n")[0] in text.split("\n")[tail.line - 1]
    again = made(tmp_path / "small.txt", tmp_path / "other")
    assert again[0].name == folder.name
    # Another share is another corpus.
    assert made(tmp_path / "small.txt", tmp_path / "root", val="20%")[0] != folder


def test_end_of_a_long_text_in_parts_is_held_out(tmp_path: Path) -> None:
    text = prose(2, 4 * PART_CHARS + 60_000)
    (tmp_path / "input.txt").write_text(text)
    keys = [dedup.text_hash(part.text) for part in parts_of(text)]
    assert min(keys) > 0.05 * 2**64, "the share by hash holds out nothing"
    folder, manifest = made(tmp_path / "input.txt", tmp_path / "root")
    train, val = splits(folder, manifest)
    held = sum(len(document.text) for document in val)
    assert 0.02 < held / len(text) < 0.08
    assert " ".join(d.text for d in [*train, *val]).split() == text.split()


def parts_of(text: str) -> list[Document]:
    from farspan.corpus.documents import cut_document

    return list(cut_document(Document(title="x", text=text, origin="x")))


@pytest.mark.parametrize("share", ["5%", "30%", "50%"])
@pytest.mark.parametrize("tail", [100, 9_000, 200_000])
def test_any_share_of_a_text_in_parts_is_held_out(
    share: str, tail: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Hashes of no part are below the share.
    monkeypatch.setattr(dedup, "text_hash", lambda text: 2**64 - 1 - len(text))
    text = prose(3, 2 * PART_CHARS + tail)
    (tmp_path / "input.txt").write_text(text)
    folder, manifest = made(tmp_path / "input.txt", tmp_path / "root", val=share)
    held = sum(len(document.text) for document in splits(folder, manifest)[1])
    asked = float(share.rstrip("%")) / 100
    assert 0.45 * asked < held / len(text) < 1.55 * asked


def test_copies_of_one_text_are_cut_alike(tmp_path: Path) -> None:
    text = prose(9, 5000)
    near = text.replace("w1", "x1", 1)
    (tmp_path / "docs").mkdir()
    for name, content in (("a", text), ("b", text), ("c", near)):
        (tmp_path / "docs" / f"{name}.txt").write_text(content)
    folder, manifest = made(tmp_path / "docs", tmp_path / "root")
    (head,), (tail,) = splits(folder, manifest)
    copies = list(read_copies(folder))
    assert [d.text for d in copies] == [head.text, tail.text, near]
    assert [d.title for d in copies] == ["b", "b (end)", "c"]
    assert np.load(folder / CLUSTERS).tolist() == [0, 1, 0, 1, 0]
    folder, manifest = made(tmp_path / "docs", tmp_path / "root", dedup=False)
    train, val = splits(folder, manifest)
    assert (len(train), len(val)) == (3, 3)
    assert len({d.text for d in val}) <= 2 and len({d.text for d in train}) <= 2


@given(
    st.text(alphabet="ab \n.。一", min_size=0, max_size=80), st.integers(0, 80), st.integers(0, 30)
)
def test_text_is_cut_where_both_sides_say_something(text: str, target: int, reach: int) -> None:
    at = place_to_cut(text, target, reach)
    if len("".join(text.split())) < 2:
        assert at == 0
        return
    text = text.strip()
    at = place_to_cut(text, target, reach)
    assert text[:at].strip() and text[at:].strip()
    head, tail = divide_document(Document(title="t", text=text, origin="o", line=1), at)
    assert head.text and tail.text
    assert "".join((head.text + tail.text).split()) == "".join(text.split())
    assert tail.line == 1 + text[: text.rindex(tail.text)].count("\n")


def test_a_paragraph_is_a_better_place_than_a_line_and_a_line_than_a_sentence() -> None:
    text = "one two. three\nfour five\n\nsix seven. eight\nnine ten eleven"
    assert text[place_to_cut(text, 40, 20) :].startswith("six")
    assert text[place_to_cut(text, 40, 8) :].startswith("nine")
    assert text[place_to_cut(text, 36, 4) :].startswith("eight")
    assert place_to_cut("一二三。四五六七八九十", 6, 3) == 4
    assert place_to_cut("x" * 30, 17, 5) == 17


def test_both_parts_of_a_divided_document_keep_the_headings_that_they_stand_under() -> None:
    text = "# One\n\nfirst words\n\n## Two\n\nmore words\n\n# Three\n\nlast words"
    headings = tuple(
        Heading(text.index(f"{'#' * level} {title}"), level, title)
        for level, title in ((1, "One"), (2, "Two"), (1, "Three"))
    )
    document = Document(title="t", text=text, origin="t.md", headings=headings)
    head, tail = divide_document(document, text.index("more words"))
    assert head.headings == headings[:2]
    assert tail.headings == (
        Heading(-1, 1, "One"),
        Heading(-1, 2, "Two"),
        Heading(tail.text.index("# Three"), 1, "Three"),
    )
