"""One worker's part of a plan, put together: its stage of the model, its state, and its exchanges
with the others.

It reads what the plan says, never which technique made it.
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
from farspan.runtime.comm.channels import Channel
from farspan.runtime.comm.messages import Messenger
from farspan.runtime.comm.scalars import ScalarExchange
from farspan.runtime.comm.topology import ProcessGroups, Topology
from farspan.runtime.device import settle
from farspan.runtime.model.decoder import Decoder
from farspan.runtime.model.tensor_axis import TensorAxis
from farspan.runtime.parallel.grad_sync import GradReducer
from farspan.runtime.parallel.outer_step import OuterStep
from farspan.runtime.parallel.param_gather import ParamGather
from farspan.runtime.parallel.pipeline import Batch, Pipeline
from farspan.runtime.spans import Spans
from farspan.runtime.state.full_state import FullState
from farspan.runtime.state.matrix_updates import MatrixUpdates
from farspan.runtime.state.tied_embeddings import TABLE, TiedEmbedding
from farspan.runtime.state.train_state import WORKING_DTYPES, TrainState
from farspan.runtime.state.zero_buckets import Bucket, Division
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
        """Ranks whose own loss is not finite; where every loss is, those whose gradient is not,
        maybe by another's part of it."""
        losses = [rank for rank, (loss, _) in self.by_rank.items() if not math.isfinite(loss)]
        return losses or [
            rank for rank, (_, square) in self.by_rank.items() if not math.isfinite(square)
        ]


