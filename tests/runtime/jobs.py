"""What the workers of a `Fleet` are asked to do; each function is called by all workers of a plan
at once."""

from __future__ import annotations

import itertools
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from farspan.domain.plan import Plan
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Event, Saved, Step, Validated, Warned
from farspan.runtime.comm import worker_group
from farspan.runtime.comm.messages import Sent
from farspan.runtime.comm.worker_group import Group
from farspan.runtime.state import full_state
from farspan.runtime.state.tied_embeddings import TABLE
from farspan.runtime.training.trainer import Trainer
from farspan.runtime.training.validation import ValidationSums
from farspan.runtime.worker import build
from tests.runtime import reference
from tests.runtime.copies import SlowCopies, slow_copies

#: A snapshot that is looked at takes this long at most: steps take milliseconds.
SLOW_SNAPSHOT_S = 0.05
Arrays = dict[str, NDArray[np.float32]]


class Gradients(NamedTuple):
    """As one worker knows them: its replica's mean loss and norm; on rank 0 the gradients of every
    replica."""

    loss: float
    norm: float
    by_replica: list[Arrays]


class Trained(NamedTuple):
    """As one worker knows it: its replica's losses, gradient norms, and the last validation
    loss."""

    reason: str
    losses: list[float]
    norms: list[float]
    validation: float | None
    #: What rank 0 says.
    saved: list[int]
    warned: list[str]


class SlowlyCopied(NamedTuple):
    """What a worker's device copied late, and the shapes of what changed meanwhile."""

    downloads: int
    uploads: int
    changed: list[tuple[int, ...]]

    @classmethod
    def of(cls, copies: list[SlowCopies]) -> SlowlyCopied:
        changed = list(itertools.chain.from_iterable(engine.changed for engine in copies))
        downloads = sum(engine.downloads for engine in copies)
        return cls(downloads, sum(engine.uploads for engine in copies), changed)


class WorkClock:
    """A clock that only the work moves: a step and a validated token take the same each time."""

    def __init__(self, step_s: float, token_s: float) -> None:
        self.step_s = step_s
        self.token_s = token_s
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def follow(self, made: Trainer) -> None:
        make_step = made._train_step
        read_windows = made.validation.read

        def timed_step(step: int) -> tuple[float, float, int, float]:
            self.now_s += self.step_s
            return make_step(step)

        def timed_read(first: int, stop: int) -> ValidationSums:
            sums = read_windows(first, stop)
            self.now_s += self.token_s * sums.tokens
            return sums

        made._train_step = timed_step  # type: ignore[method-assign]
        made.validation.read = timed_read  # type: ignore[method-assign]


class TrainedByClock(NamedTuple):
    reason: str
    elapsed_s: float
    events: list[Event]


@contextmanager
def trainer(
    group: Group, plan: Plan, path: Path, monotonic: Callable[[], float] = time.monotonic
) -> Iterator[tuple[Trainer, list[Event]]]:
    """A worker's trainer, with weights of which none is idle; and the events that it emits."""
    events: list[Event] = []
    worker = build(plan, RunFolder(path), group, events.append)
    worker.executor.load_parameters(iter(reference.start(plan.model).items()))
    yield Trainer(worker, monotonic), events
    for parameter in worker.state.parameters:
        # A hook that knows its parameter's owner would keep both, and all connections, for as long
        # as this process is.
        parameter._post_accumulate_grad_hooks.clear()


def gradients(group: Group, plan: Plan, path: Path, step: int) -> Gradients:
    """Of one step at the first weights."""
    with trainer(group, plan, path) as (made, _):
        return _gradients(made, step)


def check(group: Group, plan: Plan, path: Path, step: int) -> tuple[Gradients, Trained]:
    """The gradients of one step, and then the training from the first."""
    with trainer(group, plan, path) as (made, events):
        found = _gradients(made, step)
        made.worker.executor.skip_step()
        return found, _trained(made, events)


