"""An index follows its text: what is new is embedded, what is gone is removed, and the rest is left
as it was."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from farspan.domain.corpus import Document
from farspan.retrieval.bm25 import BM25Index
from farspan.retrieval.embed import Embedder
from farspan.retrieval.index import DRIFT, OWN_VECTORS, Index
from farspan.retrieval.search import search
from farspan.retrieval.words import Words, detect_languages
from tests.retrieval import making

NEW = Document(
    title="Quokka",
    text="A quokka.\n\nThe quokka lives on an island and eats leaves.",
    origin="new.txt",
)


def check(index: Index, documents: list[Document]) -> None:
    """The index is of exactly these documents: passages, vectors, store and words."""
    manifest = index.manifest
    passages = index.passages
    assert [(d.title, d.origin, d.metadata) for d in passages.documents] == [
        (d.title, d.origin, d.metadata) for d in documents
    ]
    for row, chunk in enumerate(passages):
        assert documents[chunk.document].text[chunk.start :].startswith(chunk.text)
        assert (
            chunk.document == passages.rows_N["document"][row]
            and chunk.id == passages.rows_N["id"][row]
        )
    assert {n for n in range(len(documents)) if passages.of_document(n)} == set(
        range(len(documents))
    )
    assert index.stores[OWN_VECTORS].ids().tolist() == sorted(passages.rows_N["id"].tolist())
    embedder = Embedder.load(
        making.model(5), making.TOKENIZER, index.path / manifest.files / "fitted.safetensors"
    )
    vectors = embedder.passages([chunk.indexed for chunk in passages])
    stored = index.vectors(np.arange(manifest.chunks), OWN_VECTORS)
    assert np.einsum("ne,ne->n", vectors, stored).min() > 0.999
    for row in range(0, len(vectors), 17):
        (best,) = index.stores[OWN_VECTORS].search(stored[row], 1).scores
        assert best == pytest.approx(1, abs=1e-3)
    rules = Words(manifest.lexical.rules)
    texts = [f"{document.title}\n{document.text}" for document in documents]
    languages = detect_languages([document.text for document in documents])
    listed = map(rules.of_text, texts, languages)
    words = BM25Index.build(listed, manifest.lexical.k1, manifest.lexical.b)
    for query in ("socket port", "quokka island", "words that are new"):
        asked = rules.of_query(query)
        scores = words.bm25_scores(asked)
        np.testing.assert_allclose(index.lexical.bm25_scores(asked), scores)
        assert scores.any() or query != "socket port"
    covariance = np.cov(stored, rowvar=False, bias=True)
    np.testing.assert_allclose(index.covariances[OWN_VECTORS], covariance, atol=1e-5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    making.make(tmp_path / "index", evaluate=False)
    return tmp_path / "index"


@pytest.mark.parametrize("seed", range(4))
def test_any_changes_give_the_index_of_what_is_there_in_the_end(folder: Path, seed: int):
    rng = random.Random(seed)
    documents = list(making.DOCUMENTS)
    for turn in range(3):
        for _ in range(rng.randrange(1, 12)):
            match rng.randrange(4):
                case 0:
                    documents.pop(rng.randrange(len(documents)))
                case 1:
                    at = rng.randrange(len(documents))
                    text = documents[at].text.replace("objects", f"things of turn {turn}")
                    documents[at] = msgspec.structs.replace(documents[at], text=text)
                case 2:
                    new = msgspec.structs.replace(
                        NEW, title=f"Quokka {turn} {rng.random()}", metadata={"turn": str(turn)}
                    )
                    documents.insert(rng.randrange(len(documents)), new)
                case 3:
                    rng.shuffle(documents)
        work, manifest = making.make(folder, evaluate=False, documents=documents)
        assert work.embedded < 60
        index = making.opened(folder)
        check(index, documents)
        assert index.manifest == manifest
        index.close()
    fresh = making.make(folder.with_name("fresh"), evaluate=False, documents=documents)[1]
    other = making.opened(folder.with_name("fresh"))
    assert sorted(other.passages.rows_N["id"]) == sorted(
        making.opened(folder).passages.rows_N["id"]
    )
    assert fresh.corpus == manifest.corpus
    other.close()


def test_single_changed_document_embeds_only_its_new_chunks(folder: Path):
    lines: list[str] = []
    documents = [
        msgspec.structs.replace(
            making.DOCUMENTS[0], text=making.DOCUMENTS[0].text + "\n\nOne more line."
        )
    ]
    work, _ = making.make(
        folder, evaluate=False, documents=[*documents, *making.DOCUMENTS[1:]], say=lines.append
    )
    assert 0 < work.embedded <= 3
    assert lines[0].startswith("1 document new or changed, 1 gone: ")
    assert lines[0].endswith(f": {work.embedded} new passages" if work.embedded > 1 else "passage")


def test_a_document_that_moved_keeps_its_vectors(folder: Path):
    moved = [
        msgspec.structs.replace(d, origin=f"elsewhere/{d.origin}", line=4) for d in making.DOCUMENTS
    ]
    work, manifest = making.make(folder, evaluate=False, documents=moved)
    assert work.embedded == 0 and manifest.fitted_chunks == manifest.chunks
    index = making.opened(folder)
    check(index, moved)
    index.close()


def test_new_metadata_columns_can_be_filtered_in_every_search_system(folder: Path):
    marked = [
        msgspec.structs.replace(d, metadata={"year": str(n % 3)})
        for n, d in enumerate(making.DOCUMENTS)
    ]
    _, manifest = making.make(folder, evaluate=False, documents=marked)
    assert manifest.fields == ("title", "origin", "year")
    index = making.opened(folder)
    for system in ("bm25", "model", "fused"):
        found = search(index, "socket port of a thread", 200, system, {"year": "1"})
        assert found.results and all(result.metadata == {"year": "1"} for result in found.results)
        whole = search(index, "socket port of a thread", 200, system)
        assert {r.title for r in found.results} <= {
            r.title for r in whole.results
        } or system != "bm25"
    index.close()


def test_a_new_fit_is_due_when_much_is_new_and_is_made_when_asked_for(folder: Path):
    count = len(making.DOCUMENTS)
    little, much = (making.changed(int(share * count)) for share in (DRIFT / 4, DRIFT))
    assert not making.make(folder, evaluate=False, documents=little)[1].fit_is_due
    followed = making.make(folder, evaluate=False, documents=much)[1]
    assert followed.fit_is_due
    work, fitted = making.make(folder, evaluate=False, documents=much, refit=True)
    assert not fitted.fit_is_due and fitted.fit != followed.fit and work.embedded >= fitted.chunks
    assert making.make(folder, evaluate=False, documents=much, refit=True)[0].embedded == 0, (
        "nothing is left to do"
    )


def test_an_evaluation_stays_with_its_fit(tmp_path: Path):
    folder = tmp_path / "index"
    first = making.make(folder)[1]
    second = making.make(folder, documents=[*making.DOCUMENTS, NEW])[1]
    assert (
        first.evaluation is not None
        and second.evaluation == first.evaluation
        and second.fit == first.fit
    )
    assert making.make(folder, documents=[*making.DOCUMENTS, NEW], evaluate=False)[0].embedded == 0


def test_text_without_anything_left_is_refused_and_the_index_stays(folder: Path):
    before = (folder / "index.json").read_bytes()
    with pytest.raises(Exception, match="no-documents"):
        making.make(folder, evaluate=False, documents=[Document(title="t", text=" ", origin="o")])
    assert (folder / "index.json").read_bytes() == before
    making.opened(folder).close()


def test_a_document_that_a_source_gives_twice_is_found_once_each(tmp_path: Path):
    twice = [*making.DOCUMENTS, NEW, NEW]
    _, manifest = making.make(tmp_path / "index", evaluate=False, documents=twice)
    index = making.opened(tmp_path / "index")
    assert (
        len(index.stores[OWN_VECTORS].ids())
        == manifest.chunks
        == len({*index.passages.rows_N["id"].tolist()})
    )
    assert [result.title for result in search(index, "quokka", 9, "bm25").results] == [
        "Quokka",
        "Quokka",
    ]
    index.close()


def test_files_that_were_only_touched_leave_the_index_and_are_known_again(folder: Path):
    files = making.opened(folder).manifest.files
    work, manifest = making.make(folder, evaluate=False, source="later")
    assert work.embedded == 0 and (manifest.source, manifest.files) == ("later", files)
    assert making.opened(folder).manifest == manifest


@pytest.mark.parametrize("keeps_part", [False, True])
def test_index_that_is_replaced_while_it_is_opened_is_opened_again(
    tmp_path, monkeypatch, keeps_part
):
    """A store whose files are being removed may open whole, or with a part of its vectors."""
    folder = tmp_path / "index"
    _, before = making.make(folder, evaluate=False, documents=making.DOCUMENTS[:80])
    module = before.sets[OWN_VECTORS].module
    plain = module.open
    old = []

    def open_slowly(place):
        store = plain(place)
        if not old:
            old.append(store)
            if keeps_part:
                store.delete(store.ids()[1:].tolist())
            making.make(folder, evaluate=False, documents=[*making.DOCUMENTS[:80], NEW])
        return store

    monkeypatch.setattr(module, "open", open_slowly)
    index = making.opened(folder)
    assert index.manifest != before
    check(index, [*making.DOCUMENTS[:80], NEW])
    index.close()
