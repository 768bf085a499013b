"""What `farspan bench` measures: a matrix of settings as a user writes it, its cells, and what came
of each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from farspan.domain.config import Name, Positive, Quantity
from farspan.domain.train import Precision


class Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model by its knobs, where no preset and no number of parameters says it."""

    layers: Positive
    d_model: Positive
    vocab: Positive
    context: Positive
    family: Literal["gpt2", "llama"] = "gpt2"
    heads: Positive | None = None
    tied: bool = True


class LabOf(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A lab that is brought up for its cells: a file, or the name of one that ships with farspan;
    with bytes that a connection may have under way, the rate of all links, and the memory of all
    devices, of its own."""

    lab: str
    window: Quantity | None = None
    bandwidth: Quantity | None = None
    memory: Quantity | None = None


List = Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
Counts = Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1)]


class Matrix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every combination of the lists is a cell. Clusters are files, names, or `here`, this machine.
    Techniques are the planner's, those of a paper's plans (`published:Data`), or plan files;
    devices are `all`, a site, or how many of the first."""

    name: Name
    clusters: Annotated[dict[str, str | LabOf], msgspec.Meta(min_length=1)]
    models: Annotated[dict[str, str | Shape], msgspec.Meta(min_length=1)]
    techniques: List
    devices: Annotated[tuple[Positive | str, ...], msgspec.Meta(min_length=1)] = ("all",)
    #: Sequences a device.
    batch: Counts = (8,)
    #: Tokens of a sequence; 0 is the model's context.
    seq_len: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(min_length=1)
    ] = (0,)
    precision: Annotated[tuple[Precision, ...], msgspec.Meta(min_length=1)] = ("fp32",)
    attention: Annotated[tuple[Literal["sdpa", "vanilla"], ...], msgspec.Meta(min_length=1)] = (
        "sdpa",
    )
    #: Steps that count, after those that warm up, fewer where they take long; and fresh runs of
    #: every cell.
    steps: Positive = 5
    repeats: Positive = 1
    seed: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = 0
    #: Of one cell, at most.
    deadline: Quantity = "5m"
    #: Of the run that minutes and dollars are told of.
    tokens: Quantity = "10M"
    #: Dollars an hour of a device by kind, or of `any`, where the cluster has none.
    prices: dict[str, Annotated[float, msgspec.Meta(ge=0)]] = {}
    version: Literal[1] = 1


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One combination."""

    cluster: str
    model: str
    technique: str
    devices: str
    batch: int
    seq_len: int
    precision: Precision
    attention: Literal["sdpa", "vanilla"]
    repeat: int

    def __str__(self) -> str:
        more = [
            f"{self.batch} x {self.seq_len}" if self.seq_len else f"{self.batch} a device",
            self.precision,
        ]
        more += [self.attention] if self.attention != "sdpa" else []
        more += [f"repeat {self.repeat + 1}"] if self.repeat else []
        return (
            f"{self.technique} of {self.model} on {self.devices} of {self.cluster}, "
            f"{', '.join(more)}"
        )


Status = Literal["ok", "oom", "failed", "no-plan"]


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cell that was measured, with the prediction made before, and all that explains it. None is
    unknown."""

    matrix: str
    cell: Cell
    #: What the cell meant: matrix, hashes of cluster, model and plan. A row of another hash is of
    #: another question.
    key: str
    cluster_hash: str
    model_hash: str
    plan_hash: str | None
    status: Status
    cause: str = ""
    #: The signal that ended a worker ("SIGKILL"), where one did.
    signal: str | None = None
    #: Devices of the plan, sequences of a step, parameters of the model.
    used: int
    rows: int
    parameters: int
    #: Tokens and FLOPs (Alpa's formula, which the FABRIC paper prints) of a step, and tokens of the
    #: run that minutes are told of.
    step_tokens: int
    step_flops: float
    run_tokens: float
    step_s: float | None = None
    steps_s: tuple[float, ...] = ()
    memory_bytes: int | None = None
    predicted_s: float | None = None
    predicted_low_s: float | None = None
    predicted_high_s: float | None = None
    predicted_memory_bytes: int | None = None
    #: What follows from the measured step.
    tokens_per_s: float | None = None
    tflops_per_device: float | None = None
    minutes: float | None = None
    tokens_per_usd: float | None = None
    usd_per_hour: float | None = None
    rtt_s: float | None = None
    #: Seconds that the cell took altogether, and when it began.
    took_s: float = 0.0
    at: str = ""
    seed: int = 0
    commit: str | None = None
    farspan: str = ""
    torch: str = ""
    python: str = ""
    machine: str = ""


def latest(rows: Iterable[Row]) -> list[Row]:
    """Of each cell the row that came last: what the cell meant before the matrix was changed is
    another question."""
    return list({row.cell: row for row in rows}.values())


def cells(matrix: Matrix) -> list[Cell]:
    """Every combination, repeats last: the first look is whole before any cell runs again."""
    return [
        Cell(
            cluster=cluster,
            model=model,
            technique=technique,
            devices=str(devices),
            batch=batch,
            seq_len=seq_len,
            precision=precision,
            attention=attention,
            repeat=repeat,
        )
        for repeat in range(matrix.repeats)
        for cluster in matrix.clusters
        for model in matrix.models
        for devices in dict.fromkeys(matrix.devices)
        for batch in dict.fromkeys(matrix.batch)
        for seq_len in dict.fromkeys(matrix.seq_len)
        for precision in dict.fromkeys(matrix.precision)
        for attention in dict.fromkeys(matrix.attention)
        for technique in dict.fromkeys(matrix.techniques)
    ]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a step of so many seconds means for the row's run; dollars are None where a price is
    unknown."""

    tokens_per_s: float
    tflops_per_device: float
    minutes: float
    tokens_per_usd: float | None


def figures(row: Row, step_s: float) -> Figures:
    """Return the figures of a row for a measured or a predicted step."""
    rate = row.step_tokens / step_s
    return Figures(
        tokens_per_s=rate,
        tflops_per_device=row.step_flops / step_s / row.used / 1e12,
        minutes=row.run_tokens / rate / 60,
        tokens_per_usd=rate * 3600 / row.usd_per_hour if row.usd_per_hour else None,
    )
