"""One worker's part of a plan, put together: its stage of the model, its state, and its exchanges
with the others.

It reads what the plan has, never which technique made it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from farspan import models
from farspan.domain.train import Optimizer
from farspan.runtime.comm.host_staging import HostStaging
from farspan.runtime.comm.message_tags import MessageChannel
from farspan.runtime.comm.messages import Messenger
from farspan.runtime.comm.scalars import ScalarExchange
from farspan.runtime.comm.topology import ProcessGroups, Topology
from farspan.runtime.device import synchronize_device
from farspan.runtime.model.decoder import Decoder, parameter_shapes
from farspan.runtime.model.tensor_axis import TensorAxis
from farspan.runtime.native_dtypes import TORCH_DTYPES
from farspan.runtime.parallel.grad_sync import GradReducer
from farspan.runtime.parallel.outer_step import OuterStep
from farspan.runtime.parallel.param_gather import ParamGather
from farspan.runtime.parallel.pipeline import Batch, Pipeline
from farspan.runtime.spans import Spans
from farspan.runtime.state.full_state import FullState
from farspan.runtime.state.muon import MatrixUpdates
from farspan.runtime.state.tied_embeddings import TABLE, TiedEmbedding
from farspan.runtime.state.train_state import (
    TrainState,
    UpdateScalars,
    ema_decay,
    update_scalars,
)
from farspan.runtime.state.zero_buckets import Bucket, ZeroDivision
from farspan.semantics.kernel_choice import matrix_precision


@dataclass(frozen=True)
class Outcome:
    """What all workers of a replica know after the passes of a step: the summed loss, the norm of
    the gradient sum before any division, and the loss and the squared norm by rank."""

    loss: float
    norm: float
    by_rank: dict[int, tuple[float, float]]

    @property
    def faulty(self) -> list[int]:
        """Ranks with a loss of their own that is not finite; where every loss is, those with a
        gradient that is not, maybe by another's part of it."""
        losses = [rank for rank, (loss, _) in self.by_rank.items() if not math.isfinite(loss)]
        squares = [rank for rank, (_, square) in self.by_rank.items() if not math.isfinite(square)]
        return losses or squares


