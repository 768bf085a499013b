"""A run starts again by itself after a fault that can be cured, loses nothing but time, and ends
where none can be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from farspan.app.replanning import plan_without
from farspan.domain.epoch_fence import read_ledger
from farspan.domain.problems import Problem, Refusal
from farspan.domain.run_events import Finished, Recovered, Saved, Step, Warned, read_events
from farspan.launch.agent_pool import AgentPool
from farspan.launch.launchers import launch_workers
from farspan.launch.run_lock import Lease
from farspan.launch.spares import Spares
from farspan.launch.workers import SupervisorState
from farspan.report.history import follow_events
from farspan.runtime.checkpoint.manifest import TrainerState
from farspan.runtime.comm.topology import Topology
from farspan.runtime.training.sample_order import PackedWindows, SampleOrder
from farspan.semantics.identity import training_key
from tests import tiny
from tests.app.supervised import Watched, made
from tests.examples import slow_after
from tests.launch.test_launchers import TRAIN
from tests.runtime import stored_tensors
from tests.runtime.test_worker import _tensors
from tests.waiting import LIMIT_S, wait_for

#: Some seconds of steps, with checkpoints all along.
STEPS = replace(TRAIN, steps=300, validate_every=300, checkpoint_every_s=0.3)
TWO = tiny.plan(STEPS, rows=(4, 4), micro_rows=4)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run that nothing disturbs."""
    watched = Watched(made(tmp_path_factory.mktemp("calm") / "run", TWO))
    ending = watched.train()
    assert isinstance(ending, Finished) and not watched.faulted
    return watched.losses


@pytest.mark.parametrize(
    ("rank", "number"),
    slow_after(0, [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)]),
)
def test_the_losses_after_a_fault_are_those_of_a_run_without_bit_by_bit(
    tmp_path, calm, rank, number
):
    hurt = list[int]()

    def at_step(watched: Watched, step: int) -> None:
        if step >= 100 and not hurt and any(isinstance(event, Saved) for event in watched.events):
            hurt.append(watched.signal(rank, number))

    watched = Watched(made(tmp_path / "run", TWO), at_step)
    ending = watched.train()
    assert isinstance(ending, Finished) and ending.reason == "done"
    assert watched.losses == calm
    (fault,) = watched.faulted
    (again,) = [event for event in watched.events if isinstance(event, Recovered)]
    assert (
        fault.problem.code == "worker-lost"
        and fault.problem.rank == rank
        and again.fault == fault.problem
    )
    assert again.step > 0 and again.lost == fault.step - again.step and not again.replanned
    assert again.epoch == read_ledger(watched.run.epochs).epoch == 2
    assert not Path(f"/proc/{hurt[0]}").exists(), "whoever stood still was ended"
    # What the report says of it: the time until it went on is the run's, too.
    history = follow_events(read_events(watched.run.events))
    assert len(history.starts) == 2 and history.lost_steps == again.lost
    assert history.run_s == pytest.approx(watched.events[-1].at - history.starts[0][0].at, abs=0.5)


@pytest.mark.slow
def test_a_fault_that_comes_back_at_the_same_step_ends_the_run_with_its_cause(tmp_path):
    """Where no other device is left: one of several is given up."""

    def kill(watched: Watched) -> None:
        """As soon as there is a worker again."""
        while (workers := watched.supervisor.workers) is None or not any(
            0 in process.ranks for process in workers.processes
        ):
            time.sleep(0.02)
        watched.signal(0, signal.SIGKILL)

    watched = Watched(
        made(tmp_path / "run", tiny.plan(STEPS)),
        lambda w, step: step == 40 and w.signal(0, signal.SIGKILL),
        at_fault=lambda w: threading.Thread(target=kill, args=(w,)).start(),
    )
    problem = watched.train()
    assert (
        isinstance(problem, Problem)
        and problem.code == "worker-lost"
        and problem.signal == "SIGKILL"
    )
    assert len(watched.faulted) == 2 and "the same fault came 3 times" in problem.fact


@pytest.mark.slow
def test_with_stop_a_fault_ends_the_run(tmp_path):
    watched = Watched(
        made(tmp_path / "run", TWO, "stop"),
        lambda w, step: step == 40 and w.signal(1, signal.SIGKILL),
    )
    problem = watched.train()
    assert isinstance(problem, Problem) and problem.code == "worker-lost" and not watched.faulted


