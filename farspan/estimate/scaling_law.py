"""Loss by a published scaling law, and what training in separate replicas costs in tokens."""

from __future__ import annotations

import math

#: L = E + A / N^alpha + B / D^beta, nats a token: Besiroglu et al. (arXiv 2404.10102, table 1), who
#: fitted the data of Hoffmann et al. (arXiv 2203.15556) again. For web text and a tokenizer of 32k;
#: small models lie outside the fit.
E, A, B, ALPHA, BETA = 1.8172, 482.01, 2085.43, 0.3478, 0.3658

#: Parameters and tokens of the runs behind the fit (arXiv 2203.15556, abstract): beyond them the
#: formula may give more than a uniform guess.
FITTED_PARAMETERS, FITTED_TOKENS = (7e7, 1.6e10), (5e9, 5e11)


def fitted_loss(parameters: float, tokens: float) -> float | None:
    """As `loss`; None outside the range of the fit."""
    inside = (
        FITTED_PARAMETERS[0] <= parameters <= FITTED_PARAMETERS[1]
        and FITTED_TOKENS[0] <= tokens <= FITTED_TOKENS[1]
    )
    return scaling_law_loss(parameters, tokens) if inside else None


def scaling_law_loss(parameters: float, tokens: float) -> float:
    """Return the loss in nats a token of a model with `parameters` after `tokens`."""
    return E + A / math.pow(parameters, ALPHA) + B / math.pow(tokens, BETA)


def tokens_for(excess: float, parameters: float, tokens: float) -> float:
    """Factor on `tokens` that makes up for a loss that is higher by a share `excess`; infinite
    where none does."""
    asked = scaling_law_loss(parameters, tokens)
    remaining = asked / (1 + excess) - E - A / parameters**ALPHA
    return math.inf if remaining <= 0 else math.pow(B / remaining, 1 / BETA) / tokens
