"""What is fitted to a corpus: what embeds, to its passages and to what belongs to them; and how
well that searches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from farspan.corpus.copies import Copies
from farspan.corpus.tokenizer import Tokenizer
from farspan.domain.corpus import Document
from farspan.domain.units import counted, format_seconds
from farspan.retrieval.chunk import Chunk
from farspan.retrieval.embed import Embedder, Read
from farspan.retrieval.evaluate import Evaluation, ModelVectors, evaluate
from farspan.retrieval.index import Origin, Recipe
from farspan.retrieval.pairs import pairs_of
from farspan.retrieval.pooling import Processes
from farspan.retrieval.queries import (
    Queries,
    Query,
    body_of,
    choose_queries,
    passage_of,
    question_lines,
)
from farspan.retrieval.rank import query_form
from farspan.retrieval.stores import Vectors
from farspan.retrieval.tuning import steps_to_fit
from farspan.retrieval.work import IndexWork
from farspan.runtime.model.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class Task:
    """An index to be made at `path`, and of what. The first `train` documents are the training
    split; `say` gets lines for people, and `work` is told how far it is."""

    path: Path
    model: Decoder
    tokenizer: Tokenizer
    documents: Sequence[Document]
    train: int
    origin: Origin
    recipe: Recipe
    say: Callable[[str], None]
    work: IndexWork
    #: Which of the documents are copies, and where exact copies stand; none without it.
    copies: Copies | None = None
    #: Fingerprint of where the documents were read from.
    source: str = ""
    #: Fit to the documents of today, whatever the old index was fitted to.
    refit: bool = False
    #: A person's queries, which a fit is judged by too, and the seconds that it takes at most.
    own: Sequence[Query] = ()
    fit_s: float = math.inf
    processes: Processes | None = None

    def known_copies(self) -> Copies:
        return self.copies or Copies.none(len(self.documents))


def fit_corpus(task: Task, chunks: Sequence[Chunk]) -> tuple[Embedder, Vectors, Evaluation | None]:
    """Return what embeds, the vectors (N, E) of the chunks, and the evaluation, if the recipe asks
    for one and a document has a body to be found by. Near copies are found, and nothing is fitted
    to them."""
    documents = task.documents
    copies = task.known_copies()
    recipe = task.recipe
    kept = [row for row, chunk in enumerate(chunks) if chunk.document < copies.kept]
    # Heads hold titles, and some bodies questions: what is fitted must not know them, or the
    # evaluation would.
    fitted_rows = [row for row in kept if not chunks[row].head] or kept
    are_heads_found = all(chunks[row].head for row in kept)
    copied_rows = [
        row
        for row, chunk in enumerate(chunks)
        if chunk.document >= copies.kept and (are_heads_found or not chunk.head)
    ]
    bodies = [chunks[row] for row in fitted_rows]
    found_by = [body_of(document) for document in documents]
    queries = choose_queries(
        documents, found_by, task.train, recipe.seed, own=task.own, copies=copies
    )
    questions = [question_lines(document) for document in documents]
    passages = [passage_of(chunk, questions[chunk.document]) for chunk in bodies]
    copied = [passage_of(chunks[row], questions[chunks[row].document]) for row in copied_rows]
    pairs = pairs_of(documents[: task.train], bodies, passages, queries.relevant)
    # What the index holds beside: passages with their questions, and heads.
    found_rows = [*fitted_rows, *copied_rows]
    found_texts = [*passages, *copied]
    rest = [
        row
        for row, text in zip(found_rows, found_texts, strict=True)
        if text != chunks[row].indexed
    ]
    rest += sorted(set(range(len(chunks))) - set(found_rows))
    asked = (
        [query_form(query.text) for query in (*queries.reported, *queries.tuning)]
        if recipe.evaluate
        else []
    )
    task.work.expect(
        "embedding", _chars(found_texts, pairs.asked, asked, [chunks[row].indexed for row in rest])
    )
    task.work.expect("fitting", steps_to_fit(len(pairs.texts), recipe.fit))
    limit = f", for {format_seconds(task.fit_s)} at most" if task.fit_s < math.inf else ""
    task.say(
        f"fitting to {counted(len(pairs.texts), 'pair')} of a title, opening or heading and a "
        f"passage{limit}"
    )
    start = Embedder.unfitted(task.model, task.tokenizer, passages, task.work, task.processes)
    texts = start.read(passages)
    belonging = start.read(pairs.asked)
    copied_texts = start.read(copied)
    embedder = start.fitted(texts, belonging, pairs, recipe.fit, task.fit_s)
    evaluation = None
    if recipe.evaluate and queries.reported:
        sides = {
            "untuned": start.fitted(
                texts,
                belonging,
                pairs,
                msgspec.structs.replace(recipe.fit, steps=0),
            ),
            "model": embedder,
        }
        owners = np.array([chunks[row].document for row in found_rows])
        found = _joined(texts, copied_texts)
        evaluation = evaluate(
            found_by, owners, queries, sides_of(sides, found, queries), recipe.seed
        )
        evaluation = msgspec.structs.replace(evaluation, near_copies=copies.near)
    vectors_NE = np.empty((len(chunks), recipe.fit.size), np.float32)
    vectors_NE[fitted_rows] = embedder.vectors(texts, "passage")
    vectors_NE[copied_rows] = embedder.vectors(copied_texts, "passage")
    # Apart, so that the vectors of the others are those of an index without copies.
    first_copy = len(kept)
    for part in ([row for row in rest if row < first_copy], [r for r in rest if r >= first_copy]):
        vectors_NE[part] = embedder.passages([chunks[row].indexed for row in part])
    return embedder, vectors_NE, evaluation


def _joined(first: Read, second: Read) -> Read:
    return Read(first.bags + second.bags, torch.cat([first.pooled, second.pooled]))


def sides_of(
    embedders: Mapping[str, Embedder], passages: Read, queries: Queries
) -> dict[str, ModelVectors]:
    """Each one's vectors of what it has read, and of the queries as searches ask them: embedders of
    one model."""
    some = next(iter(embedders.values()))
    asked = [
        some.read([query_form(query.text) for query in part])
        for part in (queries.reported, queries.tuning)
    ]
    return {
        name: ModelVectors(
            one.vectors(passages, "passage"), *(one.vectors(part, "query") for part in asked)
        )
        for name, one in embedders.items()
    }


def _chars(*texts: Sequence[str]) -> int:
    return sum(len(text) for part in texts for text in part)
