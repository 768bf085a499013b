"""An index is built once, whole or not at all, refused where it does not belong, and answers as it
says."""

import msgspec
import numpy as np
import pytest

from farspan.domain.corpus import Document
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import save
from farspan.retrieval.build import build
from farspan.retrieval.chunk import Chunk
from farspan.retrieval.embedder_fit import Task
from farspan.retrieval.evaluate import Evaluation, exact_search
from farspan.retrieval.hybrid_ranking import query_form
from farspan.retrieval.index import (
    Index,
    IndexManifest,
    Origin,
    Recipe,
    VectorSet,
    read_manifest,
)
from farspan.retrieval.index_work import IndexWork
from farspan.retrieval.search import (
    SNIPPET_CHARS,
    chance_cosine,
    marks,
    passage_vectors,
    search,
    snippet,
)
from tests.retrieval.making import opened

ORIGIN = Origin(model="m1", tokenizer="t1")
TRAIN = 50


def make(path, model, tokenizer, documents, **changes) -> tuple[IndexManifest, list[str]]:
    said: list[str] = []
    options = {"train": TRAIN, "origin": ORIGIN, "recipe": Recipe()} | changes
    task = Task(
        path=path,
        model=model,
        tokenizer=tokenizer,
        documents=documents,
        write_line=said.append,
        work=IndexWork(),
        **options,
    )
    return build(task), said


@pytest.fixture(scope="module")
def built(tmp_path_factory, model, tokenizer, documents):
    path = tmp_path_factory.mktemp("built") / "index"
    make(path, model, tokenizer, documents)
    return path


@pytest.fixture
def index(built, model, tokenizer):
    index = opened(built, model, tokenizer)
    yield index
    index.close()


def every_chunk(index: Index) -> list[Chunk]:
    return list(index.passages)


def with_evaluation(index: Index, **changes) -> None:
    """Put an evaluation into an open index."""
    evaluation = index.manifest.evaluation
    assert isinstance(evaluation, Evaluation)
    index.manifest = msgspec.structs.replace(
        index.manifest, evaluation=msgspec.structs.replace(evaluation, **changes)
    )


def better(index: Index, system: str) -> None:
    with_evaluation(index, default=system, fusion_weight=0.3)


def test_index_manifest_records_origin_counts_fit_and_evaluation(
    built, model, tokenizer, documents
):
    manifest, _ = make(built, model, tokenizer, documents)
    assert (manifest.origin, manifest.documents, manifest.recipe.store) == (ORIGIN, 60, "qdrant")
    evaluation = manifest.evaluation
    titles = evaluation.kinds["title"]
    assert evaluation.val_documents == 10 and evaluation.train_documents + titles.tuning <= TRAIN
    assert titles.reported == 10 + evaluation.train_documents
    assert all(
        set(kind.systems) == {"bm25", "untuned", "model", "fused"}
        for kind in evaluation.kinds.values()
    )
    assert (manifest.fit.k1, manifest.fit.b) == (evaluation.k1, evaluation.b)
    assert msgspec.json.decode((built / "index.json").read_bytes(), type=IndexManifest) == manifest


def test_equal_index_is_left_as_it_is_and_another_model_or_text_rebuilds_it(
    tmp_path, model, tokenizer, documents
):
    path = tmp_path / "index"
    first, _ = make(path, model, tokenizer, documents)
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()}
    again, said = make(path, model, tokenizer, documents)
    assert again == first and said == [f"index {path} is up to date"]
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()} == before
    other, said = make(path, model, tokenizer, documents, origin=Origin(model="m2", tokenizer="t1"))
    assert other.origin.model == "m2" and len(said) > 1
    changed, said = make(
        path, model, tokenizer, documents[:-1], origin=other.origin, recipe=Recipe(seed=3)
    )
    assert changed.documents == 59 and len(said) > 1
    assert [p.name for p in tmp_path.iterdir()] == ["index"]


@pytest.mark.parametrize("system", ["bm25", "fused", "model"])
def test_a_document_without_text_is_passed_over(tmp_path, model, tokenizer, documents, system):
    """Corpora of before have documents of blank space alone: they have a title, and no chunk."""
    blank = Document(title="Zebra crossing", text="\u00a0\n\u3000", origin="blank.txt")
    crossing = msgspec.structs.replace(documents[1], text=documents[1].text + " zebra")
    make(tmp_path / "index", model, tokenizer, [blank, crossing, *documents[2:]])
    index = opened(tmp_path / "index", model, tokenizer)
    found = search(index, "zebra crossing", k=1, system=system).results
    index.close()
    assert len(found) == 1 and found[0].origin != "blank.txt"


