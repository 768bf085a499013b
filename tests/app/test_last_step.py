"""No step is made again where the survivors of a lost worker hold the whole state."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from farspan.domain.plan import Mesh, Plan, Zero
from farspan.domain.run_events import Finished, Recovered, Saved, Step, Validated
from farspan.runtime.checkpoint import checkpoint_folder
from farspan.runtime.checkpoint.checkpoint_folder import Unsaved
from farspan.runtime.checkpoint.last_step import (
    GATHER_S,
    WholeState,
    assign_survivors,
    write_last_step,
)
from farspan.runtime.checkpoint.manifest import TrainerState
from farspan.runtime.checkpoint.slice_files import Listing
from farspan.runtime.comm.topology import Topology
from farspan.runtime.parallel.executor import Executor
from farspan.runtime.state.full_state import BucketManifest, Piece
from farspan.runtime.state.train_state import TrainState
from tests import tiny
from tests.app.supervised import Watched, made
from tests.examples import slow_after
from tests.launch.test_launchers import TRAIN

STEPS = 120
#: No checkpoint is due before the end; every other step is validated.
RARE = replace(TRAIN, steps=STEPS, validate_every=2, checkpoint_every_s=1e6)
DATA = tiny.plan(RARE, rows=(4, 4), micro_rows=4)


def divided(plan: Plan, zero: Zero, *shape: int) -> Plan:
    """The plan with its state divided over the last axis of a mesh of this shape."""
    (replica,) = plan.replicas
    (stage,) = replica.stages
    mesh = Mesh(ranks=stage.mesh.ranks, shape=shape, axes=("site", "data")[-len(shape) :])
    stage = replace(stage, mesh=mesh, zero=zero)
    return replace(plan, replicas=(replace(replica, stages=(stage,)),))


#: Two sites of two workers, with all of the state in each.
HYBRID = divided(tiny.plan(RARE, rows=(2, 2, 2, 2), micro_rows=2), 3, 2, 2)
#: Averaged weights take the place of the weights in a validation.
AVERAGED = replace(
    DATA, train=replace(RARE, optimizer=replace(RARE.optimizer, average=0.9), validate_every=200)
)
PLANS = {"data": DATA, "hybrid": HYBRID, "average": AVERAGED}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Watched]:
    """Runs that nothing disturbs, by the name of their plan, as they are asked for."""

    class Runs(dict[str, Watched]):
        def __missing__(self, name: str) -> Watched:
            folder = tmp_path_factory.mktemp("calm")
            self[name] = watched = Watched(made(folder / "run", PLANS[name]))
            assert isinstance(watched.train(), Finished) and not watched.faulted
            return watched

    return Runs()


def validated(watched: Watched) -> dict[int, float]:
    """The validation losses by step; one whose weights were not written yet is made again."""
    events = [event for event in watched.events if isinstance(event, Validated)]
    return {event.step: event.loss for event in events}


@dataclass(frozen=True)
class Case:
    plan: str
    lost: tuple[int, ...]
    number: signal.Signals = signal.SIGKILL


CASES = [
    Case("data", (1,)),
    Case("hybrid", (2, 3)),
    Case("data", (0,)),
    Case("data", (1,), signal.SIGSTOP),
    Case("hybrid", (0,)),
    Case("hybrid", (1, 2)),
    Case("average", (0,)),
]


@pytest.mark.parametrize("case", slow_after(1, CASES), ids=str)
def test_next_start_begins_at_the_last_whole_step(tmp_path, undisturbed, case):
    hurt = list[int]()

    def harm(watched: Watched, step: int) -> None:
        # An odd one: a validation follows after the next.
        if step >= 41 and step % 2 and not hurt:
            hurt.extend(watched.signal(rank, case.number) for rank in case.lost)

    watched = Watched(made(tmp_path / "run", PLANS[case.plan]), harm)
    ending = watched.train()
    assert isinstance(ending, Finished) and ending.reason == "done"
    (again,) = [event for event in watched.events if isinstance(event, Recovered)]
    assert again.lost == 0 and again.step >= 41
    # Each step was made once, with the loss that it has in a run without the fault.
    steps = [event.step for event in watched.events if isinstance(event, Step)]
    assert steps == list(range(1, STEPS + 1))
    calm = undisturbed[case.plan]
    assert watched.losses == calm.losses
    assert validated(watched) == validated(calm)
    saved = [event.step for event in watched.events if isinstance(event, Saved)]
    assert saved == [again.step, STEPS]
    assert not list(watched.run.checkpoints.glob(".*"))


@pytest.mark.slow
def test_survivors_without_the_whole_state_leave_the_checkpoint_as_it_is(tmp_path):
    """Half of the state is lost with each worker: the run goes back to what was saved."""
    often = replace(RARE, validate_every=200, checkpoint_every_s=0.2)
    plan = divided(tiny.plan(often, rows=(4, 4), micro_rows=4), 3, 2)
    calm = Watched(made(tmp_path / "calm" / "run", plan))
    assert isinstance(calm.train(), Finished)
    hurt = list[int]()

    def harm(watched: Watched, step: int) -> None:
        has_saved = any(isinstance(event, Saved) for event in watched.events)
        if step >= 41 and has_saved and not hurt:
            hurt.append(watched.signal(1, signal.SIGKILL))

    watched = Watched(made(tmp_path / "run", plan), harm)
    assert isinstance(watched.train(), Finished)
    (again,) = [event for event in watched.events if isinstance(event, Recovered)]
    before = watched.events[: watched.events.index(again)]
    assert again.step in [event.step for event in before if isinstance(event, Saved)]
    assert watched.losses == calm.losses


# -- who writes what
#   ------------------------------------------------------------------------------------------------


def manifest(names: set[str]) -> BucketManifest:
    pieces = [Piece(name, None, (4,), 0, 4, 0) for name in sorted(names)]
    return BucketManifest(
        0, [4] * len(pieces), [[piece] for piece in pieces], [False] * len(pieces), []
    )


@given(
    st.lists(st.sets(st.sampled_from("abcd"), min_size=1), min_size=1, max_size=5),
    st.data(),
)
def test_each_piece_is_written_once_by_a_survivor_of_the_newest_whole_step(owned, data):
    manifests = [manifest(names) for names in owned]
    ranks = st.sets(st.sampled_from(range(len(owned))))
    steps = {rank: data.draw(st.integers(6, 8)) for rank in data.draw(ranks)}
    writers = assign_survivors(manifests, steps)

    def held_at(step: int) -> set[str]:
        return set().union(*(owned[rank] for rank, at in steps.items() if at == step))

    everything = set().union(*owned)
    whole = [step for step in set(steps.values()) if held_at(step) == everything]
    if not whole:
        assert writers == {}
        return
    written = [piece.name for pieces in writers.values() for _, piece in pieces]
    assert sorted(written) == sorted(everything)
    assert {steps[rank] for rank in writers} == {max(whole)}
    for rank, pieces in writers.items():
        assert {piece.name for _, piece in pieces} <= owned[rank]


class Survivor(NamedTuple):
    """What of an executor is needed to write the last step."""

    topology: SimpleNamespace
    state: TrainState
    whole: SimpleNamespace
    outer: None = None


@pytest.mark.parametrize(
    ("expected", "late_s"),
    [(({0}, {1}), (0.0, 0.3)), (({0, 1}, {0, 1}), (GATHER_S + 0.3, 0.0))],
    ids=["a cut between them", "one is late"],
)
def test_survivors_that_know_of_different_others_write_one_whole_checkpoint(
    tmp_path, monkeypatch, expected, late_s
):
    """Each leads where it sees itself alone, and a part takes longer than the other is late."""
    (tmp_path / "checkpoints").mkdir()
    plan = tiny.plan(replace(RARE, keep=1))
    executor = Executor(Topology(plan, 0), torch.device("cpu"))
    (own,) = executor.whole.manifests
    whole = SimpleNamespace(manifests=[own, own], shapes=executor.whole.shapes)

    put_slices = checkpoint_folder.put_slices

    def put_slowly(*arguments: Any) -> Listing:
        listing = put_slices(*arguments)
        time.sleep(1.0)
        return listing

    monkeypatch.setattr(checkpoint_folder, "put_slices", put_slowly)

    def write(rank: int, step: int, survivors: set[int], delay_s: float) -> None:
        time.sleep(delay_s)
        topology = SimpleNamespace(rank=rank, plan=plan, replica_index=0)
        state = TrainerState(step=step, plan=plan.hash, training="", elapsed_s=0.0)
        survivor = Survivor(topology, executor.state, whole)
        reported = written.append
        with suppress(Unsaved, OSError):
            write_last_step(
                survivor,  # type: ignore[arg-type]
                tmp_path / "checkpoints",
                survivors,
                state,
                torch.clone,
                lambda path, size: reported(path),
            )

    written = list[Path]()
    write(0, 3, {0}, 0.0)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, (0, 1), (7, 7), expected, late_s))
    older, newest = written
    assert checkpoint_folder.verify(newest).step == 7
    assert not older.exists() and not list(newest.parent.glob(".*"))


def test_state_that_an_error_has_left_between_two_steps_is_not_written():
    whole = WholeState(torch.device("cpu"))
    whole.trainer = TrainerState(step=3, plan="", training="", elapsed_s=0.0)
    with pytest.raises(ZeroDivisionError), whole.change():
        raise ZeroDivisionError
    assert whole.freeze() is None


def test_state_that_is_frozen_is_not_changed_any_more(tmp_path: Path):
    whole = WholeState(torch.device("cpu"))
    whole.trainer = TrainerState(step=3, plan="", training="", elapsed_s=0.0)
    assert whole.freeze() is whole.trainer
    assert not whole.hold().acquire(blocking=False)
