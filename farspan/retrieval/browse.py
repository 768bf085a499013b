"""Look through an index without a query: its documents in order, and the passages around one."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.domain.corpus import cite_place
from farspan.retrieval.filters import Where
from farspan.retrieval.index import Index
from farspan.retrieval.search import Result, passage, row_of


class ListedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A document in a list. `id` is its first passage's; empty where it has no text to show."""

    id: str
    title: str
    origin: str
    #: The place that a citation names.
    place: str
    passages: int
    metadata: dict[str, str] = {}


class Documents(msgspec.Struct, frozen=True, kw_only=True):
    """Documents in the order of the source, from one on, of `total`."""

    documents: tuple[ListedDocument, ...]
    total: int


class Surrounded(msgspec.Struct, frozen=True, kw_only=True):
    """A passage, and those before and after it in its document."""

    passage: Result
    before: tuple[Result, ...] = ()
    after: tuple[Result, ...] = ()


def list_documents(
    index: Index,
    k: int,
    offset: int = 0,
    where: Where = None,
    among: npt.NDArray[np.bool_] | None = None,
) -> Documents:
    """Return at most `k` documents from the one at `offset` on, of those that `where` and `among`
    leave.

    Raises Refusal (usage, out-of-range) for fields and values that are not there.
    """
    bindings = index.bind(where, among)
    numbers = np.arange(len(index.documents))
    if bindings is not None:
        numbers = np.flatnonzero(bindings.mask)
    listed = tuple(_listed(index, int(number)) for number in numbers[offset : offset + k])
    return Documents(documents=listed, total=len(numbers))


def _listed(index: Index, number: int) -> ListedDocument:
    document = index.documents[number]
    rows = index.passages.of_document(number)
    first = index.passages.rows_N["id"][rows.start] if rows else None
    return ListedDocument(
        id="" if first is None else f"{int(first):016x}",
        title=document.title,
        origin=document.origin,
        place=cite_place(document.origin, document.line, document.page),
        passages=len(rows),
        metadata=document.metadata,
    )


def surround(index: Index, chunk_id: str, before: int, after: int) -> Surrounded:
    """Return a passage with up to `before` and `after` passages of its document around it.

    Raises Refusal (usage) for an id that the index does not have.
    """
    row = row_of(index, chunk_id)
    ids_N = index.passages.rows_N["id"]
    rows = index.passages.of_document(int(index.passages.rows_N["document"][row]))

    def passages(first: int, last: int) -> tuple[Result, ...]:
        return tuple(passage(index, f"{int(ids_N[each]):016x}") for each in range(first, last))

    return Surrounded(
        passage=passage(index, chunk_id),
        before=passages(max(rows.start, row - before), row),
        after=passages(row + 1, min(rows.stop, row + 1 + after)),
    )
