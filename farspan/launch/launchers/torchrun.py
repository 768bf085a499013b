"""One `torchrun` a host, which starts the workers of that host.

Where farspan cannot start them, run the same command by hand on every host with the same
FARSPAN_SECRET, or set the variables that it sets, too (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT),
and start `python -m farspan.runtime.worker PLAN RUN_DIR`. torchrun's own store listens on all
addresses. It carries nothing of ours, as the workers have another.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

from farspan.domain.interpreter import module_command
from farspan.domain.run import STORE_PORT
from farspan.domain.worker_exit import WorkerExit
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
from farspan.launch.workers import SAVE_TIMEOUT_S, Workers

#: One of the failures at the end of what torchrun prints.
FAILURE = re.compile(r"^  rank\s*: (\d+) .*\n  exitcode\s*: (-?\d+)", re.MULTILINE)


class Launch(Workers):
    def start(self) -> Iterator[Process]:
        rendezvous = arrange_rendezvous(self.hosts, self.agents)
        for node, host in enumerate(self.hosts):
            folder = run_folder(host, self.plan, self.run)
            ranks = self.ranks_on(host)
            threads = max(self.plan.devices[rank].threads for rank in ranks)
            # By itself torchrun kills workers that still save 30 s after it was asked to end.
            values = {
                **worker_environment(threads),
                **rendezvous_environment(host, rendezvous),
                "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{SAVE_TIMEOUT_S:.0f}",
                STORE_PORT: str(rendezvous.port),
                **self.environment_on(host),
            }
            options = [
                f"--nnodes={len(self.hosts)}",
                f"--node-rank={node}",
                f"--nproc-per-node={len(ranks)}",
                f"--master-addr={rendezvous.address}",
                f"--master-port={rendezvous.torchrun_port}",
                "--max-restarts=0",
                "--module",
                "farspan.runtime.worker",
                str(folder.plan),
                str(folder.path),
            ]
            words = module_command(host_python(host), "torch.distributed.run", *options)
            # Nor does it end where its launcher is gone, and its workers look at torchrun alone.
            yield HostProcess(
                host,
                ranks,
                with_environment(values, words),
                log=self.log(f"rank-{ranks[0]}"),
                keep_open=self.keep_open,
                hold=True,
                secret=rendezvous.secret,
            )

    def failures(self, process: Process) -> list[WorkerExit]:
        """Return all failures that torchrun prints at its end. Of those that it sees at one glance
        it takes the lowest rank for the first, which may have failed because of another."""
        # One that gets a signal from elsewhere passes it on to its workers, which save and end
        # well; it alone reports a failure.
        if process.poll() == 1 and self.stopped:
            return [self.exit_of(rank, -signal.SIGTERM) for rank in process.ranks]
        log = self.words(self.run.logs / f"rank-{process.ranks[0]}.log")
        _, _, report = log.rpartition("\nFailures:\n")
        exits = [self.exit_of(int(rank), int(code)) for rank, code in FAILURE.findall(report)]
        # What it takes for the first is its last.
        return exits[::-1] or super().failures(process)
