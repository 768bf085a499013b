"""A signal to a worker without the word of who started it is a preemption: the step is saved, the
worker goes, and the run goes on without losing a step. A signal to all workers is a stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest
from msgspec.structs import replace

from farspan.app.jobs import read_status
from farspan.domain.cluster_json import save_cluster_json
from farspan.domain.epoch_fence import read_ledger
from farspan.domain.problems import EXIT_CODES, Problem, Refusal
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Finished, Recovered, Saved, Step, read_events
from farspan.launch.launchers import launch_workers
from farspan.runtime.checkpoint import checkpoint_folder
from farspan.runtime.host_shutdown import JOB_VARIABLES
from tests import tiny
from tests.app.supervised import Watched, made
from tests.launch.test_killed import holders, processes, said, started
from tests.launch.test_launchers import (
    LONG,
    lost,
    planned,
    sites,  # noqa: F401 - a fixture
    wait_until_all_ended,
    worker_of,
)
from tests.waiting import LIMIT_S, wait_for

#: Without a checkpoint before the signal: all that is kept is what the preemption saves.
TWO = tiny.plan(replace(LONG, checkpoint_every_s=1e6), rows=(4, 4), micro_rows=4)
THREE = tiny.plan(TWO.train, rows=(4, 2, 2), micro_rows=4)


def signal_together(pids: list[int]) -> None:
    """Send SIGTERM to processes so that none acts before all have it."""
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, number)


def preempt(run: RunFolder, *ranks: int) -> None:
    """Send SIGTERM to workers, wherever a launcher started them."""
    signal_together([worker_of(run, rank) for rank in ranks])


def trained_through(run: RunFolder, harm, at: int = 3) -> tuple[Watched, Finished | Problem | None]:
    """The run with `harm` done once after a step; asked to stop once it has gone on."""
    done = list[str]()

    def at_step(watched: Watched, step: int) -> None:
        recovered = any(isinstance(event, Recovered) for event in watched.events)
        if step >= at and not done:
            done.append("harm")
            harm(watched)
        elif recovered and done == ["harm"]:
            done.append("stop")
            watched.supervisor.request_stop()

    watched = Watched(run, at_step)
    return watched, watched.train()


def pids_of(watched: Watched) -> list[int]:
    workers = watched.supervisor.workers
    assert workers is not None
    return [process.pid for process in workers.processes]


def went_on(watched: Watched, ending: object, ranks: tuple[int, ...]) -> None:
    """The run has recovered once, from the preemption of these ranks, and made each step once."""
    assert isinstance(ending, Finished) and ending.reason == "interrupted"
    (fault,) = watched.faulted
    (again,) = [event for event in watched.events if isinstance(event, Recovered)]
    (end,) = [
        event
        for event in watched.events
        if isinstance(event, Finished) and event.reason == "preempted"
    ]
    assert again.fault == fault.problem == end.problem
    assert (fault.problem.code, fault.problem.ranks) == ("preempted", ranks)
    assert (fault.problem.rank, fault.problem.host) == (ranks[0], "here")
    assert (again.step, again.lost) == (end.step, 0)
    steps = [event.step for event in watched.events if isinstance(event, Step)]
    assert steps == list(range(1, len(steps) + 1)), "no step is lost or made twice"
    assert any(isinstance(event, Saved) and event.step == end.step for event in watched.events)
    assert read_ledger(watched.run.epochs).epoch == 2
    told = read_status(watched.run).recovered
    assert told is not None and "preempted" in told.fault.what and told.lost == 0


# -- on this machine
#   ------------------------------------------------------------------------------------------------


def test_a_signal_to_one_worker_ends_all_at_a_step_that_is_saved(tmp_path):
    run = tiny.run_folder(tmp_path / "run", TWO)
    with (
        pytest.raises(Refusal) as refusal,
        launch_workers("local", TWO, run, tiny.this_machine(TWO)) as workers,
    ):
        for event in workers:
            if isinstance(event, Step) and event.step == 1:
                os.kill(workers.processes[1].pid, signal.SIGTERM)
    assert (refusal.value.problem.code, refusal.value.problem.rank) == ("preempted", 1)
    assert [process.poll() for process in workers.processes] == [EXIT_CODES["preempted"]] * 2
    assert_preempted(run, (1,))


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "number"), [(1, signal.SIGTERM), (0, signal.SIGINT)])
def test_a_signal_to_one_worker_saves_its_step_and_the_run_goes_on(tmp_path, rank, number):
    run = made(tmp_path / "run", TWO)
    watched, ending = trained_through(run, lambda watched: watched.signal(rank, number))
    went_on(watched, ending, (rank,))


@pytest.mark.slow
def test_workers_that_are_preempted_together_are_all_named(tmp_path):
    run = made(tmp_path / "run", THREE)
    watched, ending = trained_through(run, lambda watched: signal_together(pids_of(watched)[1:]))
    went_on(watched, ending, (1, 2))
    assert "ranks 1 and 2 on here were preempted" in watched.faulted[0].text


@pytest.mark.slow
def test_further_signals_while_a_preempted_worker_saves_change_nothing(tmp_path):
    def is_gone(pid: int) -> bool:
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            return True
        return False

    def insist(pid: int) -> None:
        wait_for(lambda: is_gone(pid), "the worker's end")

    def harm(watched: Watched) -> None:
        threading.Thread(target=insist, args=(pids_of(watched)[1],), daemon=True).start()

    watched, ending = trained_through(made(tmp_path / "run", TWO), harm)
    went_on(watched, ending, (1,))


@pytest.mark.slow
def test_a_signal_to_all_workers_is_a_stop_that_resume_takes_up(tmp_path):
    run = made(tmp_path / "run", TWO)
    watched, ending = trained_through(run, lambda watched: signal_together(pids_of(watched)))
    assert isinstance(ending, Finished) and ending.reason == "interrupted" and not watched.faulted
    assert next(checkpoint_folder.newest_first(run.checkpoints)).name.endswith(str(ending.step))


@pytest.mark.slow
def test_a_stop_that_comes_with_a_preemption_is_a_stop(tmp_path):
    def harm(watched: Watched) -> None:
        watched.signal(1, signal.SIGTERM)
        watched.supervisor.request_stop()

    watched, ending = trained_through(made(tmp_path / "run", TWO), harm)
    if isinstance(ending, Problem):
        assert ending.code == "interrupted"
    else:
        assert ending is not None and ending.reason in ("interrupted", "preempted")
    assert not watched.faulted


@pytest.mark.slow
def test_with_on_fault_stop_a_preemption_ends_the_run_and_status_names_it(tmp_path):
    run = made(tmp_path / "run", TWO, "stop")
    watched, problem = trained_through(run, lambda watched: watched.signal(1, signal.SIGTERM))
    assert isinstance(problem, Problem) and problem.code == "preempted"
    assert problem.what == "rank 1 on here was preempted" and not watched.faulted
    found = read_status(run)
    assert (found.state, found.reason) == ("stopped", "preempted")
    assert found.problem == problem and found.saved_step == found.step


def signalled_at_start(watched: Watched, ranks: tuple[int, ...]) -> threading.Thread:
    """Send SIGTERM to workers of the first start before they train."""

    def send() -> None:
        def there() -> bool:
            workers = watched.supervisor.workers
            return workers is not None and len(workers.processes) == 2

        wait_for(there, "the workers' processes")
        signal_together([pids_of(watched)[rank] for rank in ranks])

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_worker_that_gets_the_signal_before_it_trains_is_preempted_too(tmp_path):
    asked = list[int]()

    def at_step(watched: Watched, step: int) -> None:
        if watched.faulted and not asked:
            asked.append(step)
            watched.supervisor.request_stop()

    watched = Watched(made(tmp_path / "run", TWO), at_step)
    thread = signalled_at_start(watched, (1,))
    ending = watched.train()
    thread.join()
    assert isinstance(ending, Finished) and ending.reason == "interrupted"
    (fault,) = watched.faulted
    assert (fault.problem.code, fault.problem.rank) == ("preempted", 1)
    assert [event.lost for event in watched.events if isinstance(event, Recovered)] == [0]


@pytest.mark.slow
def test_all_workers_that_get_the_signal_before_they_train_stop_the_run(tmp_path):
    watched = Watched(made(tmp_path / "run", TWO))
    thread = signalled_at_start(watched, (0, 1))
    problem = watched.train()
    thread.join()
    assert isinstance(problem, Problem) and problem.code == "interrupted"
    assert problem.exit_code == 130 and not watched.faulted


@pytest.mark.slow
def test_workers_that_were_started_by_hand_end_with_the_code_of_a_preemption(tmp_path):
    """Whoever starts them again sees that they did not finish."""
    run = tiny.run_folder(tmp_path / "run", TWO)
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29431",
        "FARSPAN_SECRET": "of these two workers",
    }
    words = [sys.executable, "-m", "farspan.runtime.worker", str(run.plan), str(run.path)]
    workers = [subprocess.Popen(words, env=environment | {"RANK": str(rank)}) for rank in range(2)]
    try:
        wait_for(lambda: has_stepped(run), "a first step", workers[0])
        workers[1].send_signal(signal.SIGTERM)
        codes = [worker.wait(timeout=LIMIT_S) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert codes == [EXIT_CODES["preempted"]] * 2
    assert_preempted(run, (1,))


def has_stepped(run: RunFolder) -> bool:
    return run.events.exists() and any(isinstance(one, Step) for one in read_events(run.events))


def assert_preempted(run: RunFolder, ranks: tuple[int, ...]) -> None:
    """The last start was preempted at a step that is saved."""
    *_, end = read_events(run.events)
    assert isinstance(end, Finished) and end.reason == "preempted"
    assert end.problem is not None and end.problem.ranks == ranks
    assert end.step == max(
        event.step for event in read_events(run.events) if isinstance(event, Step)
    )
    newest = next(checkpoint_folder.newest_first(run.checkpoints))
    assert newest.name.endswith(str(end.step)) and checkpoint_folder.verify(newest)


# -- under other launchers
#   ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "ray"])
def test_a_signal_to_one_worker_under_another_launcher_is_a_preemption(tmp_path, launcher):
    if launcher == "ray":
        pytest.importorskip("ray", reason="waits for farspan[ray]")
    run = made(tmp_path / "run", TWO, launcher=launcher)
    watched, ending = trained_through(run, lambda watched: preempt(run, 1))
    went_on(watched, ending, (1,))
    wait_for(lambda: not processes(str(run.path)), "no process of the run is left")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "ray"])
def test_a_signal_to_all_workers_under_another_launcher_is_a_stop(tmp_path, launcher):
    if launcher == "ray":
        pytest.importorskip("ray", reason="waits for farspan[ray]")
    run = made(tmp_path / "run", TWO, launcher=launcher)
    watched, ending = trained_through(run, lambda watched: preempt(run, 0, 1))
    assert isinstance(ending, Finished) and ending.reason == "interrupted" and not watched.faulted
    assert next(checkpoint_folder.newest_first(run.checkpoints)).name.endswith(str(ending.step))


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["torchrun", "holder", "driver"])
def test_an_agent_that_gets_the_signal_is_preempted_with_its_workers(tmp_path, agent):
    """It passes the signal on. What was started here is gone, though nobody here has asked."""
    if agent == "driver":
        pytest.importorskip("ray", reason="waits for farspan[ray]")
    run, process = started(tmp_path, "ray" if agent == "driver" else "torchrun")
    if agent == "driver":
        (pid,) = processes("farspan.launch.ray_driver", str(run.path))
    else:
        (pid,) = holders(run)
    if agent == "torchrun":
        pid = next(
            child for child, parent in processes("torch.distributed.run").items() if parent == pid
        )
    os.kill(pid, signal.SIGTERM)
    problem = said(process)
    assert (problem.code, problem.ranks) == ("preempted", (0, 1))
    wait_for(lambda: not processes(str(run.path)), "no process of the run is left")
    *_, end = read_events(run.events)
    assert isinstance(end, Finished) and end.reason == "interrupted"
    assert next(checkpoint_folder.newest_first(run.checkpoints)).name.endswith(str(end.step))


# -- hosts
#   ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "torchrun"])
def test_the_workers_of_a_host_that_is_preempted_are_named_and_those_of_others_save(
    sites,  # noqa: F811
    tmp_path,
    launcher,
):
    """Under torchrun its agent gets the signal, and passes it on."""
    run = tiny.run_folder(tmp_path / "run", planned(replace(LONG, checkpoint_every_s=1e6)))

    def harm() -> None:
        if launcher == "local":
            preempt(run, 2, 3)
        else:
            worker = psutil.Process(worker_of(run, 3))
            worker.parent().send_signal(signal.SIGTERM)

    problem = lost(run, launcher, sites[1], harm)
    assert (problem.code, problem.ranks, problem.host) == ("preempted", (2, 3), "star")
    assert problem.what == "ranks 2 and 3 on star were preempted"
    assert_preempted(run, (2, 3))
    wait_until_all_ended(run)


@pytest.mark.slow
@pytest.mark.parametrize("leaves", [True, False])
def test_a_host_is_not_tried_again_at_once_only_if_it_is_being_taken_away(
    tmp_path, cluster, monkeypatch, leaves
):
    """Nothing else is wrong with it, so it is there when its notice is over."""
    utah, star = (replace(TWO.devices[0], host=host) for host in ("utah", "star"))
    run = made(tmp_path / "run", replace(TWO, devices=(utah, star)))
    save_cluster_json(cluster, run.cluster)
    monkeypatch.setattr("farspan.app.restart_policy.NOTICE_S", 1.0)
    for name in JOB_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if leaves:
        monkeypatch.setenv("PBS_JOBID", "7")
    watched, ending = trained_through(run, lambda watched: preempt(run, 1))
    assert isinstance(ending, Finished) and ending.reason == "interrupted"
    (fault,) = watched.faulted
    assert (fault.problem.host, fault.problem.leaving) == ("star", ("star",) if leaves else ())
    assert ("waiting for star" in watched.notes) == leaves
    (again,) = [event for event in watched.events if isinstance(event, Recovered)]
    assert again.lost == 0
    assert again.down_s >= (1.0 if leaves else 0.0)