def test_an_error_in_code_is_not_tried_again(tmp_path):
    """Here one of a token that the model has no row for."""
    run = made(tmp_path / "run", TWO)
    np.full(3000, 60_000, "<u2").tofile(tmp_path / "corpus" / "train.bin")
    watched = Watched(run)
    problem = watched.train()
    assert isinstance(problem, Problem) and not watched.faulted
    assert (problem.code, problem.cause) == (
        "worker-lost",
        "own",
    ) and "index out of range" in problem.fact


@pytest.mark.slow
def test_run_whose_ledger_of_starts_is_damaged_goes_on_by_itself_and_when_it_is_resumed(
    tmp_path, calm
):
    def damage_then_stop(watched: Watched, step: int) -> None:
        if step == 60 and not watched.faulted:
            watched.run.epochs.write_bytes(b"")
        elif watched.faulted and step == 120:
            watched.supervisor.request_stop()

    first = Watched(made(tmp_path / "run", TWO), damage_then_stop)
    ending = first.train()
    assert isinstance(ending, Finished) and ending.reason == "interrupted", ending
    assert [fault.problem.where for fault in first.faulted] == [str(first.run.epochs)]
    assert read_ledger(first.run.epochs).epoch == 2
    first.run.epochs.write_bytes(b"{")
    again = Watched(first.run)
    ending = again.train()
    assert isinstance(ending, Finished) and ending.reason == "done", ending
    assert first.losses | again.losses == calm
    assert read_ledger(first.run.epochs).epoch == 3


def test_stop_request_during_fault_recovery_interrupts_the_run(tmp_path):
    watched = Watched(
        made(tmp_path / "run", TWO),
        lambda w, step: step == 60 and w.signal(1, signal.SIGKILL),
        at_fault=lambda w: w.supervisor.request_stop(),
    )
    problem = watched.train()
    assert (
        isinstance(problem, Problem)
        and problem.code == "interrupted"
        and "before workers were started" in problem.what
    )


def test_without_any_host_there_is_no_plan(tmp_path):
    with pytest.raises(Refusal, match="no device of the run is there"):
        plan_without(made(tmp_path / "run", TWO), {"here"})


# -- steps that are not finite
#   -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("batches", [1, 2])
def test_the_first_batch_whose_loss_is_not_finite_is_left_out_and_a_second_ends_the_run(
    tmp_path, batches
):
    """Token 299 has an embedding that is no number, and stands in so many windows."""
    train = replace(TRAIN, steps=20, validate_every=20)
    plan = tiny.plan(train, rows=(4, 4), spec=replace(tiny.SPEC, tied=False))
    run = made(tmp_path / "run", plan)
    val, tokens = (
        np.fromfile(tmp_path / "corpus" / f"{name}.bin", "<u2") for name in ("val", "train")
    )
    val[val == 299] = tokens[tokens == 299] = 298
    order = SampleOrder(PackedWindows(tokens, train.seq_len).count, train.seed)
    for step in range(5, 5 + 4 * batches, 4):
        window = int(order.window(Topology(plan, 0).samples_by_microbatch(step)[0])[0])
        tokens[window * train.seq_len + 3] = 299
    for name, content in (("val", val), ("train", tokens)):
        content.tofile(tmp_path / "corpus" / f"{name}.bin")
    tensors = _tensors(plan.model)
    tensors["model/tok.weight"][299] = float("nan")
    progress = TrainerState(step=0, plan=plan.hash, training=training_key(plan), elapsed_s=0.0)
    stored_tensors.write(run.checkpoints, tensors, progress)
    watched = Watched(run)
    ending = watched.train()
    assert [(fault.problem.code, fault.problem.step) for fault in watched.faulted] == [
        ("non-finite", 5)
    ]
    said = [event.message for event in watched.events if isinstance(event, Warned)]
    assert any("step 6: its batch is left out" in message for message in said)
    if batches == 1:
        assert isinstance(ending, Finished) and ending.reason == "done"
        assert sorted(watched.losses) == [*range(1, 6), *range(7, 21)]
    else:
        assert isinstance(ending, Problem) and ending.code == "non-finite" and ending.step == 9
        assert "step 6 was left out for the same reason" in ending.fact


