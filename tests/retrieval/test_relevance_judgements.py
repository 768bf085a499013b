"""Queries of a person's own: files in BEIR's and TREC's form, what is refused, and that they are
judged apart."""

import re

import pytest

from farspan.domain.corpus import Document
from farspan.domain.problems import Refusal
from farspan.retrieval.queries import Query, body_of, choose_queries
from farspan.retrieval.relevance_judgements import read_judged
from tests.retrieval import making

DOCUMENTS = [
    Document(
        title=f"pkg.name{n}",
        text=f"First line {n}.\nBody {n} has five words or more.",
        origin=f"docs/{n}.md",
    )
    for n in range(60)
]
QUERIES = (
    '{"_id": "q1", "text": "how is it done"}\n\n{"_id": 2, "text": "why not", "metadata": {}}\n'
)


@pytest.fixture
def written(tmp_path):
    def write(qrels: str, queries: str = QUERIES):
        (tmp_path / "queries.jsonl").write_text(queries)
        (tmp_path / "qrels.tsv").write_text(qrels)
        return tmp_path / "queries.jsonl", tmp_path / "qrels.tsv"

    return write


@pytest.mark.parametrize(
    "qrels",
    [
        "query-id\tcorpus-id\tscore\nq1\tpkg.name3\t1\nq1\tdocs/5.md\t2\nq1\tpkg.name9\t0\n",
        "q1 0 pkg.name3 1\nq1 0 docs/5.md 2\nq1 0 pkg.name9 0\n2 0 pkg.name1 0\n",
        "q1\t0\tdocs/3.md\t1\n\nq1\t0\tpkg.name5\t1\n",
    ],
)
def test_documents_are_named_by_title_or_by_place(written, qrels):
    assert read_judged(*written(qrels), DOCUMENTS) == [Query("how is it done", (3, 5), "own")]


@pytest.mark.parametrize(
    ("qrels", "queries", "code", "said"),
    [
        ("q1\tpkg.name3\n", QUERIES, "file-unreadable", "qrels.tsv:1"),
        (
            "q1\tpkg.name3\thigh\n",
            QUERIES,
            "file-unreadable",
            "query-id <tab> corpus-id <tab> score",
        ),
        ("q1\tpkg.nam33\t1\n", QUERIES, "out-of-range", "the nearest is pkg.name33"),
        ("q7\tpkg.name3\t1\n", QUERIES, "out-of-range", "there is no such query"),
        ("q1\tpkg.name3\t0\n", QUERIES, "out-of-range", "2 queries and no pair"),
        ("", QUERIES, "out-of-range", "no query has a document"),
        (
            "q1\tpkg.name3\t1\n",
            '{"id": "q1", "text": "how"}\n',
            "file-unreadable",
            "queries.jsonl:1",
        ),
        (
            "q1\tpkg.name3\t1\n",
            "how is it done?\n",
            "file-unreadable",
            '{"_id": "q1", "text": "..."}',
        ),
    ],
)
def test_malformed_qrels_or_queries_are_refused(written, qrels, queries, code, said):
    with pytest.raises(Refusal, match=re.escape(said)) as refused:
        read_judged(*written(qrels, queries), DOCUMENTS)
    assert refused.value.problem.code == code


def test_files_that_are_not_there_or_no_text_are_refused(written, tmp_path):
    queries, qrels = written("q1\tpkg.name3\t1\n")
    with pytest.raises(Refusal, match="no such file"):
        read_judged(tmp_path / "none", qrels, DOCUMENTS)
    qrels.write_bytes(b"q1\t\xff\xfe\t1\n")
    with pytest.raises(Refusal, match="cannot be read"):
        read_judged(queries, qrels, DOCUMENTS)


def test_half_of_them_tune_and_nothing_else_asks_for_their_documents():
    own = [Query(f"question {n}", (n, n + 1), "own") for n in range(0, 20, 2)]
    bodies = [body_of(document) for document in DOCUMENTS]
    queries = choose_queries(DOCUMENTS, bodies, 50, 0, own=own)
    reported, tuning = (
        [q for q in part if q.kind == "own"] for part in (queries.reported, queries.tuning)
    )
    assert len(reported) == len(tuning) == 5 and {*reported, *tuning} == {*own}
    others = {
        n
        for part in (queries.reported, queries.tuning)
        for q in part
        if q.kind != "own"
        for n in q.relevant
    }
    assert others and not others & {n for query in own for n in query.relevant}
    shared = choose_queries(
        DOCUMENTS, bodies, 50, 0, own=[Query(f"question {n}", (1,), "own") for n in range(10)]
    )
    assert not [query for query in shared.tuning if query.kind == "own"], (
        "one document answers reported queries alone"
    )


@pytest.mark.parametrize("asking", [False, True])
def test_a_small_corpus_keeps_half_of_its_training_documents_to_be_fitted_to(asking):
    head = "# Why is it so?\n" if asking else ""
    documents = [
        Document(
            title=f"name{n}",
            text=f"First line of it {n}.\n\n{head}Body {n} has five words or more.",
            origin=f"{n}.md",
        )
        for n in range(80)
    ]
    queries = choose_queries(documents, [body_of(document) for document in documents], 76, 0)
    assert {query.kind for query in queries.tuning} == {
        "title",
        "asked",
        "opening",
        *(["question"] if asking else []),
    }
    assert {76, 77, 78, 79} <= {n for query in queries.reported for n in query.relevant}
    assert len([n for n in range(76) if n not in queries.relevant]) >= 38


def test_index_is_tuned_again_for_given_queries(tmp_path):
    path = tmp_path / "index"
    own = [Query(document.title, (n,), "own") for n, document in enumerate(making.DOCUMENTS[:20])]
    _, first = making.make(path)
    assert first.evaluation and "own" not in first.evaluation.kinds
    work, tuned = making.make(path, refit=True, own=own)
    assert (
        tuned.evaluation
        and tuned.evaluation.kinds["own"].reported == 10
        and tuned.fit.id != first.fit.id
    )
    assert (
        work.embedded and making.make(path, refit=True, own=own)[1] == making.make(path)[1] == tuned
    )
