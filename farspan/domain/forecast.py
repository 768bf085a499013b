"""The validation loss that a run is predicted to reach, and what it was predicted from."""

from __future__ import annotations

import msgspec


class Counted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How well counts of `tokens` training tokens predict the validation split, nats a token
    (`corpus.counting`): of two tokens in a row; of these and the same piece of text so far; of six
    in a row and the same."""

    tokens: float
    few: float
    few_again: float
    many_again: float


class Forecast(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Made before a run; `loss` and `interval` (low, high) are nats a token at its end."""

    loss: float
    interval: tuple[float, float]
    parameters: float
    #: Of the training split, and those that the run reads of it, repeatedly if need be.
    unique_tokens: float
    tokens: float
    steps: float
    #: Of more and more tokens.
    counted: tuple[Counted, ...]
    #: Of the whole validation split (`corpus.entropy`): by how much a part of it is easier.
    bigram_nats: float
