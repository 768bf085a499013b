"""Queries of short trials and their results: how fast one device trains one model, and what it can
do at all."""

from __future__ import annotations

import msgspec

from farspan.domain.cluster import DType, MatmulRate, UnitTime
from farspan.domain.model import ModelSpec
from farspan.domain.plan import PlannedDevice
from farspan.domain.train import Precision, TrainSpec


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
    #: Whether the steps were of compiled blocks.
    compiled: bool = False


class LeftOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was not measured, as it would have needed more bytes than were free; `rows` where it
    has rows."""

    what: str
    needed: int
    free: int
    rows: tuple[int, ...] = ()


class DeviceRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """FLOP/s of matrix products by shape and dtype, bytes a second of memory, bytes that a worker
    may use, and of a GPU the seconds to launch a kernel."""

    rates: tuple[MatmulRate, ...]
    bandwidth: float
    memory: int
    launch_s: float | msgspec.UnsetType = msgspec.UNSET
    left_out: tuple[LeftOut, ...] = ()


class UnitTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a model's units on a device."""

    times: tuple[UnitTime, ...]
    left_out: tuple[LeftOut, ...] = ()


class DescribeQuery(msgspec.Struct, frozen=True, tag="describe"):
    """What devices are here? Answered by a Cluster."""

    backend: str
    workers: int | None


class ReportQuery(msgspec.Struct, frozen=True, tag="report"):
    """Which fast paths do the devices take, and who holds them? Answered by DeviceReports."""

    backend: str


class InstalledQuery(msgspec.Struct, frozen=True, tag="installed"):
    """What is this PyTorch built for, and which GPUs does it see? Answered by a Wheel."""


class MatmulQuery(msgspec.Struct, frozen=True, tag="matmul"):
    """FLOP/s of a matrix product at a small model's shape, by dtype. Answered by a dict."""

    device: PlannedDevice
    precisions: tuple[Precision, ...]


class MeasureQuery(msgspec.Struct, frozen=True, tag="measure"):
    """Time real steps of `train.batch` sequences, `seconds` in each precision. Answered by
    ProbeResult."""

    device: PlannedDevice
    model: ModelSpec
    train: TrainSpec
    precisions: tuple[Precision, ...]
    seconds: float


class RatesQuery(msgspec.Struct, frozen=True, tag="rates"):
    """What can the device do? `shapes` are (m, k, n). Answered by DeviceRates."""

    device: PlannedDevice
    shapes: tuple[tuple[int, int, int], ...]
    dtypes: tuple[DType, ...]
    #: Bytes that the device may use.
    memory: int


class UnitsQuery(msgspec.Struct, frozen=True, tag="units"):
    """How long do a model's units take over `rows` sequences of `seq_len` tokens? Answered by
    UnitTimes."""

    device: PlannedDevice
    model: ModelSpec
    seq_len: int
    rows: tuple[int, ...]
    dtypes: tuple[DType, ...]
    #: Bytes that the device may use.
    memory: int
    #: Whether blocks are compiled before they are timed.
    compiled: bool = False


class AllReduceQuery(msgspec.Struct, frozen=True, tag="allreduce"):
    """Time all-reduces with the other probes of a group, which connect to one address. Answered by
    seconds by bytes."""

    device: PlannedDevice
    rank: int
    world: int
    address: str
    port: int
    secret: str
    interface: str | None
    sizes: tuple[int, ...]


Query = (
    DescribeQuery
    | ReportQuery
    | InstalledQuery
    | MatmulQuery
    | MeasureQuery
    | RatesQuery
    | UnitsQuery
    | AllReduceQuery
)
