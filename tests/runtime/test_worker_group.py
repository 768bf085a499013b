"""Who is lost and who is only busy: real processes that meet, wait, stand still and write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import indent

import pytest

from farspan.runtime.comm.worker_group import NCCL_ERROR_VARIABLES, backend
from tests.examples import slow_after
from tests.ports import reserved_port
from tests.waiting import LIMIT_S

SILENCE_S = 5.0
MEMBER = f"""
import os, signal, sys, time
import torch
from farspan.runtime.comm import worker_group, heartbeat
from farspan.runtime.comm.worker_group import Group, connect_workers

heartbeat.SILENCE_S, heartbeat.BEAT_S, heartbeat.RANK_0_ANSWER_S = {SILENCE_S}, 0.05, 8.0
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SECRET = b"the secret of this run"


def lost(peer, how):
    print("lost", peer, flush=True)
    os._exit(3)


def stand_still():
    os.kill(os.getpid(), signal.SIGSTOP)


with Group(rank, world, torch.device("cpu"), connect_workers(rank, world, SECRET)) as group:
    group.watch(lost)
    group.all_reduce_sum(1.0)
"""


@contextmanager
def members(
    world: int, program: str, member: str = MEMBER
) -> Iterator[list[subprocess.Popen[str]]]:
    place = {"WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    with reserved_port() as port:
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        started = [
            subprocess.Popen(
                [sys.executable, "-c", member + indent(program, "    ")],
                env={**os.environ, **place, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        try:
            yield started
        finally:
            for process in started:
                process.kill()
                process.wait()
                process.stdout.close()


@pytest.mark.parametrize("texts", [("", "a disk is full"), ("a", ""), ("", ""), ("b", "cc")])
def test_texts_are_gathered_also_where_some_have_none(texts):
    with members(
        2,
        f"print(group.all_gather_text({texts!r}[rank]), "
        f"group.broadcast_bytes({texts!r}[0].encode()), flush=True)",
    ) as two:
        said = [process.communicate(timeout=LIMIT_S)[0].strip() for process in two]
    assert said == [f"{list(texts)} {texts[0].encode()!r}"] * 2


@pytest.mark.slow
def test_a_busy_worker_is_waited_for_far_longer_than_a_silent_one():
    """Here in the exchange by which workers part."""
    program = f"""
assert group.all_gather(rank) == [0.0, 1.0, 2.0]
if rank == 0:
    time.sleep({2 * SILENCE_S})
"""
    with members(3, program) as started:
        assert [process.wait(LIMIT_S) for process in started] == [0, 0, 0]


@pytest.mark.parametrize("still", slow_after(1, [1, 0]))
def test_a_worker_that_stands_still_is_lost_and_named(still):
    program = f"""
if rank == {still}:
    stand_still()
group.all_reduce_sum(1.0)
"""
    with members(3, program) as started:
        others = [rank for rank in range(3) if rank != still]
        watcher = started[others[0]]
        assert watcher.wait(LIMIT_S) == 3
        assert watcher.stdout.read().split() == ["lost", str(still)]
        assert started[others[1]].wait(LIMIT_S) != 0
        assert started[still].poll() is None


def test_rank_0_names_the_hung_rank_to_the_others_despite_a_broken_connection():
    program = """
if rank == 2:
    stand_still()
if rank == 0:
    worker_group.dist.recv(torch.zeros(1), 1)  # Rank 1 ends first.
group.all_reduce_sum(1.0)
"""
    with members(3, program) as started:
        for rank in (0, 1):
            assert started[rank].wait(LIMIT_S) == 3
            assert started[rank].stdout.read().split() == ["lost", "2"]


@pytest.mark.slow
def test_a_step_that_does_not_end_is_a_fault_though_all_live_and_what_lies_between_steps_is_not():
    """As where a library waits for ever for a peer that is gone, and says nothing."""
    program = """
heartbeat.STALL_S, heartbeat.STALL_TIMES = 4.0, 3.0
for _ in range(4):
    with group.step():
        group.all_reduce_sum(1.0)
time.sleep(6.0)
group.all_reduce_sum(1.0)
print("saved", flush=True)
with group.step():
    if rank == 1:
        time.sleep(1000.0)
    group.all_reduce_sum(1.0)
"""
    with members(3, program) as started:
        ended = [process.wait(LIMIT_S) for process in started]
        said = [process.stdout.read().split() for process in started]
        # Who notices first ends first, which may end another's exchange before that one notices.
        assert 3 in ended and set(ended) <= {3, 1}
        for code, (saved, *lost) in zip(ended, said, strict=True):
            assert saved == "saved" and (code == 1 or (lost[0] == "lost" and lost[1] in "012"))


def test_workers_on_heterogeneous_devices_communicate_over_gloo():
    program = """
