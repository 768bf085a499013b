"""Inside a Slurm job: workers on this node as by `local`, those on the job's other nodes in steps
of it (`srun --overlap`)."""

from __future__ import annotations

from collections.abc import Iterator

from farspan.launch.launchers import local
from farspan.launch.processes import Process
from farspan.launch.slurm_allocation import record_job, require_allocation


class Launch(local.Launch):
    def start(self) -> Iterator[Process]:
        require_allocation(self.run.path, self.run.resume_command())
        record_job(self.run)
        yield from super().start()
