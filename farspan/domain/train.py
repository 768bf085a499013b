"""TrainSpec: how long, on what, with which optimizer. Together with model and cluster it is all a
technique sees."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]
#: tf32: fp32 numbers, whose products CUDA devices that can multiply to ten bits after the point.
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
ScheduleKind = Literal["cosine", "linear", "constant", "wsd"]


class Muon(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Momentum whose singular values are made nearly 1 by Newton and Schulz's iteration (Jordan et
    al. 2024, kellerjordan.github.io/posts/muon), times 0.2 sqrt(longer side): an element then moves
    as far as AdamW's would (arXiv 2502.16982, equation 4), and both take one learning rate."""

    momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.95
    iterations: Annotated[int, msgspec.Meta(ge=1, le=20)] = 5
    #: How many times the learning rate embedding and head take, which AdamW updates.
    embedding: Annotated[float, msgspec.Meta(gt=0, le=100)] = 1.0


class Optimizer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW with decoupled weight decay (on matrices only) and clipping by the global norm; with
    `muon`, Muon for the matrices of blocks and AdamW for the rest."""

    lr: Annotated[float, msgspec.Meta(gt=0, le=1)] = 6e-4
    beta1: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.95
    eps: Annotated[float, msgspec.Meta(gt=0)] = 1e-8
    weight_decay: Annotated[float, msgspec.Meta(ge=0)] = 0.1
    #: Largest global gradient norm; 0 leaves gradients as they are.
    clip: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    #: Unset, not None, where there is none: plans and checkpoints of before are known by the same
    #: hashes.
    muon: Muon | msgspec.UnsetType = msgspec.UNSET
    #: Of an exponential moving average of the weights, which is what is validated and kept as the
    #: best: the share of it that is left after a step. Of replicas it averages synced parameters.
    average: Annotated[float, msgspec.Meta(gt=0, lt=1)] | msgspec.UnsetType = msgspec.UNSET


class Schedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Learning rate over the run: linear warm-up, then cosine, linear, constant, or WSD (stable,
    then linear decay)."""

    kind: ScheduleKind = "cosine"
    warmup_steps: Annotated[int, msgspec.Meta(ge=0)] = 0
    #: Final learning rate as a share of the peak.
    floor: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1
    #: WSD only: share of the steps spent decaying.
    decay: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.2


class Regularization(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that keep a model that reads its text many times from overfitting it."""

    #: Share of what the embedding and each half of a block write that is set to 0, the rest scaled
    #: up (Srivastava et al. 2014).
    dropout: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    #: Share of the tokens read that another token, drawn at random, takes the place of; what is
    #: predicted stays.
    mask: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    #: After the first epoch documents come in another order each time.
    reshuffle: bool = False


class TrainSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One synchronous run: `steps` optimizer steps of `batch` sequences of `seq_len` tokens."""

    steps: Positive
    batch: Positive
    seq_len: Positive
    precision: Precision
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    #: Unset where there is none, as `Optimizer.muon`.
    regularization: Regularization | msgspec.UnsetType = msgspec.UNSET
    attention: Literal["sdpa", "vanilla"] = "sdpa"
    recompute: bool = False
    #: Whether devices compile the blocks of the model; of `auto` each PlannedDevice has what was
    #: chosen.
    compile: bool | Literal["auto"] = False
    #: Whether a device records its step as one CUDA graph, likewise. Unset where it is not asked
    #: for: plans of before are known by the same hashes.
    graph: bool | Literal["auto"] | msgspec.UnsetType = msgspec.UNSET
    #: Bits of a number in transit between sites: gradients, activations, replicas' changes. Fewer
    #: than the precision's keep the quantization residual (error feedback, arXiv 1901.09847), but
    #: for activations: each is another sample's.
    wan_bits: Literal[8, 16, 32] = 32
    seed: int = 0
    #: Of each source of a mixture, in the corpus's order, the share of the samples that are its
    #: own. Unset for a single source.
    shares: tuple[float, ...] | msgspec.UnsetType = msgspec.UNSET
    #: Steps between validations, and how many tokens of the validation split each of these reads
    #: (0: all).
    validate_every: Positive = 100
    validate_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    #: Stop after this many validations in a row that are worse than the best by more than chance; 0
    #: never stops early.
    patience: Annotated[int, msgspec.Meta(ge=0)] = 0
    checkpoint_every_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    keep: Positive = 3
    #: Seconds that the workers may take, from when they open their devices to their last event,
    #: over all resumptions; None runs every step.
    deadline_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    #: Of a run with a deadline: steps that it makes at most. `steps` are what fits at the speed of
    #: a trial of seconds; a run that is faster makes more. Unset where `steps` are the limit.
    most_steps: Positive | msgspec.UnsetType = msgspec.UNSET

    @property
    def step_limit(self) -> int:
        """Steps that the run makes at most."""
        return max(self.steps, self.most_steps or 0)

    @property
    def regular(self) -> Regularization:
        """The regularization, which may do nothing."""
        return self.regularization or Regularization()

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq_len