class Executor:
    """Runs the steps of a worker. All workers of its replica call every method, all of
    the run `synchronize_replicas`."""

    def __init__(self, topology: Topology, device: torch.device) -> None:
        plan = topology.plan
        stage = topology.stage
        self.topology = topology
        self.device = device
        self.staging = HostStaging(device)
        self.messenger = Messenger(self.staging)
        # On MPS spans are of orders given (domain.run_events.IN_STEP).
        self.spans = Spans() if device.type == "mps" else Spans(lambda: synchronize_device(device))
        self.groups = groups = ProcessGroups(topology)
        tensor = groups.of(topology.group("tensor"), "tensor")
        axis = TensorAxis(tensor, stage.mesh.size("tensor"), topology.tensor, stage.splits)
        with torch.device("meta"):
            self.model = Decoder(
                plan.model,
                attention=plan.train.attention,
                recompute=stage.recompute,
                units=stage.units,
                axis=axis,
            )
        slices = self.model.slices
        optimizer = plan.train.optimizer
        updates = self._matrix_updates(tensor) if optimizer.muon else None
        # Both ends of the pipeline have the table, and exchange its gradient.
        shared = plan.model.tied and not (topology.first and topology.last)
        table = TABLE if shared else None
        matrices = updates.matrix_names if updates else frozenset[str]()
        data = topology.group("data")
        division = ZeroDivision(
            zero=topology.zero,
            ways=len(data),
            index=data.index(topology.rank),
            bucket_bytes=stage.grad_sync.bucket_bytes,
            partial=self.model.partial,
            sliced=frozenset(slices),
            tied=table,
            matrices=matrices,
        )
        self.state = TrainState(
            self.model,
            plan.train.precision,
            device,
            division,
            updates,
            averaged=bool(optimizer.average),
        )
        self.param_gather = ParamGather(topology, self.state, self.model.blocks, groups)
        self.grad_reducer = GradReducer(topology, self.state, groups, self.messenger)
        self.pipeline = Pipeline(
            topology,
            self.model,
            groups,
            self.messenger,
            self.grad_reducer,
            self.param_gather,
            self.spans,
        )
        self.totals = ScalarExchange(topology, self.messenger, MessageChannel.TOTALS, 2)
        self.decisions = ScalarExchange(topology, self.messenger, MessageChannel.DECISIONS, 5)
        shapes = parameter_shapes(plan.model)
        self.whole = FullState(topology, self.state, slices, shapes, self.messenger)
        self.tied: TiedEmbedding | None = None
        if shared and (topology.first or topology.last):
            self.tied = TiedEmbedding(topology, self.state, self.messenger, self._table_rows())
        self.outer: OuterStep | None = None
        if plan.sync is not None:
            self.outer = OuterStep(topology, self.state, self.whole, self.staging)
        self.grad_reducer.on_bucket_ready = self.param_gather.on_bucket_ready
        self.grad_reducer.on_bucket_reduced = self._on_bucket_reduced

    def _matrix_updates(self, group: dist.ProcessGroup | None) -> MatrixUpdates:
        topology = self.topology
        plan = topology.plan
        # All that own parts of the same matrices compute in one precision.
        owners = topology.group("site") if topology.zero else topology.peers
        kinds = (plan.devices[rank].kind for rank in owners)
        dtype = TORCH_DTYPES[matrix_precision(plan.train.precision, kinds)]
        return MatrixUpdates(models.graph(plan.model), self.model.slices, group, dtype)

    def _table_rows(self) -> dict[int, tuple[int, int]]:
        """Return the rows [start, stop) of the table that each worker of both ends holds."""
        stages = self.topology.replica.stages
        vocabulary = self.topology.plan.model.vocab_size
        rows = {}
        for stage, operator in ((stages[0], "tok"), (stages[-1], "head")):
            for group in stage.mesh.batch:
                ways = len(group) if stage.splits.get(operator) == "v" else 1
                for t, rank in enumerate(group):
                    part = t % ways
                    rows[rank] = (part * vocabulary // ways, (part + 1) * vocabulary // ways)
        return rows

    def _on_bucket_reduced(self, bucket: int) -> None:
        if self.tied is not None and self.state.buckets[bucket].tied:
            self.tied.on_grad_ready()

    # -- a step
    #   --------------------------------------------------------------------------------------------

    def compute_gradients(
        self, tokens: NDArray[np.int64], read: Callable[[int], Batch], scale: float
    ) -> Outcome:
        """Make the passes of a step and the sums of its gradients, of `scale` times the summed
        loss; the state then holds them. `tokens` are all that the replica reads in the step."""
        tied = self.tied
        if tied is not None:
            tied.post_receives(tokens)
        # Where every worker knows the norm by itself, the loss is sent before the last backward
        # pass.
        norm_is_local = len(self.totals.others) > 0 and not self._has_partial_gradient
        loss = self.pipeline.run_microbatches(
            read, scale, self._send_loss if norm_is_local else None
        )
        with self.spans("collective"):
            if tied is not None:
                tied.on_passes_done()
            self.grad_reducer.finish_sums()
            # Only the first stage counts the table in the norm: the others send theirs before they
            # wait for it.
            if tied is not None and self.topology.first:
                tied.add_received()
        squares = self.state.squared_grad_norm(None if norm_is_local else self._counts_in_norm)
        if not norm_is_local:
            self._send_totals(float(loss), squares)
        with self.spans("collective"):
            if tied is not None and not self.topology.first:
                tied.add_received()
        with self.spans("receive"):
            received = self.totals.receive_values()
        by_rank = {}
        for rank, (rank_loss, rank_squares) in received.items():
            by_rank[rank] = (rank_loss, squares if norm_is_local else rank_squares)
        total_loss = sum(rank_loss for rank_loss, _ in by_rank.values())
        if not norm_is_local:
            squares = sum(rank_squares for _, rank_squares in by_rank.values())
        return Outcome(total_loss, math.sqrt(squares), by_rank)

    def optimizer_step(self, optimizer: Optimizer, lr: float, step: int, divisor: float) -> None:
        """Make one step of the optimizer, `step` counting from 1, on gradients divided by
        `divisor`."""
        self.update_state(optimizer, lr, step, divisor)
        self.publish_update()

    def update_state(self, optimizer: Optimizer, lr: float, step: int, divisor: float) -> None:
        """Make one step of the optimizer in the state that this worker owns: no other takes part
        in it. `publish_update` comes next."""
        self.staging.delay_changes()
        scalars = update_scalars(optimizer, lr, step, divisor)
        self._update_state(optimizer, self.state.on_device(scalars))

    def publish_update(self) -> None:
        """Give the others what this worker has updated."""
        with self.spans("collective"):
            self.param_gather.all_gather_updated()
        self.messenger.wait_for_previous_step()

    def update(self, optimizer: Optimizer, scalars: UpdateScalars) -> None:
        """Make one step of the optimizer by numbers that lie where the state takes them from."""
        self._update_state(optimizer, scalars)
        with self.spans("collective"):
            self.param_gather.all_gather_updated()

    def _update_state(self, optimizer: Optimizer, scalars: UpdateScalars) -> None:
        with self.spans("update"):
            self.state.update(optimizer, scalars)
            if optimizer.average and self.outer is None:
                self.state.update_weight_average(self.state.master, scalars.average_weight)

    def synchronize_replicas(self, step: int, last: bool) -> None:
        """Synchronize the replicas, which have made their steps up to `step`."""
        assert self.outer is not None
        self.staging.delay_changes()
        self.outer.synchronize_replicas(last)
        self._publish_outer_step(step)

    def finish_outer_sync(self, step: int) -> None:
        """Take the exchange under way: no outer sync comes any more."""
        assert self.outer is not None
        self.staging.delay_changes()
        self.outer.finish_exchange()
        self._publish_outer_step(step)

    def _publish_outer_step(self, step: int) -> None:
        plan = self.topology.plan
        average = plan.train.optimizer.average
        if average and self.outer is not None and plan.sync is not None:
            decay = ema_decay(average, step) ** plan.sync.every
            self.state.update_weight_average(self.outer.synced_parameters, 1 - decay)
        self.param_gather.all_gather_updated()

    def skip_step(self) -> None:
        """Drop the gradients of this step, which overflowed, and their quantization residuals: the
        next have another scale."""
        self.state.clear_gradients()
        self.grad_reducer.drop_residuals()
        self.messenger.wait_for_previous_step()

    def _send_loss(self, loss: Tensor) -> None:
        if self.staging.engine is None:
            self._send_totals(float(loss), 0.0)
        else:
            counted = loss if self._counts_loss else torch.zeros_like(loss)
            self.totals.send_computed(torch.stack((counted, torch.zeros_like(loss))).double())

    def _send_totals(self, loss: float, squares: float) -> None:
        self.totals.send_values((loss if self._counts_loss else 0.0, squares))

    @property
    def _counts_loss(self) -> bool:
        return self.topology.last and self.topology.tensor == 0

    @property
    def _has_partial_gradient(self) -> bool:
        """Whether workers hold unlike parts of the gradient, so that its norm needs them all."""
        topology = self.topology
        divided = topology.zero > 0 or topology.mesh.size("tensor") > 1
        return divided or len(topology.replica.stages) > 1

    def _counts_in_norm(self, bucket: Bucket) -> bool:
        """Return whether no other worker of the replica counts what this one owns of a bucket."""
        topology = self.topology
        if topology.group("site")[0] != topology.rank:
            return False
        if bucket.tied and not topology.first:
            return False
        if not bucket.sliced and topology.tensor != 0:
            return False
        return bucket.ways > 1 or topology.group("data")[0] == topology.rank

    # -- evaluation and weights
    #   --------------------------------------------------------------------------------------------

    def evaluate_batches(self, batches: Iterable[Batch]) -> list[float]:
        """Return the summed loss of each row of microbatches; nothing where another worker counts
        them."""
        self.model.eval()
        losses: list[float] = self.pipeline.evaluate_batches(batches).tolist()
        self.model.train()
        self.messenger.wait_for_previous_step()
        return losses if self._counts_loss else []

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Give the model the run's weights meanwhile: their average, or what a checkpoint has,
        which is the model of all replicas' last outer sync."""
        self.staging.delay_changes()
        outer = self.outer if self.outer is not None and self.outer.under_way else None
        if self.state.average:
            self.state.swap_weight_average()
        elif outer is not None:
            outer.show_synced()
        else:
            yield
            return
        self.publish_masters()
        yield
        if self.state.average:
            self.state.swap_weight_average()
        elif outer is not None:
            outer.show_own()
        self.publish_masters()

    def load_parameters(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Take the whole values of all parameters of the model: of each, the part that is here."""
        self.staging.delay_changes()
        self.state.load_parameters(self._own_parts(values))
        self.begin_run()

    def _own_parts(self, values: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        own_names = {*self.state.names, *self.state.frozen}
        for name, whole in values:
            if name in own_names:
                cut = self.model.slices.get(name)
                yield name, whole if cut is None else cut.copy_from(whole)

    def begin_run(self) -> None:
        """Make the masters the first weights of a run."""
        self.publish_masters()
        self.state.begin_weight_average()
        if self.outer is not None:
            self.outer.start_from_masters()

    def publish_masters(self) -> None:
        """Publish the masters after they changed otherwise than by `optimizer_step`."""
        self.state.publish_masters()
        self.param_gather.all_gather_updated()
