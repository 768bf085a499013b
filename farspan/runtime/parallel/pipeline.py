"""A step of one worker's stage: the passes of its schedule, and the messages to the stages before
and after it.

The order of passes is the one that the estimator simulates (`order_1f1b_passes`). Every message
has a receive that was posted before the sender can be that far ahead, over the end of the step too,
so that it travels at once; nobody waits for a send. A whole model is a pipeline of one stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from farspan.runtime.comm.messages import Messenger
from farspan.runtime.comm.topology import ProcessGroups, Topology
from farspan.runtime.model.decoder import Decoder
from farspan.runtime.model.dropout import Dropout
from farspan.runtime.parallel.grad_sync import GradReducer
from farspan.runtime.parallel.param_gather import ParamGather
from farspan.runtime.parallel.stage_sends import StageMessages, StageSends
from farspan.runtime.spans import Spans
from farspan.semantics.pass_order import depths_in_flight, order_1f1b_passes


class Batch(NamedTuple):
    """Tokens and targets (B, S) of a microbatch, and what of it is dropped."""

    inputs: Tensor
    targets: Tensor
    dropout: Dropout | None = None


#: Microbatches of a validation after which those before them must have left.
EVALUATED = 8


class Pipeline:
    """The passes of one stage. `run_microbatches` makes those of one step,
    `evaluate_batches` forward passes alone."""

    def __init__(
        self,
        topology: Topology,
        model: Decoder,
        groups: ProcessGroups,
        messenger: Messenger,
        grad_reducer: GradReducer,
        param_gather: ParamGather,
        spans: Spans,
    ) -> None:
        self._topology = topology
        self._model = model
        self._grad_reducer = grad_reducer
        self._spans = spans
        self._param_gather = param_gather
        self._messenger = messenger
        self._depths = depths_in_flight(topology.replica)
        self._device = torch.device(topology.device)
        self._edges = StageSends(topology, groups, messenger, self._depths)

    def run_microbatches(
        self,
        read: Callable[[int], Batch],
        scale: float | Tensor,
        on_loss: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Make forward and backward passes of all microbatches; gradients of `scale` times the
        summed loss are collected and their sums begun. Returns this worker's summed loss, and gives
        it to `on_loss` before the last backward pass."""
        topology = self._topology
        edges = self._edges
        spans = self._spans
        microbatches = topology.replica.microbatches
        total = torch.zeros((), device=self._device)
        live: dict[int, tuple[Tensor, Tensor]] = {}
        self._param_gather.begin_passes()
        for kind, i in order_1f1b_passes(microbatches, self._depths[topology.stage_index]):
            if kind == "forward":
                batch = read(i)
                x = batch.inputs
                if not topology.first:
                    x = self._receive_rows(edges.from_before, i).requires_grad_()
                with spans("forward", i):
                    y = self._model.forward_blocks(x, batch.dropout)
                    if topology.last:
                        y = self._model.summed_loss(y, batch.targets)
                        total += y.detach()
                if not topology.last:
                    edges.to_next.send_rows(y)
                live[i] = (x, y)
                if on_loss is not None and i == microbatches - 1:
                    on_loss(total)
                continue
            x, y = live.pop(i)
            gradient = None if topology.last else self._receive_rows(edges.from_next, i)
            self._grad_reducer.prepare_backward(i == microbatches - 1)
            with spans("backward", i):
                # Given a gradient, torch imports its symbolic shapes first, half a second: a loss
                # needs none.
                if gradient is None:
                    y = y * scale
                y.backward(gradient)
            if not topology.first:
                assert x.grad is not None
                edges.to_before.send_rows(x.grad)
        self._param_gather.end_passes()
        return total

    def _receive_rows(self, messages: StageMessages, microbatch: int) -> Tensor:
        with self._spans("receive", microbatch):
            return messages.take_rows()

    @torch.no_grad()
    def evaluate_batches(self, batches: Iterable[Batch]) -> Tensor:
        """Return the summed loss of each row of all microbatches, each of this worker's rows of a
        microbatch; of a stage that is not the last, nothing."""
        topology = self._topology
        losses = [torch.zeros(0, device=self._device)]
        self._param_gather.begin_passes()
        for i, batch in enumerate(batches, 1):
            x = batch.inputs if topology.first else self._edges.evaluated_before.take_rows()
            y = self._model.forward_blocks(x)
            if topology.last:
                losses.append(self._model.row_losses(y, batch.targets))
            else:
                self._edges.evaluated_next.send_rows(y)
            # Else all that a whole validation sends would stay in memory.
            if i % EVALUATED == 0:
                self._messenger.wait_for_previous_step()
        self._param_gather.end_passes()
        return torch.cat(losses)
