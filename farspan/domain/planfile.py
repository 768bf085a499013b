"""plan.yaml: a plan as a person writes it down, in a short form; `planning.planfile` makes a whole
Plan of it.

Blocks of the model stand on devices of the cluster. What is left out is as farspan's own plans have
it.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from farspan.domain.config import ModelConfig, Positive, Quantity
from farspan.domain.plan import Edge, Sync, Topology, Zero
from farspan.domain.problems import Refusal

#: PyTorch DDP's default, from Li et al., arXiv 2006.15704.
BUCKET_BYTES = 25 * 2**20
Bits = Literal[8, 16, 32]
Rows = Annotated[int, msgspec.Meta(ge=0)]


class ModelEntry(ModelConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """run.yaml's `model`, and the vocabulary, which no text gives here."""

    vocab_size: Positive | None = None


class TrainEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step: `batch` sequences, or tokens, of all devices together."""

    batch: Quantity
    seq_len: Positive | None = None
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    attention: Literal["sdpa", "vanilla"] = "sdpa"
    recompute: bool = False
    steps: Positive = 1
    #: Bits of a number on its way between sites, where a stage or an edge does not say.
    wan_bits: Bits = 32


class StageEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Blocks `a-b` of the model, b excluded, on devices `host:first-last`: `tp` neighbours share
    the operators of a sequence, `dp` groups of them the sequences."""

    on: str | tuple[str, ...]
    layers: str | None = None
    tp: Positive = 1
    dp: Positive | None = None
    #: Parts of the devices, one a site, between which state is not divided.
    sites: Positive = 1
    zero: Zero = 0
    recompute: bool | None = None
    #: Bytes of a gradient bucket; null sends each tensor by itself.
    bucket: Quantity | None = BUCKET_BYTES
    bits: Bits | None = None
    topology: Topology = "flat"
    wan_rate: Positive | None = None
    #: Sequences a step of each of the `dp` groups.
    rows: tuple[Rows, ...] | None = None
    #: The dim of each operator that `tp` divides, instead of Megatron-LM's.
    splits: dict[str, str] | None = None


class ReplicaEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One synchronous computation."""

    stages: tuple[StageEntry, ...] = ()
    microbatches: Positive = 1
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    in_flight: tuple[Positive, ...] | None = None
    edges: tuple[Edge, ...] | None = None
    #: Sequences a step of this replica, where there are several.
    batch: Positive | None = None


class PlanFile(ReplicaEntry, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file: one replica, or several that meet now and then."""

    model: str | ModelEntry
    train: TrainEntry
    replicas: tuple[ReplicaEntry, ...] = ()
    sync: Sync | None = None
    engine: str = "farspan"

    @property
    def parts(self) -> tuple[tuple[str, ReplicaEntry], ...]:
        """Every replica, and what stands before the places of its keys."""
        named = tuple((f"replicas[{i}].", replica) for i, replica in enumerate(self.replicas))
        return named or (("", self),)


class PlanRefusals(msgspec.Struct, frozen=True):
    """Refusals of a plan at places of its file."""

    file: str

    def value(self, place: str, what: str, fact: str, remedy: str) -> Refusal:
        """Of a value that nothing here can have."""
        return Refusal(
            "out-of-range", what=what, where=f"{self.file}, {place}", fact=fact, remedy=remedy
        )

    def mismatch(self, place: str, what: str, fact: str, remedy: str) -> Refusal:
        """Of what does not hold together."""
        return Refusal(
            "plan-mismatch", what=what, where=f"{self.file}, {place}", fact=fact, remedy=remedy
        )
