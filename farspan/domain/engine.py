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
#: rows of a biased product, those of the residual stream, q and k, q's heads, scores, logits. Those
#: from "gradient" on are of GPUs (`semantics.kernel_choice.gpu_activities`).
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
    "gradient",
    "positions",
    "split",
    "repeated",
    "padding",
    "head_input",
    "head_gradient",
    "tied",
    "fused_loss",
    "scalars",
]
#: What an update does with each parameter.
UpdateActivity = Literal["norm", "adamw", "publish"]


class Moves(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers that one activity's kernels read and write for each element: in the forward, in the
    backward pass."""

    #: In the training's precision.
    working: tuple[float, float] = (0, 0)
    #: In fp32, whatever the precision.
    full: tuple[float, float] = (0, 0)
    #: Copies from one precision to the other, where they are two.
    casts: tuple[float, float] = (0, 0)
    #: Kernels that are launched; parts of one where operators share it.
    launches: tuple[float, float] = (0, 0)
    #: Several kernels of a step that the framework composes, over rows that are broadcast, cut and
    #: turned.
    composed: bool = False

    def bytes(self, backward: bool, width: int) -> float:
        """Bytes for each element in one of the passes, of a precision of `width` bytes."""
        cast = (4 + width) * self.casts[backward] if width < 4 else 0.0
        return width * self.working[backward] + 4 * self.full[backward] + cast


class AttentionSpeed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rate of the attention kernel that cards take from a compute capability on, until the next
    one's: forward and backward together, counting half of the products, as none is computed with
    later keys."""

    #: None: cards whose capability nothing knows.
    capability: float | None = None
    kernel: str
    #: Share of the data sheet's FLOP/s in 16 bits that long sequences reach, by the size of a head.
    shares: dict[int, float]
    #: Positions of sequences that reach half of that.
    half_length: float

    def share(self, positions: int, head: int) -> float:
        """Return the share that sequences of this length reach."""
        nearest = min(self.shares, key=lambda size: abs(size - head))
        return self.shares[nearest] * positions / (positions + self.half_length)


class HostLink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes a second, each way, between a card and its host's memory where that is pinned: by
    what joins it to the host, which cards of a capability have, from this one on."""

    capability: float
    #: What its data sheet calls PCI Express of this generation.
    pcie_rate: float
    copies: float


class GpuEngine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is otherwise on a GPU of NVIDIA or AMD, whatever the plan's other devices are."""

    #: Kernels that are launched one by one, in place of the engine's; the share of the memory's
    #: bandwidth that composed ones reach; and what blocks launch where they are compiled.
    kernels: dict[Activity, Moves]
    composed_bandwidth: float
    compiled: dict[Activity, Moves]
    #: Kernels of attention that keeps no scores: forward, backward.
    attention_launches: tuple[float, float]
    attention: tuple[AttentionSpeed, ...]
    #: Share of the data sheet's FLOP/s in fp32 that attention reaches there.
    full_attention: float
    #: What an update reads and writes for each parameter ("forward"), and its kernels in addition
    #: to one for every `list_elements`.
    update: dict[UpdateActivity, Moves]
    list_elements: int
    #: How many times as long as one of many small kernels (`DeviceTimes.launch_s`) a step's kernels
    #: take to launch in the mean.
    launch_cost: float
    #: Seconds of the GPU between two kernels; all that is left of launches in a recorded step.
    kernel_gap_s: float
    #: Seconds of the host in a step in addition to its launches; and in which the GPU waits until
    #: the host has read the gradient's norm.
    step_s: float
    sync_s: float
    #: Copies between a GPU and its host, through which all messages go but NCCL's collectives; and
    #: bytes a second that gloo carries between two workers of a host.
    host_links: tuple[HostLink, ...]
    loopback_rate: float


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
    #: The same where weights are frozen: none of their gradients come and go. Unset: as `slack`.
    frozen_slack: float | msgspec.UnsetType = msgspec.UNSET
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
    #: What is otherwise on each GPU; None prices them as the rest says.
    gpu: GpuEngine | None = None

    def on(self, backends: Iterable[str]) -> Engine:
        """Return the engine as it is on devices of these backends."""
        if set(backends) == {"cpu"}:
            return msgspec.structs.replace(self, cpu={}, **self.cpu)
        return self

    def on_device(self, backend: str, *, compiled: bool = False) -> Engine:
        """Return the engine with the kernels of one device; `compiled` where its blocks are."""
        if self.gpu is None or backend != "cuda":
            return msgspec.structs.replace(self, gpu=None) if self.gpu else self
        kernels = {**self.kernels, **self.gpu.kernels, **(self.gpu.compiled if compiled else {})}
        shares = self.gpu.composed_bandwidth
        return msgspec.structs.replace(self, kernels=kernels, composed_bandwidth=shares)


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
