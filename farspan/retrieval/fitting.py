"""What is fitted to a corpus: weights, means and maps, to its chunks and titles; and how well that finds documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from farspan.corpus.tokenizer import Tokenizer
from farspan.domain.corpus import Document
from farspan.domain.units import counted
from farspan.retrieval.chunk import Chunk
from farspan.retrieval.embed import Embedder, steps_to_fit
from farspan.retrieval.evaluate import Evaluation, ModelVectors, Queries, body_of, choose_queries, evaluate
from farspan.retrieval.index import Recipe
from farspan.retrieval.pooling import Processes
from farspan.retrieval.rank import query_form
from farspan.retrieval.stores import Vectors
from farspan.retrieval.work import IndexWork
from farspan.runtime.model.decoder import Decoder, initialise

#: Titles at most that the maps are fitted to.
_TITLES = 16_384


def fit_corpus(
    model: Decoder, tokenizer: Tokenizer, documents: Sequence[Document], chunks: Sequence[Chunk], train: int,
    recipe: Recipe, say: Callable[[str], None], work: IndexWork, processes: Processes | None = None,
) -> tuple[Embedder, Vectors, Evaluation | None]:  # fmt: skip
    """What embeds, the vectors (N, E) of the chunks, and the evaluation, if the recipe asks for one and a document has
    a body to be found by. The first `train` documents are the training split."""
    # Heads hold titles: what is fitted to chunks must not know them, or the evaluation would.
    order = sorted(range(len(chunks)), key=lambda row: chunks[row].head)
    bodies = [chunks[row] for row in order if not chunks[row].head]
    texts = [body_of(document) for document in documents]
    queries = choose_queries(documents, texts, train, recipe.seed)
    titles, owners = title_pairs(documents[:train], bodies, queries)
    fitted = [chunk.indexed for chunk in bodies or chunks]
    heads = [chunks[row].indexed for row in order[len(fitted) :]]
    questions = [query.text for query in (*queries.reported, *queries.tuning)] if recipe.evaluate else []
    models = 2 if recipe.evaluate and queries.reported else 1
    work.expect("embedding", models * _chars(fitted, titles, questions) + _chars(heads))
    work.expect("fitting", models * steps_to_fit(len(titles), recipe.fit))
    embedder, vectors_BE = Embedder.fit(model, tokenizer, fitted, titles, owners, recipe.fit, work, processes)
    evaluation = None
    if models == 2:
        say(f"embedding the same with an untrained model, to compare over {counted(len(queries.reported), 'title')}")
        blank = untrained(model, recipe.seed)
        sides = {
            "model": _side(embedder, vectors_BE, queries),
            "untrained": _side(
                *Embedder.fit(blank, tokenizer, fitted, titles, owners, recipe.fit, work, processes), queries
            ),
        }
        evaluation = evaluate(texts, np.array([c.document for c in bodies]), queries, sides, recipe.seed)
    vectors_NE = np.empty((len(chunks), vectors_BE.shape[1]), np.float32)
    vectors_NE[order] = np.concatenate([vectors_BE, embedder.passages(heads)])
    return embedder, vectors_NE, evaluation


def _chars(*texts: Sequence[str]) -> int:
    return sum(len(text) for part in texts for text in part)


def title_pairs(
    documents: Sequence[Document], bodies: Sequence[Chunk], queries: Queries
) -> tuple[list[str], list[int]]:
    """Titles as they would be asked, and the number of the first body chunk of each: what the maps are fitted to.

    Evenly over the documents, without those that the evaluation asks for.
    """
    relevant = {number for query in (*queries.reported, *queries.tuning) for number in query.relevant}
    first = {chunk.document: row for row, chunk in reversed([*enumerate(bodies)])}
    usable = [n for n, d in enumerate(documents) if n in first and n not in relevant and query_form(d.title)]
    chosen = usable[:: len(usable) // _TITLES + 1]
    return [query_form(documents[n].title) for n in chosen], [first[n] for n in chosen]


def untrained(model: Decoder, seed: int) -> Decoder:
    """A model of the same shape, on the same device, with the weights that training begins from."""
    blank = Decoder(model.spec).eval().to(model.tok.weight.device)
    initialise(blank, seed)
    return blank


def _side(embedder: Embedder, bodies_BE: Vectors, queries: Queries) -> ModelVectors:
    reported, tuning = ([query.text for query in some] for some in (queries.reported, queries.tuning))
    return ModelVectors(bodies_BE, embedder.queries(reported), embedder.queries(tuning))
