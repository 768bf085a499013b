"""Queries are chosen honestly, and words, vectors and mixes are measured as a plain loop would."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from farspan.corpus.distinct_texts import Copies
from farspan.domain.corpus import Document
from farspan.retrieval.bm25 import BM25Index
from farspan.retrieval.choose import Bodies, LexicalChoice
from farspan.retrieval.chunk import Chunk, head_length
from farspan.retrieval.evaluate import SideVectors, cosine_rows, evaluate, format_evaluation
from farspan.retrieval.evaluation_text import EvaluationText, mine_evaluation
from farspan.retrieval.hybrid_ranking import DEPTH, WORDS_ALONE, best_by_document, query_form
from farspan.retrieval.queries import MIN_BODY_WORDS, Queries, Query, body_of, choose_queries
from farspan.retrieval.words import WordRules, Words
from tests.retrieval.conftest import chunk_documents, make_documents


def make(number: int, body: str | None = None) -> Document:
    text = f"First line {number}.\n" + (
        f"Body {number} has five words or more." if body is None else body
    )
    return Document(title=f"pkg.name{number}", text=text, origin=str(number))


def chosen(documents: list[Document], train: int, seed: int = 0) -> Queries:
    return choose_queries(documents, [body_of(document) for document in documents], train, seed)


def test_a_query_is_the_title_with_its_separators_split():
    assert query_form("torch.nn.functional.cross_entropy") == " torch nn functional cross entropy"
    assert query_form("CrossEntropyLoss of  HTTPServer") == " cross entropy loss of http server"


def test_validation_documents_come_first_and_tuning_is_apart():
    queries = chosen([make(n) for n in range(2000)], train=1900)
    reported = [query.relevant[0] for query in queries.reported if query.kind == "title"]
    tuning = [query.relevant[0] for query in queries.tuning if query.kind == "title"]
    assert len(reported) == 500 and queries.filling == 400
    assert set(range(1900, 2000)) <= set(reported)
    assert len(tuning) == 300 and max(tuning) < 1900 and not set(reported) & set(tuning)
    assert queries == chosen([make(n) for n in range(2000)], train=1900)
    enough = chosen([make(n) for n in range(2000)], train=1000)
    assert enough.filling == 0 and sum(query.kind == "title" for query in enough.reported) == 1000


def test_documents_without_a_body_are_not_asked_for():
    documents = [
        make(0, ""),
        make(1, " word " * (MIN_BODY_WORDS - 1)),
        make(2, " word " * MIN_BODY_WORDS),
        make(3),
    ]
    reported = chosen(documents, train=0).reported
    assert {query.relevant for query in reported} == {(2,), (3,)}
    assert sorted(query.relevant for query in reported if query.kind == "title") == [(2,), (3,)]


def test_same_titles_and_same_bodies_answer_one_another():
    documents = [make(n) for n in range(40)]
    documents[10] = make(10, body_of(documents[3])[1:])
    documents[11] = Document(title="pkg.Name5", text=documents[11].text, origin="")
    relevant = {query.text: query.relevant for query in chosen(documents, train=0).reported}
    assert relevant[" pkg name3"] == relevant[" pkg name10"] == (3, 10)
    assert relevant[" pkg name5"] == (5, 11)


def test_no_document_answers_both_a_reported_and_a_tuning_query():
    """Each validation document's body is also that of a training document, whose title another one
    has too."""
    documents = []
    for n in range(40):
        body = body_of(make(n))
        documents += [
            make(100 + n, body),
            make(100 + n, f"Case {n} of some other five words."),
            make(200 + n),
        ]
    documents += [make(300 + n, body_of(make(n))) for n in range(40)]
    queries = chosen(documents, train=120)
    reported, tuning = (
        {n for query in some for n in query.relevant} for some in (queries.reported, queries.tuning)
    )
    assert queries.tuning and len(queries.reported) >= 40
    assert not reported & tuning


def test_chunks_give_documents_their_best_and_only_the_nearest_count():
    scores = best_by_document([0, 0, 2, 3], np.array([0.1, 0.5, -0.2, 0.3]), 5)
    np.testing.assert_allclose(scores, [0.5, 0, 0, 0.3, 0])
    many = best_by_document(range(DEPTH * 3), np.arange(DEPTH * 3) + 1.0, DEPTH * 3)
    assert (many > 0).sum() == DEPTH and many[-1] == DEPTH * 3


WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
#: Words as they are written, with the usual k1 and b.
PLAIN = LexicalChoice(rules=WordRules(stems=False, stop_words=False, languages=("en",)))


def english(texts: Sequence[str]) -> Bodies:
    return Bodies(texts, ["en"] * len(texts))


def random_side(generator: np.random.Generator, chunks: int, asked: int, tuned: int) -> SideVectors:
    def draw(rows: int) -> np.ndarray:
        return generator.normal(size=(rows, 8)).astype(np.float32)

    return SideVectors(draw(chunks), draw(asked), draw(tuned))


class Loop:
    """Scores of 40 documents, and what is measured of them, a document at a time."""

    def __init__(self, bodies: list[str], owners: list[int], asked: list[Query]) -> None:
        self.asked = asked
        self.owners = owners
        self.words = Words(PLAIN.rules)
        listed = [self.words.of_text(body, "en") for body in bodies]
        self.bm25 = BM25Index.build(listed, PLAIN.k1, PLAIN.b)

    def by_words(self, row: int) -> list[float]:
        return self.bm25.bm25_scores(self.words.of_query(self.asked[row].text)).tolist()

    def by_vectors(self, side: SideVectors, row: int) -> list[float]:
        best = [0.0] * 40
        for chunk, owner in enumerate(self.owners):
            best[owner] = max(best[owner], float(side.chunks[chunk] @ side.reported[row]))
        return best

    def fused(self, sides: dict[str, SideVectors], mix: dict[str, float], row: int) -> list[float]:
        """Each voice's scores over their standard deviation; those of vectors over that of all
        chunks, from the lowest that was found."""
        total = [0.0] * 40
        for voice, weight in mix.items():
            if voice == "bm25":
                scores = self.by_words(row)
                lowest = 0.0
                deviation = float(np.std(scores))
            else:
                side = sides[voice]
                scores = self.by_vectors(side, row)
                lowest = min(score for score in scores if score > 0)
                deviation = float(np.std([vector @ side.reported[row] for vector in side.chunks]))
            for number, score in enumerate(scores):
                if score > 0:
                    total[number] += weight * (score - lowest) / deviation
        for number in range(40):
            if any(self.found(sides, voice, row)[number] for voice in mix):
                total[number] = max(total[number], 1e-6)
        return total

    def found(self, sides: dict[str, SideVectors], voice: str, row: int) -> list[bool]:
        scores = self.by_words(row) if voice == "bm25" else self.by_vectors(sides[voice], row)
        return [score > 0 for score in scores]

    def metrics(self, scores_of) -> dict[str, float]:
        """Means over the queries; ties go against the right document."""
        values: dict[str, list[float]] = {"hit_at_1": [], "hit_at_10": [], "ndcg_at_10": []}
        values |= {"mrr_at_10": [], "recall_at_100": []}
        for row, query in enumerate(self.asked):
            scores = scores_of(row)
            ranking = sorted(range(40), key=lambda n: (-scores[n], n in query.relevant))
            places = [1 + ranking.index(n) for n in query.relevant]
            first = min(places)
            ideal = sum(1 / math.log2(2 + n) for n in range(len(query.relevant)))
            gain = sum(1 / math.log2(1 + place) for place in places if place <= 10)
            values["hit_at_1"].append(first <= 1)
            values["hit_at_10"].append(first <= 10)
            values["ndcg_at_10"].append(gain / ideal)
            values["mrr_at_10"].append(1 / first if first <= 10 else 0)
            values["recall_at_100"].append(np.mean([place <= 100 for place in places]))
        return {name: float(np.mean(row)) for name, row in values.items()}


@pytest.mark.parametrize("seed", range(3))
def test_systems_are_measured_as_a_plain_loop_does(seed):
    generator = np.random.default_rng(seed)
    bodies = [" ".join(generator.choice(WORDS, 6)) for _ in range(40)]
    owners = [n for n in range(40) for _ in range(1 + n % 2)]
    asked = [Query(" ".join(generator.choice(WORDS, 2)), (n, n + 1)) for n in range(0, 20, 2)]
    queries = Queries(asked, [Query("alpha beta", (30,)), Query("zeta", (31,), "own")], 4)
    sides = {
        name: random_side(generator, len(owners), 10, 2)
        for name in ("model", "untuned", "encoder", "table")
    }
    result = evaluate(english(bodies), owners, queries, PLAIN, sides, seed=1)

    loop = Loop(bodies, owners, asked)
    found = result.kinds["title"]
    expected = {
        "bm25": loop.metrics(loop.by_words),
        "fused": loop.metrics(lambda row: loop.fused(sides, result.choice.mix.weights, row)),
    }
    by_table = {**sides, "encoder": sides["table"]}
    mix = result.table_choice.mix.weights
    expected["fused by table"] = loop.metrics(lambda row: loop.fused(by_table, mix, row))
    for name, side in sides.items():
        expected[name] = loop.metrics(lambda row, side=side: loop.by_vectors(side, row))
    assert found.systems.keys() == expected.keys()
    for system, means in expected.items():
        assert msgspec.structs.asdict(found.systems[system]) == pytest.approx(means), system
    compared = [(difference.a, difference.b) for difference in found.differences]
    assert compared == [
        ("fused", "bm25"),
        ("fused", "encoder"),
        ("fused by table", "bm25"),
        ("model", "bm25"),
        ("model", "untuned"),
    ]
    for difference in found.differences:
        a = getattr(found.systems[difference.a], difference.metric)
        b = getattr(found.systems[difference.b], difference.metric)
        assert abs(difference.mean - (a - b)) < 1e-12
        assert difference.interval[0] <= difference.mean <= difference.interval[1]
    counts = (result.val_documents, result.train_documents, found.reported, found.tuning)
    assert counts == (6, 4, 10, 1)
    shown = format_evaluation(result, PLAIN)
    assert "the titles of 6 validation documents and 4 training documents" in shown
    assert "no stems, with stop words, BM25 with k1 2 and b 0.9" in shown


def test_words_alone_are_measured_without_any_vectors():
    bodies = [f"word{n} and more" for n in range(12)]
    queries = Queries([Query(f"word{n}", (n,)) for n in range(6)], [Query("word11", (11,))], 0)
    result = evaluate(english(bodies), [], queries, PLAIN, {}, seed=0)
    assert result.kinds["title"].systems.keys() == {"bm25"}
    assert (result.choice.mix, result.default, result.table_choice) == (WORDS_ALONE, "bm25", None)
    assert result.kinds["title"].differences == ()
    shown = format_evaluation(result, PLAIN)
    assert "default: keyword search (BM25); the index has no other voice" in shown


def test_only_reported_titles_count_as_sources():
    """Numbered names of files that the text does not have are no queries."""
    documents = [make(n) for n in range(40)]
    for number in range(0, 40, 2):
        name = f"scan-{number:04}"
        documents[number] = Document(title=name, origin=f"{name}.txt", text=documents[number].text)
    queries = chosen(documents, train=36)
    titles = [query for query in queries.reported if query.kind == "title"]
    trained = [query for query in titles if query.relevant[0] < 36]
    assert queries.filling == len(trained) and 0 < len(titles) - len(trained) < 4


def test_cosines_of_many_queries_are_those_of_each(monkeypatch):
    monkeypatch.setattr("farspan.retrieval.evaluate.COSINE_BLOCK", 90)
    rng = np.random.default_rng(0)
    chunks_CE = rng.standard_normal((30, 8)).astype(np.float32)
    asked_QE = rng.standard_normal((11, 8)).astype(np.float32)
    cosines = cosine_rows(chunks_CE, asked_QE)
    for row in (0, 1, 2, 3, 10, 4, 0, 9):
        np.testing.assert_allclose(cosines(row), chunks_CE @ asked_QE[row], rtol=1e-5, atol=1e-6)


def test_a_kind_of_few_queries_has_no_table():
    bodies = [f"word{n} and more" for n in range(12)]
    eye = np.eye(12, dtype=np.float32)
    side = SideVectors(eye, eye[:7], np.eye(1, 12, dtype=np.float32))
    titles = [Query(f"word{n}", (n,)) for n in range(6)]
    own = [Query("word9", (9,), "own")]
    queries = Queries([*titles, *own], [Query("word11", (11,))], 0)
    result = evaluate(english(bodies), range(12), queries, PLAIN, {"model": side}, seed=0)
    shown = format_evaluation(result, PLAIN)
    assert "6 title queries" in shown and "1 own query: too few to measure on" in shown
    assert shown.count("nDCG@10  MRR@10") == 1


def test_weights_are_chosen_on_tuning_queries_alone():
    """Vectors find every tuning query and no reported one: they are chosen, and reported as they
    are."""
    bodies = ["same words"] * 60
    eye = np.eye(60, dtype=np.float32) + 0.1
    # Words and vectors put document 59 first, and vectors what was asked for last: rounding would
    # order documents that are equally near.
    wrong = np.repeat(eye[[59]], 20, axis=0) - 0.5 * np.eye(20, 60, dtype=np.float32)
    side = SideVectors(eye, wrong, eye[20:50])
    reported = [Query("same", (n,)) for n in range(20)]
    tuning = [Query("same", (n,)) for n in range(20, 50)]
    queries = Queries(reported, tuning, 0)
    result = evaluate(english(bodies), range(60), queries, PLAIN, {"model": side}, seed=0)
    assert result.choice.mix.model > 0 and result.default == "fused"
    assert result.choice.interval[0] > 0
    assert result.kinds["title"].systems["fused"].hit_at_1 == 0
    swapped = Queries(tuning, reported, 0)
    other = SideVectors(eye, eye[20:50], wrong)
    result = evaluate(english(bodies), range(60), swapped, PLAIN, {"model": other}, seed=0)
    assert result.choice.mix == WORDS_ALONE and result.default == "bm25"
    assert result.kinds["title"].systems["model"].hit_at_1 == 1


def mine(documents: Sequence[Document], chunks: Sequence[Chunk], train: int) -> EvaluationText:
    copies = Copies.none(len(documents))
    return mine_evaluation(documents, chunks, train=train, copies=copies, own=(), seed=0)


def test_what_is_asked_for_competes_by_its_body_and_others_whole():
    documents = make_documents(60)
    chunks = chunk_documents(documents, 32)
    text = mine(documents, chunks, 50)
    asked = text.queries.relevant
    assert 0 < len(asked) < 60
    for number, document in enumerate(documents):
        whole = f"{document.title}\n{document.text}"
        assert text.bodies[number] == (body_of(document) if number in asked else whole)
    for chunk, found in zip(chunks, text.texts, strict=True):
        document = documents[chunk.document]
        if chunk.document not in asked:
            assert found == chunk.indexed
            continue
        start = max(chunk.start, head_length(document))
        assert found == document.text[start : chunk.start + len(chunk.text)]
        assert document.title not in found
    assert text.candidates == [row for row, found in enumerate(text.texts) if found.strip()]
    assert text.owners(chunks).tolist() == [chunks[row].document for row in text.candidates]
    changed = [row for row in text.candidates if text.texts[row] != chunks[row].indexed]
    assert text.changed(chunks) == changed
    assert {chunks[row].document for row in changed} <= asked
    # Nothing that a query was taken from is fitted to.
    for row, passage in zip(text.fitted_rows, text.passages, strict=True):
        document = documents[chunks[row].document]
        assert passage.strip() and passage in document.text
        assert passage not in document.text[: head_length(document)]
    assert text.reported == [query_form(query.text) for query in text.queries.reported]
    assert text.tuning == [query_form(query.text) for query in text.queries.tuning]


def test_documents_of_a_line_each_are_fitted_to_whole():
    documents = [Document(title=f"t{n}", text=f"line of {n}", origin=f"{n}") for n in range(5)]
    chunks = chunk_documents(documents, 32)
    text = mine(documents, chunks, 4)
    assert text.queries.reported == [] and text.fitted_rows == [0, 1, 2, 3, 4]
    assert text.passages == text.texts == [chunk.indexed for chunk in chunks]
    assert text.bodies == [f"{document.title}\n{document.text}" for document in documents]


def test_questions_and_openings_are_asked_and_left_out_of_what_is_found():
    documents = [
        Document(
            title=f"faq {n}",
            origin=f"{n}.md",
            text=f"faq {n}\nHow this part {n} is used every day.\n\nSome words stand before it.\n\n"
            f"# Why does thing {n} fail?\n\nBecause part {n} was left out of the box.\n",
        )
        for n in range(40)
    ]
    queries = chosen(documents, train=40)
    kinds = {
        kind: [q for q in queries.reported if q.kind == kind]
        for kind in ("title", "question", "opening")
    }
    assert len(kinds["title"]) == len(kinds["opening"]) and kinds["question"]
    for query in (*queries.reported, *queries.tuning):
        (number,) = query.relevant
        assert query.text.strip() not in body_of(documents[number])
    assert {q.text for q in kinds["question"]} <= {f"Why does thing {n} fail?" for n in range(40)}
    text = documents[0].text
    assert len(body_of(documents[0])) == len(text) - text.index("\n\n"), (
        "places of what stays are the same"
    )
