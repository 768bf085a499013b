"""A step of one worker's stage: the passes of its schedule, and the messages to the stages beside it.

The order of passes is the one that the estimator simulates (`estimate.schedule.order`). Every message has a receive
that was posted as many messages before as the sender can be ahead, over the end of the step too, so that it travels at
once; nobody waits for a send. A whole model is a pipeline of one stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from farspan.estimate.schedule import effective_depths, order
from farspan.runtime.comm.messages import Wire
from farspan.runtime.comm.topology import Groups, Place
from farspan.runtime.model.decoder import Decoder
from farspan.runtime.parallel.grad_sync import Reducer
from farspan.runtime.parallel.param_gather import Gatherer
from farspan.runtime.parallel.stage_sends import Edges, Messages
from farspan.runtime.spans import Spans

#: Inputs and targets of one microbatch, (rows, S) each.
Batch = tuple[Tensor, Tensor]


#: Microbatches of a validation after which those before them must have left.
EVALUATED = 8


class Pipeline:
    """The passes of one stage. `train` makes those of one step, `evaluate` forward passes alone."""

    def __init__(
        self, place: Place, model: Decoder, groups: Groups, wire: Wire, reducer: Reducer, gatherer: Gatherer,
        spans: Spans,
    ) -> None:  # fmt: skip
        self._place, self._model, self._reducer, self._spans = place, model, reducer, spans
        self._gatherer, self._wire = gatherer, wire
        self._depths = effective_depths(place.replica)
        self._device = torch.device(place.device)
        self._edges = Edges(place, groups, wire, self._depths)

    def train(self, read: Callable[[int], Batch], scale: float, said: Callable[[Tensor], None] | None = None) -> Tensor:
        """Forward and backward passes of all microbatches; gradients of `scale` times the summed loss are collected and
        their sums begun. Returns this worker's summed loss, and tells it to `said` before the last backward pass."""
        place, edges, spans = self._place, self._edges, self._spans
        microbatches = place.replica.microbatches
        total = torch.zeros((), device=self._device)
        live: dict[int, tuple[Tensor, Tensor]] = {}
        self._gatherer.begin()
        for kind, i in order(microbatches, self._depths[place.stage_index]):
            if kind == "forward":
                batch = read(i)
                x = batch[0] if place.first else self._take(edges.from_before, i).requires_grad_()
                with spans("forward", i):
                    y = self._model.advance(x)
                    if place.last:
                        y = self._model.finish(y, batch[1])
                        total += y.detach()
                if not place.last:
                    edges.to_next.send(y)
                live[i] = (x, y)
                if said is not None and i == microbatches - 1:
                    said(total)
                continue
            x, y = live.pop(i)
            gradient = None if place.last else self._take(edges.from_next, i)
            self._reducer.arm(i == microbatches - 1)
            with spans("backward", i):
                # Given a gradient, torch imports its symbolic shapes first, half a second: a loss needs none.
                (y * scale).backward() if gradient is None else y.backward(gradient)
            if not place.first:
                assert x.grad is not None
                edges.to_before.send(x.grad)
        self._gatherer.end()
        return total

    def _take(self, messages: Messages, microbatch: int) -> Tensor:
        with self._spans("receive", microbatch):
            return messages.take()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Tensor:
        """The summed loss of each row of as many microbatches as there are, each of this worker's rows of a microbatch;
        of a stage that is not the last, nothing."""
        place, losses = self._place, [torch.zeros(0, device=self._device)]
        self._gatherer.begin()
        for i, batch in enumerate(batches):
            x = batch[0] if place.first else self._edges.evaluated_before.take()
            y = self._model.advance(x)
            if place.last:
                losses.append(self._model.row_losses(y, batch[1]))
            else:
                self._edges.evaluated_next.send(y)
            if (i + 1) % EVALUATED == 0:  # Else all that a whole validation sends would stay in memory.
                self._wire.settle()
        self._gatherer.end()
        return torch.cat(losses)
