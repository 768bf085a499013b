"""Plan: which device computes what. Techniques write it, the estimator prices it, the runtime executes it.

Inside one replica everything is one synchronous computation. This version has one replica of one stage whose mesh has
one axis, "data".
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from farspan.domain.codec import content_hash
from farspan.domain.model import ModelSpec
from farspan.domain.train import TrainSpec


class Mesh(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ranks laid out over named axes, row-major: the last axis varies fastest."""

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[str, ...]


class GradSync(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How gradients of a data axis are summed: buckets of this many bytes, each sent as soon as it is whole."""

    bucket_bytes: Annotated[int, msgspec.Meta(ge=1)]


class Stage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Consecutive layers on one mesh. Data coordinate i reads `rows[i]` sequences a step, `micro_rows` at a time."""

    layers: tuple[int, int]
    mesh: Mesh
    rows: tuple[int, ...]
    micro_rows: Annotated[int, msgspec.Meta(ge=1)]
    grad_sync: GradSync

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.mesh.ranks):
            raise ValueError(f"{len(self.rows)} row counts for {len(self.mesh.ranks)} ranks")


class Replica(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    stages: tuple[Stage, ...]


class PlannedDevice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The device that a rank expects to find."""

    host: str
    backend: str
    index: int
    threads: int


class Inputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content hashes of what the plan was made from."""

    cluster: str
    corpus: str


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a worker needs beside the token files. `technique` is a label for people: no code may read it."""

    technique: str
    model: ModelSpec
    train: TrainSpec
    replicas: tuple[Replica, ...]
    devices: tuple[PlannedDevice, ...]
    inputs: Inputs
    version: int = 1

    @property
    def hash(self) -> str:
        return content_hash(self)
