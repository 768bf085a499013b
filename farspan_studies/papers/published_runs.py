"""Training runs and block times that others measured and published, as data: `published/runs.json`,
`blocks.json`.

Nothing but a blind comparison reads these files: no estimate, no search and no default depends on
them. They were written down before any of them was priced, by the rule that each file states.
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import Annotated, Literal, TypeVar

import msgspec

from farspan.domain.struct_files import parse_json

T = TypeVar("T")
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Precision = Literal["bf16", "fp16", "fp32", "tf32"]
#: flash: scores never written out (any such kernel); fused: softmax in one kernel, scores written
#: out; eager: neither.
Attention = Literal["flash", "eager", "fused"]


class Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder by the knobs of `ModelSpec`; where a model is no exact member of a family, the
    closest, as noted."""

    family: Literal["gpt2", "llama"]
    layers: Positive
    d_model: Positive
    heads: Positive
    kv_heads: Positive
    d_ff: Positive
    #: Rows of the table and of the head, padding included where the source pads.
    vocab_size: Positive
    context: Positive
    activation: Literal["gelu_tanh", "swiglu", "relu"]
    norm: Literal["layernorm", "rmsnorm"]
    positions: Literal["learned", "rope"]
    bias: bool
    tied: bool
    #: False: the source trains the same blocks under a classifier, with no matrix of the
    #: vocabulary's size at the end.
    lm_head: bool = True


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured run. Exactly one of the three measured fields is set."""

    id: str
    #: Repository or paper; after a comma, where in it.
    source: str
    #: None where the index of stored files names no repository.
    url: str | None
    checked: str
    model: Shape
    #: Tokens a sequence.
    seq_len: Positive
    #: Sequences an optimizer step, over all devices.
    batch: Positive
    #: Sequences a device (or group of `tensor * pipeline` devices) and pass.
    microbatch: Positive
    #: The data sheet's name.
    gpu: str
    gpus: Positive
    gpus_per_host: Positive
    network: str | None
    #: Gbit/s a host and direction; None where not stated or with one host.
    network_gbit: float | None
    data: Positive
    tensor: Positive
    pipeline: Positive
    #: Virtual stages a device; 1 is none.
    interleave: Positive = 1
    sequence_parallel: bool = False
    zero: Literal[0, 1, 2, 3]
    recompute: Literal["none", "full", "selective"]
    precision: Precision
    attention: Attention
    compiled: bool
    optimizer: str
    software: str
    #: Seconds an optimizer step.
    step_s: Seconds | None = None
    #: Tokens a second, all devices together.
    tokens_per_s: Seconds | None = None
    #: TFLOP/s a device, by `flops_formula`.
    tflops_per_gpu: Seconds | None = None
    flops_formula: str = ""
    #: Fields that the source leaves open and that were filled from a public config or by
    #: convention.
    assumed: tuple[str, ...] = ()
    note: str = ""

    @property
    def origin(self) -> str:
        """The repository or paper alone."""
        return self.source.partition(",")[0]

    def __post_init__(self) -> None:
        measured = [
            x for x in (self.step_s, self.tokens_per_s, self.tflops_per_gpu) if x is not None
        ]
        if len(measured) != 1:
            raise ValueError(f"{self.id}: {len(measured)} measured values, not 1")
        if (self.tflops_per_gpu is not None) != bool(self.flops_formula):
            raise ValueError(f"{self.id}: a formula of FLOPs goes with TFLOP/s, and only with it")
        if self.gpus != self.data * self.tensor * self.pipeline:
            raise ValueError(
                f"{self.id}: {self.gpus} GPUs are not {self.data} x {self.tensor} x {self.pipeline}"
            )
        if self.batch % (self.data * self.microbatch):
            raise ValueError(
                f"{self.id}: a batch of {self.batch} is not whole passes of "
                f"{self.data * self.microbatch}"
            )


class LeftOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Published numbers that were seen and are not in the list, and the part of the rule that keeps
    them out."""

    source: str
    why: str


class Runs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rule: str
    #: Where a source has more rows than were taken: which, by its name.
    sampling: dict[str, str]
    left_out: tuple[LeftOut, ...]
    runs: tuple[Run, ...]


class Block(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of equal transformer blocks on one GPU or one tensor-parallel group."""

    id: str
    source: str
    url: str | None
    checked: str
    model: Shape
    #: Blocks that the times cover together.
    layers: Positive
    #: What the times cover: the blocks alone, or the blocks and what else.
    covers: Literal["blocks", "blocks, embedding and head", "blocks without attention's scores"]
    gpu: str
    batch: Positive
    seq_len: Positive
    tensor: Positive = 1
    precision: Precision
    attention: Attention
    forward_s: Seconds
    #: Without the forward pass; None where not given.
    backward_s: Seconds | None
    software: str
    assumed: tuple[str, ...] = ()
    note: str = ""


class Blocks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rule: str
    sampling: dict[str, str]
    left_out: tuple[LeftOut, ...]
    blocks: tuple[Block, ...]


@functools.cache
def published_runs() -> Runs:
    """Return the list of runs, checked. Raises ValueError where the file is not of the form."""
    return _load("runs.json", Runs)


@functools.cache
def published_blocks() -> Blocks:
    """Return the list of block times, checked. Raises ValueError where the file is not of the
    form."""
    return _load("blocks.json", Blocks)


def _load(name: str, kind: type[T]) -> T:
    file = resources.files("farspan_studies").joinpath("published").joinpath(name)
    return parse_json(file.read_bytes(), kind, f"published/{name}")
