"""Queries are chosen honestly, and the four systems are measured as a plain loop would."""

import math

import numpy as np

from farspan.domain.corpus import Document
from farspan.retrieval.bm25 import BM25Index
from farspan.retrieval.evaluate import (
    FUSION_WEIGHTS,
    ModelVectors,
    choose_settings,
    evaluate,
    format_evaluation,
)
from farspan.retrieval.hybrid_ranking import DEPTH, best_by_document, fuse_hybrid_scores
from farspan.retrieval.names import query_form
from farspan.retrieval.queries import MIN_BODY_WORDS, Queries, Query, body_of, choose_queries
from farspan.retrieval.words import Words


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
    assert [
        query.relevant
        for query in sorted(chosen(documents, train=0).reported, key=lambda q: q.text)
    ] == [
        (2,),
        (3,),
    ]


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


def test_fusion_by_hand():
    fused = fuse_hybrid_scores(
        np.array([4, 2, 0], np.float32), np.array([0, 0.5, 0.9], np.float32), 0.5
    )
    np.testing.assert_allclose(fused, [1, 0.75, 0.45])
    np.testing.assert_allclose(
        fuse_hybrid_scores(np.zeros(2, np.float32), np.array([0.2, 0.4], np.float32), 1.0),
        [0.2, 0.4],
    )


def test_systems_are_measured_as_a_plain_loop_does():
    generator = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    bodies = [" ".join(generator.choice(words, 6)) for _ in range(40)]
    owners = [n for n in range(40) for _ in range(1 + n % 2)]
    draw = lambda rows: generator.normal(size=(rows, 8)).astype(np.float32)  # noqa: E731
    asked = [Query(" ".join(generator.choice(words, 2)), (n, n + 1)) for n in range(0, 20, 2)]
    queries = Queries(asked, [Query("alpha beta", (30,)), Query("zeta", (31,))], 4)
    trained, untrained = (ModelVectors(draw(len(owners)), draw(10), draw(2)) for _ in range(2))
    result = evaluate(bodies, owners, queries, {"model": trained, "untuned": untrained}, seed=1)

    def metrics(scores_of):
        hits1 = []
        hits10 = []
        gains = []
        for row, query in enumerate(asked):
            scores = scores_of(row, query)
            places = [
                1 + i
                for i, n in enumerate(
                    sorted(range(40), key=lambda n: (-scores[n], n in query.relevant))
                )
                if n in query.relevant
            ]
            hits1.append(places[0] <= 1)
            hits10.append(places[0] <= 10)
            best = 1 + 1 / math.log2(3)
            gains.append(sum(1 / math.log2(1 + place) for place in places if place <= 10) / best)
        return np.mean(hits1), np.mean(hits10), np.mean(gains)

    def by_vectors(side):
        def best(row, document):
            return max(
                side.chunks[i] @ side.reported[row]
                for i, owner in enumerate(owners)
                if owner == document
            )

        return lambda row, query: [max(0, best(row, n)) for n in range(40)]

    words = Words()
    lexical = BM25Index.build(map(words.of_text, bodies), result.k1, result.b)
    found = result.kinds["title"]
    expected = {
        "bm25": metrics(lambda row, query: lexical.bm25_scores(words.of_query(query.text))),
        "model": metrics(by_vectors(trained)),
        "untuned": metrics(by_vectors(untrained)),
    }
    for system, (hit1, hit10, gain) in expected.items():
        quality = found.systems[system]
        np.testing.assert_allclose(
            [quality.hit_at_1, quality.hit_at_10, quality.ndcg_at_10], [hit1, hit10, gain]
        )
    for difference in found.differences:
        a, b = (
            getattr(found.systems[name], difference.metric) for name in (difference.a, difference.b)
        )
        assert abs(difference.mean - (a - b)) < 1e-12
        assert difference.interval[0] <= difference.mean <= difference.interval[1]
    assert (result.val_documents, result.train_documents, found.reported, found.tuning) == (
        6,
        4,
        10,
        2,
    )
    assert "the titles of 6 validation documents and 4 training documents" in format_evaluation(
        result
    )


