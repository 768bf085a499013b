"""A table of token vectors answers for an encoder, is written and read, and refuses damage."""

import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from farspan.domain.problems import Refusal
from farspan.retrieval.encoders import distillation
from farspan.retrieval.encoders.distillation import distill_query_table, fit_rows, make_queries
from farspan.retrieval.encoders.opening import open_encoder
from farspan.retrieval.encoders.query_table import QueryTable
from farspan.retrieval.index_work import IndexWork
from tests.retrieval.conftest import make_documents
from tests.retrieval.encoder_folders import WORDS, minilm, write_bert, write_static

DOCUMENTS = make_documents(60)
PASSAGES = [document.text for document in DOCUMENTS]
TITLES = [document.title for document in DOCUMENTS]


@pytest.fixture(scope="module")
def encoder():
    return open_encoder(minilm())


@pytest.fixture(scope="module")
def table(encoder):
    return distill_query_table(encoder, PASSAGES, TITLES, texts=1500)


def test_a_table_makes_vectors_near_those_of_the_encoder(encoder, table):
    queries = ["how do I multiply a matrix?", "listen on a port", "what is a string prefix"]
    expected = encoder.queries(queries)
    cosines = (table.queries(queries) * expected).sum(1)
    assert cosines.min() > 0.7
    # Nearer to its own query than to the others.
    similarities = table.queries(queries) @ expected.T
    assert (similarities.argmax(1) == np.arange(3)).all()


def test_a_query_without_known_tokens_has_no_direction(table):
    assert not table.queries(["", "\u2603\u2603"]).any()


def test_a_table_is_read_as_it_was_written_without_torch(table, tmp_path):
    path = tmp_path / "table.safetensors"
    table.save(path)
    queries = ["how do I multiply a matrix?", "", "Ports AND sockets"]
    again = QueryTable.load(path)
    assert again.dim == 384
    np.testing.assert_allclose(again.queries(queries), table.queries(queries), atol=1e-3)
    program = (
        "import sys; from pathlib import Path\n"
        "from farspan.retrieval.encoders.query_table import QueryTable\n"
        f"vectors = QueryTable.load(Path({str(path)!r})).queries(['multiply a matrix'])\n"
        "print(vectors.shape, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "(1, 384) False\n", result.stderr


def damage(name, change):
    def spoil(tensors):
        tensors[name] = change(tensors[name])

    return spoil


def set_first(value):
    def change(array):
        changed = array.copy()
        changed.flat[0] = value
        return changed

    return change


DAMAGES = {
    "no rows": lambda tensors: tensors.pop("rows"),
    "fewer rows than tokens": damage("rows", lambda rows: rows[1:].copy()),
    "another size of the bias": damage("bias", lambda bias: bias[1:].copy()),
    "tokens that are not in order": damage("tokens", set_first(1 << 20)),
    "a token below 0": damage("tokens", set_first(-1)),
    "a NaN": damage("rows", set_first(np.nan)),
    "a tokenizer that is none": damage("tokenizer", lambda text: text[:100].copy()),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_table_is_refused(name, table, tmp_path):
    path = tmp_path / "table.safetensors"
    table.save(path)
    tensors = load_file(path)
    DAMAGES[name](tensors)
    save_file(tensors, path)
    with pytest.raises(Refusal) as refused:
        QueryTable.load(path)
    assert refused.value.problem.code == "file-unreadable"


def test_a_table_that_is_cut_off_or_missing_is_refused(table, tmp_path):
    path = tmp_path / "table.safetensors"
    with pytest.raises(Refusal, match="cannot be read"):
        QueryTable.load(path)
    table.save(path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(Refusal, match="cannot be read"):
        QueryTable.load(path)


def test_rows_are_the_least_squares_solution(monkeypatch):
    rng = np.random.default_rng(4)
    bags = [list(rng.integers(0, 12, rng.integers(1, 7)) * 3) for _ in range(80)]
    vectors = rng.normal(size=(80, 5)).astype(np.float32)
    tokens, rows = fit_rows(bags, vectors, IndexWork())
    matrix = np.zeros((80, len(tokens) + 1))
    for number, bag in enumerate(bags):
        np.add.at(matrix[number], np.searchsorted(tokens, bag), 1)
        matrix[number, -1] = 1
        matrix[number] /= (len(bag) + 1) ** 0.25
    normal = matrix.T @ matrix + 0.2 * np.eye(len(tokens) + 1)
    expected = np.linalg.solve(normal, matrix.T @ vectors)
    np.testing.assert_allclose(rows, expected, atol=1e-3)
    # The same without torch.
    monkeypatch.setattr(distillation, "_find_sum_bags", lambda: distillation._sum_bags)
    np.testing.assert_allclose(fit_rows(bags, vectors, IndexWork())[1], rows, atol=1e-5)


def test_queries_are_made_of_the_corpus_and_the_same_each_time(tmp_path):
    write_bert(tmp_path)
    encoder = open_encoder(tmp_path)

    def make(questions):
        rng = np.random.default_rng(0)
        return make_queries(encoder, PASSAGES, TITLES, questions, 300, rng)

    queries = make(["how do I {}"])
    assert queries == make(["how do I {}"])
    assert len(queries) == len({*queries})
    assert {*TITLES[:50]} & {*queries}
    assert any(query.startswith("how do I ") for query in queries)
    assert not any(query.startswith("how do I ") for query in make([]))


def test_passages_of_scripts_without_spaces_are_cut_within(tmp_path):
    write_bert(tmp_path)
    encoder = open_encoder(tmp_path)
    text = "套接字监听端口并接受连接" * 20
    rng = np.random.default_rng(0)
    queries = make_queries(encoder, [text], [], [], 50, rng)
    spans = [query for query in queries if query in text and 3 <= len(query) <= 14]
    assert len(spans) > 5


@pytest.mark.parametrize("passages", [[], ["", " "], ["one"]])
def test_a_corpus_of_next_to_nothing_makes_a_table(passages, tmp_path):
    write_bert(tmp_path)
    table = distill_query_table(open_encoder(tmp_path), passages, [], texts=20)
    assert table.queries(["how"]).any()


def test_a_static_encoder_is_its_own_table_nearly(tmp_path):
    rng = np.random.default_rng(5)
    rows = rng.normal(size=(len(WORDS), 6)).astype(np.float32)
    write_static(tmp_path, {"embedding.weight": rows})
    encoder = open_encoder(tmp_path)
    passages = [" ".join(rng.choice(WORDS[4:], 12)) for _ in range(40)]
    table = distill_query_table(encoder, passages, [], texts=400)
    queries = ["how do i open the socket", "read a file"]
    assert (table.queries(queries) * encoder.queries(queries)).sum(1).min() > 0.9


def test_progress_is_counted_and_embedding_resumed(encoder, tmp_path):
    shown = []
    work = IndexWork(changed=lambda work: shown.append((work.kind, work.share)))
    work.folder = tmp_path
    first = distill_query_table(encoder, PASSAGES, TITLES, work, texts=100)
    assert {kind for kind, _ in shown} == {"embedding", "fitting"}
    assert shown[-1] == ("fitting", 1)
    again = IndexWork()
    again.folder = tmp_path
    second = distill_query_table(encoder, PASSAGES, TITLES, again, texts=100)
    assert again.embedded == 0
    np.testing.assert_array_equal(first.queries(["a port"]), second.queries(["a port"]))
