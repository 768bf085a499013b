"""Worker processes that stay: torch is imported once, and each case is one call of a function by
some of them.

They are forked from a server that has imported everything, so that killing all of them after a
failure costs little.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from farspan.runtime.comm import messages, worker_group
from farspan.runtime.comm.control_channel import Notices
from farspan.runtime.comm.worker_group import Group
from farspan.runtime.model import kernels
from tests.ports import reserved_port

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
#: A case that takes longer stands still.
DEADLINE_S = 240.0
#: After the first failure the others may say what they saw, and after the deadline write where they
#: are.
GRACE_S = 1.0
MODULES = ["tests.runtime.verify"]


class Failed(AssertionError):
    """What the workers of a case raised, or where they stood still."""


class Member(NamedTuple):
    process: BaseProcess
    pipe: Connection
    stacks: Path


class Fleet:
    """Up to so many workers on this machine as are asked for; after a failure they are new ones."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(MODULES)
        self._members: list[Member] = []
        self._folder = tempfile.TemporaryDirectory(prefix="fleet-")

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._kill()
        self._folder.cleanup()

    def run(
        self,
        function: Callable[Concatenate[Group, Arguments], Result],
        world: int,
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> list[Result]:
        """`function(group, *args)` on `world` workers; their results, by rank. Raises Failed."""
        while len(self._members) < world:
            self._members.append(self._start(len(self._members)))
        # A file, as a server looks up the names of who calls: where no name server answers, for
        # five seconds.
        store = str(Path(self._folder.name) / f"store-{time.monotonic_ns()}")
        with reserved_port() as port:
            for rank, member in enumerate(self._members[:world]):
                member.pipe.send((rank, world, store, port, function, args, kwargs))
            answers, problems = self._answers(self._members[:world])
        if problems:
            self._kill()
            raise Failed("\n".join(problems))
        return [answers[rank] for rank in range(world)]

    def _answers(self, members: list[Member]) -> tuple[dict[int, Any], list[str]]:
        """Results by rank, and what went wrong."""
        waiting = {member.pipe: rank for rank, member in enumerate(members)}
        answers = dict[int, Any]()
        problems = list[str]()
        end = time.monotonic() + DEADLINE_S
        while waiting and (left := end - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    well, answers[rank] = pipe.recv()
                except (EOFError, ConnectionError):
                    members[rank].process.join(DEADLINE_S)
                    well = False
                    answers[rank] = f"the process ended with {members[rank].process.exitcode}"
                if not well:
                    problems.append(f"rank {rank}: {answers[rank]}")
                    end = min(end, time.monotonic() + GRACE_S)
        if waiting and not problems:
            problems = self._stacks({rank: members[rank] for rank in waiting.values()})
        return answers, problems

    def _stacks(self, members: dict[int, Member]) -> list[str]:
        """Where these workers stand still."""
        for member in members.values():
            assert member.process.pid is not None
            os.kill(member.process.pid, signal.SIGUSR1)
        time.sleep(GRACE_S)
        return [
            f"rank {r} stands still after {DEADLINE_S:.0f} s:\n{m.stacks.read_text()}"
            for r, m in members.items()
        ]

    def _start(self, number: int) -> Member:
        ours, theirs = self._context.Pipe()
        stacks = Path(self._folder.name) / f"{number}-{time.monotonic_ns()}"
        process = self._context.Process(target=serve, args=(theirs, stacks), daemon=True)
        process.start()
        theirs.close()
        return Member(process, ours, stacks)

    def _kill(self) -> None:
        for member in self._members:
            member.process.kill()
        for member in self._members:
            member.process.join()
            member.pipe.close()
        self._members = []


def serve(pipe: Connection, stacks: Path) -> None:
    """One worker: call after call, until nobody is there to ask."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    # Small models must be divided as large ones are: over streams, and the logits in chunks.
    for module, name, value in (
        (messages, "LEAST_PART", 512),
        (kernels, "LOGITS_CHUNK_BYTES", 40_000),
    ):
        setattr(module, name, value)
    os.fsync = lambda fd: None  # Nobody reads these runs after a power cut.
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        while True:
            try:
                rank, world, store, port, function, args, kwargs = pipe.recv()
            except EOFError:
                return
            # Where whoever asked is gone there is nobody else to end this.
            faulthandler.dump_traceback_later(2 * DEADLINE_S, exit=True, file=file)
            try:
                met = None
                if world > 1:
                    met = Notices(b"of these workers", rank)
                    met.rendezvous(world, port, DEADLINE_S)
                    shared = dist.FileStore(store, world)
                    worker_group._connect_store = lambda notices, shared=shared: shared
                with Group(rank, world, torch.device("cpu"), met) as group:
                    found = True, function(group, *args, **kwargs)
            except BaseException:
                found = False, traceback.format_exc()
            faulthandler.cancel_dump_traceback_later()
            # A worker's parts know each other; with them go the threads of their connections.
            gc.collect()
            pipe.send(found)
