"""Every document can be found, near copies and exact ones too, and vectors are fitted as without
them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from farspan.corpus.distinct_texts import Copies
from farspan.domain.corpus import Document, Place
from farspan.retrieval.index import DRIFT, OWN_VECTORS
from farspan.retrieval.queries import Query, body_of, choose_queries
from farspan.retrieval.relevance_judgements import read_judged
from farspan.retrieval.search import search
from tests.retrieval import making

KEPT = making.DOCUMENTS
#: Parties that agreements name: one each, in documents that are alike otherwise.
PARTIES = ["Abernathy", "Galbraith", "Okonkwo", "Lindqvist"]
#: More than half of a passage, so that the next begins behind it.
BETWEEN = "The parties agree on this and that. " * 12


def near_copy(number: int, party: str) -> Document:
    """A copy of a document in which one more name stands, in a passage of its own."""
    of = KEPT[number]
    text = of.text.replace("More about", f"{BETWEEN}\n\nSigned by {party}. More about")
    assert text != of.text
    return Document(title=f"copy {party}", text=text, origin=f"copies/{party}.txt", line=1)


COPIED = [near_copy(number, party) for number, party in enumerate(PARTIES)]
EVERY = [*KEPT, *COPIED]
PLACE = Place(
    title="Kookaburra", origin="other/place.txt", metadata={"year": "1999"}, line=31, page=5
)
COPIES = Copies(
    len(KEPT), [*range(len(KEPT)), *range(len(COPIED))], {3: (PLACE,), len(KEPT) + 1: (PLACE,)}
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copies") / "index"
    making.make(folder, documents=EVERY, copies=COPIES)
    return folder


def found(folder: Path, query: str, **more) -> list:
    index = making.opened(folder)
    try:
        return list(search(index, query, 5, more.pop("system", "bm25"), **more).results)
    finally:
        index.close()


@pytest.mark.parametrize("party", PARTIES)
def test_near_copy_is_found_by_the_one_word_that_it_has_alone(folder: Path, party: str) -> None:
    assert [result.title for result in found(folder, party)] == [f"copy {party}"]
    assert found(folder, f"signed by {party}", system="fused")[0].title == f"copy {party}"


def test_near_copies_change_nothing_of_the_fit(folder: Path, tmp_path: Path) -> None:
    making.make(tmp_path / "index", evaluate=False)
    with_copies = making.opened(folder)
    without = making.opened(tmp_path / "index")
    fitted = [
        (index.path / index.manifest.files / "fitted.safetensors").read_bytes()
        for index in (with_copies, without)
    ]
    assert fitted[0] == fitted[1]
    chunks = len(without.passages.rows_N)
    np.testing.assert_array_equal(
        with_copies.vectors(np.arange(chunks), OWN_VECTORS),
        without.vectors(np.arange(chunks), OWN_VECTORS),
    )
    manifest = with_copies.manifest
    assert (manifest.documents, manifest.near_copies, manifest.exact_copies) == (204, 4, 2)
    assert not manifest.fit_is_due and manifest.fitted_chunks == manifest.chunks
    assert manifest.evaluation is not None
    assert (manifest.evaluation.documents, manifest.evaluation.near_copies) == (204, 4)
    for index in (with_copies, without):
        index.close()


def test_exact_copies_are_one_result_with_several_places(folder: Path) -> None:
    assert len(found(folder, "Galbraith")) == 1
    results = found(folder, "Galbraith signed")
    (where,) = results[0].also
    assert (where.origin, where.title, results[0].copies) == ("other/place.txt", "Kookaburra", 1)
    # The passage is as many lines below the beginning of its copy as of its document.
    assert where.line - PLACE.line == results[0].line - COPIED[1].line > 0
    assert where.page == 5 + results[0].page


@pytest.mark.parametrize("system", ["bm25", "model", "fused"])
@pytest.mark.parametrize(
    "where", [{"origin": "other/place.txt"}, {"title": "Kookaburra", "year": "1999"}]
)
def test_search_is_narrowed_to_the_place_of_a_copy(
    folder: Path, system: str, where: dict[str, str]
) -> None:
    titles = {r.title for r in found(folder, "signed string thread", system=system, where=where)}
    assert "copy Galbraith" in titles and titles <= {"copy Galbraith", KEPT[3].title}


def test_title_of_a_copy_finds_its_document(folder: Path) -> None:
    assert {r.title for r in found(folder, "kookaburra")} == {"copy Galbraith", KEPT[3].title}


def test_index_of_kept_documents_alone_comes_to_hold_every_copy(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    _, before = making.make(folder, evaluate=False)
    work, after = making.make(folder, evaluate=False, documents=EVERY, copies=COPIES)
    assert after.fit == before.fit and 0 < work.embedded < 20
    assert found(folder, "Lindqvist")[0].title == "copy Lindqvist"
    assert after.fitted_chunks == after.chunks and not after.fit_is_due
    # Many near copies of what the fit knows make no new fit due.
    many = [msgspec.structs.replace(d, title=f"{d.title} copy") for d in KEPT[: len(KEPT) // 2]]
    assert len(many) > DRIFT * len(KEPT)
    copies = Copies(len(KEPT), [*range(len(KEPT)), *range(len(many))], {})
    _, followed = making.make(folder, evaluate=False, documents=[*KEPT, *many], copies=copies)
    assert not followed.fit_is_due


def test_place_that_is_new_or_gone_is_followed_without_embedding(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    making.make(folder, evaluate=False)
    places = Copies(len(KEPT), range(len(KEPT)), {7: (PLACE,)})
    work, manifest = making.make(folder, evaluate=False, copies=places)
    assert (work.embedded, manifest.exact_copies) == (0, 1)
    assert [r.title for r in found(folder, "kookaburra")] == [KEPT[7].title]
    work, manifest = making.make(folder, evaluate=False)
    assert (work.embedded, manifest.exact_copies) == (0, 0)
    assert found(folder, "kookaburra") == []


def test_near_copy_of_the_right_document_is_right_too() -> None:
    bodies = [body_of(document) for document in EVERY]
    own = [Query("who signed", (len(KEPT) + 2,), "own"), Query("and this", (3,), "own")]
    queries = choose_queries(EVERY, bodies, 170, 0, own=own, copies=COPIES)
    for query in (*queries.reported, *queries.tuning):
        for number in query.relevant:
            first = COPIES.clusters[number]
            assert first in query.relevant, "its near copies and what they are copies of"
            copies = [n for n, its in enumerate(COPIES.clusters) if its == first]
            assert {*copies} <= {*query.relevant}
    asked = {query.text for query in (*queries.reported, *queries.tuning)}
    assert not [text for text in asked if "copy" in text], "copies themselves are not asked for"
    # What is fitted is none of what answers, by itself or by a copy.
    assert {2, 3, len(KEPT) + 2} <= queries.relevant
    # Without the copies the same is asked.
    alone = choose_queries(list(KEPT), bodies[: len(KEPT)], 170, 0)
    same = choose_queries(EVERY, bodies, 170, 0, copies=COPIES)
    assert [q.text for q in alone.reported] == [q.text for q in same.reported]
    assert [q.text for q in alone.tuning] == [q.text for q in same.tuning]


@pytest.mark.parametrize("name", ["Kookaburra", "other/place.txt"])
def test_judged_document_may_be_named_as_one_of_its_copies(name: str, tmp_path: Path) -> None:
    (tmp_path / "queries.jsonl").write_text('{"_id": "q1", "text": "who signed"}\n')
    (tmp_path / "qrels.tsv").write_text(f"q1\t{name}\t1\n")
    judged = read_judged(tmp_path / "queries.jsonl", tmp_path / "qrels.tsv", EVERY, COPIES)
    assert judged == [Query("who signed", (3, len(KEPT) + 1), "own")]
