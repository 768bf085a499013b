"""What one worker reads of each step: its samples' tokens on its device, as the training has
them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from farspan.domain.plan import row_quantum
from farspan.runtime.model.dropout import Dropout
from farspan.runtime.parallel.pipeline import Batch
from farspan.runtime.training.sample_order import SampleOrder, dropout_seeds, mask
from farspan.runtime.training.worker_parts import Worker

Arrays = tuple[NDArray[np.int64], NDArray[np.int64]]


class Batches:
    """`order` is that of all samples of the run."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._train = worker.plan.train
        self.order = SampleOrder(
            worker.train.count, self._train.seed, self._train.regular.reshuffle
        )

    def valid(self, samples: NDArray[np.int64]) -> int:
        """Count the targets of these samples."""
        windows = self.order.window(samples)
        return int(self._worker.train.valid(windows).sum())

    def read(self, samples: NDArray[np.int64]) -> Arrays:
        """Read inputs, some of them masked if the training does that, and targets."""
        train = self._train
        inputs, targets = self._worker.train.read(self.order.window(samples))
        if share := train.regular.mask:
            vocab_size = self._worker.manifest.vocab_size
            inputs = mask(inputs, samples, share, vocab_size, train.seed)
        return inputs, targets

    def of(self, samples: NDArray[np.int64]) -> Batch:
        """Return a microbatch on the device, with its dropout."""
        batch = self.on_device(self.read(samples))
        if not (share := self._train.regular.dropout):
            return batch
        seeds = np.zeros(len(batch.inputs), np.int32)  # Also of rows that count for nothing.
        seeds[: len(samples)] = dropout_seeds(samples, self._train.seed)
        device_seeds = torch.from_numpy(seeds).to(self._worker.group.device)
        return batch._replace(dropout=Dropout(share, device_seeds))

    def on_device(self, arrays: Arrays) -> Batch:
        """Copy tokens and targets to the device; a worker without any reads the fewest rows, which
        count for nothing."""
        inputs, targets = arrays
        if len(inputs) == 0:
            topology = self._worker.executor.topology
            rows = row_quantum(topology.mesh, topology.stage.splits)
            inputs = np.zeros((rows, inputs.shape[1]), np.int64)
            targets = np.full_like(inputs, -1)
        device = self._worker.group.device
        tokens = torch.from_numpy(inputs).to(device, non_blocking=True)
        return Batch(tokens, torch.from_numpy(targets).to(device, non_blocking=True))
