"""A searcher over a list of documents in RUN/index/index.json: simple, and quick to open."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from farspan.domain.corpus import Place, cite_place
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import load, write_atomically
from farspan.retrieval.browse import Documents, ListedDocument, Surrounded
from farspan.retrieval.choose import LexicalChoice
from farspan.retrieval.filters import Filters, Where
from farspan.retrieval.hybrid_ranking import System
from farspan.retrieval.index import (
    OWN_VECTORS,
    Fit,
    IndexManifest,
    Origin,
    Recipe,
    VectorSet,
)
from farspan.retrieval.passages import IndexedDocument
from farspan.retrieval.search import Answer, Result
from farspan.retrieval.serve.searcher import Kind, WrittenPiece
from farspan.retrieval.topics import Topics, find_topics, refuse_topic
from farspan.retrieval.words import WordRules
from tests.waiting import wait_for

DIM = 32
#: The model reads so many words of a text.
CONTEXT = 50


class Text(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    text: str
    origin: str
    line: int = 0
    page: int = 0
    headings: tuple[str, ...] = ()
    metadata: dict[str, str] = {}
    #: Where exact copies of it stand.
    also: tuple[Place, ...] = ()


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def vector(text: str) -> np.ndarray:
    """A unit vector: words at random directions."""
    total = np.full(DIM, 1e-6, np.float32)
    for word in words(text)[:CONTEXT]:
        total += (
            np.random.default_rng(zlib.crc32(word.encode())).standard_normal(DIM).astype(np.float32)
        )
    return total / np.linalg.norm(total)


def put(run: Path, texts: list[Text]) -> None:
    """Make these the texts of the run's index."""
    (run / "index").mkdir(parents=True, exist_ok=True)
    write_atomically(run / "index" / "index.json", msgspec.json.encode(texts))


