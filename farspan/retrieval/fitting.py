"""What is fitted to a corpus: what embeds, to its passages and to what belongs to them; and how
well that searches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from farspan.corpus.tokenizer import Tokenizer
from farspan.domain.corpus import Document
from farspan.domain.units import counted, format_seconds
from farspan.retrieval.chunk import Chunk
from farspan.retrieval.embed import Embedder, Read
from farspan.retrieval.evaluate import Evaluation, ModelVectors, evaluate
from farspan.retrieval.index import Recipe
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
from farspan.retrieval.teacher import word_vectors
from farspan.retrieval.tuning import steps_to_fit
from farspan.retrieval.work import IndexWork
from farspan.runtime.model.decoder import Decoder, initialise


def fit_corpus(
    model: Decoder,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    chunks: Sequence[Chunk],
    train: int,
    recipe: Recipe,
    say: Callable[[str], None],
    work: IndexWork,
    processes: Processes | None = None,
    own: Sequence[Query] = (),
    seconds: float = math.inf,
    teacher: Path | None = None,
) -> tuple[Embedder, Vectors, Evaluation | None]:
    """What embeds, the vectors (N, E) of the chunks, and the evaluation, if the recipe asks for one
    and a document has a body to be found by. The first `train` documents are the training split;
    `own` queries are judged too, and the fit takes so many `seconds` at most and begins at a
    `teacher`'s words."""
    # Heads hold titles, and some bodies questions: what is fitted must not know them, or the
    # evaluation would.
    order = sorted(range(len(chunks)), key=lambda row: chunks[row].head)
    bodies = [chunks[row] for row in order if not chunks[row].head] or [
        chunks[row] for row in order
    ]
    found_by = [body_of(document) for document in documents]
    queries = choose_queries(documents, found_by, train, recipe.seed, own=own)
    questions = [question_lines(document) for document in documents]
    passages = [passage_of(chunk, questions[chunk.document]) for chunk in bodies]
    pairs = pairs_of(documents[:train], bodies, passages, queries.relevant)
    # What the index holds beside: passages with their questions, and heads.
    rest = [row for row, chunk in enumerate(bodies) if passages[row] != chunk.indexed]
    rest += range(len(bodies), len(order))
    more = [chunks[order[row]].indexed for row in rest]
    asked = (
        [query_form(query.text) for query in (*queries.reported, *queries.tuning)]
        if recipe.evaluate
        else []
    )
    work.expect("embedding", _chars(passages, pairs.asked, asked, more))
    work.expect("fitting", steps_to_fit(len(pairs.texts), recipe.fit))
    limit = f", for {format_seconds(seconds)} at most" if seconds < math.inf else ""
    say(
        f"fitting to {counted(len(pairs.texts), 'pair')} of a title, opening or heading and a "
        f"passage{limit}"
    )
    start = Embedder.unfitted(model, tokenizer, passages, work, processes)
    texts, belonging = start.read(passages), start.read(pairs.asked)
    taught_VT = word_vectors(teacher, start.token_texts()) if teacher else None
    embedder = start.fitted(texts, belonging, pairs, recipe.fit, seconds, taught_VT)
    evaluation = None
    if recipe.evaluate and queries.reported:
        sides = {
            "untuned": start.fitted(
                texts,
                belonging,
                pairs,
                msgspec.structs.replace(recipe.fit, steps=0),
                taught_VT=taught_VT,
            ),
            "model": embedder,
        }
        owners = np.array([chunk.document for chunk in bodies])
        evaluation = evaluate(
            found_by, owners, queries, sides_of(sides, texts, queries), recipe.seed
        )
    vectors_BE = embedder.vectors(texts, "passage")
    vectors_NE = np.empty((len(chunks), vectors_BE.shape[1]), np.float32)
    vectors_NE[order[: len(bodies)]] = vectors_BE
    vectors_NE[[order[row] for row in rest]] = embedder.passages(more)
    return embedder, vectors_NE, evaluation


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


def untrained(model: Decoder, seed: int) -> Decoder:
    """A model of the same shape, on the same device, with the weights that training begins from."""
    blank = Decoder(model.spec).eval().to(model.tok.weight.device)
    initialise(blank, seed)
    return blank
