"""Every store finds what brute force finds, filters, persists, and loses nothing acknowledged to kill -9."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from farspan.domain.problems import Refusal
from farspan.retrieval import stores

WRITER = """
import sys, time
from pathlib import Path
import numpy as np
from farspan.retrieval import stores
store = stores.load(sys.argv[1]).create(Path(sys.argv[2]), 16)
vectors = np.random.default_rng(0).normal(size=(100_000, 16)).astype("float32")
for start in range(0, len(vectors), 50):
    ids = range(start, start + 50)
    store.add(ids, vectors[start : start + 50], [{"document": i} for i in ids])
    print(start + 50, flush=True)
    time.sleep(0.005)  # Who kills it must not come too late.
"""


@pytest.fixture(params=stores.names())
def name(request):
    return request.param


def unit_vectors(count: int, dim: int = 24) -> np.ndarray:
    vectors = np.random.default_rng(1).normal(size=(count, dim)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_search_is_brute_force_with_and_without_a_filter_also_after_reopening(name, tmp_path):
    vectors = unit_vectors(3000)
    payloads = [{"document": i // 3, "title": f"t{i % 2}"} for i in range(len(vectors))]
    store = stores.load(name).create(tmp_path / "store", 24)
    for start in range(0, len(vectors), 700):
        some = slice(start, start + 700)
        store.add(range(len(vectors))[some], vectors[some], payloads[some])
    for reopened in (False, True):
        if reopened:
            store.finish()
            store.close()
            store = stores.load(name).open_store(tmp_path / "store")
        assert store.count() == len(vectors)
        for query in unit_vectors(20)[::-1]:
            similarities = vectors @ query
            found = store.search(query, 10)
            assert [hit.id for hit in found] == np.argsort(-similarities)[:10].tolist()
            np.testing.assert_allclose([h.score for h in found], np.sort(similarities)[::-1][:10], atol=1e-5)
            assert [hit.payload for hit in found] == [payloads[hit.id] for hit in found]
            odd = store.search(query, 5, {"title": "t1"})
            assert [h.id for h in odd] == [i for i in np.argsort(-similarities) if i % 2][:5]
    assert {hit.id for hit in store.search(vectors[0], 9, {"document": 7, "title": "t1"})} == {21, 23}
    store.close()


def test_an_id_that_is_added_again_is_replaced(name, tmp_path):
    store = stores.load(name).create(tmp_path / "store", 24)
    first, second = unit_vectors(2)
    store.add([4], first[None], [{"title": "old"}])
    store.add([4], second[None], [{"title": "new"}])
    hit = store.search(second, 5)[0]
    assert (store.count(), hit.id, hit.payload) == (1, 4, {"title": "new"})
    assert hit.score == pytest.approx(1, abs=1e-5)
    store.close()


@pytest.mark.parametrize("acknowledged", [1, 40])
def test_what_was_acknowledged_survives_kill_9(name, tmp_path, acknowledged):
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, name, str(tmp_path / "store")], stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    for _ in range(acknowledged):
        count = int(writer.stdout.readline())
    os.kill(writer.pid, signal.SIGKILL)
    rest = writer.stdout.read().split("\n")[:-1]
    writer.wait()
    count = int(rest[-1]) if rest else count
    assert count < 100_000
    store = stores.load(name).open_store(tmp_path / "store")
    assert store.count() >= count
    vectors = np.random.default_rng(0).normal(size=(100_000, 16)).astype("float32")
    for number in range(0, count, 7):
        found = store.search(vectors[number], 1, {"document": number})
        assert [(hit.id, hit.score) for hit in found] == [
            (number, pytest.approx(float(vectors[number] @ vectors[number]), rel=1e-4))
        ]
    store.close()


def test_an_unknown_store_is_refused_with_the_nearest():
    assert stores.resolve("auto") == stores.DEFAULT
    with pytest.raises(Refusal) as refusal:
        stores.resolve("qdrnt")
    assert refusal.value.problem.code == "out-of-range"
    assert refusal.value.problem.remedy == "set index.store: qdrant"