assert worker_group.dist.get_backend() == "gloo"
assert group.all_reduce_sum(rank, 1.0) == [1.0, 2.0]
assert group.broadcast_bytes(bytes([7]) if rank == 0 else b"") == bytes([7])
"""
    mixed = MEMBER.replace('torch.device("cpu")', 'torch.device(("cuda", "cpu")[rank])')
    with members(2, program, mixed) as started:
        assert [process.wait(LIMIT_S) for process in started] == [0, 0]


@pytest.mark.parametrize(
    ("kinds", "wanted"),
    [("cpu cpu", "gloo"), ("cuda cpu", "gloo"), ("cuda cuda", "cpu:gloo,cuda:nccl")],
)
def test_nccl_is_for_groups_of_gpus_and_gloo_for_what_is_in_the_memory_of_hosts(kinds, wanted):
    assert backend(kinds.split()) == wanted


STARTING = MEMBER.partition("with Group(")[0]


@pytest.mark.parametrize("still", slow_after(1, [1, 0]))
def test_worker_that_hangs_before_all_are_connected_is_named_as_lost(still):
    """Met, and then nothing: the others wait for connections, which by themselves they would for
    hours. It stands still once it has heard a beat: a worker that was never heard is waited for as
    one that opens its device."""
    program = f"""
import threading
heartbeat.OPEN_S = {2 * SILENCE_S}
heard, hear = threading.Event(), heartbeat.Heartbeat._receive_beat
def hear_and_note(self, peer, content):
    hear(self, peer, content)
    heard.set()
heartbeat.Heartbeat._receive_beat = hear_and_note
if rank == {still}:
    worker_group.dist.init_process_group = lambda *given, **named: heard.wait() and stand_still()
Group(rank, world, torch.device("cpu"), connect_workers(rank, world, SECRET), lost)
"""
    with members(3, "", STARTING + program) as started:
        watcher = started[1 - still]
        assert watcher.wait(LIMIT_S) == 3
        assert watcher.stdout.read().split() == ["lost", str(still)]


def test_worker_that_cannot_open_its_device_is_named_by_the_others():
    program = """
met = connect_workers(rank, world, SECRET)
if rank == 1:
    os._exit(5)
Group(rank, world, torch.device("cpu"), met, lost)
"""
    with members(3, "", STARTING + program) as started:
        for rank in (0, 2):
            assert started[rank].wait(LIMIT_S) == 3
            assert started[rank].stdout.read().split() == ["lost", "1"]


@pytest.mark.slow
def test_rank_0_that_exits_while_workers_open_their_devices_is_named():
    program = """
from farspan.domain.problems import Refusal
try:
    met = connect_workers(rank, world, SECRET)
    if rank == 0:
        os._exit(5)
    if rank == 1:
        time.sleep(1.0)
    Group(rank, world, torch.device("cpu"), met, lost)
except Refusal as refusal:
    print("lost", refusal.problem.what.removeprefix("rank ").removesuffix(" was lost"), flush=True)
    os._exit(3)
"""
    with members(3, "", STARTING + program) as started:
        for rank in (1, 2):
            assert started[rank].wait(LIMIT_S) == 3
            assert started[rank].stdout.read().split() == ["lost", "0"]


@pytest.mark.slow
def test_worker_that_opens_its_device_slowly_is_not_reported_lost():
    """And no longer than that."""
    program = f"""
heartbeat.OPEN_S = {4 * SILENCE_S}
met = connect_workers(rank, world, SECRET)
if rank == 1:
    time.sleep({2 * SILENCE_S})
if rank == 2:
    stand_still()
Group(rank, world, torch.device("cpu"), met, lost)
"""
    with members(3, "", STARTING + program) as started:
        for rank in (0, 1):
            assert started[rank].wait(LIMIT_S) == 3
            assert started[rank].stdout.read().split() == ["lost", "2"]


@pytest.mark.slow
def test_a_loss_waits_until_what_is_being_written_is_whole():
    program = f"""
if rank == 1:
    stand_still()
with group.writing:
    time.sleep({3 * SILENCE_S})
    print("written", flush=True)
group.all_reduce_sum(1.0)
"""
    with members(2, program) as started:
        assert started[0].wait(LIMIT_S) == 3
        assert started[0].stdout.read().split() == ["written", "lost", "1"]


def test_a_killed_worker_is_noticed_without_waiting_for_silence():
    program = """
heartbeat.SILENCE_S = 10_000.0
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    group.all_reduce_sum(1.0)
except RuntimeError:
    group.announce_exit()
    os._exit(4)  # As a worker ends.
"""
    with members(2, program) as started:
        assert started[1].wait(LIMIT_S) == -signal.SIGKILL
        assert started[0].wait(LIMIT_S) == 4


def test_killed_worker_is_noticed_by_workers_that_exchange_nothing():
    """By its connection to rank 0, which reports it to the others."""
    program = """
heartbeat.SILENCE_S = 10_000.0
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(10_000)
"""
    with members(3, program) as started:
        for rank in (0, 2):
            assert started[rank].wait(LIMIT_S) == 3
            assert started[rank].stdout.read().split() == ["lost", "1"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, "0 None"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, "3 None"),
        ({"NCCL_ASYNC_ERROR_HANDLING": "1"}, "None 1"),
    ],
)
def test_errors_of_nccl_end_no_worker_before_its_lost_peer_is_named(monkeypatch, given, wanted):
    for name in NCCL_ERROR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    names = ", ".join(f"os.environ.get({name!r})" for name in NCCL_ERROR_VARIABLES)
    with members(2, f"print({names})") as started:
        assert [process.communicate(timeout=LIMIT_S)[0] for process in started] == [
            f"{wanted}\n"
        ] * 2