def check_with_slow_copies(
    group: Group, plan: Plan, path: Path, step: int, seed: int
) -> tuple[Gradients, Trained, SlowlyCopied]:
    """As `check`, on devices that copy beside what they compute, and late."""
    with slow_copies(seed + group.rank) as copies:
        found, trained = check(group, plan, path, step)
    return found, trained, SlowlyCopied.of(copies())


def train_with_slow_copies(
    group: Group, plan: Plan, path: Path, seed: int
) -> tuple[Trained, SlowlyCopied]:
    """As `train`, on devices that copy beside what they compute, later than a step takes."""
    with slow_copies(seed + group.rank, most_s=SLOW_SNAPSHOT_S) as copies:
        trained = train(group, plan, path)
    return trained, SlowlyCopied.of(copies())


def train(group: Group, plan: Plan, path: Path, until: int | None = None) -> Trained:
    """From the newest checkpoint to the end, or to where all stop who were asked to at a step."""
    with trainer(group, plan, path) as (made, events):
        if until is not None:
            made.worker.stop = lambda: made.state.step >= until
        made.restore()
        return _trained(made, events)


def train_preempted(
    group: Group, plan: Plan, path: Path, until: int, ranks: tuple[int, ...]
) -> tuple[Trained, tuple[int, ...], int]:
    """From the newest checkpoint to where these ranks are preempted at a step; who was, as this
    worker knows it, and the last step."""
    with trainer(group, plan, path) as (made, events):
        made.worker.preempted = lambda: made.state.step >= until and group.rank in ranks
        made.restore()
        return _trained(made, events), made.preempted, made.state.step


def train_by_clock(group: Group, plan: Plan, path: Path, clock: WorkClock) -> TrainedByClock:
    """From the first step to the end, timed by `clock`."""
    with trainer(group, plan, path, clock) as (made, events):
        clock.follow(made)
        made.restore()
        return TrainedByClock(made.run(), made.elapsed_s, events)


def restore_and_save(group: Group, plan: Plan, path: Path) -> tuple[int, int]:
    """From the newest checkpoint, which is written anew: bytes of tensors that were read, and that
    this worker owns."""
    with trainer(group, plan, path) as (made, _):
        made.restore()
        made.checkpointer.step = -1
        made.save(last=True)
        owned = sum(
            4 * (piece.stop - piece.start)
            for pieces in made.worker.executor.whole.manifests[group.rank].pieces
            for piece in pieces
        )
        return made.checkpointer.read_bytes, (3 if plan.sync is None else 5) * owned


