"""What a plan or a run costs: time, memory, dollars and energy, predicted (`Estimate`) and measured
(`Measurement`). Sizes are bytes; losses are nats a token."""

from __future__ import annotations

from typing import Any

import msgspec

#: Share of a run that validation, checkpoints, start-up and noise take in addition to its steps. A
#: planning margin.
OVERHEAD_SHARE = 0.1


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one worker at its peak, by what they hold."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    #: What the process holds before any tensor: of a GPU its context and the kernels that were
    #: loaded.
    framework: float
    #: What libraries of matrix products work in, and what communicators keep for their channels.
    workspace: float = 0.0
    communicators: float = 0.0
    #: What the allocator holds of tensors' memory while no tensor does, or a compiler keeps twice.
    fragmentation: float = 0.0
    #: The copy of the worker's part of a checkpoint, while training continues; of devices other
    #: than CPUs it lies in the memory of the host.
    snapshot: float = 0.0

    @property
    def shown(self) -> dict[str, float]:
        """The same in few enough parts for a picture: communicators count with the buffers, and
        libraries with the framework."""
        parts: dict[str, float] = msgspec.structs.asdict(self)
        parts["buffers"] += parts.pop("communicators")
        parts["framework"] += parts.pop("workspace")
        return parts

    @property
    def total(self) -> int:
        total: float = sum(msgspec.structs.astuple(self))
        return round(total)


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run has to do, and what its devices are and cost together: what an Estimate's figures
    are derived from."""

    steps: float
    tokens_per_step: float
    #: Model FLOPs of a step (`domain.model.train_flops_per_token`).
    flops_per_step: float
    deadline_s: float | None = None
    devices: int
    #: FLOP/s of all devices together by their data sheets; None where one's is unknown, and so for
    #: price and watts.
    peak_flops: float | None
    usd_per_hour: float | None
    #: For the bytes of a step that leave their site.
    egress_usd_per_step: float = 0.0
    watts: float | None


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan would take. `interval` multiplies `step_s`: the run is expected between these two
    factors.

    A step is split as its slowest device sees it: `compute_s`, exposed communication
    (`communication_s`), and waiting for other stages (`bubble_s`).
    """

    step_s: float
    compute_s: float
    communication_s: float
    bubble_s: float
    #: Of each rank.
    memory: tuple[Memory, ...]
    workload: Workload
    #: Tokens that reach the loss of one synchronous token: 1 but for replicas with an outer sync;
    #: with bounds.
    token_efficiency: float = 1.0
    token_efficiency_interval: tuple[float, float] = (1.0, 1.0)
    #: Whether a published run in this setting stands behind `token_efficiency`.
    evidence: bool = True
    #: Predicted training loss in nats a token at the end of the run; None where model or tokens
    #: lie outside the range of the law that predicts it.
    loss: float | None = None
    interval: tuple[float, float]
    assumptions: tuple[str, ...]

    @property
    def memory_bytes(self) -> int:
        """The peak of the fullest device."""
        return max((part.total for part in self.memory), default=0)

    @property
    def whole_s(self) -> float:
        """Seconds of a run of all steps, and of what it does in addition to them."""
        return self.workload.steps * self.step_s / (1 - OVERHEAD_SHARE)

    @property
    def equal_loss_s(self) -> float:
        """As `whole_s`, with the further steps that the loss of synchronous training takes."""
        return self.whole_s / self.token_efficiency

    @property
    def equal_loss_interval_s(self) -> tuple[float, float]:
        """Bounds of `equal_loss_s`: those of a step's time and of the tokens together."""
        low, high = self.interval
        worst, best = sorted(self.token_efficiency_interval)
        least_s = low * self.whole_s / max(best, 1e-9)
        most_s = high * self.whole_s / max(worst, 1e-9)
        return least_s, most_s

    @property
    def equal_loss_factor(self) -> float:
        """Factor that makes a figure of the run one of `equal_loss_s`."""
        return self.equal_loss_s / self.run_s

    @property
    def run_s(self) -> float:
        """Seconds of the run, which a deadline may end."""
        deadline_s = self.workload.deadline_s
        return self.whole_s if deadline_s is None else min(self.whole_s, deadline_s)

    @property
    def steps_done(self) -> float:
        """Steps until the run ends."""
        return self.workload.steps * (self.run_s / self.whole_s)

    @property
    def tokens_done(self) -> float:
        """Tokens until the run ends, each counted as what it is worth of synchronous training."""
        return self.steps_done * self.workload.tokens_per_step * self.token_efficiency

    @property
    def tokens_per_s(self) -> float:
        return self.workload.tokens_per_step / self.step_s

    @property
    def tflops_per_device(self) -> float:
        """Model FLOPs a second and device, in 10^12."""
        workload = self.workload
        return workload.flops_per_step / self.step_s / workload.devices / 1e12

    @property
    def mfu(self) -> float | None:
        """Model FLOPs a second, as a share of the data sheets'."""
        peak = self.workload.peak_flops
        return None if peak is None else self.workload.flops_per_step / self.step_s / peak

    @property
    def usd(self) -> float | None:
        """Devices by the hour and bytes that leave their site; None where a price is unknown."""
        price = self.workload.usd_per_hour
        if price is None:
            return None
        egress = self.workload.egress_usd_per_step * self.steps_done
        return price * self.run_s / 3600 + egress

    @property
    def kwh(self) -> float | None:
        """Every device at its board power for the whole run: an upper bound."""
        watts = self.workload.watts
        return None if watts is None else watts * self.run_s / 3.6e6

    def as_json(self) -> dict[str, Any]:
        """Return the estimate as `--json` has it, with the figures that follow from it."""
        figures: dict[str, Any] = msgspec.to_builtins(self)
        for name in ("run_s", "tokens_per_s", "tflops_per_device", "mfu", "usd", "kwh"):
            figures[name] = getattr(self, name)
        return figures


class SourceLoss(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The mean loss of `tokens` of one source of a mixture, nats a token."""

    loss: float
    bits_per_byte: float
    tokens: int
    #: As that of `Validated`.
    standard_error: float | None = None


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """What a run took; the fields of `Estimate`, so that comparing is subtracting."""

    step_s: float
    run_s: float
    tokens_per_s: float
    memory_bytes: int
    usd: float | None
    steps: int
    tokens: int
    train_loss: float
    #: Of the last validation, as are perplexity and bits per byte; and the least on the tokens that
    #: all validations read.
    val_loss: float | None
    best_val_loss: float | None
    perplexity: float | None
    bits_per_byte: float | None
    mfu: float | None
    tflops_per_device: float
    reason: str
    #: Of the last validation too, as in `Validated`: after which step, on which and how many
    #: tokens, how sure.
    val_step: int | None = None
    val_tokens: int | None = None
    val_of: int | None = None
    val_read: str | None = None
    val_standard_error: float | None = None
    unigram_nats: float | None = None
    bigram_nats: float | None = None
    #: After which step the loss was `best_val_loss`, and on how many tokens.
    best_val_step: int | None = None
    best_val_tokens: int | None = None
    #: Of a mixture, by source.
    val_sources: dict[str, SourceLoss] | msgspec.UnsetType = msgspec.UNSET
