"""A step of one device, from tokens to new weights, that asks the host for nothing: what changes
from step to step it reads from the device's memory, and what came of it it leaves there.

So it can be recorded once as a CUDA graph and launched as a whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from farspan.domain.train import TrainSpec
from farspan.runtime.model.dropout import Dropout
from farspan.runtime.parallel.executor import Executor
from farspan.runtime.parallel.pipeline import Batch
from farspan.runtime.state.train_state import UpdateScalars

#: Numbers at the beginning of a step's inputs: what the loss is multiplied by, and an update's.
SCALARS = ("loss_scale", "lr", "table_lr", "updates", "average_weight")


@dataclass(frozen=True)
class StepLayout:
    """Where the inputs of a step lie in one int32 array, the same on host and device: SCALARS, of
    each microbatch tokens and targets (2, rows, seq_len), and the seeds of its dropout (rows,)."""

    #: Rows of each microbatch.
    rows: tuple[int, ...]
    seq_len: int

    @property
    def size(self) -> int:
        return self._start(len(self.rows))

    def scalars(self, inputs: Tensor) -> Tensor:
        """Return the fp32 numbers of SCALARS."""
        return inputs[: len(SCALARS)].view(torch.float32)

    def tokens(self, inputs: Tensor, microbatch: int) -> Tensor:
        """Return tokens and targets (2, rows, seq_len) of a microbatch."""
        rows = self.rows[microbatch]
        start = self._start(microbatch)
        return inputs[start : start + 2 * rows * self.seq_len].view(2, rows, self.seq_len)

    def seeds(self, inputs: Tensor, microbatch: int) -> Tensor:
        """Return the seeds (rows,) of a microbatch's dropout."""
        stop = self._start(microbatch + 1)
        return inputs[stop - self.rows[microbatch] : stop]

    def _start(self, microbatch: int) -> int:
        before = sum(self.rows[:microbatch])
        return len(SCALARS) + before * (2 * self.seq_len + 1)


def read_batch(
    layout: StepLayout, inputs: Tensor, microbatch: int, device: torch.device, dropout: float
) -> Batch:
    """Return a microbatch of a step's inputs on a device, with its dropout."""
    both = layout.tokens(inputs, microbatch).to(device, non_blocking=True)
    tokens, targets = both.long().unbind()
    if not dropout:
        return Batch(tokens, targets)
    seeds = layout.seeds(inputs, microbatch).to(device, non_blocking=True)
    return Batch(tokens, targets, Dropout(dropout, seeds))


class DeviceStep:
    """One step of a plan with one device; `run` makes it from `inputs` and fills `results`.

    A loss or a gradient that is not finite stops this update and all later ones: by the time the
    host sees the results, the next step is under way.
    """

    def __init__(self, executor: Executor, train: TrainSpec, layout: StepLayout) -> None:
        self._executor = executor
        self._train = train
        self.layout = layout
        device = executor.device
        self.inputs = torch.zeros(layout.size, dtype=torch.int32, device=device)
        #: The summed loss, and the norm of the gradient before clipping.
        self.results = torch.zeros(2, dtype=torch.float64, device=device)
        #: 0.0 from the first step on that was not finite.
        self._going = torch.ones((), device=device)

    def list_changed(self) -> list[Tensor]:
        """List the tensors that a step changes and another begins with, but for the working
        weights, which are the masters rounded."""
        state = self._executor.state
        changed = [*state.master, *state.exp_avg, *state.exp_avg_sq, *state.average]
        return [tensor for tensor in changed if tensor.numel()]

    def run(self) -> None:
        """Make the passes, and the update."""
        executor = self._executor
        state = executor.state
        train = self._train
        loss_scale, lr, table_lr, updates, average_weight = self.layout.scalars(
            self.inputs
        ).unbind()
        dropout = train.regular.dropout

        def read(microbatch: int) -> Batch:
            return read_batch(self.layout, self.inputs, microbatch, executor.device, dropout)

        loss = executor.pipeline.run_microbatches(read, loss_scale)
        executor.grad_reducer.finish_sums()
        norm = state.norm_on_device()
        torch.stack((loss.double(), norm), out=self.results)

        # Neither is negative: their sum is finite where both are.
        self._going.mul_(self.results.sum() < math.inf)
        clip = train.optimizer.clip
        divisor = (norm / clip).clamp(min=1.0) if clip else torch.ones_like(norm)
        if state.average:
            average_weight = average_weight * self._going
        numbers = UpdateScalars(
            lr=lr,
            table_lr=table_lr,
            updates=updates,
            grad_divisor=divisor.float(),
            average_weight=average_weight,
            skip=1.0 - self._going,
        )
        executor.update(train.optimizer, numbers)
