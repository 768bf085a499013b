"""What a short trial of the worker found: how fast one device trains one model."""

from __future__ import annotations

import msgspec

from farspan.domain.train import Precision


class Speed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker at one precision: the median optimizer step, and the peak memory of the process."""

    step_s: float
    tokens_per_s: float
    memory_bytes: int


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speeds by precision, each measured on steps of `rows` sequences of `seq_len` tokens on one device."""

    rows: int
    seq_len: int
    speeds: dict[Precision, Speed]
