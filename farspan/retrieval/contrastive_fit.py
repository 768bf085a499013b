"""Contrastive fitting of embedding vectors.

    v(x) = unit(unit(sum over distinct tokens t of x of w_t T_t) + exp(g) unit((h(x) - m) M))

T are the token vectors and w the token weights; h are the model's states, averaged over the text
(`pooling.py`), m their mean. Passages and queries have a mean, a projection M and a gate g each;
token vectors and weights are shared. All but the means are fitted, by InfoNCE (arXiv 1807.03748)
over pairs mined from the corpus (`pairs.py`). The negatives are the other passages of the batch and
one hard negative for each pair, which BM25 ranks high (arXiv 2004.04906). T is initialized at
random plus co-occurrence vectors (`cooccurrence.py`), and w to inverse document frequencies: a hash
of BM25's words that knows some synonyms. Tokens that no pair contains keep that quality.

Shapes: N passages, Q queries, P pairs, B pairs of a batch, F features, E size of a vector, V
vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from farspan.retrieval.cooccurrence import cooccurrence_vectors
from farspan.retrieval.cpu_threads import one_thread_each
from farspan.retrieval.index import FitSettings
from farspan.retrieval.index_work import IndexWork
from farspan.retrieval.pairs import Pairs
from farspan.retrieval.stores import Vectors

KINDS = ("passage", "query")
#: One over the temperature that divides cosines (SimCSE, arXiv 2104.08821).
_INVERSE_TEMPERATURE = 20.0
#: Whitening drops directions with less than this share of the largest variance: they hold rounding
#: errors. A LayerNorm leaves one direction without variance.
_VARIANCE_FLOOR = 1e-6
#: Share of co-occurrence vectors in the initial token vectors, relative to random ones, and their
#: rank. Of 0, 0.5, 1, 2 and 4 a share of 1 was best on the built-in corpus, and none better than 1
#: on Perl's documentation (docs/log.md).
_COOCCURRENCE_SHARE = 1.0
_MAX_COOCCURRENCE_RANK = 256
#: Learning rates: of token vectors and projections, and of weights and gates, which are logarithms.
_LEARNING_RATE = 1e-3
_LOG_LEARNING_RATE = 1e-2
#: Whitened features have unit variance; scaled by this, projections learn as fast as token vectors.
_FEATURE_SCALE = 1 / 30
#: Steps that are timed before the number of steps is fitted to the time budget.
_TIMED_STEPS = 8
#: Texts that are embedded at once.
_EMBED_BATCH = 4096

Fitted = dict[str, Tensor]
#: Distinct tokens of each text.
Bags = Sequence[Sequence[int]]


def steps_to_fit(pairs: int, fit: FitSettings) -> int:
    """Return the optimizer steps for a number of pairs; 0 for one pair, which has no negatives."""
    if pairs <= 1:
        return 0
    steps_per_epoch = -(-pairs // fit.batch)
    return min(fit.steps, fit.epochs * steps_per_epoch)


def embed_texts(fitted: Fitted, bags: Bags, pooled_NF: Tensor, kind: str) -> Vectors:
    """Return the unit vectors (N, E) of texts; `kind` is "passage" or "query"."""
    batches = [torch.empty(0, fitted["table"].shape[1])]
    for start in range(0, len(bags), _EMBED_BATCH):
        batch = slice(start, start + _EMBED_BATCH)
        states_BF = pooled_NF[batch] - fitted[f"{kind}_mean"]
        batches.append(_embed_batch(fitted, bags[batch], states_BF, kind))
    return torch.cat(batches).numpy()


def _embed_batch(fitted: Fitted, bags: Bags, states_BF: Tensor, kind: str) -> Tensor:
    lengths = torch.tensor([0, *map(len, bags[:-1])]).cumsum(0)
    tokens = torch.tensor([*chain.from_iterable(bags)], dtype=torch.long)
    weights = fitted["token_weights"][tokens].exp()
    lexical_BE = F.embedding_bag(
        tokens, fitted["table"], lengths, mode="sum", per_sample_weights=weights
    )
    projected_BE = F.normalize(states_BF @ fitted[f"{kind}_map"], dim=1)
    gated_BE = fitted[f"{kind}_gate"].exp() * projected_BE
    return F.normalize(F.normalize(lexical_BE, dim=1) + gated_BE, dim=1)


def fit_embedder(
    bags: tuple[Bags, Bags],
    pooled: tuple[Tensor, Tensor],
    frequencies_V: Tensor,
    pairs: Pairs,
    width: int,
    fit: FitSettings,
    work: IndexWork | None = None,
    seconds: float = math.inf,
) -> Fitted:
    """Fit token vectors and weights, means, projections and gates.

    `bags` and `pooled` are the distinct tokens and the features (N, F) and (Q, F) of passages and
    of the texts that belong to them. Features come in streams of `width`; `frequencies_V` are
    inverse document frequencies. Fewer steps are taken where all would exceed `seconds`.
    """
    passages_NF, queries_QF = pooled
    passage_mean_F = passages_NF.mean(0)
    query_mean_F = queries_QF.mean(0) if len(queries_QF) else passage_mean_F
    whitening_FF = _whitening_map(passages_NF - passage_mean_F, width) * _FEATURE_SCALE
    states = [
        (passages_NF - passage_mean_F) @ whitening_FF,
        (queries_QF - query_mean_F) @ whitening_FF,
    ]
    fitted = _initial_parameters(bags[0], frequencies_V, passages_NF.shape[1], fit)
    # A step of two threads takes 0.8 of the time of one, and five times that of its own beside a
    # busy process.
    with one_thread_each():
        _minimize_contrastive_loss(fitted, bags, states, pairs, fit, work or IndexWork(), seconds)

    # Whitening becomes part of the projections.
    for kind, mean_F in zip(KINDS, (passage_mean_F, query_mean_F), strict=True):
        fitted[f"{kind}_map"] = whitening_FF @ fitted[f"{kind}_map"]
        fitted[f"{kind}_mean"] = mean_F.clone()
    return fitted


def _initial_parameters(
    passages: Bags, frequencies_V: Tensor, features: int, fit: FitSettings
) -> Fitted:
    """Return the parameters before the first step.

    Both kinds start with one random projection, which keeps angles, and equal parts of lexical and
    model vectors.
    """
    generator = torch.Generator().manual_seed(fit.seed)
    vocabulary = len(frequencies_V)
    table_VE = torch.randn(vocabulary, fit.size, generator=generator) / fit.size**0.5
    rank = min(_MAX_COOCCURRENCE_RANK, fit.size)
    rotation_ER = _random_orthonormal(fit.size, rank, generator)
    cooccurrence_VR = _COOCCURRENCE_SHARE * cooccurrence_vectors(
        passages, vocabulary, rank, fit.seed
    )
    table_VE += cooccurrence_VR @ rotation_ER.T
    projection_FE = _random_orthonormal(features, min(fit.size, features), generator)
    projection_FE = F.pad(projection_FE, (0, fit.size - projection_FE.shape[1]))

    fitted = {"table": table_VE, "token_weights": frequencies_V.log()}
    for kind in KINDS:
        fitted[f"{kind}_map"] = projection_FE.clone()
        fitted[f"{kind}_gate"] = torch.tensor(0.0)
    return fitted


def _random_orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(rows, columns, generator=generator))[0]


def _minimize_contrastive_loss(
    fitted: Fitted,
    bags: tuple[Bags, Bags],
    states: list[Tensor],
    pairs: Pairs,
    fit: FitSettings,
    work: IndexWork,
    seconds: float,
) -> None:
    steps = steps_to_fit(len(pairs.texts), fit)
    rng = random.Random(fit.seed)
    linear: list[Tensor] = []
    logarithms: list[Tensor] = []
    for name, tensor in fitted.items():
        tensor.requires_grad_(steps > 0)
        is_logarithm = name == "token_weights" or name.endswith("gate")
        (logarithms if is_logarithm else linear).append(tensor)
    adam = torch.optim.Adam(
        [
            {"params": linear, "rate": _LEARNING_RATE},
            {"params": logarithms, "rate": _LOG_LEARNING_RATE},
        ]
    )
    work.start_kind("fitting")
    began = work.clock()
    batch = min(fit.batch, len(pairs.texts))
    step = 0
    while step < steps:
        for group in adam.param_groups:
            group["lr"] = group["rate"] * (1 - step / steps)
        chosen = rng.sample(range(len(pairs.texts)), batch)
        adam.zero_grad()
        _info_nce_loss(fitted, bags, states, pairs, chosen, rng).backward()
        adam.step()
        work.add_done(1)
        step += 1
        # Shorten the schedule to what the time budget allows at the measured speed.
        if step == _TIMED_STEPS and seconds < math.inf:
            elapsed_s = max(work.clock() - began, 1e-9)
            affordable = max(step, int(_TIMED_STEPS * seconds / elapsed_s))
            work.add_expected("fitting", min(0, affordable - steps))
            steps = min(steps, affordable)
    for name, tensor in fitted.items():
        fitted[name] = tensor.detach()


def _info_nce_loss(
    fitted: Fitted,
    bags: tuple[Bags, Bags],
    states: list[Tensor],
    pairs: Pairs,
    chosen: list[int],
    rng: random.Random,
) -> Tensor:
    """Return the InfoNCE loss of the `chosen` pairs in both directions.

    Texts are also compared with one hard negative each.
    """
    texts = [pairs.texts[pair] for pair in chosen]
    own_B = torch.arange(len(chosen))
    hard = [rng.choice(pairs.negatives[text]) for text in texts if pairs.negatives[text]]
    rows = [pairs.passages[pair] for pair in chosen] + hard
    text_bags = [bags[1][text] for text in texts]
    passage_bags = [bags[0][row] for row in rows]
    texts_BE = _embed_batch(fitted, text_bags, states[1][texts], "query")
    passages_RE = _embed_batch(fitted, passage_bags, states[0][rows], "passage")

    # Another passage of a pair's own document is no wrong answer.
    groups = torch.from_numpy(pairs.groups[rows])
    same_RB = groups[:, None] == groups[None, : len(chosen)]
    same_RB[own_B, own_B] = False
    logits_BR = texts_BE @ passages_RE.T * _INVERSE_TEMPERATURE
    logits_BR = logits_BR.masked_fill(same_RB.T, -torch.inf)
    to_passages = F.cross_entropy(logits_BR, own_B)
    to_texts = F.cross_entropy(logits_BR[:, : len(chosen)].T, own_B)
    return to_passages + to_texts


def _whitening_map(centred_NF: Tensor, width: int) -> Tensor:
    """Return the whitening (F, F): unit variance for each stream of `width` (arXiv 2103.15316)."""
    blocks = []
    for centred_ND in centred_NF.split(width, dim=1):
        covariance_DD = (centred_ND.T @ centred_ND / len(centred_ND)).double()
        variances_D, directions_DD = torch.linalg.eigh(covariance_DD)
        floor = float(variances_D[-1]) * _VARIANCE_FLOOR or 1.0
        inverse_std_D = variances_D.clamp(min=floor) ** -0.5
        scales_D = torch.where(variances_D < floor, 0.0, inverse_std_D)
        blocks.append((directions_DD * scales_D).float())
    return torch.block_diag(*blocks)
