"""What one worker reads of each step: its samples' tokens on its device, as the training has
them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farspan.domain.plan import row_quantum
from farspan.runtime.parallel.device_step import StepLayout, read_batch
from farspan.runtime.parallel.pipeline import Batch
from farspan.runtime.training.prefetch import Prefetcher, ReadStep
from farspan.runtime.training.sample_order import Indices, dropout_seeds, mask, order_samples
from farspan.runtime.training.worker_parts import Worker

Arrays = tuple[NDArray[np.int64], NDArray[np.int64]]
#: Devices that wait for what the host reads unless it is read before.
PREFETCHING_DEVICES = frozenset({"cuda"})
NO_TOKENS = np.empty(0, dtype=np.int64)


class Batches:
    """`order` is that of all samples of the run."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._train = train = worker.plan.train
        self._topology = topology = worker.executor.topology
        self.order = order_samples(worker.train, train)
        #: Rows of a microbatch without samples: the fewest, which count for nothing.
        self._least_rows = row_quantum(topology.mesh, topology.stage.splits)
        self._by_microbatch = topology.samples_by_microbatch(0)
        rows = [len(samples) or self._least_rows for samples in self._by_microbatch]
        self.layout = StepLayout(tuple(rows), train.seq_len)
        self._prefetcher: Prefetcher | None = None
        device = worker.group.device
        if device.type in PREFETCHING_DEVICES:
            self._prefetcher = Prefetcher(
                self.read_steps, self.layout.size, train.step_limit, device
            )

    def read_step(self, step: int) -> ReadStep:
        """Return the inputs of this worker in a step; for a GPU they were read before."""
        if self._prefetcher is not None:
            return self._prefetcher.get(step)
        (read,) = self.read_steps(step, [torch.zeros(self.layout.size, dtype=torch.int32)])
        return read

    def microbatch(self, step: ReadStep, microbatch: int) -> Batch:
        """Return a microbatch on the device, with its dropout."""
        device = self._worker.group.device
        dropout = self._train.regular.dropout
        return read_batch(self.layout, step.inputs, microbatch, device, dropout)

    def close(self) -> None:
        """End what reads ahead."""
        if self._prefetcher is not None:
            self._prefetcher.close()

    def read_steps(self, first_step: int, arrays: Sequence[Tensor]) -> list[ReadStep]:
        """Read the steps from `first_step` on into arrays, one for each step."""
        train = self._train
        windows = self._worker.train
        count = len(arrays)
        first = first_step * train.batch
        samples = np.arange(first, first + count * train.batch)
        window_of = self.order.window(samples)
        valid_by_step = windows.valid(window_of).reshape(count, train.batch)

        # This worker's samples of all steps: of each microbatch its place in the step.
        in_step = samples.reshape(count, train.batch)
        window_in_step = window_of.reshape(count, train.batch)
        own = np.concatenate(self._by_microbatch)
        own_samples = in_step[:, own].ravel()
        inputs, targets = self._read(window_in_step[:, own].ravel(), own_samples)
        seeds = np.zeros(len(own_samples), np.int32)
        if train.regular.dropout:
            seeds = dropout_seeds(own_samples, train.seed)

        replica = self._topology.replica_samples(0)
        steps = list[ReadStep]()
        for i, array in enumerate(arrays):
            row = i * len(own)
            for microbatch, of_microbatch in enumerate(self._by_microbatch):
                rows = slice(row, row + len(of_microbatch))
                row = rows.stop
                tokens = self.layout.tokens(array, microbatch)
                if not len(of_microbatch):
                    tokens[0] = 0
                    tokens[1] = -1
                    continue
                tokens[0] = torch.from_numpy(inputs[rows])
                tokens[1] = torch.from_numpy(targets[rows])
                self.layout.seeds(array, microbatch)[:] = torch.from_numpy(seeds[rows])
            replica_tokens = NO_TOKENS
            if self._worker.executor.tied is not None:
                replica_tokens, _ = self._read(window_in_step[i, replica], in_step[i, replica])
            step = ReadStep(
                valid=int(valid_by_step[i, replica].sum()),
                valid_of_all=int(valid_by_step[i].sum()),
                replica_tokens=replica_tokens,
                inputs=array,
            )
            steps.append(step)
        return steps

    def _read(self, window_of: Indices, samples: NDArray[np.int64]) -> Arrays:
        """Read the windows of samples: inputs, some of them masked if the training does that, and
        targets."""
        train = self._train
        inputs, targets = self._worker.train.read(window_of)
        share = train.regular.mask
        if share:
            vocab_size = self._worker.manifest.vocab_size
            inputs = mask(inputs, samples, share, vocab_size, train.seed)
        return inputs, targets

    def on_device(self, arrays: Arrays) -> Batch:
        """Copy tokens and targets to the device; a worker without any reads the fewest rows, which
        count for nothing."""
        inputs, targets = arrays
        if len(inputs) == 0:
            inputs = np.zeros((self._least_rows, inputs.shape[1]), np.int64)
            targets = np.full_like(inputs, -1)
        device = self._worker.group.device
        tokens = torch.from_numpy(inputs).to(device, non_blocking=True)
        return Batch(tokens, torch.from_numpy(targets).to(device, non_blocking=True))
