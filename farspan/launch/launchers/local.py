"""One process a device, started from here: on this machine, and on hosts that an `enter` command
leads to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from farspan.domain.interpreter import module_command
from farspan.domain.run import ON_STDIN, SECRET_VARIABLE
from farspan.launch.hosts import host_python
from farspan.launch.processes import (
    HostProcess,
    Process,
    rendezvous_environment,
    run_folder,
    with_environment,
    worker_environment,
)
from farspan.launch.rendezvous import arrange_rendezvous
from farspan.launch.workers import Workers


class Launch(Workers):
    sends = True

    def start(self) -> Iterator[Process]:
        rendezvous = arrange_rendezvous(self.hosts, self.agents)
        by_name = {host.name: host for host in self.hosts}
        for rank, device in enumerate(self.plan.devices):
            host = by_name[device.host]
            folder = run_folder(host, self.plan, self.run)
            values = {
                **worker_environment(device.threads),
                **rendezvous_environment(host, rendezvous),
                **self.environment_on(host),
                "RANK": str(rank),
                "WORLD_SIZE": str(len(self.plan.devices)),
            }
            spare = self.spare(device)
            log = self.log(f"rank-{rank}")
            if spare is not None:
                values[SECRET_VARIABLE] = ON_STDIN
                log_path = Path(log.name).absolute()
                spare.become_worker(rank, folder, values, log_path, rendezvous.secret)
                yield spare
                continue
            paths = (str(folder.plan), str(folder.path))
            words = module_command(host_python(host), "farspan.runtime.worker", *paths)
            yield HostProcess(
                host,
                (rank,),
                with_environment(values, words),
                log=log,
                keep_open=self.keep_open,
                device=device.index,
                secret=rendezvous.secret,
            )
