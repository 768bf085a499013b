"""The validation loss that a run is expected to reach, and what that was told from."""

from __future__ import annotations

import msgspec


class Forecast(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Made before a run; `loss` and `interval` (low, high) are nats a token at its end."""

    loss: float
    interval: tuple[float, float]
    parameters: float
    #: Of the training split, and those that the run reads of it, again and again if need be.
    unique_tokens: float
    tokens: float
    steps: float
    #: (tokens, nats): how well counting so many tokens predicts the validation split (`corpus.counting`).
    counted: tuple[tuple[float, float], ...]
    #: Of the whole validation split (`corpus.entropy`): by how much a part of it is easier.
    bigram_nats: float