class ListSearcher:
    """Searches a list of texts.

    A query or a prompt that begins with `hold NAME` writes the file `held-NAME` into the run's
    folder, and goes on once `free-NAME` is there. The query `fault` is a fault of the searcher's
    own.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._path = run / "index" / "index.json"
        self._stamp = self.stamp()
        self.texts = load(self._path, list[Text])
        self.vectors = np.array([vector(f"{text.title} {text.text}") for text in self.texts])
        self.rows = {
            f"{zlib.crc32(text.title.encode()):016x}": row for row, text in enumerate(self.texts)
        }
        self.ids = list(self.rows)
        self.closed = False
        names = {name for text in self.texts for name in text.metadata}
        self.manifest = IndexManifest(
            origin=Origin(model="m", tokenizer="t"),
            recipe=Recipe(evaluate=False),
            corpus="c",
            source="",
            documents=len(self.texts),
            chunks=len(self.texts),
            lexical=LexicalChoice(rules=WordRules(languages=("en",))),
            sets={OWN_VECTORS: VectorSet(dim=DIM, store="qdrant", table="")},
            fit=Fit(id="f", documents=len(self.texts), chunks=len(self.texts)),
            fitted_chunks=len(self.texts),
            fields=("origin", "title", *sorted(names)),
            evaluation=None,
            files="0" * 16,
        )

    @property
    def fields(self) -> tuple[str, ...]:
        return self.manifest.fields

    def search(
        self,
        query: str,
        k: int,
        system: System | None = None,
        where: Where = None,
        offset: int = 0,
        topic: int | None = None,
    ) -> Answer:
        assert not self.closed
        self._hold(query, lambda: False)
        if query == "fault":
            raise ZeroDivisionError("/etc/secret")
        terms = {*words(query)}
        near = self.vectors @ vector(query)
        passes = self._mask(where, topic)
        found_rows = []
        for row, text in enumerate(self.texts):
            count = sum(word in terms for word in words(f"{text.title} {text.text}"))
            if passes[row] and (count or system == "model"):
                found_rows.append((count if system != "model" else float(near[row]), row))
        found_rows.sort(reverse=True)
        results = [
            self._result(row, terms, score, None if system == "bm25" else float(near[row]))
            for score, row in found_rows[offset : offset + k]
        ]
        why = "asked for" if system else "counted"
        return Answer(
            query=query,
            system=system or "bm25",
            why=why,
            unknown_words=not any(terms & {*words(f"{t.title} {t.text}")} for t in self.texts),
            results=tuple(results),
            total=len(found_rows),
        )

    def _result(self, row: int, terms: set[str], score: float, near: float | None) -> Result:
        text = self.texts[row]
        marks = tuple(m.span() for m in re.finditer(r"\w+", text.text) if m[0].lower() in terms)
        return Result(
            id=self.ids[row],
            title=text.title,
            score=score,
            word_score=score,
            vector_score=near,
            text=" ".join(text.text.split())[:200],
            passage=text.text,
            origin=text.origin,
            line=text.line,
            page=text.page,
            headings=text.headings,
            marks=marks,
            metadata=text.metadata,
            also=text.also,
            copies=len(text.also),
        )

    def _row(self, chunk_id: str) -> int:
        if chunk_id not in self.rows:
            raise Refusal(
                "usage",
                what="there is no passage of this id",
                where=chunk_id,
                fact="none",
                remedy="search again",
            )
        return self.rows[chunk_id]

    def passage(self, chunk_id: str) -> Result:
        return self._result(self._row(chunk_id), set(), 0.0, None)

    def surround(self, chunk_id: str, before: int, after: int) -> Surrounded:
        row = self._row(chunk_id)
        around = [self._result(other, set(), 0.0, None) for other in range(len(self.texts))]
        return Surrounded(
            passage=around[row],
            before=tuple(around[max(row - before, 0) : row]),
            after=tuple(around[row + 1 : row + 1 + after]),
        )

    def documents(
        self, k: int, offset: int = 0, where: Where = None, topic: int | None = None
    ) -> Documents:
        rows = np.flatnonzero(self._mask(where, topic)).tolist()
        listed = []
        for row in rows[offset : offset + k]:
            text = self.texts[row]
            listed.append(
                ListedDocument(
                    id=self.ids[row],
                    title=text.title,
                    origin=text.origin,
                    place=cite_place(text.origin, text.line, text.page),
                    passages=1,
                    metadata=text.metadata,
                )
            )
        return Documents(documents=tuple(listed), total=len(rows))

    def _mask(self, where: Where, topic: int | None) -> np.ndarray:
        filters = Filters.parse(where)
        filters.check_fields(self.fields)
        documents = []
        for text in self.texts:
            documents.append(
                IndexedDocument(
                    key="", title=text.title, origin=text.origin, metadata=text.metadata
                )
            )
        passes = filters.mask(documents)
        if topic is not None:
            topics, numbers = self._grouped()
            if topic >= len(topics.topics):
                raise refuse_topic(topic, topics)
            passes &= numbers == topic
        return passes

    def similar(self, chunk_id: str, k: int) -> tuple[Result, ...]:
        row = self._row(chunk_id)
        near = self.vectors @ self.vectors[row]
        return tuple(
            self._result(o, set(), float(near[o]), float(near[o]))
            for o in np.argsort(-near)
            if o != row
        )[:k]

    def topics(self) -> Topics:
        return self._grouped()[0]

    def _grouped(self) -> tuple[Topics, np.ndarray]:
        texts = [f"{text.title} {text.text}" for text in self.texts]
        return find_topics(self.vectors, texts)

    @property
    def dim(self) -> int:
        return DIM

    def embed(self, texts: list[str], kind: Kind) -> tuple[np.ndarray, list[int], int]:
        counts = [len(words(text)) for text in texts]
        sign = 1 if kind == "document" else -1
        vectors = np.array([sign * vector(text) for text in texts], np.float32)
        return (
            vectors,
            [max(count - CONTEXT, 0) for count in counts],
            sum(min(count, CONTEXT) for count in counts),
        )

    def generate(
        self,
        prompt: str,
        tokens: int,
        temperature: float,
        top_k: int,
        seed: int,
        enough: Callable[[], bool] = lambda: False,
    ) -> str:
        """`tokens` words."""
        self._hold(prompt, enough)
        written = []
        for number in range(tokens):
            if enough():
                break
            written.append(f"word{(number + seed) % 7}")
        return " " + " ".join(written)

    def write(
        self,
        prompt: str,
        tokens: int,
        temperature: float,
        top_k: int,
        top_p: float,
        seed: int,
        enough: Callable[[], bool] = lambda: False,
    ) -> Iterator[WrittenPiece]:
        """`tokens` words; a prompt with `ends` is ended after three of them."""
        self._hold(prompt, enough)
        if prompt == "fault":
            raise ZeroDivisionError("/etc/secret")
        written = 0
        last = 3 if "ends" in prompt else tokens
        for number in range(min(tokens, last)):
            if enough():
                break
            written += 1
            yield WrittenPiece(f" word{number % 7}", len(words(prompt)), written)
            if prompt == "breaks" and number == 1:
                raise ZeroDivisionError("/etc/secret")
            if prompt.startswith("slow"):
                self._hold(f"hold {prompt.replace(' ', '_')}", enough)
        yield WrittenPiece("", len(words(prompt)), written, written < tokens and not enough())

    def _hold(self, text: str, enough: Callable[[], bool]) -> None:
        if found := re.match(r"hold (\w+)", text):
            (self._run / f"held-{found[1]}").touch()
            freed = self._run / f"free-{found[1]}"
            wait_for(lambda: freed.exists() or enough(), f"{freed.name} is there")

    def stamp(self) -> tuple[int, int]:
        there = self._path.stat()
        return there.st_mtime_ns, there.st_ino

    def close(self) -> None:
        self.closed = True


NASTY = '<img src=x onerror="document.title=1"><script>document.title="owned"</script>'
RIVERS = [
    "Rhine",
    "Danube",
    "Elbe",
    "Loire",
    "Tagus",
    "Ebro",
    "Po",
    "Vistula",
    "Oder",
    "Dnieper",
    "Volga",
    "Don",
]


def texts() -> list[Text]:
    """Rivers for several pages of results, and text that is hard to show."""
    rivers = [
        Text(
            title=f"The {name} {part}",
            origin=f"rivers/{name.lower()}.md",
            line=3 + 10 * number,
            page=0,
            headings=("Rivers of Europe", name),
            also=tuple(
                Place(title="Old", origin=f"old/{year}.md", line=year) for year in range(1, 6)
            )
            if (name, part) == ("Rhine", "mouth")
            else (),
            metadata={"lang": "en", "kind": "note" if number else "essay"},
            text=f"The {name} is a river.\n\nIts {part} is where the water of the {name} is "
            f"{('cold', 'slow')[number]}"
            f" and people of {name}land keep boats. A barge takes grain down to the sea, and salt "
            "on its way back.",
        )
        for name in RIVERS
        for number, part in enumerate(("source", "mouth"))
    ]
    hard = [
        Text(
            title="שלום עולם",
            text="נהר הוא זרם מים טבעי. הנהר זורם אל הים, והמים מתוקים.",
            origin="hebrew.txt",
            metadata={"lang": "he"},
        ),
        Text(
            title="Boats 🚣 and 👩‍👩‍👧 families",
            origin="emoji 🎉.md",
            metadata={"lang": "en"},
            text="🚣🚣🚣 A family in a kayak 👩‍👩‍👧 goes down the stream 🌊 past a heron.",
        ),
        Text(
            title=f"Hostile {NASTY}",
            text=f"A hostile text {NASTY} with kayak in it.",
            origin=f"x/{NASTY}.html",
            headings=(NASTY,),
            metadata={"lang": NASTY[:40]},
        ),
        Text(
            title="Long words",
            text="kayak " + "w" * 900 + " " + "and so on " * 300 + "the end",
            origin="long.pdf",
            page=12,
            line=40,
        ),
        Text(
            title="", text="A text without a title, about a heron.", origin="untitled.txt", line=1
        ),
    ]
    return rivers + hard
