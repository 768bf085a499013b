"""Mixtures: one corpus of several sources, each with its own spans of the token files."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farspan.corpus.distinct_texts import read_distinct
from farspan.corpus.documents import read_documents
from farspan.corpus.prepare import prepare_corpus, read_text
from farspan.corpus.token_files import TokenFile
from farspan.domain.config import DataConfig, PartConfig, ReplayConfig, TokenizerConfig
from farspan.domain.corpus import SPLITS, CorpusManifest
from farspan.domain.problems import Refusal

TOKENIZER = TokenizerConfig(vocab=400)


def write_texts(folder: Path, seed: int, count: int, words: str) -> Path:
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    for number in range(count):
        text = " ".join(f"{words}{rng.randrange(500)}" for _ in range(120))
        (folder / f"{number:03}.txt").write_text(text)
    return folder


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Path, Path, Path]:
    return (
        write_texts(tmp_path / "papers", 0, 30, "p"),
        write_texts(tmp_path / "notes", 1, 12, "n"),
        write_texts(tmp_path / "web", 2, 40, "w"),
    )


def make(root: Path, workers: int = 1, **data: Any) -> tuple[Path, CorpusManifest]:
    return prepare_corpus(
        DataConfig(**data), TOKENIZER, root, workers=workers, write_line=lambda line: None
    )


def mixture(sources: tuple[Path, Path, Path], **more: Any) -> dict[str, Any]:
    papers, notes, web = map(str, sources)
    parts = (papers, PartConfig(source=notes, name="my notes"))
    return {"source": parts, "replay": ReplayConfig(source=web, share="20%"), **more}


def test_every_source_has_its_own_spans_in_both_splits(tmp_path, sources):
    folder, manifest = make(tmp_path / "root", **mixture(sources))
    assert [part.name for part in manifest.parts] == ["papers", "my notes", "replay"]
    assert [part.replay for part in manifest.parts] == [False, False, True]
    documents = list(read_documents(folder))
    at = 0
    for split in SPLITS:
        whole = getattr(manifest, split)
        file = TokenFile.open(folder, split, manifest)
        first = 0
        for part, source in zip(manifest.parts, sources, strict=True):
            size = getattr(part, split)
            own = documents[at : at + size.documents]
            assert own and all((source / document.origin).exists() for document in own)
            assert sum(len(document.text.encode()) for document in own) == size.text_bytes
            # Its tokens begin and end where its documents do.
            assert int(file.offsets[first]) == sum(
                getattr(before, split).tokens
                for before in manifest.parts[: manifest.parts.index(part)]
            )
            first += size.documents
            at += size.documents
        assert first == whole.documents
        assert sum(getattr(part, split).tokens for part in manifest.parts) == whole.tokens
    assert at == len(documents)


def test_workers_change_nothing_and_names_and_replay_are_part_of_the_hash(tmp_path, sources):
    _, one = make(tmp_path / "one", **mixture(sources))
    _, two = make(tmp_path / "two", workers=2, **mixture(sources))
    assert one == two
    papers, notes, web = map(str, sources)
    _, searched = make(tmp_path / "one", source=(papers, notes, web))
    assert searched.hash != one.hash
    assert searched.train == one.train


def test_single_source_keeps_the_hash_that_it_had(tmp_path, sources):
    _, alone = make(tmp_path / "root", source=str(sources[0]))
    _, listed = make(tmp_path / "root", source=(str(sources[0]),))
    assert alone.parts is not listed.parts and len(listed.parts) == 1
    assert alone.train == listed.train and alone.hash != listed.hash


def test_text_of_two_sources_is_trained_on_in_the_first(tmp_path, sources):
    papers, notes, _ = sources
    for number in range(10):
        (notes / f"copy{number}.txt").write_bytes((papers / f"{number:03}.txt").read_bytes())
    _, manifest = make(tmp_path / "root", source=(str(papers), str(notes)))
    assert manifest.exact_duplicates == 10
    first, second = manifest.parts
    assert first.train.documents + first.val.documents == 30
    assert second.train.documents + second.val.documents == 12


@pytest.mark.parametrize("dedup", [True, False])
def test_each_source_has_held_out_text_that_no_source_trains_on(tmp_path, dedup):
    for seed in range(6):
        small = write_texts(tmp_path / f"small{seed}", seed, 2, "s")
        large = write_texts(tmp_path / f"large{seed}", 100 + seed, 20, "l")
        (large / "copy.txt").write_bytes((small / "000.txt").read_bytes())
        folder, manifest = make(
            tmp_path / "root", source=(str(small), str(large)), dedup=dedup, val="1%"
        )
        assert all(part.val.documents and part.train.documents for part in manifest.parts)
        texts = [document.text for document in read_documents(folder)]
        trained = texts[: manifest.train.documents]
        assert not set(trained) & set(texts[manifest.train.documents :])


def test_source_that_is_all_copies_of_another_is_refused(tmp_path, sources):
    papers, _, _ = sources
    again = tmp_path / "again"
    again.mkdir()
    for path in papers.iterdir():
        (again / path.name).write_bytes(path.read_bytes())
    with pytest.raises(Refusal) as refused:
        make(tmp_path / "root", source=(str(papers), str(again)))
    problem = refused.value.problem
    assert problem.code == "no-documents" and problem.where == str(again)
    assert "'again' has nothing" in problem.fact


def test_sources_that_cannot_be_read_and_names_that_clash_are_refused_by_name(tmp_path, sources):
    papers, notes, _ = map(str, sources)
    (tmp_path / "empty").mkdir()
    cases = {
        "path-missing": (papers, str(tmp_path / "nowhere")),
        "no-documents": (papers, str(tmp_path / "empty")),
        "out-of-range": (papers, PartConfig(source=notes, name="papers")),
    }
    for code, source in cases.items():
        with pytest.raises(Refusal) as refused:
            make(tmp_path / "root", source=source)
        assert refused.value.problem.code == code


def test_what_is_replayed_is_not_read_for_an_index(tmp_path, sources):
    root = tmp_path / "root"
    data = DataConfig(**mixture(sources))
    folder, manifest = make(root, **mixture(sources))
    text = read_text(data, TOKENIZER, manifest.hash, root, workers=1, write_line=lambda line: None)
    # Also where the sources are gone and only the corpus is left.
    kept = read_distinct(folder, manifest, "")
    for read in (text, kept):
        assert len(read.documents) == 42
        assert not any(document.text.startswith("w") for document in read.documents)
    assert {d.text for d in kept.documents[: kept.train]} == {
        d.text for d in text.documents[: text.train]
    }


def test_interrupted_reading_resumes_in_its_source(tmp_path, sources, monkeypatch):
    from farspan.corpus import shard_stages

    monkeypatch.setattr(shard_stages, "SHARD_BYTES", 3000)
    _, whole = make(tmp_path / "whole", **mixture(sources))
    taken = 0
    take = shard_stages._take_shard

    def interrupt(documents: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken == 11:
            raise KeyboardInterrupt
        return take(documents)

    monkeypatch.setattr(shard_stages, "_take_shard", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "root", **mixture(sources))
    monkeypatch.setattr(shard_stages, "_take_shard", take)
    folder, resumed = make(tmp_path / "root", **mixture(sources))
    assert resumed == whole
    for name in ("train.bin", "val.bin"):
        other = tmp_path / "whole" / whole.hash / name
        assert np.array_equal(np.fromfile(folder / name, "<u2"), np.fromfile(other, "<u2"))
