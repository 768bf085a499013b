"""Vectors fitted by contrast: what belongs together lies near, and what only looks alike lies
apart.

    v(x) = unit(unit(sum over distinct tokens t of x of w_t T_t) + exp(g) unit((h(x) - m) M))

T is a table of a vector for each token and w what each token weighs; h are the model's states,
averaged over the text (`pooling.py`), m their mean. Means, maps M and gates g are one each for
passages and for queries; table and weights are shared. All but the means are fitted, by InfoNCE
(arXiv 1807.03748) over pairs that the corpus gives (`pairs.py`), against the other passages of the
batch and one more for each pair that BM25 takes for an answer (hard negatives, as in arXiv
2004.04906). T begins at random plus what tokens share passages with (`cooccurrence.py`), and w at
inverse document frequencies: a hash of BM25's words that knows some synonyms. What the fit has not
seen stays as good as that.

Shapes: N passages, Q queries, P pairs, B pairs of a batch, F features, E size of a vector, V
vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from farspan.retrieval.cooccurrence import token_vectors
from farspan.retrieval.index import FitSettings
from farspan.retrieval.pairs import Pairs
from farspan.retrieval.stores import Vectors
from farspan.retrieval.work import IndexWork

KINDS = ("passage", "query")
#: What cosines are multiplied by: one over the temperature of SimCSE (arXiv 2104.08821).
_SHARPNESS = 20.0
#: Whitening leaves out directions with less than this share of the largest variance: what is in
#: them is rounding. A LayerNorm leaves one without any.
_VARIANCE_FLOOR = 1e-6
#: What the table begins with of tokens that share passages, beside as much at random, and its
#: directions. Of 0, 0.5, 1, 2 and 4 parts 1 was best on the built-in corpus, and none better than 1
#: on Perl's documentation (docs/log.md).
_SHARED, _DIRECTIONS = 1.0, 256
#: Learning rates: of table and maps, and of weights and gates, which are logarithms.
_RATE, _LOG_RATE = 1e-3, 1e-2
#: Whitened features have one variance each; maps learn at the table's pace when they are so much
#: smaller.
_SCALE = 1 / 30
#: Steps that tell how many the time is enough for.
_TIMED = 8

Fitted = dict[str, Tensor]
#: Distinct tokens of each text.
Bags = Sequence[Sequence[int]]


def steps_to_fit(pairs: int, fit: FitSettings) -> int:
    """Steps in which so many pairs are fitted; none where no pair has another to be told from."""
    return min(fit.steps, fit.epochs * -(-pairs // fit.batch)) if pairs > 1 else 0


def vectors_of(fitted: Fitted, bags: Bags, pooled_NF: Tensor, kind: str) -> Vectors:
    """Unit vectors (N, E) of texts, `kind` being "passage" or "query"."""
    parts = []
    for start in range(0, len(bags), 4096):
        states_BF = pooled_NF[start : start + 4096] - fitted[f"{kind}_mean"]
        parts.append(_vectors(fitted, bags[start : start + 4096], states_BF, kind))
    return torch.cat(parts).numpy() if parts else torch.empty(0, fitted["table"].shape[1]).numpy()


def _vectors(fitted: Fitted, bags: Bags, states_BF: Tensor, kind: str) -> Tensor:
    lengths = torch.tensor([0, *map(len, bags[:-1])]).cumsum(0)
    tokens = torch.tensor([token for bag in bags for token in bag], dtype=torch.long)
    weights = fitted["token_weights"][tokens].exp()
    table_BE = F.embedding_bag(
        tokens, fitted["table"], lengths, mode="sum", per_sample_weights=weights
    )
    gated_BE = fitted[f"{kind}_gate"].exp() * F.normalize(states_BF @ fitted[f"{kind}_map"], dim=1)
    return F.normalize(F.normalize(table_BE, dim=1) + gated_BE, dim=1)


def tune(
    bags: tuple[Bags, Bags],
    pooled: tuple[Tensor, Tensor],
    frequencies_V: Tensor,
    pairs: Pairs,
    width: int,
    fit: FitSettings,
    work: IndexWork | None = None,
    seconds: float = math.inf,
) -> Fitted:
    """Table, weights, means, maps and gates, from distinct tokens and features (N, F) and (Q, F) of
    passages and of the texts that are asked; features come in streams of `width`, `frequencies_V`
    are inverse document frequencies. Steps are fewer where they would take more than so many
    `seconds`."""
    passages_NF, queries_QF = pooled
    means = passages_NF.mean(0), queries_QF.mean(0) if len(queries_QF) else passages_NF.mean(0)
    whitening_FF = _whitening(passages_NF - means[0], width) * _SCALE
    states = [
        (features - mean) @ whitening_FF for features, mean in zip(pooled, means, strict=True)
    ]
    fitted = _start(bags[0], frequencies_V, passages_NF.shape[1], fit)
    _contrast(fitted, bags, states, pairs, fit, work or IndexWork(), seconds)
    for kind, mean_F in zip(KINDS, means, strict=True):
        fitted[f"{kind}_map"], fitted[f"{kind}_mean"] = (
            whitening_FF @ fitted[f"{kind}_map"],
            mean_F.clone(),
        )
    return fitted


def _start(passages: Bags, frequencies_V: Tensor, features: int, fit: FitSettings) -> Fitted:
    """Maps of both kinds begin as one random projection, which keeps angles, and both parts of a
    vector alike."""
    generator = torch.Generator().manual_seed(fit.seed)
    table_VE = torch.randn(len(frequencies_V), fit.size, generator=generator) / fit.size**0.5
    directions = min(_DIRECTIONS, fit.size)
    turn_EE = torch.linalg.qr(torch.randn(fit.size, directions, generator=generator))[0].T
    table_VE += (
        _SHARED * token_vectors(passages, len(frequencies_V), directions, fit.seed) @ turn_EE
    )
    start_FE = torch.linalg.qr(torch.randn(features, min(fit.size, features), generator=generator))[
        0
    ]
    start_FE = F.pad(start_FE, (0, fit.size - start_FE.shape[1]))
    gate = torch.tensor(0.0)
    fitted = {"table": table_VE, "token_weights": frequencies_V.log()}
    return fitted | {
        f"{kind}_{name}": start.clone()
        for kind in KINDS
        for name, start in (
            ("map", start_FE),
            ("gate", gate),
        )
    }


def _contrast(
    fitted: Fitted,
    bags: tuple[Bags, Bags],
    states: list[Tensor],
    pairs: Pairs,
    fit: FitSettings,
    work: IndexWork,
    seconds: float,
) -> None:
    steps, rng = steps_to_fit(len(pairs.texts), fit), random.Random(fit.seed)
    for tensor in fitted.values():
        tensor.requires_grad_(steps > 0)
    logs = [
        tensor
        for name, tensor in fitted.items()
        if name == "token_weights" or name.endswith("gate")
    ]
    rest = [tensor for tensor in fitted.values() if not any(tensor is log for log in logs)]
    adam = torch.optim.Adam([{"params": rest, "rate": _RATE}, {"params": logs, "rate": _LOG_RATE}])
    work.start("fitting")
    began, step = work.clock(), 0
    while step < steps:
        for group in adam.param_groups:
            group["lr"] = group["rate"] * (1 - step / steps)
        chosen = rng.sample(range(len(pairs.texts)), min(fit.batch, len(pairs.texts)))
        adam.zero_grad()
        _loss(fitted, bags, states, pairs, chosen, rng).backward()
        adam.step()
        work.did(1)
        step += 1
        if step == _TIMED and seconds < math.inf:
            enough = max(step, int(_TIMED * seconds / max(work.clock() - began, 1e-9)))
            work.expect("fitting", min(0, enough - steps))
            steps = min(steps, enough)
    for name, tensor in fitted.items():
        fitted[name] = tensor.detach()


def _loss(
    fitted: Fitted,
    bags: tuple[Bags, Bags],
    states: list[Tensor],
    pairs: Pairs,
    chosen: list[int],
    rng: random.Random,
) -> Tensor:
    """InfoNCE of the `chosen` pairs in both directions, texts to passages against a hard negative
    each as well."""
    texts, own_B = [pairs.texts[pair] for pair in chosen], torch.arange(len(chosen))
    hard = [rng.choice(pairs.negatives[text]) for text in texts if pairs.negatives[text]]
    rows = [*(pairs.passages[pair] for pair in chosen), *hard]
    a_BE = _vectors(fitted, [bags[1][text] for text in texts], states[1][texts], "query")
    b_BE = _vectors(fitted, [bags[0][row] for row in rows], states[0][rows], "passage")
    # Another passage of a pair's own document is no wrong answer.
    groups = torch.from_numpy(pairs.groups[rows])
    same_BB = groups[:, None] == groups[None, : len(chosen)]
    same_BB[own_B, own_B] = False
    alike_BB = (a_BE @ b_BE.T * _SHARPNESS).masked_fill(same_BB.T, -torch.inf)
    return F.cross_entropy(alike_BB, own_B) + F.cross_entropy(alike_BB[:, : len(chosen)].T, own_B)


def _whitening(centred_NF: Tensor, width: int) -> Tensor:
    """(F, F) that gives the principal directions of each stream of `width` one variance (arXiv
    2103.15316)."""
    blocks = []
    for centred_ND in centred_NF.split(width, dim=1):
        variances_D, directions_DD = torch.linalg.eigh(
            (centred_ND.T @ centred_ND / len(centred_ND)).double()
        )
        floor = float(variances_D[-1]) * _VARIANCE_FLOOR or 1.0
        scales_D = torch.where(variances_D < floor, 0.0, variances_D.clamp(min=floor) ** -0.5)
        blocks.append((directions_DD * scales_D).float())
    return torch.block_diag(*blocks)
