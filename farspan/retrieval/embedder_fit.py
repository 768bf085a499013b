"""Fit an embedder to a corpus' passages and the texts that belong to them, and evaluate it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
import torch

from farspan.corpus.distinct_texts import Copies
from farspan.corpus.tokenizer import Tokenizer
from farspan.domain.corpus import Document
from farspan.domain.units import counted, format_seconds
from farspan.retrieval.chunk import Chunk
from farspan.retrieval.contrastive_fit import steps_to_fit
from farspan.retrieval.embed import Embedder, Read
from farspan.retrieval.evaluate import Evaluation, ModelVectors, evaluate
from farspan.retrieval.hybrid_ranking import query_form
from farspan.retrieval.index import Origin, Recipe
from farspan.retrieval.index_work import IndexWork
from farspan.retrieval.pairs import mine_pairs
from farspan.retrieval.pooling import Processes
from farspan.retrieval.queries import (
    Queries,
    Query,
    body_of,
    choose_queries,
    passage_of,
    question_lines,
)
from farspan.retrieval.stores import Vectors
from farspan.runtime.model.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class Task:
    """An index to be built at `path`, and its inputs.

    The first `train` documents are the training split; `write_line` writes lines for people, and
    `work` counts progress.
    """

    path: Path
    model: Decoder
    tokenizer: Tokenizer
    documents: Sequence[Document]
    train: int
    origin: Origin
    recipe: Recipe
    write_line: Callable[[str], None]
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
    """Return the fitted embedder, the vectors (N, E) of the chunks, and the evaluation.

    The evaluation is None if the recipe asks for none, or no document can be asked for. Near copies
    are candidates, and nothing is fitted to them.
    """
    documents = task.documents
    copies = task.known_copies()
    recipe = task.recipe
    kept = [row for row, chunk in enumerate(chunks) if chunk.document < copies.kept]
    # Heads hold titles, and some bodies questions: to fit them would leak the queries.
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
    pairs = mine_pairs(documents[: task.train], bodies, passages, queries.relevant)
    # The rest of the index: passages with their questions, and heads.
    found_rows = [*fitted_rows, *copied_rows]
    found_texts = [*passages, *copied]
    rest = [
        row
        for row, text in zip(found_rows, found_texts, strict=True)
        if text != chunks[row].indexed
    ]
    rest += sorted(set(range(len(chunks))) - set(found_rows))
    asked: list[str] = []
    if recipe.evaluate:
        asked = [query_form(query.text) for query in (*queries.reported, *queries.tuning)]
    rest_texts = [chunks[row].indexed for row in rest]
    to_embed = chain(found_texts, pairs.asked, asked, rest_texts)
    task.work.add_expected("embedding", sum(map(len, to_embed)))
    task.work.add_expected("fitting", steps_to_fit(len(pairs.texts), recipe.fit))
    limit = f", for {format_seconds(task.fit_s)} at most" if task.fit_s < math.inf else ""
    task.write_line(
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
        no_steps = msgspec.structs.replace(recipe.fit, steps=0)
        untuned = start.fitted(texts, belonging, pairs, no_steps)
        owners = np.array([chunks[row].document for row in found_rows])
        pooled = torch.cat([texts.pooled, copied_texts.pooled])
        candidates = Read(texts.bags + copied_texts.bags, pooled)
        sides = sides_of({"untuned": untuned, "model": embedder}, candidates, queries)
        evaluation = evaluate(found_by, owners, queries, sides, recipe.seed)
        evaluation = msgspec.structs.replace(evaluation, near_copies=copies.near)
    vectors_NE = np.empty((len(chunks), recipe.fit.size), np.float32)
    vectors_NE[fitted_rows] = embedder.vectors(texts, "passage")
    vectors_NE[copied_rows] = embedder.vectors(copied_texts, "passage")
    # In two batches, so that the vectors of the others are those of an index without copies.
    first_copy = len(kept)
    rest_kept = [row for row in rest if row < first_copy]
    rest_copied = [row for row in rest if row >= first_copy]
    for part in (rest_kept, rest_copied):
        vectors_NE[part] = embedder.passages([chunks[row].indexed for row in part])
    return embedder, vectors_NE, evaluation


def sides_of(
    embedders: Mapping[str, Embedder], passages: Read, queries: Queries
) -> dict[str, ModelVectors]:
    """Return each embedder's vectors of passages and of queries in their query form.

    All embedders are of one model, so the texts are read once.
    """
    reader = next(iter(embedders.values()))
    reported = reader.read([query_form(query.text) for query in queries.reported])
    tuning = reader.read([query_form(query.text) for query in queries.tuning])
    sides = {}
    for name, embedder in embedders.items():
        chunks = embedder.vectors(passages, "passage")
        reported_vectors = embedder.vectors(reported, "query")
        tuning_vectors = embedder.vectors(tuning, "query")
        sides[name] = ModelVectors(chunks, reported_vectors, tuning_vectors)
    return sides
