"""PostgreSQL with pgvector: one table, of ids, vectors and payloads, whose comment marks it as
farspan's.

The location is a URL such as postgresql://user@host/database. A password comes from PGPASSWORD or
from ~/.pgpass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from pgvector.psycopg import register_vector
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.sql import SQL, Identifier, Literal
from psycopg.types.json import Jsonb

from farspan.domain.escapes import shell_line
from farspan.domain.problems import Refusal
from farspan.retrieval.stores import StoreLocation, Vectors
from farspan.retrieval.stores._common import (
    MARK,
    CheckedStore,
    Fields,
    bad_location,
    missing,
    refuse_foreign,
    unreachable,
)

#: Up to so many bytes of vectors every one is compared: exact, and some 0.2 s a search at the most.
#: A graph that finds nearly as much is no faster at a quarter of that.
EXACT_BYTES = 512_000_000
#: Neighbours of a vector in the graph, and candidates that are kept while it is built and searched.
NEIGHBOURS = 24
BUILD_EF = 200
SEARCH_EF = 400
#: Of the server's memory, at most, while it builds the graph.
BUILD_BYTES = 2_000_000_000
#: pgvector's limits: numbers a vector, and numbers of one that a graph can hold.
MOST_NUMBERS = 16_000
MOST_IN_GRAPH = 2_000
CONNECT_S = 5
ANSWER_S = 60
#: The first version whose graph goes on searching when what it found is deleted or left out.
OLDEST = (0, 8)
#: Notices a server that has gone without a word.
_CONNECTING = {
    "connect_timeout": CONNECT_S,
    "application_name": "farspan",
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}


class PgvectorStore(CheckedStore):
    def __init__(self, connection: psycopg.Connection[Any], place: StoreLocation) -> None:
        super().__init__(place)
        self._connection = connection
        self._where = _public_location(place)

    def _execute(
        self, query: str, values: Sequence[object] = (), **identifiers: Any
    ) -> psycopg.Cursor[Any]:
        """Run one statement, in which {table} is the table."""
        return self._connection.execute(
            SQL(query).format(table=Identifier(self.place.name), **identifiers), values or None
        )

    def write(self, ids: list[int], vectors_ND: Vectors, payloads: list[Fields]) -> None:
        into = SQL("COPY {} (id, embedding, payload) FROM STDIN (FORMAT BINARY)")
        with (
            _refuse_failures(self._where),
            self._connection.cursor() as cursor,
            cursor.copy(into.format(Identifier(self.place.name))) as copy,
        ):
            copy.set_types(["int8", "vector", "jsonb"])
            for number, vector_D, payload in zip(ids, vectors_ND, payloads, strict=True):
                copy.write_row((number, vector_D, Jsonb(_without_nul(payload))))

    def remove(self, ids: list[int]) -> None:
        with _refuse_failures(self._where):
            self._execute("DELETE FROM {table} WHERE id = ANY(%s::bigint[])", [ids])

    def nearest(self, vector_D: Vectors, k: int, where: Fields) -> tuple[list[int], list[float]]:
        equal = [Jsonb(_without_nul(where))] if where else []
        narrowed = "WHERE payload @> %s " if where else ""
        with _refuse_failures(self._where), self._connection.transaction():
            if where or k > SEARCH_EF:
                # Past the graph, which finds little of what a filter leaves, to the index of
                # payloads, and exactly.
                self._execute("SET LOCAL enable_indexscan = off")
            rows = self._execute(
                f"SELECT id, -(embedding <#> %s) FROM {{table}} {narrowed}"
                "ORDER BY embedding <#> %s LIMIT %s",
                [vector_D, *equal, vector_D, k],
            ).fetchall()
        return [number for number, _ in rows], [score for _, score in rows]

    def read(self, ids: list[int]) -> Iterator[tuple[Any, Any]]:
        query = "SELECT id, embedding FROM {table} WHERE id = ANY(%s::bigint[])"
        with _refuse_failures(self._where):
            rows = self._execute(query, [ids]).fetchall()
        return ((number, vector.to_numpy()) for number, vector in rows)

    def numbers(self) -> list[int]:
        with _refuse_failures(self._where):
            return [number for (number,) in self._execute("SELECT id FROM {table}").fetchall()]

    def finish(self) -> None:
        size = len(self.numbers()) * self.place.dim * 4
        with _refuse_failures(self._where), self._connection.transaction():
            self._execute("SET LOCAL statement_timeout = 0")
            self._execute(
                "CREATE INDEX IF NOT EXISTS {index} ON {table} USING gin (payload jsonb_path_ops)",
                index=Identifier(f"{self.place.name}_payload"),
            )
            if size > EXACT_BYTES and self.place.dim <= MOST_IN_GRAPH:
                # Past this memory a build is many times slower. Shared among processes it is often
                # more than there may be: containers have 64 MB.
                memory = min(BUILD_BYTES, 64_000_000 + 2 * size) // 1000
                self._execute("SET LOCAL max_parallel_maintenance_workers = 0")
                self._execute(f"SET LOCAL maintenance_work_mem = '{memory}kB'")
                self._execute(
                    "CREATE INDEX IF NOT EXISTS {index} ON {table} USING hnsw "
                    "(embedding vector_ip_ops) "
                    f"WITH (m = {NEIGHBOURS}, ef_construction = {BUILD_EF})",
                    index=Identifier(f"{self.place.name}_nearest"),
                )
            self._execute("ANALYZE {table}")

    def close(self) -> None:
        self._connection.close()


def _without_nul(payload: Fields) -> Fields:
    """PostgreSQL's text has no NUL: it becomes the sign for a character that cannot be shown."""
    return {
        key: value.replace("\0", "\ufffd") if isinstance(value, str) else value
        for key, value in payload.items()
    }


