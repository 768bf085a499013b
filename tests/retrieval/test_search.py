"""An index is built once, whole or not at all, refused where it does not belong, and answers as it
says."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from farspan.domain.corpus import Document
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import save
from farspan.retrieval.build import build
from farspan.retrieval.choose import LexicalChoice, MixChoice
from farspan.retrieval.chunk import Chunk
from farspan.retrieval.evaluate import Evaluation
from farspan.retrieval.hybrid_ranking import DEPTH, Mix, query_form
from farspan.retrieval.index import (
    ENCODER_VECTORS,
    OWN_VECTORS,
    EncoderIdentity,
    Index,
    IndexManifest,
    Origin,
    Recipe,
    VectorSet,
    read_manifest,
)
from farspan.retrieval.index_task import Task
from farspan.retrieval.index_work import IndexWork
from farspan.retrieval.own_voice import OwnModel
from farspan.retrieval.queries import Query
from farspan.retrieval.search import (
    chance_cosine,
    passage,
    passage_vectors,
    search,
    similar,
)
from tests.retrieval.making import opened

ORIGIN = Origin(model="m1", tokenizer="t1")
TRAIN = 50
MIXED = MixChoice(mix=Mix(bm25=0.7, model=0.3), gain=0.1, interval=(0.05, 0.15))
WORDS = MixChoice()


def make(path, model, tokenizer, documents, **changes) -> tuple[IndexManifest, list[str]]:
    said: list[str] = []
    options = {"train": TRAIN, "origin": ORIGIN, "recipe": Recipe()} | changes
    voice = OwnModel(model=model, tokenizer=tokenizer, origin=options["origin"])
    task = Task(
        path=path,
        voices=[voice],
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


def choose(index: Index, choice: MixChoice) -> None:
    """Put another choice into an open index."""
    evaluation = index.manifest.evaluation
    assert isinstance(evaluation, Evaluation)
    changed = msgspec.structs.replace(evaluation, choice=choice)
    index.manifest = msgspec.structs.replace(index.manifest, evaluation=changed)


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
    assert manifest.lexical.rules.languages == ("en",)
    assert (manifest.sets.keys(), manifest.encoder, manifest.best_set) == ({"own"}, None, "own")
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
    assert other.origin.model == "m2" and said[0].startswith("fitting to ")
    changed, said = make(
        path, model, tokenizer, documents[:-1], origin=other.origin, recipe=Recipe(seed=3)
    )
    assert changed.documents == 59 and said[0].startswith("indexing 59 documents")
    assert [p.name for p in tmp_path.iterdir()] == ["index"]


def test_only_a_new_fit_chooses_words_again(tmp_path, documents, monkeypatch):
    def index(**more) -> LexicalChoice:
        task = Task(
            path=tmp_path / "index",
            documents=documents,
            train=TRAIN,
            recipe=Recipe(),
            write_line=lambda line: None,
            work=IndexWork(),
            **more,
        )
        return build(task).lexical

    usual = index()
    other = msgspec.structs.replace(usual, k1=5.0)
    monkeypatch.setattr("farspan.retrieval.build.choose_words", lambda *given: other)
    assert index() == usual
    assert index(own=[Query("the port of a socket", (0,), "own")], refit=True) == other


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
    store = index.stores[OWN_VECTORS]
    assert len(store.ids()) == len(chunks) == index.manifest.chunks
    vectors = index.own.passages([chunk.indexed for chunk in chunks])
    for chunk, vector in zip(chunks, vectors, strict=True):
        where = {"title": chunk.title, "origin": chunk.origin}
        ids, scores = store.search(vector, 1, where)
        np.testing.assert_allclose(scores, 1, atol=1e-2)
        assert ids.tolist() == [chunk.id]


@pytest.mark.parametrize(("choice", "system"), [(WORDS, "bm25"), (MIXED, "fused")])
def test_the_chosen_mix_answers_and_is_named(index, choice, system):
    choose(index, choice)
    answer = search(index, "port of a socket", 7)
    assert (answer.system, answer.voices, len(answer.results)) == (system, choice.mix.voices, 7)
    assert "tuning queries" in answer.why and not answer.by_table
    asked = search(index, "port of a socket", 7, system)
    assert asked.why == "asked for" and answer == msgspec.structs.replace(asked, why=answer.why)
    assert answer.results[0].origin.startswith("docs/") and "socket" in answer.results[0].title
    scores = [result.score for result in answer.results]
    assert scores == sorted(scores, reverse=True)


def test_the_reason_for_a_mix_is_its_gain_on_tuning_queries(index):
    choose(index, MIXED)
    answer = search(index, "port of a socket")
    assert "+0.100 (95 % interval +0.050 to +0.150)" in answer.why
    assert answer.ranked_by == "hybrid search (BM25 and the run's vectors)"


class Loop:
    """Scores of documents for a query, a document at a time."""

    def __init__(self, index: Index, query: str) -> None:
        self.words = index.lexical.bm25_scores(index.words.of_query(query)).tolist()
        asked = index.own.queries([query_form(query)])[0]
        chunks = every_chunk(index)
        vectors = index.own.passages([chunk.indexed for chunk in chunks])
        cosines = [float(vector @ asked) for vector in vectors]
        self.nearest = [-1.0] * index.manifest.documents
        for chunk, cosine in zip(chunks, cosines, strict=True):
            self.nearest[chunk.document] = max(self.nearest[chunk.document], cosine)
        self.cosines = [max(cosine, 0.0) for cosine in self.nearest]
        found = sorted(filter(None, self.cosines), reverse=True)[:DEPTH]
        self.lowest = found[-1]
        self.deviations = (float(np.std(self.words)), float(np.std(cosines)))

    def fused(self, weight: float) -> list[float]:
        """Scores in standard deviations; cosines count from the lowest that was found."""
        total = []
        for words, cosine in zip(self.words, self.cosines, strict=True):
            score = (1 - weight) * words / self.deviations[0]
            if cosine > 0:
                score += weight * (cosine - self.lowest) / self.deviations[1]
            total.append(max(score, 1e-6) if words > 0 or cosine > 0 else 0.0)
        return total


@pytest.mark.parametrize("query", ["socket listen accept", "how is a matrix transposed", "digit"])
@pytest.mark.parametrize("system", ["bm25", "model", "fused"])
def test_scores_are_those_of_a_plain_loop(index, documents, system, query):
    choose(index, MIXED)
    loop = Loop(index, query)
    expected = {"bm25": loop.words, "model": loop.cosines, "fused": loop.fused(0.3)}[system]
    answer = search(index, query, 60, system)
    assert answer.total == sum(score > 0 for score in expected) == len(answer.results)
    for result in answer.results:
        number = int(result.origin[5:-4])
        assert result.title == documents[number].title
        assert result.score == pytest.approx(expected[number], abs=2e-2)
        assert result.word_score == pytest.approx(loop.words[number])
        if system == "bm25":
            assert result.vector_score is None
        else:
            assert result.vector_score == pytest.approx(loop.nearest[number], abs=1e-3)


def test_a_filter_changes_no_score(index):
    """Deviations are those of all documents, whatever a filter leaves."""
    choose(index, MIXED)
    every = {r.id: r.word_score for r in search(index, "port of a socket", 60).results}
    loop = Loop(index, "port of a socket")
    title = index.documents[0].title
    (found,) = search(index, "port of a socket", 60, where={"title": title}).results
    assert found.word_score == every[found.id] == pytest.approx(loop.words[0])
    # Alone, it is the lowest that vectors have found.
    assert found.score == pytest.approx(0.7 * loop.words[0] / loop.deviations[0], rel=1e-4)


def test_query_of_unknown_words_is_answered_by_vectors_with_a_note(index):
    for choice in (WORDS, MIXED):
        choose(index, choice)
        answer = search(index, "zzz qqq")
        assert answer.system == "model" and answer.unknown_words
        assert answer.ranked_by == "vector search: no word of the query is in the documents"
        assert answer.why == "no word of the query is in the documents"
    assert search(index, "zzz qqq", 5, "bm25").results == ()


def test_query_of_unknown_words_finds_only_what_is_nearer_than_chance(index):
    """Vectors that were asked for find the nearest, however far; those that stand in for words
    find what no string without meaning comes near to."""
    for query in ("zzz qqq", "xyzzy plugh", "socketz"):
        chance = chance_of(index, query)
        every = search(index, query, 50, "model").results
        near = search(index, query, 50).results
        assert [result.id for result in near] == [
            result.id for result in every if result.score > chance
        ]


def chance_of(index: Index, query: str) -> float:
    vectors = passage_vectors(index, OWN_VECTORS)
    return chance_cosine(index, OWN_VECTORS, index.own, query, vectors)


def test_a_strings_meaning_is_measured_the_same_way_each_time(index):
    assert chance_of(index, "zzz qqq") == chance_of(index, "zzz qqq")


def test_vectors_that_the_index_lacks_are_refused(index):
    with pytest.raises(Refusal) as refused:
        search(index, "socket", system="encoder")
    problem = refused.value.problem
    assert (problem.code, problem.remedy) == ("usage", "search without --system")
    assert "by the encoder" in problem.what and problem.fact == "its sets of vectors: own"


def test_the_best_passage_has_most_of_the_querys_words(tmp_path, model, tokenizer, documents):
    """A document of several passages shows the one that the query is in; vectors decide among
    equals."""
    filler = "Nothing to see in this part of the text, which goes on for a while. " * 12
    text = f"A heading.\n\n{filler}\n\nThe quokka eats leaves.\n\n{filler}\n\nA quokka sleeps."
    long = Document(title="island", text=text, origin="island.txt")
    make(tmp_path / "index", model, tokenizer, [*documents, long], recipe=Recipe(evaluate=False))
    index = opened(tmp_path / "index", model, tokenizer)
    (first,) = search(index, "what does the quokka eat", 1, "bm25").results
    assert "quokka eats leaves" in first.passage and "quokka" in first.text
    (second,) = search(index, "where does a quokka sleep", 1, "bm25").results
    assert "A quokka sleeps" in second.passage
    assert [first.passage[a:b] for a, b in first.marks] == ["quokka", "eats"]
    index.close()


def test_similar_passages_are_the_nearest_of_other_documents(index):
    chunks = every_chunk(index)
    vectors = index.vectors(np.arange(len(chunks)), OWN_VECTORS)
    for row in (0, 7, len(chunks) - 1):
        best: dict[int, float] = {}
        for chunk, vector in zip(chunks, vectors, strict=True):
            cosine = float(vector @ vectors[row])
            if chunk.document != chunks[row].document:
                best[chunk.document] = max(best.get(chunk.document, -1), cosine)
        expected = sorted(best.values(), reverse=True)[:4]
        found = similar(index, f"{chunks[row].id:016x}", 4)
        assert [result.score for result in found] == pytest.approx(expected, abs=1e-3)


def test_similar_without_vectors_goes_by_words(tmp_path, documents):
    task = Task(
        path=tmp_path / "index",
        documents=documents,
        train=TRAIN,
        recipe=Recipe(evaluate=False),
        write_line=lambda line: None,
        work=IndexWork(),
    )
    manifest = build(task)
    assert manifest.sets == {} and manifest.best_set is None
    index = opened(tmp_path / "index")
    for row in (0, 7, manifest.chunks - 1):
        chunk = index.passages.chunk(row)
        terms = index.words.of_query(chunk.indexed)
        scores = index.lexical.bm25_scores(terms).tolist()
        scores[chunk.document] = 0
        found = similar(index, f"{chunk.id:016x}", 4)
        expected = sorted(scores, reverse=True)[:4]
        assert [result.score for result in found] == pytest.approx(expected)
        topic = chunk.title.partition(".")[0]
        assert {result.title.partition(".")[0] for result in found} == {topic}
        assert chunk.title not in {result.title for result in found}
        assert {result.vector_score for result in found} == {None}
        assert passage(index, found[0].id).passage == found[0].passage
    index.close()


def test_answer_is_short_as_text_and_has_a_row_for_each_result_in_html(index):
    answer = search(index, "port of a socket", 3, "bm25")
    assert repr(answer).startswith("<Answer to 'port of a socket': 3 of ")
    assert "keyword search (BM25)" in repr(answer) and len(repr(answer)) < 120
    html = answer._repr_html_()
    assert html.count("<tr") == 4 and "<script" not in html


def test_the_full_name_of_a_document_finds_it_first(index, documents):
    choose(index, WORDS)
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


def test_vectors_stay_closed_for_searches_by_words(built, model, tokenizer):
    index = Index.open(built, NeverAsked(), remedy="", vectors=False)
    assert "stores" not in vars(index) and "covariances" not in vars(index)
    assert search(index, "port of a socket", 3, "bm25").results
    index.close()


class NeverAsked:
    """Fails where a model is asked for."""

    def own(self, fitted: Path, origin: Origin):
        raise AssertionError("no model is needed")

    def encoder(self, identity: EncoderIdentity):
        raise AssertionError("no model is needed")


def test_an_index_has_several_sets_of_vectors(tmp_path, model, tokenizer, documents):
    path = tmp_path / "index"
    manifest, _ = make(path, model, tokenizer, documents)
    other = VectorSet(dim=4, store="qdrant", table="")
    identity = EncoderIdentity(id="0" * 16, name="other", folder="nowhere")
    sets = {**manifest.sets, ENCODER_VECTORS: other}
    two = msgspec.structs.replace(manifest, sets=sets, encoder=identity)
    store = other.module.create(two.place(path, ENCODER_VECTORS))
    store.add([7], np.eye(4, dtype=np.float32)[:1], [{}])
    store.finish()
    store.close()
    np.save(path / manifest.files / "covariance-encoder.npy", np.eye(4, dtype=np.float32))
    save(two, path / "index.json")
    index = opened(path, model, tokenizer)
    assert index.manifest.sets.keys() == index.stores.keys() == {"own", "encoder"}
    assert index.manifest.best_set == "encoder"
    assert index.stores[ENCODER_VECTORS].ids().tolist() == [7]
    assert len(index.stores[OWN_VECTORS].ids()) == manifest.chunks
    index.close()
