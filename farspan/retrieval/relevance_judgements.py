"""Queries of a user's own, with the documents that answer them, in BEIR's form (arXiv 2104.08663).

    queries.jsonl    {"_id": "q1", "text": "how is a file read line by line"}
    qrels.tsv        query-id, corpus-id, score, with or without that header; or TREC's four columns

A document is named by its title, or by where it is from, as `farspan search` shows both. What has a
score above 0 answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from farspan.corpus.distinct_texts import Copies
from farspan.domain.corpus import Document, Place
from farspan.domain.decoding import decode_json
from farspan.domain.escapes import shell_word
from farspan.domain.problems import Refusal
from farspan.domain.suggest import advise
from farspan.domain.units import counted
from farspan.retrieval.queries import Query

#: What the first line of a file in BEIR's form begins with.
_HEADER = "query-id"


class _Line(msgspec.Struct, frozen=True):
    id: str | int = msgspec.field(name="_id")
    text: str


def read_judged(
    queries: Path, qrels: Path, documents: Sequence[Document], copies: Copies | None = None
) -> list[Query]:
    """Return the queries that any of `documents` answers, in the file's order. An exact copy's name
    means the document that it is a copy of. Raises Refusal (path-missing, file-unreadable,
    out-of-range) for files that cannot be read, queries and documents that there are not, and files
    without a pair."""
    texts: dict[str, str] = {}
    for number, line in _read_lines(queries):
        try:
            record = decode_json(line, _Line)
        except msgspec.MsgspecError as error:
            raise _refuse_line(
                queries, number, str(error), '{"_id": "q1", "text": "..."}'
            ) from None
        texts[str(record.id)] = record.text
    named: dict[str, list[int]] = {}
    for row, document in enumerate(documents):
        places = copies.places.get(row, ()) if copies else ()
        everywhere: tuple[Document | Place, ...] = (document, *places)
        labels = {place.title for place in everywhere}
        labels.update(place.origin for place in everywhere)
        for name in labels:
            named.setdefault(name, []).append(row)
    relevant: dict[str, set[int]] = {}
    for number, line in _read_lines(qrels):
        if number == 1 and line.startswith(_HEADER):
            continue
        query, name, score = _parse_judgement(qrels, number, line)
        for what, key, known in (("query", query, texts), ("document", name, named)):
            if key not in known:
                raise _refuse_unknown(qrels, number, what, key, list(known))
        if score > 0:
            relevant.setdefault(query, set()).update(named[name])
    if not relevant:
        raise Refusal(
            "out-of-range",
            what="no query has a document that answers it",
            where=qrels,
            fact=f"{counted(len(texts), 'query')} and no pair with a score above 0",
            remedy="write lines such as: q1 <tab> TITLE <tab> 1",
        )
    return [
        Query(texts[query], tuple(sorted(relevant[query])), "own")
        for query in texts
        if query in relevant
    ]


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers from 1."""
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise Refusal(
            "path-missing",
            what="there is no such file",
            where=path,
            fact="it is to hold queries, or what answers them",
            remedy="farspan tune --help",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise _refuse_line(path, 0, str(error), "UTF-8 text") from None
    return ((number, line) for number, line in enumerate(content.splitlines(), 1) if line.strip())


def _parse_judgement(path: Path, number: int, line: str) -> tuple[str, str, float]:
    """Query, document and score of one line."""
    parts = [part.strip() for part in line.split("\t")]
    parts = line.split() if len(parts) == 1 else parts
    if len(parts) == 4:
        parts = [parts[0], *parts[2:]]
    try:
        query, document, score = parts
        return query, document, float(score)
    except ValueError:
        raise _refuse_line(
            path, number, line.strip()[:80], "query-id <tab> corpus-id <tab> score"
        ) from None


def _refuse_line(path: Path, number: int, fact: str, wanted: str) -> Refusal:
    return Refusal(
        "file-unreadable",
        what="this line cannot be read" if number else "this file cannot be read",
        where=f"{path}:{number}" if number else path,
        fact=fact,
        remedy=f"write it as: {wanted}",
    )


def _refuse_unknown(path: Path, number: int, what: str, name: str, known: list[str]) -> Refusal:
    return Refusal(
        "out-of-range",
        what=f"there is no such {what}",
        where=f"{path}:{number}",
        fact=f"{name[:80]!r}",
        remedy=advise(
            name,
            known,
            verb="the nearest is",
            fix=f"name one of {len(known):,} that there are, as {shell_word(known[0])}",
            synonyms=(),
        ),
    )
