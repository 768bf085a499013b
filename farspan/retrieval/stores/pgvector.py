"""PostgreSQL with pgvector: one table, of ids, vectors and payloads, whose comment says what it is
about.

The location is a URL such as postgresql://user@host/database. A password comes from PGPASSWORD or
from ~/.pgpass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import psycopg
from pgvector.psycopg import register_vector
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.sql import SQL, Composed, Identifier, Literal
from psycopg.types.json import Jsonb

from farspan.domain.escapes import shell_line
from farspan.domain.problems import Refusal
from farspan.retrieval.stores import About, Hit, Ids, Payload, Spot, Vectors
from farspan.retrieval.stores._common import (
    check_keys,
    check_vectors,
    claimed,
    marked,
    missing,
    rows_to_add,
    unreachable,
)

#: Up to so many bytes of vectors every one is compared: exact, and some 0.2 s a search at the most.
#: A graph that finds nearly as much is no faster at a quarter of that.
EXACT_BYTES = 512_000_000
#: Neighbours of a vector in the graph, and candidates that are kept while it is built and searched.
NEIGHBOURS, BUILD_EF, SEARCH_EF = 24, 200, 400
#: Of the server's memory, at most, while it builds the graph.
BUILD_BYTES = 2_000_000_000
#: pgvector's limits: numbers a vector, and numbers of one that a graph can hold.
MOST_NUMBERS, MOST_IN_GRAPH = 16_000, 2_000
#: PostgreSQL cuts names at 63 bytes; the indexes' names are longer than the table's.
LONGEST_NAME = 50
CONNECT_S, ANSWER_S = 5, 60
#: The first version whose graph goes on searching when what it found is deleted or left out.
OLDEST = (0, 8)
#: Notices a server that has gone without a word.
_KEEPALIVE = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}


class PgvectorStore:
    def __init__(self, connection: psycopg.Connection[Any], spot: Spot, about: About) -> None:
        self._connection, self._about = connection, about
        self._table, self._name, self._where = Identifier(spot.name), spot.name, _where(spot)

    def _asks(self, query: str, values: Sequence[object] = (), **names: Any) -> psycopg.Cursor[Any]:
        """Run one statement, in which {table} is the table."""
        return self._connection.execute(
            SQL(query).format(table=self._table, **names), values or None
        )

    def add(self, ids: Sequence[int], vectors_ND: Vectors, payloads: Sequence[Payload]) -> None:
        numbers, vectors_ND, kept = rows_to_add(ids, vectors_ND, payloads, self._about.dim)
        if not numbers:
            return
        with _answers(self._where), self._connection.transaction():
            self._asks("CREATE TEMP TABLE incoming (LIKE {table}) ON COMMIT DROP")
            into = "COPY incoming (id, embedding, payload) FROM STDIN (FORMAT BINARY)"
            with self._connection.cursor() as cursor, cursor.copy(into) as copy:
                copy.set_types(["int8", "vector", "jsonb"])
                for number, vector_D, payload in zip(numbers, vectors_ND, kept, strict=True):
                    copy.write_row((number, vector_D, Jsonb(_without_nul(payload))))
            # In order of ids, so that two writers do not each wait for a row of the other's.
            self._asks(
                "INSERT INTO {table} (id, embedding, payload) SELECT id, embedding, payload FROM "
                "incoming ORDER BY id "
                "ON CONFLICT (id) DO UPDATE SET embedding = excluded.embedding, payload = "
                "excluded.payload"
            )

    def delete(self, ids: Sequence[int]) -> None:
        with _answers(self._where):
            self._asks(
                "DELETE FROM {table} WHERE id = ANY(%s::bigint[])",
                [[int(number) for number in ids]],
            )

    def search(self, vector_D: Vectors, k: int, where: Payload | None = None) -> list[Hit]:
        check_vectors(vector_D, self._about.dim)
        equal = _without_nul(where or {})
        check_keys({*equal})
        vector_D = np.asarray(vector_D, np.float32)
        with _answers(self._where), self._connection.transaction():
            if equal or k > SEARCH_EF:
                # Past the graph, which finds little of what a filter leaves, to the index of
                # payloads, and exactly.
                self._asks("SET LOCAL enable_indexscan = off")
            rows = self._asks(
                "SELECT id, -(embedding <#> %s) AS score, payload FROM {table} WHERE payload @> %s "
                "ORDER BY embedding <#> %s LIMIT %s"
                if equal
                else (
                    "SELECT id, -(embedding <#> %s) AS score, payload FROM {table} ORDER BY "
                    "embedding <#> %s LIMIT %s"
                ),
                [vector_D, Jsonb(equal), vector_D, k] if equal else [vector_D, vector_D, k],
            ).fetchall()
        return [Hit(id=number, score=score, payload=payload) for number, score, payload in rows]

    def ids(self) -> Ids:
        with _answers(self._where):
            return np.array(
                [row[0] for row in self._asks("SELECT id FROM {table} ORDER BY id")], np.int64
            )

    def count(self) -> int:
        with _answers(self._where):
            return int(next(self._asks("SELECT count(*) FROM {table}"))[0])

    def describe(self) -> About:
        return self._about

    def finish(self) -> None:
        size = self.count() * self._about.dim * 4
        graph = size > EXACT_BYTES and self._about.dim <= MOST_IN_GRAPH
        with _answers(self._where), self._connection.transaction():
            self._asks("SET LOCAL statement_timeout = 0")
            self._asks(
                "CREATE INDEX IF NOT EXISTS {index} ON {table} USING gin (payload jsonb_path_ops)",
                index=Identifier(f"{self._name}_payload"),
            )
            if graph:
                # Past this memory a build is many times slower. Shared among processes it is often
                # more than there may be: containers have 64 MB.
                self._asks("SET LOCAL max_parallel_maintenance_workers = 0")
                self._asks(
                    "SET LOCAL maintenance_work_mem = "
                    f"'{min(BUILD_BYTES, 64_000_000 + 2 * size) // 1000}kB'"
                )
                self._asks(
                    "CREATE INDEX IF NOT EXISTS {index} ON {table} USING hnsw (embedding "
                    "vector_ip_ops) "
                    f"WITH (m = {NEIGHBOURS}, ef_construction = {BUILD_EF})",
                    index=Identifier(f"{self._name}_nearest"),
                )
            self._asks("ANALYZE {table}")

    def close(self) -> None:
        self._connection.close()


def _without_nul(payload: Payload) -> dict[str, str | int]:
    """PostgreSQL's text has no NUL: it becomes the sign for a character that cannot be shown."""
    return {
        key: value.replace("\0", "\ufffd") if isinstance(value, str) else value
        for key, value in payload.items()
    }