class Executor:
    """Runs the steps of a worker. Every method is called by all workers of its replica, `meet` by
    all of the run."""

    def __init__(self, topology: Topology, device: torch.device) -> None:
        plan = topology.plan
        stage = topology.stage
        self.topology = topology
        self.device = device
        self.messenger = Messenger()
        # On MPS spans are of orders given (domain.results.IN_STEP).
        self.spans = Spans() if device.type == "mps" else Spans(lambda: settle(device))
        self.groups = groups = ProcessGroups(topology)
        tensor = groups.of(topology.group("tensor"), "tensor")
        with torch.device("meta"):
            self.model = Decoder(
                plan.model,
                attention=plan.train.attention,
                recompute=stage.recompute,
                units=stage.units,
                axis=TensorAxis(tensor, stage.mesh.size("tensor"), topology.tensor, stage.splits),
            )
        data = topology.group("data")
        shared = plan.model.tied and not (topology.first and topology.last)
        updates = self._matrix_updates(tensor) if plan.train.optimizer.muon else None
        self.state = TrainState(
            self.model,
            plan.train.precision,
            device,
            Division(
                zero=topology.zero,
                ways=len(data),
                index=data.index(topology.rank),
                bucket_bytes=stage.grad_sync.bucket_bytes,
                partial=self.model.partial,
                sliced=frozenset(self.model.slices),
                tied=TABLE if shared else None,
                matrices=updates.names if updates else frozenset(),
            ),
            updates,
            averaged=bool(plan.train.optimizer.average),
        )
        blocks = {f"blocks.{name}": block for name, block in self.model.blocks.named_children()}
        self.param_gather = ParamGather(topology, self.state, blocks, groups)
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
        self.totals = ScalarExchange(topology, self.messenger, Channel.TOTALS, 2)
        self.decisions = ScalarExchange(topology, self.messenger, Channel.DECISIONS, 5)
        with torch.device("meta"):
            shapes = {
                name: parameter.shape for name, parameter in Decoder(plan.model).named_parameters()
            }
        self.whole = FullState(topology, self.state, self.model.slices, shapes, self.messenger)
        self.tied = self._tied() if shared and (topology.first or topology.last) else None
        self.outer = OuterStep(topology, self.state, self.whole) if plan.sync else None
        self.grad_reducer.passed = self.param_gather.passed
        self.grad_reducer.done = self._summed

    def _matrix_updates(self, group: dist.ProcessGroup | None) -> MatrixUpdates:
        plan = self.topology.plan
        topology = self.topology
        alike = topology.group("site") if topology.zero else topology.peers
        precision = matrix_precision(
            plan.train.precision, (plan.devices[rank].kind for rank in alike)
        )
        return MatrixUpdates(
            models.graph(plan.model), self.model.slices, group, WORKING_DTYPES[precision]
        )

    def _tied(self) -> TiedEmbedding:
        """The exchange of the table's gradient, and who of both ends holds which of its rows."""
        stages = self.topology.replica.stages
        vocabulary = self.topology.plan.model.vocab_size
        rows = {}
        for stage, operator in ((stages[0], "tok"), (stages[-1], "head")):
            for group in stage.mesh.batch:
                ways = len(group) if stage.splits.get(operator) == "v" else 1
                for t, rank in enumerate(group):
                    part = t * vocabulary // ways, (t + 1) * vocabulary // ways
                    rows[rank] = part if ways > 1 else (0, vocabulary)
        return TiedEmbedding(self.topology, self.state, self.messenger, rows)

    def _summed(self, bucket: int) -> None:
        if self.tied is not None and self.state.buckets[bucket].tied:
            self.tied.complete()

    # -- a step
    #   --------------------------------------------------------------------------------------------

    def gradients(
        self, tokens: NDArray[np.int64], read: Callable[[int], Batch], scale: float
    ) -> Outcome:
        """The passes of a step and the sums of its gradients, of `scale` times the summed loss; the
        state then holds them. `tokens` are all that the replica reads in the step."""
        if self.tied is not None:
            self.tied.expect(tokens)
        early = len(self.totals.others) > 0 and not self._contributes_apart
        said = (lambda loss: self._say(float(loss), 0.0)) if early else None
        loss = self.pipeline.train(read, scale, said)
        with self.spans("collective"):
            if self.tied is not None:
                self.tied.release()
            self.grad_reducer.finish()
            # Only the first stage counts the table in the norm: the others say theirs before they
            # wait for it.
            if self.topology.first:
                self._add_tied()
        squares = self.state.square_sum(None if early else self._counts)
        if not early:
            self._say(float(loss), squares)
        with self.spans("collective"):
            if not self.topology.first:
                self._add_tied()
        with self.spans("receive"):
            parts = self.totals.hear()
        total = squares if early else sum(values[1] for values in parts.values())
        by_rank = {
            rank: (values[0], squares if early else values[1]) for rank, values in parts.items()
        }
        return Outcome(sum(values[0] for values in parts.values()), math.sqrt(total), by_rank)

    def _add_tied(self) -> None:
        if self.tied is not None:
            self.tied.add()

    def update(self, optimizer: Optimizer, lr: float, step: int, divisor: float) -> None:
        """One step of the optimizer, `step` counting from 1, on gradients divided by `divisor`."""
        with self.spans("update"):
            self.state.update(optimizer, lr, step, divisor)
            if optimizer.average and self.outer is None:
                self.state.follow(self.state.master, left(optimizer.average, step))
        with self.spans("collective"):
            self.param_gather.publish()
        self.messenger.settle()

    def meet(self, step: int, last: bool) -> None:
        """The replicas have made their steps up to `step`: `OuterStep.meet`."""
        assert self.outer is not None
        self.outer.meet(last)
        self._follow_meeting(step)
        self.param_gather.publish()

    def finish(self, step: int) -> None:
        """No meeting of the replicas comes any more: they take the exchange under way."""
        assert self.outer is not None
        self.outer.finish()
        self._follow_meeting(step)
        self.param_gather.publish()

    def _follow_meeting(self, step: int) -> None:
        plan = self.topology.plan
        if (
            (average := plan.train.optimizer.average)
            and self.outer is not None
            and plan.sync is not None
        ):
            self.state.follow(self.outer.anchor, left(average, step) ** plan.sync.every)

    def skip(self) -> None:
        """Drop the gradients of this step, which overflowed, and what rounding left of them: the
        next have another scale."""
        self.state.clear()
        self.grad_reducer.forget()
        self.messenger.settle()

    def _say(self, loss: float, squares: float) -> None:
        counts = self.topology.last and self.topology.tensor == 0
        self.totals.say((loss if counts else 0.0, squares))

    @property
    def _contributes_apart(self) -> bool:
        """Whether workers hold unlike parts of the gradient, so that its norm needs them all."""
        topology = self.topology
        return (
            len(topology.replica.stages) > 1
            or topology.mesh.size("tensor") > 1
            or topology.zero > 0
        )

    def _counts(self, bucket: Bucket) -> bool:
        """Whether no other worker of the replica counts what this one owns of a bucket."""
        topology = self.topology
        return (
            (bucket.sliced or topology.tensor == 0)
            and topology.group("site")[0] == topology.rank
            and (bucket.ways > 1 or topology.group("data")[0] == topology.rank)
            and (topology.first or not bucket.tied)
        )

    # -- beside training
    #   --------------------------------------------------------------------------------------------

    def evaluate(self, batches: Iterable[Batch]) -> list[float]:
        """The summed loss of each row of microbatches; nothing where another worker counts them."""
        self.model.eval()
        losses: list[float] = self.pipeline.evaluate(batches).tolist()
        self.model.train()
        self.messenger.settle()
        return losses if self.topology.last and self.topology.tensor == 0 else []

    @contextmanager
    def met(self) -> Iterator[None]:
        """Meanwhile the model is the run's: the average of its weights, or what a checkpoint has,
        which is the model of all replicas' last meeting."""
        outer = self.outer if self.outer is not None and self.outer.under_way else None
        if self.state.average:
            self.state.swap_average()
        elif outer is not None:
            outer.show_met()
        else:
            yield
            return
        self.publish()
        yield
        if self.state.average:
            self.state.swap_average()
        elif outer is not None:
            outer.show_own()
        self.publish()

    def load(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Take the whole values of all parameters of the model: of each, what is held here."""
        held = set(self.state.names)
        slices = self.model.slices
        self.state.load(
            (n, slices[n].of(whole) if n in slices else whole) for n, whole in values if n in held
        )
        self.begin()

    def begin(self) -> None:
        """The masters are the first weights of a run."""
        self.publish()
        self.state.begin_average()
        if self.outer is not None:
            self.outer.start()

    def publish(self) -> None:
        """After the masters changed otherwise than by `update`."""
        self.state.publish()
        self.param_gather.publish()


def left(share: float, step: int) -> float:
    """What a step leaves of an average: less in the first ones, which soon would be forgotten (as
    TensorFlow's ExponentialMovingAverage has it)."""
    return min(share, (1 + step) / (10 + step))