def test_a_build_that_fails_leaves_the_old_index(tmp_path, model, tokenizer, documents):
    path = tmp_path / "index"
    first, _ = make(path, model, tokenizer, documents)
    with pytest.raises(Refusal) as refusal:
        make(
            path,
            model,
            tokenizer,
            [Document(title="t", text=" ", origin="o")],
            origin=Origin(model="x", tokenizer="y"),
        )
    assert refusal.value.problem.code == "no-documents"
    index = opened(path, model, tokenizer)
    assert index.manifest == first
    index.close()


def test_a_missing_index_is_refused(tmp_path):
    with pytest.raises(Refusal) as refusal:
        read_manifest(tmp_path, "farspan embed RUN")
    assert (refusal.value.problem.code, refusal.value.problem.remedy) == (
        "no-index",
        "farspan embed RUN",
    )


def test_every_chunk_is_in_the_store_and_found_by_its_own_vector(index):
    chunks = every_chunk(index)
    assert len(index.store.ids()) == len(chunks) == index.manifest.chunks
    vectors = index.embedder.passages([chunk.indexed for chunk in chunks])
    for chunk, vector in zip(chunks, vectors, strict=True):
        where = {"title": chunk.title, "origin": chunk.origin}
        ids, scores = index.store.search(vector, 1, where)
        np.testing.assert_allclose(scores, 1, atol=1e-2)
        assert ids.tolist() == [chunk.id]


@pytest.mark.parametrize("system", ["bm25", "fused"])
def test_the_better_system_answers_and_is_named(index, documents, system):
    better(index, system)
    answer = search(index, "port of a socket", 7)
    assert (answer.system, len(answer.results)) == (system, 7)
    assert "tuning queries" in answer.why and not any(letter.isdigit() for letter in answer.why)
    assert answer == msgspec.structs.replace(
        search(index, "port of a socket", 7, system), why=answer.why
    )
    assert answer.results[0].origin.startswith("docs/") and "socket" in answer.results[0].title
    assert [r.score for r in answer.results] == sorted(
        (r.score for r in answer.results), reverse=True
    )


@pytest.mark.parametrize("system", ["bm25", "model", "fused"])
def test_scores_are_those_of_a_plain_loop(index, documents, system):
    better(index, "fused")
    query = "socket.listen accept"
    lexical = index.lexical.bm25_scores(query)
    asked = index.embedder.queries([query_form(query)])[0]
    vectors = index.embedder.passages([chunk.indexed for chunk in every_chunk(index)])
    cosine = np.zeros(len(documents))
    for chunk, vector in zip(every_chunk(index), vectors, strict=True):
        cosine[chunk.document] = max(cosine[chunk.document], vector @ asked)
    expected = {"bm25": lexical, "model": cosine, "fused": lexical / lexical.max() + 0.3 * cosine}[
        system
    ]
    for result in search(index, query, 10, system).results:
        number = int(result.origin[5:-4])
        assert result.title == documents[number].title
        assert result.score == pytest.approx(expected[number], abs=2e-2)


def test_query_of_unknown_words_is_answered_by_the_model_with_a_note(index):
    better(index, "bm25")
    answer = search(index, "zzz qqq")
    assert answer.system == "model" and answer.unknown_words
    assert answer.ranked_by == "vector search: no word of the query is in the documents"
    assert search(index, "zzz qqq", 5, "bm25").results == ()


def test_query_of_unknown_words_finds_only_what_is_nearer_than_chance(index):
    """Vectors that were asked for find the nearest, however far; those that stand in for words
    find what no string without meaning comes near to."""
    for query in ("zzz qqq", "xyzzy plugh", "socketz"):
        chance = chance_cosine(index, query, passage_vectors(index))
        every = search(index, query, 50, "model").results
        near = search(index, query, 50).results
        assert [result.id for result in near] == [
            result.id for result in every if result.score > chance
        ]


