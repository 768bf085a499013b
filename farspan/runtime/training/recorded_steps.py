"""Steps of one device that are launched one after another, each before the host knows what came of
the one before it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from farspan.domain.train import TrainSpec
from farspan.runtime.cuda_graph import GraphedCalls
from farspan.runtime.device import mark_launched
from farspan.runtime.parallel.device_step import DeviceStep, StepLayout
from farspan.runtime.parallel.executor import Executor
from farspan.runtime.state.train_state import UpdateScalars
from farspan.runtime.training.prefetch import ReadStep

#: Steps whose results the host has not read, at most: one that is computed and one that follows.
UNREAD_STEPS = 2


class StepResult(NamedTuple):
    """What came of a step."""

    step: int
    #: A mean over its targets; and the norm of the gradient before clipping.
    loss: float
    norm: float
    valid: int
    lr: float
    #: From when it could begin to when its result was there.
    seconds: float


class _Launched(NamedTuple):
    step: int
    valid: int
    lr: float
    at: float
    #: The summed loss and the norm, when `wait` has returned.
    results: Tensor
    wait: Callable[[], None]


class RecordedSteps:
    """Launches the steps of a run, on a GPU as one CUDA graph each, and gives their results."""

    def __init__(
        self,
        executor: Executor,
        train: TrainSpec,
        layout: StepLayout,
        warn: Callable[[str], None],
    ) -> None:
        self._executor = executor
        self._step = DeviceStep(executor, train, layout)
        self._warn = warn
        self._calls = GraphedCalls(
            self._step.run,
            self._step.list_changed(),
            executor.publish_masters,
            executor.device,
            self._on_failure,
        )
        self._launched = deque[_Launched]()
        pinned = executor.device.type == "cuda"
        results = torch.zeros(UNREAD_STEPS, 2, dtype=torch.float64, pin_memory=pinned)
        self._results = deque(results.unbind())
        self._finished_at = 0.0

    @property
    def recorded(self) -> bool:
        return self._calls.recorded

    def launch(self, step: int, read: ReadStep, scalars: UpdateScalars, scale: float) -> None:
        """Launch a step on gradients of `scale` times the summed loss."""
        numbers = (scale, scalars.lr, scalars.table_lr, scalars.updates, scalars.average_weight)
        self._step.layout.scalars(read.inputs)[:] = torch.tensor(numbers)
        results = self._results.popleft()
        # Copies of the state for a checkpoint are made before it changes.
        self._executor.staging.delay_changes()
        with self._calls.own_stream():
            self._step.inputs.copy_(read.inputs, non_blocking=True)
            self._calls()
            results.copy_(self._step.results, non_blocking=True)
            wait = mark_launched(self._executor.device)
        # What uses the weights next, or the inputs' memory, comes after this step.
        self._calls.join()
        lr = float(scalars.lr)
        self._launched.append(_Launched(step, read.valid, lr, time.perf_counter(), results, wait))

    def take_results(self, unread: int) -> list[StepResult]:
        """Wait for the results of all steps but the `unread` newest."""
        taken = []
        while len(self._launched) > unread:
            launched = self._launched.popleft()
            launched.wait()
            summed_loss, norm = launched.results.tolist()
            self._results.append(launched.results)
            now = time.perf_counter()
            seconds = now - max(launched.at, self._finished_at)
            self._finished_at = now
            loss = summed_loss / launched.valid
            taken.append(
                StepResult(launched.step, loss, norm, launched.valid, launched.lr, seconds)
            )
        return taken

    def _on_failure(self, message: str) -> None:
        # What a recording has begun is begun again.
        self._executor.state.clear_gradients()
        self._warn(message)
