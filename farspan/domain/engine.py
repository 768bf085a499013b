"""Engine: the mechanisms of a training system, as data. A plan decides what happens; its engine
how."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from importlib import resources
from typing import Literal

import msgspec

from farspan.domain.cluster import DType
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import convert, parse_yaml
from farspan.domain.suggest import advise

#: Memory-bound work of kernels, by the tensors that they read: a weight's elements, a table's, the
#: rows of a biased product, those of the residual stream, q and k, q's heads, scores, logits.
Activity = Literal[
    "weight",
    "table",
    "lookup",
    "bias",
    "layernorm",
    "rmsnorm",
    "residual",
    "rotary",
    "heads",
    "scores",
    "score_blocks",
    "gelu",
    "relu",
    "swiglu",
    "loss",
]


class Moves(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers that one activity's kernels read and write for each element: in the forward, in the
    backward pass."""

    #: In the training's precision.
    working: tuple[float, float] = (0, 0)
    #: In fp32, whatever the precision.
    full: tuple[float, float] = (0, 0)
    #: Copies from one precision to the other, where they are two.
    casts: tuple[float, float] = (0, 0)
    #: Kernels that are launched.
    launches: tuple[int, int] = (0, 0)
    #: Several kernels of a step that the framework composes, over rows that are broadcast, cut and
    #: turned.
    composed: bool = False

    def bytes(self, backward: bool, width: int) -> float:
        """Bytes for each element in one of the passes, of a precision of `width` bytes."""
        cast = (4 + width) * self.casts[backward] if width < 4 else 0.0
        return width * self.working[backward] + 4 * self.full[backward] + cast