def test_a_kind_of_few_queries_has_no_table():
    bodies = [f"word{n} and more" for n in range(12)]
    side = ModelVectors(
        np.eye(12, dtype=np.float32),
        np.eye(12, dtype=np.float32)[:7],
        np.eye(1, 12, dtype=np.float32),
    )
    titles = [Query(f"word{n}", (n,)) for n in range(6)]
    own = [Query("word9", (9,), "own")]
    queries = Queries([*titles, *own], [Query("word11", (11,))], 0)
    shown = format_evaluation(evaluate(bodies, range(12), queries, {"model": side}, seed=0))
    assert "6 title queries" in shown and "1 own query: too few to measure on" in shown
    assert shown.count("nDCG@10  MRR@10") == 1


def test_the_fusion_weight_is_the_best_on_tuning_queries_alone():
    bodies = ["same words", "same words", "same words"]
    side = ModelVectors(
        np.eye(3, dtype=np.float32),
        np.eye(3, dtype=np.float32)[[0]],
        np.eye(3, dtype=np.float32)[[1]],
    )
    queries = Queries([Query("same", (2,))], [Query("same", (1,))], 0)
    result = evaluate(bodies, range(3), queries, {"model": side}, seed=0)
    assert result.fusion_weight == 0.05, "every weight finds it: the smallest is taken"
    assert result.kinds["title"].systems["fused"].hit_at_1 == 0


def chosen_on(kinds: dict[str, tuple[int, float]], seed: int):
    """Of queries of each kind: how many, and the share of them whose document is the nearest
    vector. Words tie."""
    generator = np.random.default_rng(seed)
    documents = sum(count for count, _ in kinds.values())
    near = np.concatenate([generator.random(count) < share for count, share in kinds.values()])
    asked = [
        Query("same", (n,), kind)
        for n, kind in enumerate(k for k, (count, _) in kinds.items() for _ in range(count))
    ]
    eye = np.eye(documents, dtype=np.float32)
    places = [n if near[n] else (n + 1) % documents for n in range(documents)]
    side = ModelVectors(eye, eye[:0], eye[places])
    # The right document is second by words, behind one that every query finds.
    bodies = ["same same", *["same other words"] * (documents - 1)]
    return choose_settings(bodies, range(documents), asked, side, 0)


def test_searches_answer_with_words_unless_vectors_find_more_of_every_kind():
    assert chosen_on({"title": (60, 1.0), "question": (60, 1.0)}, 0).default == "fused"
    assert chosen_on({"title": (60, 0.0), "question": (60, 0.0)}, 0).default == "bm25"
    assert (
        chosen_on({"title": (2, 1.0)}, 0).gain.interval[0]
        <= chosen_on({"title": (60, 1.0)}, 0).gain.interval[0]
    )
    assert (
        choose_settings(
            ["a b", "c d"], range(2), [], ModelVectors(*[np.eye(2, dtype=np.float32)] * 3), 0
        ).default
        == "bm25"
    )


def test_vectors_that_find_less_than_words_are_not_asked():
    """Words find every question and no title; vectors every title, and put others before the
    questions' documents."""
    bodies = [f"word{n} of its own" for n in range(40)]
    titles = [Query("nothing known", (n,)) for n in range(20)]
    questions = [Query(f"word{n}", (n,), "question") for n in range(20, 40)]
    eye = np.eye(40, dtype=np.float32)
    side = ModelVectors(eye, eye[:0], np.concatenate([eye[:20], 5 * eye[[0] * 20]]))
    found = choose_settings(bodies, range(40), [*titles, *questions], side, 0)
    assert found.gain.interval[0] > 0 or found.default == "bm25"
    assert found.weight == min(FUSION_WEIGHTS), (
        "a small weight finds the titles and leaves the questions"
    )


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