@contextmanager
def _answers(where: str) -> Iterator[None]:
    """Refuses (no-index) a table that has gone, (disk-full), and (store-unreachable) a server that
    fails or refuses."""
    try:
        yield
    except psycopg.errors.UndefinedTable as error:
        raise missing(where, str(error).splitlines()[0]) from None
    except psycopg.errors.DiskFull as error:
        raise Refusal(
            "disk-full",
            what="the database has no room left",
            where=where,
            fact=str(error).splitlines()[0],
            remedy="free some on the server's disk; what was written stays",
        ) from None
    except (
        psycopg.OperationalError,
        psycopg.InterfaceError,
        psycopg.errors.InsufficientPrivilege,
    ) as error:
        raise unreachable(where, error, _psql(where, "SELECT 1")) from None


def _words(spot: Spot) -> dict[str, Any]:
    """The parts of the location. Refuses (out-of-range) one that is none, has a password, or names
    no fit table."""
    try:
        words = conninfo_to_dict(spot.location)
    except psycopg.ProgrammingError:
        words = {}
    if (
        not words
        or words.get("password")
        or len(spot.name.encode()) > LONGEST_NAME
        or not spot.name
    ):
        raise Refusal(
            "out-of-range",
            what="this is no place for a table of vectors",
            where="run.yaml, key index.store",
            fact="it is postgresql://user@host/database without a password, and a table's name of "
            "at most "
            f"{LONGEST_NAME} bytes",
            remedy="set index.store: pgvector:postgresql://localhost/farspan",
            key="index.store",
        )
    return words


def _where(spot: Spot) -> str:
    words = _words(spot)
    return make_conninfo(
        **{key: words[key] for key in ("user", "host", "port", "dbname") if key in words}
    )


def _psql(where: str, statement: str) -> str:
    return shell_line("psql", where, "-c", statement)


def _connect(spot: Spot) -> psycopg.Connection[Any]:
    """A connection to a server that has pgvector."""
    where = _where(spot)
    with _answers(where):
        words = {
            "connect_timeout": CONNECT_S,
            "application_name": "farspan",
            **_KEEPALIVE,
            **_words(spot),
        }
        connection = psycopg.connect(**words, autocommit=True)
    try:
        with _answers(where):
            connection.execute(f"SET statement_timeout = {ANSWER_S * 1000}")
            _extend(connection, where)
            register_vector(connection)
            connection.execute(f"SET hnsw.ef_search = {SEARCH_EF}")
            connection.execute("SET hnsw.iterative_scan = strict_order")
    except Refusal:
        connection.close()
        raise
    return connection


