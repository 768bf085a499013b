"""What one worker holds for the length of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from farspan.domain.corpus import CorpusManifest
from farspan.domain.epoch_fence import Epoch
from farspan.domain.plan import Plan
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Event
from farspan.runtime.comm.worker_group import Group
from farspan.runtime.model.decoder import Decoder
from farspan.runtime.parallel.executor import Executor
from farspan.runtime.state.train_state import TrainState
from farspan.runtime.training.sample_order import Windows


@dataclass
class Worker:
    """What one worker holds for the length of a run."""

    plan: Plan
    run: RunFolder
    group: Group
    executor: Executor
    manifest: CorpusManifest
    train: Windows
    val: Windows
    emit: Callable[[Event], None]
    clock: Callable[[], float]
    #: Whether the run continues a model, instead of beginning with random weights.
    is_continued: bool = False
    #: Tokens that samples of a finished run begin with.
    prompts: tuple[list[int], ...] = ()
    #: Asked between steps: whether the run is to save and end, whether this worker is to go, and
    #: whether its cloud has given notice of that. A worker that goes is asked whether its host
    #: does, too.
    stop: Callable[[], bool] = lambda: False
    preempted: Callable[[], bool] = lambda: False
    noticed: Callable[[], bool] = lambda: False
    host_leaves: Callable[[], bool] = lambda: False
    #: The start of the run that this worker belongs to.
    epoch: Epoch = field(default_factory=lambda: Epoch(number=0))

    @property
    def model(self) -> Decoder:
        return self.executor.model

    @property
    def state(self) -> TrainState:
        return self.executor.state
