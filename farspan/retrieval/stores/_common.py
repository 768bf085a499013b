"""What every store does alike: it checks vectors and fields, and refuses what is another's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from farspan.domain.escapes import shell_line
from farspan.domain.problems import Refusal, command
from farspan.retrieval.stores import FIELD, Hits, Ids, Payload, StoreLocation, Vectors

#: Under which key a server keeps that a table or collection is farspan's.
MARK = "farspan"
Fields = dict[str, str | int]


class Closable(Protocol):
    def close(self) -> None: ...


Client = TypeVar("Client", bound=Closable)


class CheckedStore(ABC):
    """A store that checks what it is given, and shares it out in requests of `at_once` vectors."""

    at_once = 2**63

    def __init__(self, place: StoreLocation) -> None:
        self.place = place

    def add(self, ids: Sequence[int], vectors_ND: Vectors, payloads: Sequence[Payload]) -> None:
        numbers = [int(number) for number in ids]
        vectors_ND = np.asarray(vectors_ND, np.float32)
        if not numbers:
            return
        check_vectors(vectors_ND, self.place.dim)
        if min(numbers) < 0:
            raise _refuse_mismatch("an id is below 0", f"ids from {min(numbers)}")
        check_keys(set().union(*payloads))
        for some in self._split_requests(len(numbers)):
            fields = [dict(payload) for payload in payloads[some]]
            self.write(numbers[some], vectors_ND[some], fields)

    def delete(self, ids: Sequence[int]) -> None:
        for some in self._split_requests(len(ids)):
            self.remove([int(number) for number in ids[some]])

    def search(self, vector_D: Vectors, k: int, where: Payload | None = None) -> Hits:
        check_vectors(vector_D, self.place.dim)
        check_keys({*(where or {})})
        ids, scores = self.nearest(np.asarray(vector_D, np.float32), k, dict(where or {}))
        return Hits(np.array(ids, np.int64), np.array(scores, np.float32))

    def vectors(self, ids: Sequence[int]) -> Vectors:
        vectors_ND = np.zeros((len(ids), self.place.dim), np.float32)
        for some in self._split_requests(len(ids)):
            stored = dict(self.read([int(number) for number in ids[some]]))
            for row, number in enumerate(ids[some], some.start):
                if number in stored:
                    vectors_ND[row] = stored[number]
        return vectors_ND

    def ids(self) -> Ids:
        return np.sort(np.array(self.numbers(), np.int64))

    def _split_requests(self, count: int) -> Iterator[slice]:
        for start in range(0, count, self.at_once):
            yield slice(start, min(start + self.at_once, count))

    @abstractmethod
    def write(self, ids: list[int], vectors_ND: Vectors, payloads: list[Fields]) -> None:
        """Add vectors, of one request."""

    @abstractmethod
    def remove(self, ids: list[int]) -> None:
        """Delete vectors, of one request."""

    @abstractmethod
    def nearest(self, vector_D: Vectors, k: int, where: Fields) -> tuple[Sequence[Any], Any]:
        """Ids of the k nearest with these fields, best first, and their scores."""

    @abstractmethod
    def read(self, ids: list[int]) -> Iterable[tuple[Any, Any]]:
        """Ids that are there, of one request, and their vectors."""

    @abstractmethod
    def numbers(self) -> Sequence[Any]:
        """Every id."""


def check_vectors(vectors_ND: Vectors, dim: int) -> None:
    """Refuse (store-mismatch) vectors of another length than `dim`, and a NaN or infinity in
    one."""
    if (length := vectors_ND.shape[-1]) != dim:
        raise _refuse_mismatch(
            "vectors are of another length than the store's", f"store: {dim}, vectors: {length}"
        )
    if not np.isfinite(vectors_ND).all():
        raise _refuse_mismatch(
            "a vector holds a NaN or an infinity", "nothing was written or searched"
        )


def check_keys(keys: set[str]) -> None:
    """Refuse (out-of-range) a key of a payload that some store would read as more than a name."""
    for key in sorted(keys):
        if not FIELD.fullmatch(key):
            raise Refusal(
                "out-of-range",
                what=f"{key!r} cannot be a field of a chunk",
                where="the vector store",
                fact="a field is a word of letters, digits and underscores",
                remedy="name another field",
            )


def _refuse_mismatch(what: str, fact: str) -> Refusal:
    remedy = command("embed")
    return Refusal("store-mismatch", what=what, where="the vector store", fact=fact, remedy=remedy)


def refuse_location(place: StoreLocation, store: str) -> None:
    """Refuse (out-of-range) a location of a store that lies in a folder."""
    if place.location:
        what = "this store lies in the run's folder and takes no location"
        raise bad_location(what, f"location: {place.location}", store)


def bad_location(what: str, fact: str, remedy: str) -> Refusal:
    """Return the refusal of a location or a vector's length; `remedy` is what to set instead."""
    return Refusal(
        "out-of-range",
        what=what,
        where="run.yaml, key index.store",
        fact=fact,
        remedy=f"set index.store: {remedy}",
        key="index.store",
    )


@contextmanager
def closed_if_refused(client: Client, answers: AbstractContextManager[None]) -> Iterator[Client]:
    """Use a server's client inside `answers`, and close it where its collection is refused."""
    try:
        with answers:
            yield client
    except Refusal:
        client.close()
        raise


def refuse_foreign(mark: object, where: str | Path) -> None:
    """Refuse (store-foreign) a table or collection that does not bear the mark of farspan's."""
    if mark != MARK:
        raise foreign(
            where, "farspan did not make what has this name", "it bears no mark of farspan's"
        )


def foreign(where: str | Path, what: str, fact: str) -> Refusal:
    """Return the refusal of a folder, table or collection that is not this index's: it is left as
    it is."""
    remedy = "name another database or server in run.yaml, key index.store"
    if isinstance(where, Path):
        remedy = shell_line("mv", where, Path(f"{where}.other"))
    return Refusal(
        "store-foreign", what=what, where=where, fact=fact, remedy=remedy, key="index.store"
    )


def missing(where: str | Path, fact: str) -> Refusal:
    """No store where one is to be opened."""
    return Refusal(
        "no-index",
        what="there is no such vector store",
        where=where,
        fact=fact,
        remedy=command("embed"),
    )


def unreachable(where: str, error: Exception, remedy: str) -> Refusal:
    """Return the refusal of a server that does not answer, admit us, or do its work. `remedy`:
    how to look at it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return Refusal(
        "store-unreachable",
        what="the vector store's server does not do what is asked",
        where=where,
        fact=lines[0] if lines else type(error).__name__,
        remedy=remedy,
        key="index.store",
    )
