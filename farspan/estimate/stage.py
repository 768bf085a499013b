"""What one stage of a plan costs: its passes over a microbatch, its update, its memory."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from farspan.domain.cluster import Device
from farspan.domain.cost import Memory
from farspan.domain.engine import Engine
from farspan.domain.graph import Operator, OpGraph, recomputed_operators
from farspan.domain.plan import PlannedDevice, Replica, Stage
from farspan.domain.train import TrainSpec
from farspan.estimate.compute import DeviceSpeed, GpuWork, Kernels, OperatorWork, work
from farspan.estimate.memory import (
    CHANNELS,
    activation_slack,
    activations_per_row,
    communicators,
    local_parameters,
    logits_bytes,
    recomputed_per_row,
    snapshot_bytes,
    state_bytes,
    updating_bytes,
)
from farspan.estimate.network import Network
from farspan.estimate.schedule import Hop
from farspan.estimate.unit_times import TimedUnits
from farspan.semantics.communications import (
    Communication,
    Place,
    Sends,
    batch_axes,
    layout_changes,
    matrix_parts,
    ring_steps,
    stage_sends,
    table_sends,
)
from farspan.semantics.compile_choice import is_compiled
from farspan.semantics.kernel_choice import BYTES, head_chunks, repeats_keys, scored_keys
from farspan.semantics.muon_matrices import NO_MATRICES, OwnedMatrices, owned_matrices
from farspan.semantics.pass_order import depths_in_flight
from farspan.semantics.tensor_sharding import (
    COPY,
    RESIDUAL,
    UNDIVIDED,
    Collective,
    OperatorDivision,
    between,
    divided,
    work_share,
)

#: What tells figures of a device that compiles from those of one that does not.
COMPILED = b"compiled"


class Pass(NamedTuple):
    """Seconds of a forward and of a backward pass over one microbatch, and of the collectives
    inside them."""

    forward: float
    backward: float
    forward_wait: float = 0.0
    backward_wait: float = 0.0


class StepModes(NamedTuple):
    """How a GPU runs its step: whether its blocks are compiled, and whether the step is recorded as
    one CUDA graph."""

    compiled: bool
    recorded: bool


class Costs:
    """Seconds and bytes of stages of one model on one network; results are cached, since searches
    ask repeatedly."""

    def __init__(self, graph: OpGraph, train: TrainSpec, network: Network, outer: int = 0) -> None:
        """`outer`: bytes a parameter that every plan here keeps in addition, for the replica that
        it will become."""
        self.graph, self.train, self.engine, self.network = graph, train, network.engine, network
        self._outer = outer
        self.width = BYTES[train.precision]
        self.signature = [
            (device, network.core_load[host])
            for device, host in zip(network.devices, network.hosts, strict=True)
        ]
        #: How each rank runs its step.
        self.modes = [
            _modes(device, planned, train)
            for device, planned in zip(network.devices, network.planned, strict=True)
        ]
        #: Ranks whose devices are alike have the same number.
        known: dict[object, int] = {}
        keys, together = (
            {id(device): _figures(device) for device in network.devices},
            Counter(network.hosts),
        )
        compiled = [is_compiled(at, train) for at in network.planned]
        self.figures = [
            (
                keys[id(device)] + COMPILED * is_compiled_here,
                core_load,
                together[host] if device.times.units else 1,
                modes,
            )
            for (device, core_load), host, is_compiled_here, modes in zip(
                self.signature, network.hosts, compiled, self.modes, strict=True
            )
        ]
        self._turns = [
            max(device.slot.turn_s, self.engine.turn_s * (core_load - 1))
            for device, core_load in self.signature
        ]
        self.alike = [known.setdefault(figures, len(known)) for figures in self.figures]
        self.rates = {
            kind: DeviceSpeed(
                self.signature[rank][0],
                train.precision,
                self.engine,
                self.signature[rank][1],
                recorded=self.modes[rank].recorded,
            )
            for rank, kind in reversed(list(enumerate(self.alike)))
        }
        self._devices = {kind: self.signature[rank][0] for rank, kind in enumerate(self.alike)}
        #: The engine of each kind outside blocks, and in them.
        self._engines: dict[int, tuple[Engine, Engine]] = {}
        for rank, kind in enumerate(self.alike):
            backend = self.signature[rank][0].backend
            eager = self.engine.on_device(backend)
            blocks = self.engine.on_device(backend, compiled=self.modes[rank].compiled)
            self._engines[kind] = eager, blocks
        self._in_block = frozenset(op.name for op in graph.block)
        core_loads = {
            kind: (self.figures[rank][2], self.signature[rank][1])
            for rank, kind in enumerate(self.alike)
        }
        #: Kinds that record their step, at the speed at which they launch kernels one by one: as
        #: their units were timed.
        self._launching = {
            kind: DeviceSpeed(
                self.signature[rank][0], train.precision, self.engine, self.signature[rank][1]
            )
            for rank, kind in enumerate(self.alike)
            if self.modes[rank].recorded
        }
        compiling = frozenset(itertools.compress(self.alike, compiled))
        self._timed = TimedUnits(
            graph,
            train,
            self._devices,
            core_loads,
            self._unpaced,
            compiled=compiling,
            recorded=frozenset(self._launching),
        )
        self._units: dict[tuple[object, ...], tuple[float, float]] = {}
        self._sizes: dict[tuple[object, ...], float] = {}
        self._waits: dict[tuple[object, ...], tuple[float, float]] = {}
        self._sends: dict[tuple[object, ...], Sends] = {}
        #: What messages between stages take, by the number of these in memory and of their streams.
        self.hops: dict[tuple[int, int], Hop] = {}
        self._matrices: dict[tuple[object, ...], OwnedMatrices] = {}
        self._memories: dict[tuple[object, ...], Memory] = {}
        self._slowest: dict[tuple[object, ...], Pass] = {}
        self._passes: dict[tuple[object, ...], tuple[float, float, float, float]] = {}
        #: What `stage_time` knows of stages, and of the sums of their gradients.
        self.stage_times: dict[tuple[object, ...], Any] = {}
        self.syncs: dict[tuple[object, ...], Any] = {}

    def with_batch(self, train: TrainSpec, outer: int) -> Costs:
        """Return the costs of a training that is the same but for its batch: they keep what they
        know together."""
        other = copy.copy(self)
        other.train, other._outer = train, outer
        return other

    # -- arithmetic
    #   --------------------------------------------------------------------------------------------

    def unit_s(
        self, rank: int, unit: tuple[Operator, ...], rows: int, splits: Mapping[str, str], ways: int
    ) -> tuple[float, float]:
        """Seconds of a device for the forward and the backward pass of one unit over `rows`
        sequences."""
        key = (
            self.alike[rank],
            *self._unit_key(unit),
            rows,
            ways,
            tuple(splits.items()) if ways > 1 else (),
        )
        if key not in self._units:
            kind = self.alike[rank]
            residual = splits.get(RESIDUAL, COPY)
            times = [
                self._timed_op(kind, op, rows, splits.get(op.name, ""), ways, residual)
                for op in unit
            ]
            forward, backward = zip(*times, strict=True)
            self._units[key] = self._together(kind, forward), self._together(kind, backward)
        return self._units[key]

    def _unit_key(self, unit: tuple[Operator, ...]) -> tuple[object, ...]:
        """Return the key of a unit of this graph, or of its `recomputed_operators`."""
        return unit[0].name, len(unit), unit[-1].adds_to_residual, self.graph.is_other(unit)

    def op_s(
        self, rank: int, op: Operator, rows: int, split: str, ways: int, residual: str = COPY
    ) -> tuple[float, float]:
        """Seconds of a device for the forward and the backward pass of one operator under one
        split, and under one of the residual stream."""
        kind = self.alike[rank]
        forward, backward = self._timed_op(kind, op, rows, split, ways, residual)
        return self._together(kind, (forward,)), self._together(kind, (backward,))

    def _timed_op(
        self, kind: int, op: Operator, rows: int, split: str, ways: int, residual: str
    ) -> tuple[Kernels, Kernels]:
        """One operator's kernels and launches on a kind of device: forward, backward."""
        part = divided(op, split, ways, residual)
        forward, backward = self._roofline(kind, op, rows, part, split, ways)
        factors = self._timed.factors(kind, op, rows)
        return forward.scaled(factors[0]), backward.scaled(factors[1])

    def _together(self, kind: int, several: Iterable[Kernels]) -> float:
        """Seconds of operators one after another."""
        computing, launching = (sum(seconds) for seconds in zip(*several, strict=True))
        return self.rates[kind].together(computing, launching)

    def timed(self, device: Device) -> bool:
        """Whether units of this model were timed on a device, at this precision and length of
        sequences."""
        return any(self._timed.fits(unit_time) for unit_time in device.times.units)

    def _unpaced(
        self, kind: int, op: Operator, rows: int, is_eager: bool
    ) -> tuple[Kernels, Kernels]:
        """One whole operator on a device, by the roofline alone, as units are timed: without a
        graph, and where `is_eager` without a compiler."""
        forward, backward = self.operator_work(kind, op, rows, is_eager=is_eager)
        speed = self._launching.get(kind, self.rates[kind])
        pace = 1 / self._devices[kind].learned.pace
        return (
            speed.kernels(forward).scaled((pace, pace)),
            speed.kernels(backward).scaled((pace, pace)),
        )

    def roofline(self, rank: int, op: Operator, rows: int) -> tuple[Kernels, Kernels]:
        """Return the kernels and launches of one whole operator on a device, forward and backward,
        by the roofline alone."""
        return self._roofline(self.alike[rank], op, rows, UNDIVIDED)

    def _roofline(
        self,
        kind: int,
        op: Operator,
        rows: int,
        part: OperatorDivision,
        split: str = "",
        ways: int = 1,
    ) -> tuple[Kernels, Kernels]:
        forward, backward = self.operator_work(kind, op, rows, part, split, ways)
        return self.rates[kind].kernels(forward), self.rates[kind].kernels(backward)

    def operator_work(
        self,
        kind: int,
        op: Operator,
        rows: int,
        part: OperatorDivision = UNDIVIDED,
        split: str = "",
        ways: int = 1,
        *,
        is_eager: bool = False,
    ) -> tuple[OperatorWork, OperatorWork]:
        """Return the forward and the backward work of a kind of device on its part of an operator;
        as it is without compiled blocks, where `is_eager`."""
        eager, blocks = self._engines[kind]
        engine = blocks if op.name in self._in_block and not is_eager else eager
        device = self._devices[kind]
        keys = scored_keys(self.train, device.backend, op)
        gpu = None
        if engine.gpu is not None:
            gpu = self._gpu_work(device, rows, split, ways)
        return work(self.graph, op, rows, self.train.seq_len, self.width, keys, engine, part, gpu)

    def _gpu_work(self, device: Device, rows: int, split: str, ways: int) -> GpuWork:
        tokens = rows * self.train.seq_len // (ways if split == "b" else 1)
        vocabulary = self.graph.sizes["v"] // (ways if split == "v" else 1)
        capability = device.sheet.capability
        chunks = head_chunks(
            vocabulary,
            max(1, tokens),
            self.width,
            device.memory,
            capability,
            is_whole=split != "v" or ways == 1,
        )
        return GpuWork(chunks, repeats_keys(self.graph, self.width, capability))

    # -- the tensor axis
    #   --------------------------------------------------------------------------------------------

    def unit_wait(
        self,
        group: Sequence[int],
        unit: tuple[Operator, ...],
        rows: int,
        splits: Mapping[str, str],
        concurrent: int,
    ) -> tuple[float, float]:
        """Seconds of the collectives of one unit over its tensor axis: forward, backward."""
        places = ((self.network.hosts[rank], self.alike[rank]) for rank in group)
        key = (*places, *self._unit_key(unit), rows, concurrent, *splits.items())
        if key not in self._waits:
            waits = [0.0, 0.0]
            for kind, size, backward in layout_changes(
                self.graph, unit, splits, rows, self.train.seq_len, self.width
            ):
                waits[backward] += self.waited_s(kind, group, size, concurrent)
            self._waits[key] = waits[0], waits[1]
        return self._waits[key]

    def edge_s(
        self,
        group: Sequence[int],
        writes: str,
        reads: str,
        gradient: str,
        dims: str,
        rows: int,
        concurrent: int,
    ) -> tuple[float, float]:
        """Seconds of what lies between two operators: forward, backward."""
        if (
            len(group) < 2 or dims == "bs"
        ):  # Every device reads the tokens that it needs, and they have no gradient.
            return 0.0, 0.0
        size = self.graph.size(dims, b=rows, s=self.train.seq_len) * self.width
        both = between(writes, reads, gradient)
        first, second = (
            sum(self.waited_s(name, group, size, concurrent) for name in pass_collectives)
            for pass_collectives in both
        )
        return first, second

    def waited_s(
        self, name: Collective, group: Sequence[int], size: float, concurrent: int
    ) -> float:
        """Seconds of a collective that everyone waits for: each step of its ring, there and back,
        also for the turn of the worker that must answer; and for its bytes where others share that
        one's core."""
        took: float = getattr(self.network, f"{name}_s")(group, size, concurrent=concurrent)
        n = len(group)
        steps = ring_steps(name, n)
        part = size / n / (n if name == "all_to_all" else 1)
        turn = max(self._turns[rank] for rank in group)
        others = max(self.signature[rank][1] for rank in group) - 1
        return took + steps * (2 * turn + others * self.engine.turn_byte_s * part)

    def batch_axes(self, stage: Stage, microbatches: int) -> tuple[Communication, ...]:
        """Return the exchanges of a stage's batch axes in a step, the sums of its gradients first,
        and of its tensor axis for the update of matrices."""
        matrices, at = self.matrices(stage), self.network.sites.__getitem__
        parameters = self.parameters(stage) + matrices.padding * (
            stage.mesh.size("data") if stage.zero else 1
        )
        exchanges = batch_axes(
            self.graph, stage, self.engine, self.train.precision, parameters, microbatches, at
        )
        return (*exchanges, *matrix_parts(stage, matrices.shared))

    def stage_sends(self, replica: Replica, edge: int, backward: bool) -> Sends:
        """Return a microbatch's activations on their way over an edge, or their gradients back."""
        a, b = replica.stages[edge : edge + 2]
        bits = replica.edges[edge].bits
        key = (
            a.mesh,
            a.rows,
            a.splits.get(RESIDUAL),
            b.mesh,
            b.rows,
            b.splits.get(RESIDUAL),
            replica.microbatches,
            bits,
            backward,
        )
        if key not in self._sends:
            sequence = self.graph.size("bsd", b=1, s=self.train.seq_len)
            at = self._place(a, b)
            self._sends[key] = stage_sends(
                replica, edge, backward, sequence * bits / 8, sequence * self.width, at
            )
        return self._sends[key]

    def table_sends(self, source: Stage, target: Stage, row: float) -> Sends:
        """Return a tied table on its way from one stage to another: `row` bytes each of its
        rows."""
        key = (
            source.mesh,
            source.splits.get("tok"),
            source.splits.get("head"),
            target.mesh,
            target.splits.get("tok"),
            target.splits.get("head"),
            row,
        )
        if key not in self._sends:
            self._sends[key] = table_sends(
                self.graph, source, target, row, self._place(source, target)
            )
        return self._sends[key]

    def _place(self, a: Stage, b: Stage) -> Place:
        """Where each byte comes to once and spreads from: a site; or a stage, where peers send each
        other parts."""
        if not self.engine.sends_paired:
            return self.network.sites.__getitem__
        first = frozenset(a.mesh.ranks)
        return lambda rank: rank in first

    def stream_s(self, rank: int, size: float) -> float:
        """Return the seconds of a device to stream bytes through its memory."""
        return self.rates[self.alike[rank]].stream_s(size)

    # -- a stage
    #   --------------------------------------------------------------------------------------------

    def passes(self, stage: Stage, rows: Sequence[int], microbatches: int = 1) -> Pass:
        """Return the passes of a stage over one microbatch, in the mean of those that the rows of
        its batch coordinates come in: those of its slowest coordinate."""
        ways, hosts = stage.mesh.size("tensor"), self.network.hosts
        unlike: dict[tuple[object, ...], Sequence[int]] = {}
        for group, count in zip(stage.mesh.batch, rows, strict=True):
            places = tuple(hosts[rank] for rank in group) if ways > 1 else ()
            unlike.setdefault((count, *(self.alike[rank] for rank in group), *places), group)
        about = (
            stage.units,
            stage.recompute,
            microbatches,
            len(stage.mesh.batch),
            *stage.splits.items(),
        )
        key = (about, *unlike)
        if key not in self._slowest:
            passes = (
                self._mean_pass(group, stage, like[0], microbatches)
                for like, group in unlike.items()
                if like[0]
            )
            self._slowest[key] = max(
                passes, key=lambda p: p.forward + p.backward, default=Pass(0.0, 0.0)
            )
        return self._slowest[key]

    def _mean_pass(self, group: Sequence[int], stage: Stage, count: Any, microbatches: int) -> Pass:
        """Return the passes of a batch coordinate in the mean of its microbatches."""
        each, larger = divmod(count, microbatches)
        passes = self._pass(
            group, max(1, each), stage
        )  # A worker without a sequence in a microbatch reads one.
        if larger:
            more = self._pass(group, each + 1, stage)
            passes = Pass(
                *(a + larger / microbatches * (b - a) for a, b in zip(passes, more, strict=True))
            )
        return passes

    def _pass(self, group: Sequence[int], rows: int, stage: Stage) -> Pass:
        """Return the passes of a batch coordinate over `rows` sequences."""
        forward = backward = forward_wait = backward_wait = 0.0
        for unit, count in self.graph.kinds(*stage.units):
            f, b, fw, bw = self._unit_pass(group, unit, rows, stage, len(stage.mesh.batch))
            forward, forward_wait = forward + count * f, forward_wait + count * fw
            backward, backward_wait = backward + count * b, backward_wait + count * bw
            if stage.recompute and self.graph.is_block(unit):
                f, _, fw, _ = self._unit_pass(
                    group, recomputed_operators(unit), rows, stage, len(stage.mesh.batch)
                )
                backward, backward_wait = backward + count * f, backward_wait + count * fw
        return Pass(forward + forward_wait, backward + backward_wait, forward_wait, backward_wait)

    def _unit_pass(
        self,
        group: Sequence[int],
        unit: tuple[Operator, ...],
        rows: int,
        stage: Stage,
        concurrent: int,
    ) -> tuple[float, float, float, float]:
        """Seconds of the slowest device of a tensor axis for a unit, forward and backward; and of
        its collectives. Kept by what decides them."""
        ways = len(group)
        if ways == 1:
            return *self.unit_s(group[0], unit, rows, stage.splits, ways), 0.0, 0.0
        places = ((self.network.hosts[rank], self.alike[rank]) for rank in group)
        key = (*places, *self._unit_key(unit), rows, concurrent, *stage.splits.items())
        if key not in self._passes:
            times = [self.unit_s(rank, unit, rows, stage.splits, ways) for rank in group]
            waits = self.unit_wait(group, unit, rows, stage.splits, concurrent)
            self._passes[key] = (max(t[0] for t in times), max(t[1] for t in times), *waits)
        return self._passes[key]

    def parameters(self, stage: Stage) -> float:
        """Parameters that each device of a stage trains before ZeRO divides them."""
        ways = stage.mesh.size("tensor")
        key = ("parameters", stage.units, ways, tuple(stage.splits.items()) if ways > 1 else ())
        if key not in self._sizes:
            self._sizes[key] = local_parameters(self.graph, stage.units, stage.splits, ways)
        return self._sizes[key]

    def frozen_bytes(self, stage: Stage) -> float:
        """Return the bytes of a stage's frozen weights, which each of its devices has whole."""
        frozen = local_parameters(self.graph, stage.units, {}, 1, frozen=True)
        return frozen * self.engine.weight_bytes[self.train.precision]

    def owned(self, stage: Stage) -> float:
        """Return the parameters that each device of a stage updates and has the optimizer state
        for; with the padding of devices that own smaller matrices than others."""
        own = self.parameters(stage) / (stage.mesh.size("data") if stage.zero else 1)
        return own + self.matrices(stage).padding

    def matrices(self, stage: Stage) -> OwnedMatrices:
        """Return the matrices that a device of a stage updates whole; none where AdamW updates
        all."""
        if not self.train.optimizer.muon:
            return NO_MATRICES
        key = (
            stage.units,
            stage.zero,
            stage.mesh.shape,
            stage.mesh.axes,
            stage.grad_sync,
            *stage.splits.items(),
        )
        if key not in self._matrices:
            self._matrices[key] = owned_matrices(self.graph, stage)
        return self._matrices[key]

    def kept(self, stage: Stage, backend: str) -> tuple[float, float]:
        """Bytes of one sequence that a device of a stage keeps, and those of the block that it
        computes again."""
        ways = stage.mesh.size("tensor")
        key = (
            "kept",
            stage.units,
            stage.recompute,
            backend,
            ways,
            tuple(stage.splits.items()) if ways > 1 else (),
        )
        if key not in self._sizes:
            self._sizes[key] = activations_per_row(
                self.graph,
                stage.units,
                self.train,
                backend,
                splits=stage.splits,
                ways=ways,
                recompute=stage.recompute,
            )
        again = ("again", backend, ways, tuple(stage.splits.items()) if ways > 1 else ())
        if again not in self._sizes:
            self._sizes[again] = recomputed_per_row(
                self.graph, self.train, backend, stage.splits, ways
            )
        replays = stage.recompute and min(stage.units[1], self.graph.layers + 1) > max(
            stage.units[0], 1
        )
        return self._sizes[key], self._sizes[again] if replays else 0.0

    def memory(self, replica: Replica, index: int, coordinate: int, outer: int = 0) -> Memory:
        """Return the peak of a device of one batch coordinate of a stage; `outer` bytes a parameter
        more between replicas."""
        piped = len(replica.stages) > 1
        depth = depths_in_flight(replica)[index] if piped else 1
        rows = replica.micro_rows(index, coordinate)
        return self.memory_of(
            replica.stages[index], rows, depth, coordinate, piped=piped, outer=outer
        )

    def memory_of(
        self,
        stage: Stage,
        rows: int,
        depth: int,
        coordinate: int,
        *,
        piped: bool = True,
        outer: int = 0,
    ) -> Memory:
        """As `memory`, of a stage with `depth` microbatches of `rows` in flight; `piped` if it has
        neighbours. Cached, since searches ask for the same stages."""
        rank, outer = stage.mesh.batch[coordinate][0], max(outer, self._outer)
        key = (
            stage.units,
            stage.mesh.shape,
            stage.mesh.axes,
            stage.zero,
            stage.recompute,
            stage.grad_sync,
            *stage.splits.items(),
            self.alike[rank],
            rows,
            depth,
            piped,
            outer,
        )
        if key not in self._memories:
            self._memories[key] = self._memory_of(stage, rows, depth, rank, piped, outer)
        return self._memories[key]

    def _memory_of(
        self, stage: Stage, rows: int, depth: int, rank: int, piped: bool, outer: int
    ) -> Memory:
        train, engine, device = self.train, self.engine, self.signature[rank][0]
        ways, parameters = stage.mesh.size("tensor"), self.parameters(stage)
        matrices = self.matrices(stage)
        weights, gradients, optimizer = state_bytes(
            parameters, train, engine, stage.zero, stage.mesh.size("data"), matrices
        )
        if engine.undivided:
            count = self.graph.trained_parameters(*stage.units)
            whole = state_bytes(count, train, engine, 0, 1)
            weights, gradients, optimizer = (
                part + engine.undivided * max(0.0, full - part)
                for part, full in zip((weights, gradients, optimizer), whole, strict=True)
            )
        weights += self.frozen_bytes(stage)
        average = 4 if train.optimizer.average else 0
        optimizer += (outer + average) * self.owned(stage)
        each, again = self.kept(stage, device.backend)
        kept = rows * (depth * each + again)
        head = stage.units[1] == self.graph.units and stage.units[0] < stage.units[1]
        split = stage.splits.get("head", "")
        shares = work_share(split, ways), 1 / ways if split and split in "vd" else 1.0
        if head and engine.logits_chunk is not None:
            # The head's gradient is made in the forward pass: each further one that is in flight
            # keeps its own.
            kept += (depth - 1) * self.width * self.graph.size("vd") * shares[1]
        buffers, buckets = self._buffers(stage, depth * rows if piped else 0)
        logits = (
            logits_bytes(
                self.graph, train, rows, engine, device.backend, *shares, memory=device.memory
            )
            if head
            else 0.0
        )
        # When weights are updated no activations are there.
        buffers = max(buffers, updating_bytes(matrices) - kept - logits)
        lost = (engine.overhead - 1) * (weights + gradients + optimizer)
        slack = activation_slack(self.graph, engine)
        lost += (slack - 1) * (logits + buffers)
        lost += (engine.overhead * (device.learned.slack or slack) - 1) * kept
        return Memory(
            weights=weights,
            gradients=gradients,
            optimizer=optimizer,
            activations=kept,
            logits=logits,
            buffers=buffers + buckets,
            framework=engine.framework
            if device.learned.framework is None
            else device.learned.framework,
            workspace=engine.workspace,
            fragmentation=lost,
            communicators=communicators(stage.mesh, piped, len(self.network.devices))
            * engine.channel_bytes
            * CHANNELS[self._joined(rank)],
            snapshot=snapshot_bytes(parameters, len(stage.mesh.ranks) // ways, outer + average)
            if engine.snapshots and device.backend == "cpu"
            else 0.0,
        )

    def _buffers(self, stage: Stage, sent: int) -> tuple[float, float]:
        """Bytes of messages that come and go, `sent` sequences to neighbours and units that are
        gathered; and of buckets, which stay."""
        engine, ways, buckets = self.engine, stage.mesh.size("tensor"), 0.0
        buffers = 2.0 * sent * self.graph.size("bsd", b=1, s=self.train.seq_len) * self.width
        if len(stage.mesh.ranks) > ways and engine.buckets_copied:
            whole = self.parameters(stage) * stage.grad_sync.bits / 8
            buckets = whole if stage.zero == 0 else stage.grad_sync.bucket_bytes or 0
        if stage.zero == 3:
            unit = max(self.graph.size("vd"), self.graph.parameters(1, 2))
            buffers += 2 * unit * engine.weight_bytes[self.train.precision] / ways
        return buffers, buckets

    def _joined(self, rank: int) -> str:
        """Return the kind of interconnect between a device and others of its host."""
        joined = self.network.devices[rank].sheet.interconnect
        return joined.kind if joined else "pcie"


def _modes(device: Device, planned: PlannedDevice, train: TrainSpec) -> StepModes:
    """Return how a device runs its step. The engine's CPUs are as they are measured, compiled or
    not."""
    on_gpu = device.backend == "cuda"
    recorded = planned.graph is True
    return StepModes(on_gpu and is_compiled(planned, train), on_gpu and recorded)


def _figures(device: Device) -> bytes:
    """Return the figures of a device that its times and its memory depend on."""
    return msgspec.json.encode(device.but(enter=None, usd_per_hour=None, origin="given"))
