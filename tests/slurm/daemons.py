"""A real Slurm on this machine: munged, slurmctld and a slurmd a node, in a folder of their own.

It needs root, no systemd, and an address besides loopback. `python -m tests.slurm.daemons` runs one
until Ctrl-C, and prints the variable that leads clients to it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from tests.waiting import LIMIT_S, wait_for

SBIN = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
DAEMONS = ("munged", "slurmctld", "slurmd")
#: Bytes of a key: munge takes 32 to 1024.
KEY_BYTES = 128
CLIENT_PAUSE_S = 0.3

CONFIG = """\
ClusterName=test
SlurmctldHost={host}({address})
SlurmUser=root
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/linux
GresTypes=gpu
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=2,batch_sched_delay=0,bf_interval=2
KillWait=30
SlurmctldTimeout=300
SlurmdTimeout=300
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str | None:
    """Why there can be no Slurm here; None where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux"
    absent = [name for name in (*DAEMONS, "sbatch") if shutil.which(name, path=SBIN) is None]
    if absent:
        return f"needs {', '.join(absent)} (Debian: slurm-wlm munge)"
    if outer_address() is None:
        return "needs an address besides loopback"
    return None


def outer_address() -> str | None:
    """An address of this machine that is not loopback; None where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # Nothing is sent: RFC 5737.
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if address.startswith("127.") else address


def _free_ports(count: int) -> list[int]:
    holders = [socket.socket() for _ in range(count)]
    for holder in holders:
        holder.bind(("", 0))
    ports = [int(holder.getsockname()[1]) for holder in holders]
    for holder in holders:
        holder.close()
    return ports


class Slurm:
    """Daemons in a folder. `environment` leads `sbatch` and the other clients to them."""

    def __init__(self, folder: Path, nodes: int = 1, cpus: int = 2) -> None:
        self.folder = folder
        self.nodes = [f"n{number}" for number in range(nodes)]
        self._daemons = list[subprocess.Popen[bytes]]()
        controller_port, *ports = _free_ports(1 + nodes)
        lines = []
        gres = []
        for name, port in zip(self.nodes, ports, strict=True):
            device = folder / f"gpu-{name}"
            # A GPU for Slurm is a device file: this one is another /dev/null.
            os.mknod(device, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
            gres.append(f"NodeName={name} Name=gpu Type=a30 File={device}")
            lines.append(
                f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr={outer_address()} "
                f"Port={port} CPUs={cpus} RealMemory=4000 Gres=gpu:a30:1 State=UNKNOWN"
            )
        text = CONFIG.format(
            host=socket.gethostname(),
            address=outer_address(),
            controller_port=controller_port,
            folder=folder,
            nodes="\n".join(lines),
        )
        self.config = folder / "slurm.conf"
        self.config.write_text(text)
        (folder / "gres.conf").write_text("\n".join(gres) + "\n")
        (folder / "cgroup.conf").write_text("CgroupPlugin=autodetect\n")
        (folder / "state").mkdir()
        for name in self.nodes:
            (folder / f"spool-{name}").mkdir()
        self.environment = {**os.environ, "SLURM_CONF": str(self.config)}

    def start(self) -> None:
        folder = self.folder
        key = folder / "munge.key"
        key.write_bytes(os.urandom(KEY_BYTES))
        key.chmod(0o400)
        socket_path = folder / "munge.socket"
        files = [
            f"--{name}-file={folder / f'munge.{name}'}" for name in ("key", "pid", "log", "seed")
        ]
        # A folder under /tmp is one that others may write next to.
        self._start("munged", "--foreground", "--force", f"--socket={socket_path}", *files)
        wait_for(socket_path.exists, "munged listens", self._daemons[-1])
        self._start("slurmctld", "-D", "-c", "-f", self.config)
        for name in self.nodes:
            self._start("slurmd", "-D", "-c", "-N", name, "-f", self.config)
        wait_for(self._are_idle, f"all nodes are idle: {folder}/*.out")

    def _are_idle(self) -> bool:
        for daemon in self._daemons:
            assert daemon.poll() is None, f"{daemon.args} has ended: {self.folder}/*.out"
        done = self.run("sinfo", "--noheader", "--Node", "--format=%N:%T")
        return set(done.stdout.split()) == {f"{name}:idle" for name in self.nodes}

    def _start(self, *words: object) -> None:
        command = shutil.which(str(words[0]), path=SBIN)
        assert command is not None
        log: IO[bytes]
        with open(self.folder / f"{words[0]}.out", "ab") as log:
            daemon = subprocess.Popen(
                # None outlives this process, however that ends.
                ["setpriv", "--pdeathsig", "KILL", command, *map(str, words[1:])],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
            )
        self._daemons.append(daemon)

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Run a client of this Slurm. One that is run in a loop leaves the cores to the jobs."""
        time.sleep(CLIENT_PAUSE_S)
        command = [str(word) for word in words]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60
        )

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says of a job, by key."""
        fields = self.run("scontrol", "--oneliner", "show", "job", number).stdout.split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def bring_limit_near(self, job: str) -> None:
        """Give a job that runs a limit that its notice comes before: Slurm counts it in minutes,
        and looks at limits twice a minute."""
        began = self.run("squeue", "--noheader", f"--jobs={job}", "--format=%M")
        *hours, minutes, _ = re.split("[-:]", began.stdout.strip())
        assert not hours
        limit = f"TimeLimit={int(minutes) + 2}"
        changed = self.run("scontrol", "update", f"JobId={job}", limit)
        assert changed.returncode == 0, changed.stderr

    def stop(self) -> None:
        """End all jobs, then the daemons, the last that was started first."""
        self.run("scancel", "--user=root")
        with suppress(AssertionError):  # Else the daemons outlive it.
            wait_for(lambda: not self.run("squeue", "--noheader").stdout, "all jobs have ended")
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self._daemons:
            daemon.wait(LIMIT_S)


@contextmanager
def running(nodes: int = 1, cpus: int = 2) -> Iterator[Slurm]:
    """A Slurm for the time of the `with`."""
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        slurm = Slurm(Path(folder), nodes, cpus)
        try:
            slurm.start()
            yield slurm
        finally:
            slurm.stop()


if __name__ == "__main__":
    number_of_nodes = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    with suppress(KeyboardInterrupt), running(number_of_nodes) as started:
        print(f"export SLURM_CONF={started.config}", flush=True)
        signal.pause()