class Engine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates are shares of a device's data sheet; sizes are bytes; times are seconds. `fitted` names
    what was fitted."""

    name: str
    source: str
    #: Share of the best product's FLOP/s on a device that a training's matrix products reach, by
    #: dtype.
    efficiency: dict[DType, float]
    #: Share of those that products reach whose summed or written dims are whole multiples of fewer
    #: bytes than 16: by the bytes, the next smaller one counts.
    aligned: dict[int, float] = {}
    #: Share of the memory's bandwidth that streaming kernels reach; and that composed ones do
    #: (`Moves.composed`).
    bandwidth: float
    composed_bandwidth: float | None = None
    #: What other kernels than matrix products' read and write; an activity that is left out takes
    #: no time of its own.
    kernels: dict[Activity, Moves] = {}
    #: Kernels of an operator that is a product or attention: forward, backward.
    launches: tuple[int, int] = (1, 1)
    #: fp32 products use TF32 where the device has it.
    tf32: bool = False
    #: Times that the update's tensors go through memory: 1 where one kernel does all of it.
    update_passes: float = 1.0
    #: Seconds to launch one kernel. Where other devices than CPUs compute, launches overlap with
    #: the kernels launched before.
    launch_s: float
    #: Sustained FLOP/s a watt of board power at most; None does not limit.
    flops_per_watt: float | None = None
    #: Bytes that one TCP stream has in flight where the link does not give them.
    window: int
    #: TCP streams of a collective, and of a pair of stages where the plan has 1.
    streams: int = 1
    #: Bytes that a collective, and a send, has in flight at most; None is the streams' windows.
    collective_bytes: float | None = None
    send_bytes: float | None = None
    #: Collectives that are in flight at once.
    collectives: int = 1
    #: A step of a ring begins when the receiver has answered: a round trip of the longest wire.
    #: Else parts travel on as they come.
    ring_answered: bool = False
    #: Bytes a second that software moves between hosts at most.
    host_rate: float | None = None
    #: Bytes a second between devices of one host whose interconnect is unknown.
    local_rate: float
    #: Software's own time for one message.
    message_s: float
    #: Share of the backward pass that gradient sums hide behind.
    overlap: float
    #: Gradients of divided optimizer state are scattered as they are summed; else every device gets
    #: the whole sum.
    scatters: bool = True
    #: Sums between sites, and what replicas changed, go straight to everyone, all at once; else
    #: around a ring.
    direct: bool = False
    #: Sums that are scattered go straight to the rank that each part is for; else around a ring.
    scatters_straight: bool = False
    #: Gradients are copied into buckets to be sent, and whole sums keep buckets for all of them;
    #: else they lie in them from the start.
    buckets_copied: bool = True
    #: Weights are gathered in the buckets that gradients are summed in; else one message a tensor.
    gathers_combined: bool = True
    #: Every device of a stage sends its own part of what crosses to the next; else one device of
    #: each host.
    sends_paired: bool = False
    #: Stages that share a tied table sum its gradient by one collective; else each sends the other
    #: its part.
    ties_collective: bool = False
    #: How much longer arithmetic takes while collectives of the batch axes overlap with it: they
    #: share multiprocessors and memory.
    contention: float = 0.0
    #: Communication shares its cores with arithmetic, and takes this many times as long as alone:
    #: both lose their caches; 0 where other devices than CPUs compute.
    move_cost: float = 0.0
    #: Seconds of a core for a byte through its sockets, in or out, where no link gives them.
    socket_s: float = 0.0
    #: Seconds of a core that each message of a sum takes in addition to its bytes: threads wake for
    #: it, and others stop.
    message_busy_s: float = 0.0
    #: Seconds that a message which is waited for waits in the mean for each other worker on its
    #: receiver's core.
    turn_s: float = 0.0
    #: Seconds that a byte of such a message takes longer for each of them.
    turn_byte_s: float = 0.0
    #: Passes of a gradient's fp32 bytes through memory until it is encoded, decoded and added, by
    #: the bits that it travels in; and of a parameter's where replicas synchronize.
    coding_passes: dict[int, float] = {}
    meeting_passes: float = 0.0
    #: A sender computes nothing until its message has arrived.
    sends_awaited: bool
    #: Receives are posted before the data comes; else the sender first waits for the receiver, half
    #: a round trip.
    receives_ahead: bool
    #: Bytes a parameter: the weights that are multiplied, their gradients, and optimizer state
    #: (with fp32 weights where those are not the weights themselves).
    weight_bytes: dict[DType, int]
    gradient_bytes: dict[DType, int]
    optimizer_bytes: dict[DType, int]
    #: Factor on all tensors of a worker: what an allocator loses, and buffers that a compiler keeps
    #: twice.
    overhead: float = 1.0
    #: Factor on what comes and goes within a step: what an allocator keeps of it after it is freed.
    slack: float = 1.0
    #: Share of a stage's state that every device holds whole at its peak although the plan divides
    #: it.
    undivided: float = 0.0
    #: Share of a device's memory that a plan may fill.
    fill: float
    #: Bytes of a worker before it holds any tensor: of the device, and of the host where that is
    #: another memory.
    framework: int
    host_framework: int
    #: Bytes that libraries of matrix products work in.
    workspace: int = 0
    #: Bytes that a communicator keeps for each of its channels (`estimate.memory.CHANNELS`).
    channel_bytes: int = 0
    #: Checkpoints are written from a copy while training continues.
    snapshots: bool = False
    #: Bytes a parameter of the host's memory while a run starts: of the whole model on the first
    #: host, which makes the state, and of every stage on the hosts that receive it.
    host_state: int = 0
    #: Bytes of logits that are computed at a time; None computes all at once.
    logits_chunk: int | None
    #: Factors on the predicted step between which the measured one is expected, eight times of ten:
    #: of compute by the data sheet, of networks as they were given, and of either where it was
    #: measured.
    interval: tuple[float, float]
    network_interval: tuple[float, float]
    probed_interval: tuple[float, float] = (0.82, 1.22)
    fitted: dict[str, str] = {}
    #: What of this is otherwise where every device is a CPU.
    cpu: dict[str, float | bool] = {}

    def on(self, backends: Iterable[str]) -> Engine:
        """Return the engine as it is on devices of these backends."""
        if set(backends) == {"cpu"}:
            return msgspec.structs.replace(self, cpu={}, **self.cpu)
        return self


@functools.cache
def load_engine(name: str) -> Engine:
    """Load the engine of `catalog/engines/NAME.yaml`, whose file is read once; a Refusal offers the
    nearest one."""
    folder = resources.files("farspan.catalog").joinpath("engines")
    files = [file.name for file in folder.iterdir()]
    known = sorted(file.removesuffix(".yaml") for file in files if file.endswith(".yaml"))
    if name not in known:
        raise Refusal(
            "out-of-range",
            what=f"there is no engine {name!r}",
            where="--engine",
            fact=f"known: {', '.join(known)}",
            remedy=advise(name, known, option="--engine"),
        )
    text = folder.joinpath(f"{name}.yaml").read_text()
    where = f"engines/{name}.yaml"
    return convert(parse_yaml(text, where), Engine, where, text)
