"""Fit a query table to an encoder on a corpus, without labels.

Texts that look like queries are embedded by the encoder as queries; each token's row is then the
least-squares solution of "the rows of a text's tokens sum to its vector". A sum is linear, so there
is one solution and no training: on 300 questions about perl's manual the table found 0.88 of the
encoder's nDCG@10, and training on cosines or on the ranking of passages added nothing
(docs/decisions/0029-ready-encoders.md).

Shapes: N texts, F rows, E size of a vector.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from farspan.retrieval.encoders.encoder import Encoder, Ids
from farspan.retrieval.encoders.query_table import QueryTable
from farspan.retrieval.encoders.tensors import Floats
from farspan.retrieval.index_work import IndexWork
from farspan.retrieval.stores import Vectors

#: Texts to fit to: of 30,000 the table found .007 less on perl's manual, of 10,000 .05 less.
TEXTS = 50_000
#: Shares of the texts: spans of passages, words of the corpus, common words of the tokenizer, which
#: people use where the corpus has others, and questions about either. Titles come in addition.
_SPAN_SHARE = 0.3
_WORD_SHARE = 0.16
_COMMON_SHARE = 0.22
_QUESTION_SHARE = 0.2
_COMMON_QUESTION_SHARE = 0.12
#: Words of a span, and of what a question is about.
_SPAN_WORDS = (3, 14)
_SUBJECT_WORDS = (1, 6)
#: Every third question is about a title.
_TITLES_IN_QUESTIONS = 3
ENGLISH_QUESTIONS = (
    "how do I {}",
    "how can I {}",
    "what is {}",
    "why does {}",
    "how to {}",
    "where is {}",
    "what does {} mean",
    "is there a way to {}",
    "how do I use {}",
    "can I {}",
    "why is {}",
    "what is the difference between {}",
    "when should I use {}",
)
#: Thai, kana and ideographs have no spaces: each character counts as a word.
_SPACELESS = r"\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff"
_UNIT = re.compile(rf"[{_SPACELESS}]|[^\s{_SPACELESS}]+")
_WORD = re.compile(r"\w{2,}")
#: Letters of a common word, at least.
_COMMON_LETTERS = 3
#: The equation of a text of n tokens is divided by n to this power: between sums of tokens (0) and
#: sums of unit variance (0.5). From 0 to 0.5 the table found from .645 to .620 alone, .651 at .25.
_LENGTH_EXPONENT = 0.25
#: Ridge, in equations of one token. From 0.03 to 1 nothing changed by more than .006.
_RIDGE = 0.2
#: Steps of conjugate gradients: more changed nothing.
_STEPS = 20
#: Where a residual is 0 nothing is divided by 0.
_TINY = np.float32(1e-20)


class Bags(NamedTuple):
    """The rows that each text sums: bag n is `columns` from `starts[n]` to the next start."""

    columns: Ids
    starts: Ids


SumBags = Callable[[Floats, Ids, Ids], Floats]


def distill_query_table(
    encoder: Encoder,
    passages: Sequence[str],
    titles: Sequence[str],
    work: IndexWork | None = None,
    *,
    texts: int = TEXTS,
    questions: Sequence[str] = ENGLISH_QUESTIONS,
    seed: int = 0,
    device: str = "auto",
) -> QueryTable:
    """Fit a table to an encoder's vectors of queries about a corpus.

    `titles` are titles and headings; `questions` are forms with a `{}` in the corpus' language, or
    none. About `texts` texts are embedded, with progress and resume by `work`.
    """
    work = work or IndexWork()
    rng = np.random.default_rng(seed)
    asked = make_queries(encoder, passages, titles, questions, texts, rng)
    work.add_expected("embedding", sum(map(len, asked)))
    vectors_NE = encoder.many_queries(asked, work, device)
    encodings = encoder.tokenizer.encode_batch_fast(asked, add_special_tokens=False)
    work.add_expected("fitting", _STEPS)
    work.start_kind("fitting")
    tokens, rows_FE = fit_rows([encoding.ids for encoding in encodings], vectors_NE, work)
    return QueryTable(encoder.tokenizer, tokens, rows_FE[:-1], rows_FE[-1])


def make_queries(
    encoder: Encoder,
    passages: Sequence[str],
    titles: Sequence[str],
    questions: Sequence[str],
    count: int,
    rng: np.random.Generator,
) -> list[str]:
    """Make texts that look like queries about a corpus, each once."""
    units = [_units(passage) for passage in passages]
    spoken = [text for text, spans in zip(passages, units, strict=True) if spans]
    units = [spans for spans in units if spans]
    distinct_titles = sorted({*titles} - {""})
    common = _common_words(encoder, int(count * _COMMON_SHARE))
    words: Counter[str] = Counter()
    for text in spoken:
        words.update({*_WORD.findall(text)})
    asked = [word for word, _ in words.most_common(int(count * _WORD_SHARE))]
    asked += common
    asked += distinct_titles[: int(count * _SPAN_SHARE)]
    if not spoken:
        return list(dict.fromkeys(asked))

    def span(bounds: tuple[int, int]) -> str:
        number = int(rng.integers(len(spoken)))
        return _cut_span(spoken[number], units[number], bounds, rng)

    asked += [span(_SPAN_WORDS) for _ in range(int(count * _SPAN_SHARE))]
    if questions:
        for number in range(int(count * _QUESTION_SHARE)):
            subject = span(_SUBJECT_WORDS)
            if distinct_titles and number % _TITLES_IN_QUESTIONS == 0:
                subject = distinct_titles[int(rng.integers(len(distinct_titles)))]
            asked.append(_ask(questions, subject, rng))
        for _ in range(int(count * _COMMON_QUESTION_SHARE) if common else 0):
            subject = f"{common[int(rng.integers(len(common)))]} {span(_SUBJECT_WORDS)}"
            asked.append(_ask(questions, subject, rng))
    return list(dict.fromkeys(asked))


def _units(passage: str) -> list[tuple[int, int]]:
    return [match.span() for match in _UNIT.finditer(passage)]


def _cut_span(
    passage: str, units: list[tuple[int, int]], bounds: tuple[int, int], rng: np.random.Generator
) -> str:
    """Cut some words in a row out of a passage, at a random place."""
    least = min(bounds[0], len(units))
    most = min(bounds[1], len(units))
    words = int(rng.integers(least, most + 1))
    first = int(rng.integers(len(units) - words + 1))
    return passage[units[first][0] : units[first + words - 1][1]]


def _ask(questions: Sequence[str], subject: str, rng: np.random.Generator) -> str:
    form = questions[int(rng.integers(len(questions)))]
    # A subject may hold braces, which str.format would read.
    question = form.replace("{}", subject.rstrip("?.!,;:"))
    return f"{question}?" if rng.random() < 0.5 else question


def _common_words(encoder: Encoder, count: int) -> list[str]:
    """Return whole words of the tokenizer's vocabulary, the commonest first, as ids come."""
    vocabulary = encoder.tokenizer.get_vocab(with_added_tokens=False)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    # Byte-level BPE and SentencePiece mark the beginning of a word, WordPiece all else.
    starts = [token[1:] for token in tokens if token[0] in "Ġ▁"]
    words = starts or tokens
    whole = [word for word in words if len(word) >= _COMMON_LETTERS and word.isalpha()]
    return list(dict.fromkeys(whole))[:count]


