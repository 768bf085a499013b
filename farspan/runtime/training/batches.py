"""What one worker reads of each step: its samples' tokens on its device, as the training has
them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from farspan.domain.plan import row_quantum
from farspan.runtime.model.dropout import Dropout
from farspan.runtime.parallel.pipeline import Batch
from farspan.runtime.training.data import Order, dropout_seeds, mask
from farspan.runtime.training.parts import Worker

Arrays = tuple[NDArray[np.int64], NDArray[np.int64]]


class Batches:
    """`order` is that of all samples of the run."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._train = worker.plan.train
        self.order = Order(worker.train.count, self._train.seed, self._train.regular.reshuffle)

    def valid(self, samples: NDArray[np.int64]) -> int:
        """How many targets these samples have."""
        return int(self._worker.train.valid(self.order.window(samples)).sum())

    def read(self, samples: NDArray[np.int64]) -> Arrays:
        """Inputs, some of them masked where the training does that, and targets."""
        inputs, targets = self._worker.train.read(self.order.window(samples))
        if share := self._train.regular.mask:
            inputs = mask(
                inputs, samples, share, self._worker.manifest.vocab_size, self._train.seed
            )
        return inputs, targets

    def of(self, samples: NDArray[np.int64]) -> Batch:
        """A microbatch on the device, with what is dropped of it."""
        batch = self.on_device(self.read(samples))
        if not (share := self._train.regular.dropout):
            return batch
        seeds = np.zeros(len(batch.inputs), np.int32)  # Also of rows that count for nothing.
        seeds[: len(samples)] = dropout_seeds(samples, self._train.seed)
        return batch._replace(
            dropout=Dropout(share, torch.from_numpy(seeds).to(self._worker.group.device))
        )

    def on_device(self, arrays: Arrays) -> Batch:
        """Tokens and targets on the device; a worker without any reads the fewest rows, which count
        for nothing."""
        inputs, targets = arrays
        if len(inputs) == 0:
            topology = self._worker.executor.topology
            shape = row_quantum(topology.mesh, topology.stage.splits), inputs.shape[1]
            inputs = np.zeros(shape, np.int64)
            targets = np.full(shape, -1, np.int64)
        device = self._worker.group.device
        return Batch(
            *(torch.from_numpy(array).to(device, non_blocking=True) for array in (inputs, targets))
        )
