"""What was predicted, what happened, and the events that a run is made of.

`events.jsonl` in a run directory holds one event a line; everything that is shown about a run is computed from it.
Times are seconds since the epoch (`at`) or durations (`_s`); sizes are bytes; losses are nats a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from farspan.domain.problems import Problem, Refusal


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one worker at its peak, by what they hold."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    framework: float

    @property
    def total(self) -> int:
        held: float = sum(msgspec.structs.astuple(self))
        return round(held)


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan would take. `interval` multiplies `step_s`: the run is expected between these two factors.

    A step is split as its slowest device sees it: `compute_s`, communication that nothing hides, and waiting for other
    stages (`bubble_s`).
    """

    step_s: float
    compute_s: float
    communication_s: float
    bubble_s: float
    run_s: float
    tokens_per_s: float
    #: Model FLOPs a second and device (`domain.model.train_flops_per_token`), and as a share of the data sheets'.
    tflops_per_device: float
    mfu: float | None
    #: Of each rank.
    memory: tuple[Memory, ...]
    #: Devices and bytes that leave sites; None where a price is unknown.
    usd: float | None
    kwh: float | None
    #: Tokens that reach the loss of one synchronous token: 1 but for replicas that meet now and then; with bounds.
    token_efficiency: float = 1.0
    token_efficiency_interval: tuple[float, float] = (1.0, 1.0)
    #: Whether a published run in this setting stands behind `token_efficiency`.
    evidence: bool = True
    #: Predicted training loss in nats a token at the end of the run.
    loss: float | None = None
    interval: tuple[float, float]
    assumptions: tuple[str, ...]

    @property
    def memory_bytes(self) -> int:
        """The peak of the fullest device."""
        return max((part.total for part in self.memory), default=0)


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run ran: enough to explain a difference in speed."""

    farspan: str
    python: str
    torch: str
    platform: str
    device: str
    cpus: int
    threads: int
    memory_bytes: int
    commit: str | None = None


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", forbid_unknown_fields=True):
    at: float


class Started(_Event, frozen=True, kw_only=True, tag="started"):
    """A worker group began to train: at step 0, or after a checkpoint."""

    step: int
    plan: str
    world: int
    environment: Environment
    estimate: Estimate | None
    #: Of all devices together, at the run's precision; None where it is not known.
    peak_flops: float | None


class Step(_Event, frozen=True, kw_only=True, tag="step"):
    """One optimizer step over all ranks. `loss` is the mean over the step's valid tokens."""

    step: int
    loss: float
    lr: float
    #: Before clipping; None where it was not finite, as after an overflow in fp16, and the update was skipped. A step
    #: that was not read from a file may have inf or nan here: JSON has no word for them, and they are written as null.
    grad_norm: float | None
    tokens: int
    step_s: float
    memory_bytes: int
    #: Steps of the whole run as its time budget has it now; None of a run without one.
    steps: int | None = None


class Validated(_Event, frozen=True, kw_only=True, tag="validated"):
    """The mean loss of `tokens` of the `of` tokens to be predicted in the validation split, with the weights of `step`.

    What has a default was not told by earlier versions, which read the first tokens of the split.
    """

    step: int
    loss: float
    bits_per_byte: float
    tokens: int
    seconds: float
    #: Whether these weights are kept as the best so far, by what validations in between read.
    best: bool
    of: int | None = None
    #: Of `loss`, as an estimate of the whole split's; None where too few windows say nothing of it.
    standard_error: float | None = None
    #: What the tokens are known by: losses of runs with unlike names are not of the same tokens.
    read: str | None = None
    #: Entropies of these same tokens under the training split's counts, nats a token; told by rank 0.
    unigram_nats: float | None = None
    bigram_nats: float | None = None
    #: Of the last validation of a run: its loss on the `sample_tokens` that validations in between read.
    sample_loss: float | None = None
    sample_tokens: int | None = None

    @property
    def whole(self) -> bool:
        """Whether all of the split was read."""
        return self.tokens == self.of


class Saved(_Event, frozen=True, kw_only=True, tag="saved"):
    step: int
    path: str
    size_bytes: int
    seconds: float


class Sampled(_Event, frozen=True, kw_only=True, tag="sampled"):
    """Text that the model wrote after a prompt."""

    step: int
    prompt: str
    text: str


class Warned(_Event, frozen=True, kw_only=True, tag="warned"):
    """Something a person should know though the run went on."""

    message: str


#: Kinds of spans that are arithmetic; and backends whose passes have ended when their spans end: others only take
#: orders in them.
COMPUTE, IN_STEP = ("forward", "backward", "update"), ("cpu", "cuda")


class Span(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker did from `start` to `end`, seconds since the epoch: forward, backward, receive, collective, or
    update."""

    kind: str
    microbatch: int | None
    start: float
    end: float


class Traced(_Event, frozen=True, kw_only=True, tag="traced"):
    """All that one worker did in one step."""

    step: int
    rank: int
    spans: tuple[Span, ...]


class Finished(_Event, frozen=True, kw_only=True, tag="finished"):
    """The end of a worker group: `reason` is done, deadline, early-stop, interrupted or failed."""

    step: int
    reason: str
    seconds: float
    problem: Problem | None = None


Event = Started | Step | Validated | Saved | Sampled | Warned | Traced | Finished


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
    #: Of the last validation, as are perplexity and bits per byte; and the least on the tokens that all validations
    #: read.
    val_loss: float | None
    best_val_loss: float | None
    perplexity: float | None
    bits_per_byte: float | None
    mfu: float | None
    tflops_per_device: float
    reason: str
    #: Of the last validation too, as in `Validated`: after which step, on which and how many tokens, how sure.
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


def read_events(path: Path) -> Iterator[Event]:
    """The events of a run, oldest first. A last line that a killed worker left unfinished is left out. Raises Refusal
    (file-unreadable) for a line that is no event."""
    with open(path, "rb") as lines:
        yield from decoded((line for line in lines if line.endswith(b"\n")), path)


def decoded(lines: Iterable[bytes], where: object) -> Iterator[Event]:
    """Events from their lines, which may be another machine's. Raises Refusal (file-unreadable)."""
    decoder = msgspec.json.Decoder(Event)
    for line in lines:
        try:
            yield decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Refusal(
                "file-unreadable", what="a line is not an event of a run", where=where,
                fact=f"{str(error)[:200]}: {line[:80].decode(errors='backslashreplace')}",
                remedy=f"take that line out of {where}",
            ) from None  # fmt: skip
