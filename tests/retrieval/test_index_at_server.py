"""An index whose vectors lie at a server: it follows its text there, and leaves nothing behind."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from farspan.domain.problems import Refusal
from farspan.launch.trust import seal_server
from farspan.retrieval.index import OWN_VECTORS, IndexManifest
from farspan.retrieval.search import search
from tests.retrieval import making, servers
from tests.retrieval.test_following import NEW, check

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("waits for the library psycopg: make .venv/.test")
    with pytest.MonkeyPatch.context() as environment, servers.postgres() as location:
        environment.setenv("PGPASSWORD", servers.PASSWORD)
        yield f"pgvector:{location}"


def tables(server: str) -> set[str]:
    import psycopg

    with psycopg.connect(server.partition(":")[2]) as connection:
        rows = connection.execute(
            "SELECT tablename FROM pg_tables WHERE tablename LIKE 'farspan%'"
        ).fetchall()
    return {name for (name,) in rows}


def table_of(manifest: IndexManifest) -> str:
    return manifest.sets[OWN_VECTORS].table


def test_the_index_follows_its_text_at_a_server(server: str, tmp_path: Path):
    folder = tmp_path / "index"
    _, first = making.make(folder, evaluate=False, store=server)
    index = making.opened(folder)
    check(index, list(making.DOCUMENTS))
    assert index.own is not None
    documents = [NEW, *making.DOCUMENTS[5:]]
    work, second = making.make(folder, evaluate=False, documents=documents, store=server)
    assert table_of(first) == table_of(second) != "" and work.embedded <= 3
    # Who has the old index open goes on: what is gone is missed, what is new is passed over.
    assert search(index, "socket port", 5, "model").results
    index.close()
    index = making.opened(folder)
    check(index, documents)
    (vector,) = index.vectors(np.array([0]), OWN_VECTORS)
    assert len(index.stores[OWN_VECTORS].search(vector, 1, {"title": "Quokka"}).ids) == 1
    import psycopg

    with psycopg.connect(server.partition(":")[2]) as connection:
        where = "WHERE payload ->> 'title' = 'Quokka'"
        text = f"SELECT payload ->> 'text' FROM {table_of(second)} {where}"
        assert "quokka" in connection.execute(text).fetchone()[0].lower()
    index.close()


def test_a_new_fit_and_another_store_leave_no_table_behind(server: str, tmp_path: Path):
    folder = tmp_path / "index"
    before = tables(server)
    making.make(folder, evaluate=False, store=server)
    documents = making.changed(50)
    making.make(folder, evaluate=False, documents=documents, store=server, refit=True)
    assert len(tables(server) - before) == 1
    work, manifest = making.make(folder, evaluate=False, documents=documents)
    assert work.embedded == 0 and table_of(manifest) == "" and tables(server) == before
    index = making.opened(folder)
    check(index, documents)
    index.close()


def test_next_build_removes_server_tables_left_by_a_killed_build(
    server: str, tmp_path: Path, monkeypatch
):
    folder = tmp_path / "index"
    before = tables(server)
    making.make(folder, evaluate=False, store=server)

    def killed(*given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("farspan.retrieval.build._drop_old_vectors", killed)
        making.make(folder, evaluate=False)
    assert len(tables(server) - before) == 1
    making.opened(folder).close()
    making.make(folder, evaluate=False)
    assert tables(server) == before


def test_next_build_removes_the_table_of_a_build_killed_before_its_index_was_whole(
    server: str, tmp_path: Path, monkeypatch
):
    folder = tmp_path / "index"
    before = tables(server)
    making.make(folder, evaluate=False)

    def killed(*given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("farspan.retrieval.stores.pgvector.PgvectorStore.finish", killed)
        making.make(folder, evaluate=False, store=server)
    assert len(tables(server) - before) == 1
    # Another text, and the store of before.
    making.make(folder, evaluate=False, documents=making.changed(5))
    assert tables(server) == before


def test_a_server_that_is_gone_is_left_for_another_store(server: str, tmp_path: Path):
    folder = tmp_path / "index"
    _, manifest = making.make(folder, evaluate=False, store=server)
    port = server.partition("@")[2].partition("/")[0]
    gone = (folder / "index.json").read_text().replace(port, "127.0.0.1:1")
    (folder / "index.json").write_text(gone)
    seal_server(folder / manifest.files / "seal", server.replace(port, "127.0.0.1:1"))
    lines: list[str] = []
    _, again = making.make(folder, evaluate=False, say=lines.append)
    assert table_of(again) == "" and "is still there" in lines[-1]
    index = making.opened(folder)
    check(index, list(making.DOCUMENTS))
    index.close()
    manifest.sets[OWN_VECTORS].module.drop(manifest.place(folder, OWN_VECTORS))


def test_table_that_somebody_else_put_there_is_refused(server: str, tmp_path: Path):
    import psycopg

    folder = tmp_path / "index"
    _, manifest = making.make(folder, evaluate=False, store=server)
    with psycopg.connect(server.partition(":")[2]) as connection:
        connection.execute(f"COMMENT ON TABLE {table_of(manifest)} IS 'ours'")
    with pytest.raises(Refusal) as refusal:
        making.opened(folder)
    assert refusal.value.problem.code == "store-foreign"
    with psycopg.connect(server.partition(":")[2]) as connection:
        connection.execute(f"DROP TABLE {table_of(manifest)}")
    with pytest.raises(Refusal) as refusal:
        making.opened(folder)
    assert refusal.value.problem.code == "no-index"