def fit_rows(
    token_ids: Sequence[Sequence[int]], vectors_NE: Vectors, work: IndexWork
) -> tuple[Ids, Floats]:
    """Return the ids of all tokens in ascending order, and their rows with the bias as the last.

    Ridge regression by conjugate gradients, with the diagonal as preconditioner.
    """
    lengths_N = np.array([len(ids) for ids in token_ids])
    flat = np.fromiter(chain.from_iterable(token_ids), np.int64, lengths_N.sum())
    tokens, places = np.unique(flat, return_inverse=True)
    bias = len(tokens)
    # Every text sums the bias too: behind its own tokens.
    columns = np.insert(places, np.cumsum(lengths_N), bias)
    starts_N = np.r_[0, np.cumsum(lengths_N + 1)[:-1]]
    forward = Bags(columns, starts_N)
    by_column = np.argsort(columns, kind="stable")
    text_of = np.repeat(np.arange(len(token_ids)), lengths_N + 1)
    counts_F = np.bincount(columns, minlength=bias + 1)
    backward = Bags(text_of[by_column], np.r_[0, np.cumsum(counts_F)[:-1]])

    weights_N1 = ((lengths_N + 1.0) ** -_LENGTH_EXPONENT).astype(np.float32)[:, None]
    squared_N = weights_N1[:, 0] ** 2
    diagonal_F = np.bincount(columns, squared_N[text_of], minlength=bias + 1) + _RIDGE
    inverse_F1 = (1 / diagonal_F).astype(np.float32)[:, None]
    sum_bags = _find_sum_bags()

    def apply(rows_FE: Floats) -> Floats:
        sums_NE = sum_bags(rows_FE, *forward) * weights_N1**2
        return sum_bags(sums_NE, *backward) + np.float32(_RIDGE) * rows_FE

    rows_FE = np.zeros((bias + 1, vectors_NE.shape[1]), np.float32)
    residual_FE = sum_bags(vectors_NE * weights_N1, *backward)
    direction_FE = inverse_F1 * residual_FE
    product_E = (residual_FE * direction_FE).sum(0)
    for _ in range(_STEPS):
        applied_FE = apply(direction_FE)
        step_E = product_E / np.maximum((direction_FE * applied_FE).sum(0), _TINY)
        rows_FE += step_E * direction_FE
        residual_FE -= step_E * applied_FE
        scaled_FE = inverse_F1 * residual_FE
        next_product_E = (residual_FE * scaled_FE).sum(0)
        direction_FE = scaled_FE + next_product_E / np.maximum(product_E, _TINY) * direction_FE
        product_E = next_product_E
        work.add_done(1)
    return tokens, rows_FE


def _find_sum_bags() -> SumBags:
    """Return torch's sum over bags where it is installed: 40 times as fast as numpy's."""
    if importlib.util.find_spec("torch") is None:
        return _sum_bags
    # Here alone, as a search must not wait for torch.
    from farspan.retrieval.encoders.torch_forward import sum_bags

    return sum_bags


def _sum_bags(rows_FE: Floats, columns: Ids, starts_N: Ids) -> Floats:
    """Return the sums (N, E) of a matrix's rows; no bag is empty."""
    sums: Floats = np.add.reduceat(rows_FE[columns], starts_N, axis=0)
    return sums
