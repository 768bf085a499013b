"""One process a device, started from here: on this machine, and on hosts that an `enter` command
leads to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from farspan.domain.interpreter import module_command
from farspan.domain.run import ON_STDIN, SECRET
from farspan.launch.hosts import interpreter
from farspan.launch.processes import (
    HostProcess,
    Process,
    place,
    run_folder,
    with_environment,
    worker_environment,
)
from farspan.launch.rendezvous import arrange
from farspan.launch.workers import Workers


class Launch(Workers):
    sends = True

    def start(self) -> Iterator[Process]:
        meeting = arrange(self.hosts)
        by_name = {host.name: host for host in self.hosts}
        for rank, device in enumerate(self.plan.devices):
            host = by_name[device.host]
            folder = run_folder(host, self.plan, self.run)
            values = {
                **worker_environment(device.threads),
                **place(host, meeting),
                **self.environment,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(self.plan.devices)),
            }
            if (spare := self.spare(device)) is not None:
                log = self.log(f"rank-{rank}")
                spare.begin(
                    rank,
                    folder,
                    {**values, SECRET: ON_STDIN},
                    Path(log.name).absolute(),
                    meeting.secret,
                )
                yield spare
                continue
            worker = module_command(
                interpreter(host), "farspan.runtime.worker", str(folder.plan), str(folder.path)
            )
            yield HostProcess(
                host,
                (rank,),
                with_environment(values, worker),
                log=self.log(f"rank-{rank}"),
                keep_open=self.keep_open,
                device=device.index,
                secret=meeting.secret,
            )