_NO_EXTENSION = (
    psycopg.errors.FeatureNotSupported,
    psycopg.errors.UndefinedFile,
    psycopg.errors.InsufficientPrivilege,
)


def _extend(connection: psycopg.Connection[Any], where: str) -> None:
    """Have the extension in the database. Refuses (extra-missing) where it cannot be,
    (version-mismatch) an old one."""
    version = "SELECT extversion FROM pg_extension WHERE extname = 'vector'"
    try:
        if connection.execute(version).fetchone() is None:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
    except psycopg.errors.UniqueViolation:
        pass  # Somebody else has made it meanwhile.
    except _NO_EXTENSION as error:
        raise Refusal(
            "extra-missing",
            what="the database has no pgvector",
            where=where,
            fact=str(error).splitlines()[0],
            remedy=_psql(make_conninfo(where, user="postgres"), "CREATE EXTENSION vector"),
            key="index.store",
        ) from None
    (found,) = next(connection.execute(version))
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        raise Refusal(
            "version-mismatch",
            what="the database has an old pgvector",
            where=where,
            fact=f"{found}; {'.'.join(map(str, OLDEST))} or newer is needed",
            remedy=_psql(where, "ALTER EXTENSION vector UPDATE"),
            key="index.store",
        )


def _find(connection: psycopg.Connection[Any], spot: Spot) -> tuple[bool, str | None]:
    """Whether there is a table of that name, and its comment."""
    query = "SELECT obj_description(oid, 'pg_class') FROM pg_class WHERE oid = to_regclass(%s)"
    with _answers(_where(spot)):
        row = connection.execute(query, [Identifier(spot.name).as_string(connection)]).fetchone()
    return row is not None, row[0] if row else None


def shared(location: str) -> bool:
    """Yes: it is a server."""
    return True


def create(spot: Spot, about: About) -> PgvectorStore:
    """A new table, or the one that is there for `about`."""
    if about.dim > MOST_NUMBERS:
        raise Refusal(
            "out-of-range",
            what="pgvector cannot hold such long vectors",
            where="run.yaml, key index.store",
            fact=f"{about.dim} numbers a vector, at most {MOST_NUMBERS:,}",
            remedy="set index.store: qdrant",
            key="index.store",
        )
    connection = _connect(spot)
    try:
        if not _find(connection, spot)[0]:
            with _answers(_where(spot)), connection.transaction():
                for statement in _making(spot, about):
                    connection.execute(statement)
        claimed(_find(connection, spot)[1], f"{_where(spot)}, table {spot.name}", about)
    except (psycopg.errors.DuplicateTable, psycopg.errors.UniqueViolation):
        # Somebody else has made it meanwhile.
        connection.close()
        return create(spot, about)
    except Refusal:
        connection.close()
        raise
    return PgvectorStore(connection, spot, about)


def _making(spot: Spot, about: About) -> list[Composed]:
    table = Identifier(spot.name)
    columns = "id bigint PRIMARY KEY, embedding vector({dim}) NOT NULL, payload jsonb NOT NULL"
    return [
        SQL("CREATE TABLE {table} (" + columns + ")").format(table=table, dim=Literal(about.dim)),
        SQL("COMMENT ON TABLE {table} IS {mark}").format(table=table, mark=Literal(marked(about))),
    ]


def open_store(spot: Spot) -> PgvectorStore:
    """The table that `create` made."""
    connection = _connect(spot)
    try:
        there, comment = _find(connection, spot)
        if not there:
            raise missing(_where(spot), f"there is no table {spot.name}")
        about = claimed(comment, f"{_where(spot)}, table {spot.name}")
    except Refusal:
        connection.close()
        raise
    return PgvectorStore(connection, spot, about)


def drop(spot: Spot) -> None:
    """Remove the table, if it is farspan's."""
    connection = _connect(spot)
    try:
        there, comment = _find(connection, spot)
        if there:
            claimed(comment, f"{_where(spot)}, table {spot.name}")
            with _answers(_where(spot)):
                connection.execute(SQL("DROP TABLE {}").format(Identifier(spot.name)))
    except Refusal as refusal:
        if refusal.problem.code != "store-foreign":
            raise
    finally:
        connection.close()
