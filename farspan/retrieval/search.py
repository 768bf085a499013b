"""Answer a query from an index: documents with title, score, the passage that fits best, and where they come from."""

from __future__ import annotations

import re
import textwrap
from itertools import islice

import msgspec
import numpy as np

from farspan.retrieval.index import Index, IndexManifest, Recipe
from farspan.retrieval.lexical import words
from farspan.retrieval.rank import DEPTH, Scores, System, by_document, fuse, query_form

SNIPPET_CHARS = 300


class Result(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    score: float
    text: str
    origin: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Best first. `system` ranked them, and `why` says what made it the one to ask."""

    query: str
    system: System
    why: str
    results: tuple[Result, ...]


def search(index: Index, query: str, k: int = 10, system: System | None = None) -> Answer:
    """The k best documents by `system`, or by what the index's evaluation found better; fewer if fewer match."""
    evaluation = index.manifest.evaluation
    scores_N = lexical_N = index.lexical.scores(query)
    # Who gives a document's whole title means that document, and not those that mention it.
    lexical_N[index.named.get(query.strip().lower(), [])] += lexical_N.max(initial=0)
    chosen, why = (system, "asked for") if system else _better(index.manifest, bool(lexical_N.any()))
    if chosen != "bm25":
        scores_N = _vector_scores(index, query)
    if chosen == "fused":
        scores_N = fuse(lexical_N, scores_N, evaluation.fusion_weight if evaluation else 1.0)
    order = np.argsort(-scores_N, kind="stable")
    # A document that is blank but for its title has no passage to show.
    best = islice((n for n in order[scores_N[order] > 0].tolist() if n in index.chunks), k)
    return Answer(query=query, system=chosen, why=why, results=tuple(_result(index, query, n, scores_N) for n in best))


def _better(manifest: IndexManifest, known: bool) -> tuple[System, str]:
    """The system to ask, and why; `known` says whether any word of the query is in the index."""
    if not known:
        return "model", "no word of the query is in the index"
    evaluation = manifest.evaluation
    if evaluation is None:
        return "bm25", not_evaluated(manifest.recipe)
    bm25, fused = (evaluation.systems[name].ndcg_at_10 for name in ("bm25", "fused"))
    return evaluation.better, f"nDCG@10 when the index was made: bm25 {bm25:.3f}, fused {fused:.3f}"


def not_evaluated(recipe: Recipe) -> str:
    """Why an index has no evaluation."""
    return "no document has text after its first line" if recipe.evaluate else "the index was made without evaluation"


def _vector_scores(index: Index, query: str) -> Scores:
    """Cosines by document, from the chunks that the store finds nearest."""
    # A document may hold several of the nearest chunks; four times the depth leaves enough documents.
    hits = index.store.search(index.embedder.queries([query_form(query)])[0], 4 * DEPTH)
    documents = [int(hit.payload["document"]) for hit in hits]
    return by_document(documents, np.array([hit.score for hit in hits], np.float32), index.manifest.documents)


def _result(index: Index, query: str, document: int, scores_N: Scores) -> Result:
    terms = {*words(query)}
    chunk = max(index.chunks[document], key=lambda chunk: len(terms & {*words(chunk.indexed)}))
    text, score = snippet(chunk.text, query), float(scores_N[document])
    return Result(title=chunk.title, score=score, text=text, origin=chunk.origin)


def snippet(text: str, query: str) -> str:
    """About SNIPPET_CHARS of the text in one line, from the word before the first one of the query's."""
    terms, line = {*words(query)}, " ".join(text.split())
    first = next((match.start() for match in re.finditer(r"\S+", line) if terms & {*words(match[0])}), 0)
    start = 0 if first < SNIPPET_CHARS // 2 else line.rfind(" ", 0, first - 1) + 1
    return ("… " if start else "") + textwrap.shorten(line[start:], SNIPPET_CHARS, placeholder=" …")