@contextmanager
def _refuse_failures(where: str) -> Iterator[None]:
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
        raise unreachable(where, error, _psql_command(where, "SELECT 1")) from None


def _parse_location(place: StoreLocation) -> dict[str, Any]:
    """Return the parts of the location. Refuse (out-of-range) a malformed one."""
    try:
        words = conninfo_to_dict(place.location)
    except psycopg.ProgrammingError:
        words = {}
    if not words:
        raise bad_location(
            "this is no place for a table of vectors",
            "it is postgresql://user@host/database",
            "pgvector:postgresql://localhost/farspan",
        )
    return words


def _public_location(place: StoreLocation) -> str:
    words = _parse_location(place)
    public = {key: words[key] for key in ("user", "host", "port", "dbname") if key in words}
    return make_conninfo(**public)


def _psql_command(where: str, statement: str) -> str:
    return shell_line("psql", where, "-c", statement)


@contextmanager
def _open_connection(place: StoreLocation) -> Iterator[psycopg.Connection[Any]]:
    """Connect to a server that has pgvector; close where the table is refused."""
    where = _public_location(place)
    with _refuse_failures(where):
        connection = psycopg.connect(**{**_CONNECTING, **_parse_location(place)}, autocommit=True)
    try:
        with _refuse_failures(where):
            connection.execute(f"SET statement_timeout = {ANSWER_S * 1000}")
            _create_extension(connection, where)
            register_vector(connection)
            connection.execute(f"SET hnsw.ef_search = {SEARCH_EF}")
            connection.execute("SET hnsw.iterative_scan = strict_order")
            yield connection
    except Refusal:
        connection.close()
        raise


_NO_EXTENSION = (
    psycopg.errors.FeatureNotSupported,
    psycopg.errors.UndefinedFile,
    psycopg.errors.InsufficientPrivilege,
)


def _create_extension(connection: psycopg.Connection[Any], where: str) -> None:
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
            remedy=_psql_command(make_conninfo(where, user="postgres"), "CREATE EXTENSION vector"),
            key="index.store",
        ) from None
    (installed,) = next(connection.execute(version))
    if tuple(int(part) for part in installed.split(".")[:2]) < OLDEST:
        raise Refusal(
            "version-mismatch",
            what="the database has an old pgvector",
            where=where,
            fact=f"{installed}; {'.'.join(map(str, OLDEST))} or newer is needed",
            remedy=_psql_command(where, "ALTER EXTENSION vector UPDATE"),
            key="index.store",
        )


def _table_exists(connection: psycopg.Connection[Any], place: StoreLocation) -> bool:
    """Whether there is such a table; refuses (store-foreign) one that is not farspan's."""
    query = "SELECT obj_description(oid, 'pg_class') FROM pg_class WHERE oid = to_regclass(%s)"
    name = Identifier(place.name).as_string(connection)
    row = connection.execute(query, [name]).fetchone()
    if row is not None:
        refuse_foreign(row[0], f"{_public_location(place)}, table {place.name}")
    return row is not None


def create(place: StoreLocation) -> PgvectorStore:
    """Create a table, or use the one that is there."""
    if place.dim > MOST_NUMBERS:
        raise bad_location(
            "pgvector cannot hold such long vectors",
            f"{place.dim} numbers a vector, at most {MOST_NUMBERS:,}",
            "qdrant",
        )
    table = Identifier(place.name)
    dim = Literal(place.dim)
    mark = Literal(MARK)
    columns = "id bigint PRIMARY KEY, embedding vector({}) NOT NULL, payload jsonb NOT NULL"
    with _open_connection(place) as connection:
        if not _table_exists(connection, place):
            with connection.transaction():
                connection.execute(SQL(f"CREATE TABLE {{}} ({columns})").format(table, dim))
                connection.execute(SQL("COMMENT ON TABLE {} IS {}").format(table, mark))
    return PgvectorStore(connection, place)


def open(place: StoreLocation) -> PgvectorStore:
    """Open the table that `create` made."""
    with _open_connection(place) as connection:
        if not _table_exists(connection, place):
            raise missing(_public_location(place), f"there is no table {place.name}")
    return PgvectorStore(connection, place)


def drop(place: StoreLocation) -> None:
    """Remove the table, if it is farspan's."""
    with _open_connection(place) as connection:
        if _table_exists(connection, place):
            connection.execute(SQL("DROP TABLE {}").format(Identifier(place.name)))
    connection.close()
