"""What short trials found: how fast one device trains one model, and what it can do at all."""

from __future__ import annotations

import msgspec

from farspan.domain.cluster import MatmulRate, UnitTime
from farspan.domain.train import Precision


class Speed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker at one precision: the median optimizer step, and the peak memory of the
    process."""

    step_s: float
    tokens_per_s: float
    memory_bytes: int


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speeds by precision, each measured on steps of `rows` sequences of `seq_len` tokens on one
    device."""

    rows: int
    seq_len: int
    speeds: dict[Precision, Speed]


class LeftOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was not measured, as it would have needed more bytes than were free: of so many rows,
    where it has rows."""

    what: str
    needed: int
    free: int
    rows: tuple[int, ...] = ()


class DeviceRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """FLOP/s of matrix products by shape and dtype, bytes a second of memory, and bytes that a
    worker may use."""

    rates: tuple[MatmulRate, ...]
    bandwidth: float
    memory: int
    left_out: tuple[LeftOut, ...] = ()


class UnitTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a model's units on a device."""

    times: tuple[UnitTime, ...]
    left_out: tuple[LeftOut, ...] = ()