def train_where_files_may_not_be_large(
    group: Group, plan: Plan, path: Path, most: int, failures: int
) -> Trained:
    """As `train`, but until so many saves have failed no file of rank 0 may have more than `most`
    bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with trainer(group, plan, path) as (made, events):
        made.restore()

        def emit(event: Event) -> None:
            events.append(event)
            if sum(isinstance(event, Warned) for event in events) == failures:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

        made.worker.emit = emit
        if group.rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        try:
            return _trained(made, events)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def step_while_another_is_away(
    group: Group, plan: Plan, path: Path, steps: int
) -> list[NDArray[np.float32]]:
    """All make a step. Rank 0 leaves for an exchange and makes more steps; the others come to it
    only when these are made. Returns the parameters of the meeting, as this worker has them."""
    with trainer(group, plan, path) as (made, _):
        outer = made.worker.executor.outer
        made_them = path / "made"
        assert outer is not None
        made._train_step(0)
        if group.rank == 0:
            outer.synchronize_replicas(False)
            for step in range(1, steps):
                made._train_step(step)
            made_them.touch()
        else:
            while not made_them.exists():
                time.sleep(0.01)
            outer.synchronize_replicas(False)
        outer.finish_exchange()
        return [anchor.numpy().copy() for anchor in outer.synced_parameters]


def hand_out(group: Group, plan: Plan, path: Path) -> int:
    """Give every worker its part of a model from rank 0; the most messages that it held at once."""
    held = [0]
    with trainer(group, plan, path) as (made, _):
        messenger = made.worker.executor.messenger
        send = messenger.send

        def counted(*given: Any) -> list[Sent]:
            works = send(*given)
            held.append(len(messenger._sent))
            return works

        messenger.send = counted  # type: ignore[method-assign]
        executor = made.worker.executor
        weights = reference.start(plan.model) if group.rank == 0 else None
        executor.whole.hand_out(executor.state.master, weights)
        executor.begin_run()
        return max(held)


def _gradients(made: Trainer, step: int) -> Gradients:
    read = made.batches.read_step(step)
    outcome = made.compute_gradients(read)
    whole = made.worker.executor.whole
    state = made.worker.state
    found = [
        whole.collect_parameters(state.grad, replica)
        for replica in range(len(made.worker.plan.replicas))
    ]
    return Gradients(
        outcome.loss / read.valid,
        outcome.norm,
        [{n: g.numpy().copy() for n, g in one.items()} for one in found],
    )


def _trained(made: Trainer, events: list[Event]) -> Trained:
    reason = made.run()
    steps = [event for event in events if isinstance(event, Step)]
    validated = [event.loss for event in events if isinstance(event, Validated)]
    return Trained(
        reason,
        [s.loss for s in steps],
        [s.grad_norm for s in steps],
        validated[-1] if validated else None,
        [event.step for event in events if isinstance(event, Saved)],
        [event.message for event in events if isinstance(event, Warned)],
    )


def overflow(
    group: Group, plan: Plan, path: Path, scale: float
) -> list[tuple[float, float, float]]:
    """Loss, gradient norm and the next step's loss scale of every step of a training that begins
    with this one."""
    with trainer(group, plan, path) as (made, _):
        made.state.loss_scale = scale
        found = []
        for step in range(plan.train.steps):
            (result,) = made._train_step(step)
            found.append((result.loss, result.norm, made.state.loss_scale))
        return found


def tokens(group: Group, plan: Plan, path: Path) -> int:
    """Tokens that the first step counts."""
    with trainer(group, plan, path) as (made, _):
        (result,) = made._train_step(0)
        return result.valid


def table(group: Group, plan: Plan, path: Path) -> NDArray[np.float32] | None:
    """The token table as this worker has it after the training, if it has all of it."""
    with trainer(group, plan, path) as (made, events):
        _trained(made, events)
        state = made.worker.state
        return (
            state.view_parameter(state.master, state.names.index(TABLE)).numpy().copy()
            if TABLE in state.names
            else None
        )


def staying(group: Group, plan: Plan, path: Path) -> list[str]:
    """Parameters of blocks that this worker has gathered before any block is needed."""
    with trainer(group, plan, path) as (made, _):
        state = made.worker.state
        made.worker.executor.param_gather.begin_passes()
        here = [
            b
            for b, bucket in enumerate(state.buckets)
            if bucket.ways > 1 and state.working[b].untyped_storage().size()
        ]
        return [
            name
            for i, name in enumerate(state.names)
            if name.startswith("blocks.") and state.home[i][0] in here
        ]


class RunsWhenUnpickled:
    """What a hostile peer may send to who unpickles it."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._marker,)


def build_beside_a_hostile_peer(group: Group, plan: Plan, path: Path, marker: Path) -> None:
    """Rank 1 sends an object where the others say what they own, in the way in which torch
    exchanges objects."""
    if group.rank == 1:
        full_state.all_gather_bytes = lambda *given: dist.all_gather_object(
            [None] * len(plan.devices), RunsWhenUnpickled(marker)
        )
    try:
        with trainer(group, plan, path):
            pass
    finally:
        full_state.all_gather_bytes = worker_group.all_gather_bytes


def read(
    group: Group, plan: Plan, path: Path, first: int, stop: int
) -> tuple[ValidationSums, list[int]]:
    """What the first weights have on windows of the validation split, and the windows that this
    worker reads itself."""
    with trainer(group, plan, path) as (made, _):
        validation = made.validation
        chosen = validation.windows(first, stop)
        mine = [
            int(worker)
            for windows in validation._own_windows(chosen)
            for worker in windows
            if worker < made.worker.val.count
        ]
        topology = made.worker.executor.topology
        return validation.read(first, stop), mine if topology.last and topology.tensor == 0 else []