def test_a_strings_meaning_is_measured_the_same_way_each_time(index):
    assert chance_cosine(index, "zzz qqq", passage_vectors(index)) == chance_cosine(
        index, "zzz qqq", passage_vectors(index)
    )


def test_answer_is_short_as_text_and_has_a_row_for_each_result_in_html(index):
    answer = search(index, "port of a socket", 3, "bm25")
    assert repr(answer).startswith("<Answer to 'port of a socket': 3 of ")
    assert "keyword search (BM25)" in repr(answer) and len(repr(answer)) < 120
    html = answer._repr_html_()
    assert html.count("<tr") == 4 and "<script" not in html


def test_the_full_name_of_a_document_finds_it_first(index, documents):
    better(index, "bm25")
    for document in documents[::7]:
        assert search(index, document.title, 3).results[0].title == document.title
        assert search(index, document.title.upper(), 3).results[0].title == document.title


def test_a_title_comes_before_shorter_texts_that_mention_it(tmp_path, model, tokenizer, documents):
    alias = [
        Document(title=f"alias{n}", text="Same as lib.thing_one.", origin="") for n in range(9)
    ]
    thing = Document(
        title="lib.thing_one",
        text="What it is.\n" + "Many words of all kinds, at length. " * 9,
        origin="x",
    )
    make(tmp_path / "index", model, tokenizer, [*documents, *alias, thing])
    index = opened(tmp_path / "index", model, tokenizer)
    for system in ("bm25", "fused"):
        assert search(index, "lib.thing_one", 3, system).results[0].origin == "x"
    index.close()


def test_snippets_are_short_and_show_what_was_asked_for():
    text = "word " * 200 + "the cross_entropy loss " + "tail " * 200
    cut = snippet(text, "CrossEntropy")
    assert (
        len(cut) <= SNIPPET_CHARS + 4
        and "cross_entropy" in cut
        and cut.startswith("…")
        and cut.endswith("…")
    )
    assert snippet("a short\n  text", "nothing") == "a short text"


def test_stop_words_of_a_texts_language_are_not_marked():
    english = "It is the port that the server listens on, and the address of the server."
    german = "Die Adresse ist die des Servers, und der Server wartet an dem Port auf die Anfragen."
    assert _marked(english, "the port of the server") == ["port", "server", "server"]
    assert _marked(german, "die Adresse und der Server") == ["Adresse", "Server"]
    # English `die` is a word of its meaning; a query of nothing else keeps its stop words.
    assert _marked("The plants die where the water is cold and the sun is low.", "die") == ["die"]
    assert _marked(english, "the and") == ["the", "the", "and", "the", "the"]
    assert snippet("the " * 300 + "port is 80 " + "and " * 300, "the port").startswith("… the port")


def _marked(text: str, query: str) -> list[str]:
    return [text[start:stop] for start, stop in marks(text, query)]


def test_a_long_word_has_a_snippet():
    assert snippet("x" * 1000, "y")


def test_an_evaluation_finds_the_passages_that_a_search_finds(index):
    count = index.manifest.chunks
    compared = exact_search(index.passages.rows_N["document"], index.vectors(np.arange(count)))
    for query in ("port of a socket", "tensor product"):
        asked = index.embedder.queries([query_form(query)])[0]
        rows, scores = passage_vectors(index).nearest(asked, 40)
        documents, wanted = compared(asked, 40)
        np.testing.assert_allclose(scores, np.sort(wanted)[::-1], atol=1e-5)
        assert {*index.passages.rows_N["document"][rows].tolist()} == {*documents.tolist()}


def test_an_index_may_have_several_sets_of_vectors(tmp_path, model, tokenizer, documents):
    path = tmp_path / "index"
    manifest, _ = make(path, model, tokenizer, documents)
    other = VectorSet(encoder="another", dim=4, store="qdrant", table="")
    two = msgspec.structs.replace(manifest, sets={**manifest.sets, "other": other})
    store = other.module.create(two.place(path, "other"))
    store.add([7], np.eye(4, dtype=np.float32)[:1], [{}])
    store.finish()
    store.close()
    save(two, path / "index.json")
    index = opened(path, model, tokenizer)
    assert index.manifest.sets.keys() == index.stores.keys() == {"own", "other"}
    assert index.stores["other"].ids().tolist() == [7]
    assert len(index.store.ids()) == manifest.chunks
    index.close()