# -- who was replaced
#   ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stopped_worker_that_wakes_after_it_was_replaced_writes_nothing(tmp_path):
    plan = tiny.plan(
        replace(TRAIN, steps=100_000, validate_every=100_000, checkpoint_every_s=0.2), micro_rows=8
    )
    run = made(tmp_path / "run", plan)

    def begun() -> subprocess.Popen[bytes]:
        with Lease(run) as lease:
            told = SupervisorState(lease, lease.begin_epoch(), Spares(), AgentPool()).epoch
        place = {"RANK": "0", "WORLD_SIZE": "1", "FARSPAN_EPOCH": f'{{"number":{told.number}}}'}
        words = [sys.executable, "-m", "farspan.runtime.worker", str(run.plan), str(run.path)]
        return subprocess.Popen(words, env={**os.environ, **place, "OMP_NUM_THREADS": "1"})

    def steps() -> int:
        return (
            sum(isinstance(event, Step) for event in read_events(run.events))
            if run.events.exists()
            else 0
        )

    def trained(more: int) -> None:
        wanted = steps() + more
        wait_for(lambda: steps() >= wanted, f"step {wanted}")

    old = begun()
    try:
        trained(100)
        old.send_signal(signal.SIGSTOP)
        new = begun()
        trained(100)
        new.send_signal(signal.SIGTERM)
        assert new.wait(LIMIT_S) == 0
        content = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
        old.send_signal(signal.SIGCONT)
        assert old.wait(LIMIT_S) == 45
        assert {
            path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()
        } == content
    finally:
        old.kill()
        old.wait()


# -- warm spares
#   ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_spare_takes_a_place_and_trains_the_same(tmp_path, calm):
    run = made(tmp_path / "run", TWO)
    cluster = tiny.this_machine(TWO)
    with Lease(run) as lease:
        spares = Spares()
        apart = (TWO.devices[0], replace(TWO.devices[1], index=1))
        spares.start_spares(replace(TWO, devices=apart), cluster.hosts, run.logs, lease.keep_open)
        waiting = [spare.pid for (spare,) in spares._waiting.values()]
        held = SupervisorState(lease, lease.begin_epoch(), spares, AgentPool())
        with launch_workers("local", TWO, run, cluster, held) as workers:
            pids = [process.pid for process in workers.processes]
            losses = {event.step: event.loss for event in workers if isinstance(event, Step)}
        assert len(waiting) == 2 and pids[0] == waiting[0], "the device of rank 0 has a spare"
        spares.close()
    assert losses == calm
    assert not any(Path(f"/proc/{pid}").exists() for pid in waiting)


@pytest.mark.slow
def test_place_of_a_spare_that_stands_still_goes_to_one_that_answers_or_to_a_fresh_worker(
    tmp_path, calm
):
    run = made(tmp_path / "run", TWO)
    cluster = tiny.this_machine(TWO)
    with Lease(run) as lease, closing(Spares()) as spares:
        three = replace(TWO, devices=(TWO.devices[0],) * 3)
        spares.start_spares(three, cluster.hosts, run.logs, lease.keep_open)
        ((first, second, third),) = spares._waiting.values()
        for spare in (first, third):
            os.kill(spare.pid, signal.SIGSTOP)
        held = SupervisorState(lease, lease.begin_epoch(), spares, AgentPool())
        with launch_workers("local", TWO, run, cluster, held) as workers:
            pids = [process.pid for process in workers.processes]
            losses = {event.step: event.loss for event in workers if isinstance(event, Step)}
    assert pids[0] == second.pid and pids[1] not in (first.pid, third.pid)
    assert losses == calm
    assert not any(Path(f"/proc/{spare.pid}").exists() for spare in (first, second, third))


def test_spares_that_stand_still_end_with_the_run(tmp_path):
    run = made(tmp_path / "run", TWO)
    with Lease(run) as lease, closing(Spares()) as spares:
        spares.start_spares(TWO, tiny.this_machine(TWO).hosts, run.logs, lease.keep_open)
        pids = [spare.pid for waiting in spares._waiting.values() for spare in waiting]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [False, True])
def test_spare_workers_end_when_their_supervisor_process_dies(tmp_path, stopped):
    run = made(tmp_path / "run", TWO)
    program = f"""
import os, signal
from pathlib import Path
from farspan.domain.run import RunFolder
from farspan.launch.agent_pool import AgentPool
from farspan.launch.run_lock import Lease
from farspan.launch.spares import Spares
from tests import tiny
from tests.app.test_supervisor import TWO
run, spares = RunFolder(Path({str(run.path)!r})), Spares()
spares.start_spares(TWO, tiny.this_machine(TWO).hosts, run.logs, Lease(run).keep_open)
for waiting in spares._waiting.values():
    for spare in waiting:
        print(spare.pid, flush=True)
        if {stopped} and spare.is_ready():
            os.kill(spare.pid, signal.SIGSTOP)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S
    )
    pids = done.stdout.split()
    assert pids, done.stderr
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the spares' end")
    with Lease(run):
        pass
