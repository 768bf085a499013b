"""Small runs of real workers on this machine, under a supervisor."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from farspan.app.configs import as_yaml
from farspan.app.supervisor import Supervisor
from farspan.app.updates import Faulted, Note
from farspan.domain.cluster_json import save_cluster_json
from farspan.domain.config import OnFault, RunConfig
from farspan.domain.plan import Plan
from farspan.domain.problems import Problem, Refusal
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.run_events import Event, Finished, Step
from farspan.domain.struct_files import load, save
from tests import tiny


def made(
    path: Path, plan: Plan, on_fault: OnFault = "recover", launcher: str = "local"
) -> RunFolder:
    """A run that a supervisor can train."""
    run = tiny.run_folder(path, plan)
    run.config.write_bytes(as_yaml(RunConfig(data="tests", on_fault=on_fault)))
    save(replace(load(run.record, RunRecord), launcher=launcher), run.record)
    here = tiny.this_machine(plan).with_hosts(lambda host: replace(host, address="127.0.0.1"))
    save_cluster_json(here, run.cluster)
    return run


class Watched:
    """A run under a supervisor, whose updates are kept. `at_step` is called after each step,
    `at_fault` after each fault that the run starts again for."""

    def __init__(
        self,
        run: RunFolder,
        at_step: Callable[[Watched, int], None] = lambda watched, step: None,
        at_fault: Callable[[Watched], None] = lambda watched: None,
        *,
        until_done: bool = False,
        without: tuple[str, ...] = (),
    ) -> None:
        self.run = run
        self.faulted = list[Faulted]()
        self.events = list[Event]()
        #: Lines for people.
        self.notes = list[str]()
        self._at_step = at_step
        self._at_fault = at_fault
        self.supervisor = Supervisor(
            run, self._told, self.events.append, until_done=until_done, without=without
        )

    def train(self) -> Problem | Finished | None:
        """How it ends: with the last event, or with a problem."""
        try:
            return self.supervisor.train_run()
        except Refusal as refusal:
            return refusal.problem

    def _told(self, update: object) -> None:
        if isinstance(update, Faulted):
            self.faulted.append(update)
            self._at_fault(self)
        elif isinstance(update, Note):
            self.notes.append(update.text)
        elif isinstance(update, Step):
            self._at_step(self, update.step)

    def signal(self, rank: int, number: signal.Signals) -> int:
        """Send a signal to the worker of a rank; its process."""
        assert self.supervisor.workers is not None
        (process,) = (
            process for process in self.supervisor.workers.processes if rank in process.ranks
        )
        os.kill(process.pid, number)
        return process.pid

    @property
    def losses(self) -> dict[int, float]:
        """By step; of one that was made twice the later."""
        return {event.step: event.loss for event in self.events if isinstance(event, Step)}
