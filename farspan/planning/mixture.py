"""How a mixture is trained on: the share of the samples that each source has."""

from __future__ import annotations

import msgspec

from farspan.domain.config import DataConfig
from farspan.domain.corpus import CorpusManifest
from farspan.domain.train import TrainSpec
from farspan.domain.units import parse_fraction
from farspan.planning.size import FRESH_EPOCHS

Shares = tuple[float, ...] | msgspec.UnsetType


def choose_shares(data: DataConfig, corpus: CorpusManifest) -> Shares:
    """Return the share of each source, in the corpus's order: by weights, or else by tokens, so
    that all are read equally often; what is replayed has the share that was asked for."""
    if not corpus.parts:
        return msgspec.UNSET
    replay = data.replayed
    replayed = parse_fraction(replay.share) if replay is not None else 0.0
    weights = []
    for part, asked in zip(corpus.parts, data.parts, strict=True):
        weight = 0.0
        if not part.replay:
            weight = float(part.train.tokens) if asked.weight is None else asked.weight
        weights.append(weight)
    total = sum(weights)
    shares = []
    for part, weight in zip(corpus.parts, weights, strict=True):
        share = replayed if part.replay else (1 - replayed) * weight / total
        shares.append(share)
    return tuple(shares)


def count_epochs(corpus: CorpusManifest, train: TrainSpec) -> dict[str, float]:
    """Return how often a training reads each source of a mixture, by name."""
    if not corpus.parts or not train.shares:
        return {}
    tokens = train.steps * train.tokens_per_step
    epochs = {}
    for part, share in zip(corpus.parts, train.shares, strict=True):
        epochs[part.name] = share * tokens / part.train.tokens
    return epochs


def warn_repeats(corpus: CorpusManifest, train: TrainSpec) -> list[str]:
    """Describe the sources of a mixture that are read more often than teaches anything new."""
    warnings = []
    for name, epochs in count_epochs(corpus, train).items():
        if epochs > FRESH_EPOCHS:
            warnings.append(
                f"the run reads {name} {epochs:.3g} times; beyond {FRESH_EPOCHS} repeats teach "
                "less and less (arXiv 2305.16264): a smaller weight, more text, or fewer steps"
            )
    return warnings
